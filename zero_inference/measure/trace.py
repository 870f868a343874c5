"""`--trace` for engines without a timeline: one short generation under PyTorch's profiler.

Kineto records the copies of any engine; spans around the decoder layers show which layer they belong to. A profiler slows the host
down, so this is a separate generation after the measured ones.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import StoppingCriteriaList

from zero_inference.engines.base import LoadedModel
from zero_inference.measure.loops import ForcedTokens
from zero_inference.models.layers import decoder_layers
from zero_inference.models.prompts import greedy_config
from zero_inference.records.hardware import TracedLinkUse
from zero_inference.utils.files import write_atomically

TRACED_TOKENS = 4


def trace_generation(
    loaded: LoadedModel,
    ids: torch.Tensor,
    gen_len: int,
    make_cache: Callable[[], Any] | None,
    forced_tokens: torch.Tensor | None,
    path: Path | None,
) -> TracedLinkUse | None:
    """Generate up to `TRACED_TOKENS` tokens from `ids` [batch, prompt_len] and write a Chrome trace to `path`.

    All ranks call it, and generate even if the trace cannot be written.

    Args:
        forced_tokens: as for `measure_loops`.
        path: None writes nothing.

    Returns:
        `link_use_in` of the trace; None without `path`.

    Raises:
        OSError: the trace cannot be written.
    """
    tokens = min(gen_len, TRACED_TOKENS)
    inputs = ids.to(loaded.device)
    extra = {"past_key_values": make_cache()} if make_cache else {}
    feeding = [ForcedTokens(forced_tokens.to(loaded.device), ids.shape[1])] if forced_tokens is not None else []
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if loaded.device.type == "cuda" else [])
    with ExitStack() as hooks, profile(activities=activities) as profiler:
        _mark_layers(loaded.model, hooks)
        loaded.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=greedy_config(tokens),
            stopping_criteria=StoppingCriteriaList(feeding),
            **extra,
        )
        if loaded.device.type == "cuda":
            torch.cuda.synchronize(loaded.device)
    if path is None:
        return None
    with write_atomically(path) as part:
        profiler.export_chrome_trace(str(part))
        try:
            return link_use_in(json.loads(part.read_text())["traceEvents"])
        except ValueError as error:  # Kineto does not report a full disk
            raise OSError(errno.EIO, "it is not whole; is the disk full?", str(path)) from error


def link_use_in(events: list[dict]) -> TracedLinkUse | None:
    """Return how long copies to the device ran and how long none did, over the decode steps of a Kineto trace.

    The decode steps are the time from the second pass through the first decoder layer on the host to the last copy. Overlapping
    copies count once. None if the trace has no such copies (on a CPU).
    """
    begins = sorted(
        event["ts"] for event in events if event.get("name") == "layer 0" and event.get("cat") == "user_annotation"
    )
    copies = sorted(
        (event["ts"], event["ts"] + event["dur"], event.get("args", {}).get("bytes", 0))
        for event in events
        if event.get("cat") == "gpu_memcpy" and event.get("name", "").startswith("Memcpy HtoD")
    )
    if len(begins) < 2:
        return None
    copies = [copy for copy in copies if copy[0] >= begins[1]]
    if not copies:
        return None
    busy, reached = 0.0, copies[0][0]
    for start, end, _ in copies:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    copied = sum(nbytes for _, _, nbytes in copies)
    return TracedLinkUse(
        busy_s=busy / 1e6,
        idle_s=(reached - copies[0][0] - busy) / 1e6,
        copied_bytes=copied,
        gb_per_s_while_busy=copied / (busy / 1e6) / 1e9 if busy else None,
    )


def _mark_layers(model, hooks: ExitStack) -> None:
    """Add spans named 'layer N' around the decoder layers, until `hooks` closes."""
    _, layers = decoder_layers(model)
    open_spans: list[record_function] = []

    def begin(index: int):
        def hook(module, args) -> None:
            span = record_function(f"layer {index}")
            span.__enter__()
            open_spans.append(span)

        return hook

    def end(module, args, output) -> None:
        open_spans.pop().__exit__(None, None, None)

    for index, layer in enumerate(layers):
        hooks.callback(layer.register_forward_pre_hook(begin(index)).remove)
        hooks.callback(layer.register_forward_hook(end).remove)
