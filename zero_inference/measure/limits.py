"""The roofline of a decode: the bytes and operations that a step cannot avoid, the time they take at the measured rates, and the share of
that limit that the run reached."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_inference.config import RunConfig
from zero_inference.models.sizes import kv_cache_bytes
from zero_inference.models.spec import ModelSpec
from zero_inference.records.key import as_mapping
from zero_inference.records.limit import FloorStep, Limit, Rates
from zero_inference.records.loops import MovedPerStep
from zero_inference.runtime.distributed import Ranks


@dataclass(frozen=True)
class LeastWork:
    """What one device cannot avoid in a decode step: bytes of its memory, and floating-point operations."""

    device_bytes: int
    flops: int


def least_work(config: RunConfig, spec: ModelSpec, ranks: Ranks, weight_bytes: int) -> LeastWork:
    """Each active weight read once as stored, keys and values read once at their mean length; 2 operations a weight and sequence.

    Of experts only as many count as one token uses; an embedding table that is not the head counts as nothing. What is idle is
    taken off at its unquantized size, which an engine may not exceed: the bound errs to the low side.
    """
    model = spec.outline
    idle = _idle_parameters(model, spec)
    idle_bytes = sum(numel * dtype.itemsize for numel, dtype in idle)
    active = sum(p.numel() for p in model.parameters()) - sum(numel for numel, _ in idle)
    batch = config.batch_size // ranks.world_size
    kv = kv_cache_bytes(spec, batch, config.prompt_len + config.gen_len // 2)
    return LeastWork(device_bytes=max(0, weight_bytes - idle_bytes) + kv, flops=2 * active * batch)


def decode_limits(
    rates: Rates,
    moved: MovedPerStep,
    ahead_bytes: int,
    work: LeastWork,
    on_gpu: bool,
    steps: int,
    decode_s: float,
) -> Limit:
    """The least time of a step by each of the rates, which one binds, and the share reached.

    Args:
        moved: what crossed link and disk in a step, counted over all ranks.
        ahead_bytes: those of the decode's bytes that had crossed before its first step, over all ranks. The link does not owe them.
    """
    floor_step = FloorStep(
        device_memory=_seconds(work.device_bytes, rates.device_copy_gb_per_s),
        matmul=work.flops / (rates.matmul_tflops * 1e12) if rates.matmul_tflops else None,
        link=_seconds(moved.host_to_device_bytes_per_step or None, rates.link_gb_per_s) if on_gpu else None,
        disk=_seconds(moved.disk_read_bytes_per_step or None, rates.disk_gb_per_s),
    )
    in_all = {name: step_s * steps for name, step_s in as_mapping(floor_step).items()}
    if "link" in in_all:
        in_all["link"] = max(0.0, in_all["link"] - ahead_bytes / (rates.link_gb_per_s * 1e9))
    bound_by = max(in_all, key=lambda name: in_all[name], default=None)
    floor = in_all[bound_by] or None if bound_by is not None else None
    return Limit(
        rates=rates,
        link_ahead_bytes=ahead_bytes,
        floor_step_s=floor_step,
        bound_by=bound_by if floor else None,
        floor_decode_s=floor,
        fraction_of_limit=floor / decode_s if floor else None,
    )


def _seconds(nbytes: float | None, gb_per_s: float | None) -> float | None:
    """None where there is nothing to move, or its rate is not known."""
    return nbytes / (gb_per_s * 1e9) if nbytes is not None and gb_per_s else None


def _idle_parameters(model, spec: ModelSpec) -> list[tuple[int, torch.dtype]]:
    """Elements, with their dtype, that a token of one sequence does not touch: rows of an embedding, experts not chosen."""
    head = model.get_output_embeddings()
    idle = [
        (module.weight.numel(), module.weight.dtype)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and (head is None or module.weight is not head.weight)
    ]
    config = spec.text_config
    experts = next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(config, key, None))), 0
    )
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    if experts:
        idle += [
            (p.numel() * (experts - chosen) // experts, p.dtype)
            for name, p in model.named_parameters()
            if ".experts." in name and (p.dim() == 3 and p.shape[0] == experts or p.dim() == 2)
        ]
    return idle
