"""`--trace` for engines without a timeline: a short generation of its own under PyTorch's profiler, which slows the host down.

Kineto records the copies of any engine; spans around the decoder layers show which layer they belong to.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zero_inference.engines.base import LoadedModel
from zero_inference.measure.loops import generate_ids
from zero_inference.models.layers import decoder_layers
from zero_inference.records.hardware import TracedLinkUse
from zero_inference.utils.files import write_atomically
from zero_inference.utils.patching import Patches

TRACED_TOKENS = 4


def trace_generation(
    loaded: LoadedModel,
    ids: torch.Tensor,
    gen_len: int,
    make_cache: Callable[[], Any] | None,
    forced_tokens: torch.Tensor | None,
    path: Path | None,
) -> TracedLinkUse | None:
    """Generate up to `TRACED_TOKENS` tokens, as `generate_ids` does, and write a Chrome trace to `path`; None writes nothing.

    All ranks call it, and generate even if the trace cannot be written: then OSError. Returns `link_use_in` of the trace.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if loaded.device.type == "cuda" else [])
    with Patches() as hooks, profile(activities=activities) as profiler:
        spans: list[record_function] = []

        def begin(name: str) -> None:
            spans.append(record_function(name))
            spans[-1].__enter__()

        for index, layer in enumerate(decoder_layers(loaded.model)[1]):
            hooks.add_hooks(
                layer.register_forward_pre_hook(lambda *_, name=f"layer {index}": begin(name)),
                layer.register_forward_hook(lambda *_: spans.pop().__exit__(None, None, None)),
            )
        generate_ids(loaded, ids, min(gen_len, TRACED_TOKENS), make_cache, forced_tokens)
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
    """Return how long copies to the device ran and how long none did, over the decode steps of a Kineto trace; None without any.

    The decode steps are the time from the second pass through the first decoder layer on the host to the last copy. Overlapping
    copies count once.
    """
    begins = sorted(
        event["ts"] for event in events if event.get("name") == "layer 0" and event.get("cat") == "user_annotation"
    )
    copies = sorted(
        (event["ts"], event["ts"] + event["dur"], event.get("args", {}).get("bytes", 0))
        for event in events
        if event.get("cat") == "gpu_memcpy" and event.get("name", "").startswith("Memcpy HtoD")
    )
    copies = [copy for copy in copies if len(begins) > 1 and copy[0] >= begins[1]]
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
