"""RunConfig: what one run was asked to do, checked. The options and their defaults are in `choices`, what is refused in `checks`."""

from __future__ import annotations

from dataclasses import replace

from zero_inference.config import checks
from zero_inference.config.choices import (
    AUTO,
    DECODE_GRAPH,
    DEFAULTS,
    DTYPES,
    ENGINES,
    FIELD_NAMES,
    GOALS,
    NORM_KERNELS,
    PATHS,
    QUALITY_FIELDS,
    QUALITY_TASKS,
    QUANT_BITS,
    Choices,
)

__all__ = [
    "DEFAULTS",
    "DTYPES",
    "ENGINES",
    "FIELD_NAMES",
    "DECODE_GRAPH",
    "AUTO",
    "GOALS",
    "NORM_KERNELS",
    "PATHS",
    "QUALITY_FIELDS",
    "QUALITY_TASKS",
    "QUANT_BITS",
    "RunConfig",
]


class RunConfig(Choices):
    """The choices of one run.

    `validate()` raises UsageError for anything that can be seen to be wrong without loading the model's config;
    what depends on the model is checked by `planning.checks` and the engine's plan, before a weight is read.
    """

    def validate(self) -> RunConfig:
        """Return the configuration with what it implies, or raise UsageError: what was asked, found, and has to change."""
        checks.check_paths(self)
        checks.check_values(self)
        checks.check_engine(self)
        checks.check_offload(self)
        checks.check_companions(self)
        checks.check_files(self)
        checks.check_quality(self)
        return replace(self, cpu_offload=True) if self.engine == "stream" else self
