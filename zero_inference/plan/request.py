"""The part of the record that is known before a run."""

from __future__ import annotations

import datetime

from zero_inference.config import RunConfig
from zero_inference.models.spec import ModelSpec
from zero_inference.records.schema import Request
from zero_inference.runtime.distributed import Ranks

AS_GIVEN = (
    "engine",
    "model",
    "batch_size",
    "prompt_len",
    "gen_len",
    "quant_bits",
    "quant_group_size",
    "cpu_offload",
    "disk_offload",
    "kv_offload",
    "norm_kernels",
    "dummy",
    "pin_kv_cache",
    "async_kv_offload",
    "seed",
)


def request_of(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, argv: list[str], *, pin_memory: bool, weights_place: str
) -> Request:
    """`pin_memory` and `weights_place` as they are resolved for this machine."""
    return Request(
        **{name: getattr(config, name) for name in AS_GIVEN},
        timestamp=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        argv=argv,
        model_type=spec.config.model_type,
        dtype=str(spec.dtype).removeprefix("torch."),
        world_size=ranks.world_size,
        num_nodes=ranks.num_nodes,
        pin_memory=pin_memory,
        weights_place=weights_place,
    )
