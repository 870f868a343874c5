"""The part of the record that is known before a run, and the name of its log."""

from __future__ import annotations

import datetime
from pathlib import Path

from zero_inference.config.options import LOG_PREFIX, OPTIONS
from zero_inference.config.run_config import RunConfig, non_default_options
from zero_inference.models.spec import ModelSpec
from zero_inference.records.schema import Request
from zero_inference.utils import get_filename
from zero_inference.utils.ranks import Ranks


def request_of(config: RunConfig, spec: ModelSpec, ranks: Ranks, argv: list[str]) -> Request:
    """What was asked, as far as it is known before the plan; `pin_memory` is what was asked for until then."""
    return Request(
        **{name: getattr(config, name) for name, option in OPTIONS.items() if option.recorded},
        timestamp=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        argv=argv,
        quant_group_size=config.group_size,
        model_type=spec.config.model_type,
        dtype=spec.dtype_name,
        dummy_routing=spec.dummy_routing,
        world_size=ranks.world_size,
        num_nodes=ranks.num_nodes,
        options=non_default_options(config),
        weights_place=weights_place(config, ranks),
    )


def weights_place(config: RunConfig, ranks: Ranks) -> str:
    """'cpu', 'disk' or 'gpu': without an offload they are on the device, which is host memory where there is no GPU."""
    return "cpu" if config.offload == "gpu" and ranks.device.type == "cpu" else config.offload


def log_path(config: RunConfig, ranks: Ranks, place: str | None = None) -> Path:
    """Where the run logs: --log-file, or a name made of the options in --log-dir.

    Args:
        place: where the weights are found to be, if it is not what the options say.
    """
    if config.log_file:
        return Path(config.log_file)
    place = place or weights_place(config, ranks)
    name = get_filename(
        config.model,
        config.batch_size,
        config.prompt_len,
        config.gen_len,
        place == "cpu",
        place == "disk",
        ranks.num_nodes,
        ranks.local_world_size,
        config.kv_offload,
        config.quantized,
        prefix=LOG_PREFIX.get(config.engine, config.engine),
    )
    return Path(config.log_dir) / f"{name}.log"
