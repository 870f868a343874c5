"""RunConfig: the checked options of one run. The options and their defaults are in `options`, what is refused in `checks`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zero_inference.config import checks
from zero_inference.config.options import Options
from zero_inference.config.values import bits_of, dtype_name
from zero_inference.errors import UsageError
from zero_inference.utils.format import parse_gib


class RunConfig(Options):
    """The choices of one run.

    `validate()` raises UsageError for anything that can be seen to be wrong without loading the model's config;
    what depends on the model is checked by `planning.checks` and the engine's plan, before a weight is read.
    """

    def validate(self) -> RunConfig:
        """Return the configuration with what it implies, or raise UsageError: what was asked, found, and has to change."""
        asked = self._spelled()
        checks.check_paths(asked)
        checks.check_model(asked)
        checks.check_values(asked)
        checks.check_engine(asked)
        checks.check_offload(asked)
        checks.check_companions(asked)
        checks.check_prompts(asked)
        checks.check_files(asked)
        checks.check_quality(asked)
        return replace(asked, cpu_offload=True) if asked.engine == "stream" and not asked.cpu_offload else asked

    def _spelled(self) -> RunConfig:
        """With the names of the choices for other spellings of them: float16 for fp16, 4 for int4. Raises UsageError."""
        spelled: dict[str, Any] = {"dtype": dtype_name(self.dtype), "quant_bits": bits_of(self.quant_bits)}
        if isinstance(self.prompt, str):
            spelled["prompt"] = (self.prompt,)
        if isinstance(self.gpu_memory, str):
            try:
                spelled["gpu_memory"] = parse_gib(self.gpu_memory)
            except ValueError as error:
                raise UsageError(f"--gpu-memory {self.gpu_memory}: {error}.") from error
        changed = {name: value for name, value in spelled.items() if value != getattr(self, name)}
        return replace(self, **changed) if changed else self
