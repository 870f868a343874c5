"""How queries of the device that computes come to the cores, and the attention's result back.

`CopyMeeting` needs nothing but copies and has the host wait for each layer. `CoresMeeting` asks the threads of
`zero_inference.cpu.cores`: at once for a model on the CPU; in the order of the stream for one on a GPU, where the host waits for
nothing and no copy engine takes part, so that queries do not queue up behind weights on the link.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from zero_inference.cpu.attention import attention
from zero_inference.cpu.attention_tasks import AttentionTasks
from zero_inference.cpu.crossing import Crossing, HostCalls
from zero_inference.kv_cache.attended import AttendedLayer
from zero_inference.utils.log import kv_width
from zero_inference.utils.transfers import Transfers


def crossing_bytes(config: Any, batch: int, element_bytes: int) -> tuple[int, int]:
    """What the input and the output of a `Crossing` have to hold for one new token of `batch` sequences.

    Args:
        config: the transformers config.
        element_bytes: of the model's dtype.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    query_width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return batch * (query_width + 2 * kv_width(text)) * element_bytes, batch * query_width * element_bytes


class CopyMeeting:
    """Copies to page-locked memory and back, and a host that waits for them; on a CPU nothing moves.

    Args:
        transfers: counters to raise.
        threads: cores that work; None: all that the process may use.
    """

    def __init__(self, transfers: Transfers, threads: int | None = None):
        self.transfers, self.threads = transfers, threads
        self.staging = torch.empty(0, dtype=torch.uint8)

    def attend(
        self, layer: AttendedLayer, query: torch.Tensor, window: int = 0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        device = query.device
        states = query, *layer.newest
        query, key, value = self._to_host(layer, states) if device.type == "cuda" else states
        layer.keep(key, value)
        out = attention(
            query,
            *layer.kept,
            positions=layer.length,
            scale=layer.logits.scale,
            softcap=layer.logits.softcap,
            sinks=layer.logits.sinks,
            slopes=layer.logits.slopes,
            window=window,
            mask=mask,
            threads=self.threads,
        ).transpose(1, 2)
        self.transfers.cores_bytes += _read_bytes(layer, query, window)
        if device.type == "cuda":
            self.transfers.host_to_device_bytes += out.nbytes
        return out.to(device)

    def _to_host(self, layer: AttendedLayer, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """`states` in page-locked memory, when they and the prompt's keys and values are there."""
        packed = torch.cat([part.flatten() for part in states])
        count = packed.nbytes
        if self.staging.numel() < count:
            self.staging = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        host = self.staging[:count].view(packed.dtype)
        layer.cache.writer.before_reading(packed.device)
        host.copy_(packed, non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        there.synchronize()
        self.transfers.device_to_host_bytes += count
        parts = host.split([part.numel() for part in states])
        return tuple(part.view(like.shape) for part, like in zip(parts, states))


class CoresMeeting:
    """Calls of the threads that `calls` has. Masks that are no window are left to a `CopyMeeting`, and passes of so many tokens that
    queries, new keys and new values are larger than the input of `calls`, or the result than its output.

    Args:
        calls: for a model on the CPU `HostCalls`, on a GPU `Crossing`.
        cpus: where the `CopyMeeting` may run its threads, if this thread may not run there; None: where this one may.
    """

    def __init__(self, calls: HostCalls | Crossing, cpus: set[int] | None = None):
        self.calls, self.transfers, self.cpus = calls, calls.transfers, cpus
        self.tasks = AttentionTasks(calls.cores)
        self.numbers: dict[AttendedLayer, int] = {}
        self.others = CopyMeeting(calls.transfers, calls.cores.threads)

    def attend(
        self, layer: AttendedLayer, query: torch.Tensor, window: int = 0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, heads, new, _ = query.shape
        keys, values = layer.kept
        states = query, *layer.newest
        out = query.new_empty((batch, new, heads, values.shape[4]))
        if mask is not None or not self._has_room(states, out):
            with _running_on(self.cpus):
                return self.others.attend(layer, query, window, mask)
        if layer not in self.numbers:
            logits = layer.logits
            self.numbers[layer] = self.tasks.add(
                keys, values, heads, logits.scale, logits.softcap, logits.slopes, logits.sinks
            )
        self.transfers.cores_bytes += _read_bytes(layer, query, window)
        packed = torch.cat([part.flatten() for part in states])
        if isinstance(self.calls, Crossing):
            layer.cache.writer.before_reading(out.device)
            target, what = self.calls.output.data_ptr(), (new, layer.length, window)
            self.calls.meet(
                [packed],
                [out],
                lambda sources, call: self.tasks.submit(self.numbers[layer], sources[0], target, *what, call),
            )
        else:
            self.tasks.run(self.numbers[layer], packed, out, new, layer.length, window)
        return out

    def _has_room(self, states: tuple[torch.Tensor, ...], out: torch.Tensor) -> bool:
        if not isinstance(self.calls, Crossing):
            return True
        asked = sum(part.nbytes for part in states)
        return asked <= self.calls.input.nbytes and out.nbytes <= self.calls.output.nbytes


@contextlib.contextmanager
def _running_on(cpus: set[int] | None) -> Iterator[None]:
    """Threads that are started meanwhile may run on `cpus`: they inherit where this one may."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _read_bytes(layer: AttendedLayer, query: torch.Tensor, window: int) -> int:
    """Of keys and values, which are read once for all new tokens."""
    positions = min(layer.length, window + query.shape[2] - 1) if window else layer.length
    return positions * sum(kept[0, :, :, 0].nbytes for kept in layer.kept)
