"""What an engine hands over: a model to call, what it stored, and counters of what it moves.

An engine is a module with three functions:

    check(config, spec, ranks)                             raises UsageError before anything is loaded
    load(config, spec, ranks, progress) -> LoadedModel     raises RunError when loading goes wrong
    footprint(config, spec, ranks, model) -> Footprint     what the weights of a rank take, from a meta model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_inference.engines.stream.timeline import Timeline
from zero_inference.errors import UsageError
from zero_inference.runtime.divisors import nearest_divisor
from zero_inference.runtime.transfers import Transfers


@dataclass(frozen=True)
class Footprint:
    """Bytes that the weights of one rank take at each place while it runs. `pinned` is part of `host`."""

    device: int = 0
    host: int = 0
    pinned: int = 0
    disk: int = 0


@dataclass
class LoadedModel:
    """A model ready for `generate` and what the record says of it.

    Attributes:
        model: the transformers model to call; inputs go to `device`.
        weight_bytes: bytes of all weights as this engine stores them, quantized and over all ranks.
        transfers: counters that rise while the model runs.
        facts: further record fields, such as `ds_config` or `quantized_fraction`.
        close: releases what the engine holds (files, patches); safe to call twice.
        timeline: when layers were copied and computed, of an engine that keeps it.
        preallocated_cache: the engine is made for a KV cache that takes no memory while the model runs.
        page_locked: uint8 [bytes] each, the host memory that this rank's device copies weights from, where the engine has it so.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    transfers: Transfers = field(default_factory=Transfers)
    facts: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    timeline: Timeline | None = None
    preallocated_cache: bool = False
    page_locked: Sequence[torch.Tensor] = ()


def group_size_refusal(asked: int, name: str, shape: tuple[int, ...], packs: int = 1) -> UsageError:
    """What to say where groups of `asked` do not fit the last dimension of weight `name`, of which `packs` elements share a word."""
    last = shape[-1]
    fitting = nearest_divisor(asked, last, (256, 128, 64, 32, 16, 8), packs)
    change = (
        f"use --quant-group-size {fitting} or another divisor"
        if fitting
        else "this model cannot be quantized so, drop --quant-bits"
    )
    return UsageError(
        f"--quant-group-size {asked}: does not divide {name} of shape {list(shape)} along its last dimension; {change}."
    )


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
