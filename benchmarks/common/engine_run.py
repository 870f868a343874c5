"""A loaded model for a benchmark that takes the options of run_model.py."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_inference.config.run_config import RunConfig
    from zero_inference.engines.base import LoadedModel
    from zero_inference.models.spec import ModelSpec
    from zero_inference.utils.ranks import Ranks


def loaded_by_options(description: str) -> tuple[RunConfig, ModelSpec, Ranks, LoadedModel]:
    """Reads the command line; raises UsageError and RunError as the run would."""
    from zero_inference.cli import add_run_arguments
    from zero_inference.config.options import FIELD_NAMES
    from zero_inference.config.run_config import RunConfig

    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add_run_arguments(parser)
    args = parser.parse_args()
    config = RunConfig(**{name: getattr(args, name) for name in FIELD_NAMES}).validate()

    from zero_inference.models.spec import resolve_model
    from zero_inference.planning.plan import plan_run
    from zero_inference.utils.ranks import detect_ranks, start_process_group

    ranks = detect_ranks(args.local_rank)
    spec = resolve_model(config, ranks.device.type)
    start_process_group(ranks)
    return config, spec, ranks, plan_run(config, spec, ranks).load()
