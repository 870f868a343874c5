"""Where a run kept its weights and its KV cache, in the words of a plan."""

from __future__ import annotations

from zero_inference.report.run import Run

LEAST_SHARE = 0.005  # less is 0%


def where(run: Run) -> str | None:
    """`66% host` (the rest is on the device), `host`, `device` or `disk`; None for a run that says nothing of it.

    Page-locked memory and a KV cache on the device are usual and not said: `host pageable`, `device, KV host`. `33% cached`: of the
    weights, experts that are in host memory and also on the device.
    """
    if run.record.get("cpu_offload") is None and run.record.get("disk_offload") is None:
        return None
    parts = [_weights(run)]
    cached, stored = run.amount("stream.expert_slot_bytes"), run.amount("weight_bytes")
    if cached and stored and cached / stored >= LEAST_SHARE:
        parts.append(f"{cached / stored:.0%} cached")
    if run.record.get("kv_offload"):
        parts.append("KV host")
    return ", ".join(parts)


def _weights(run: Run) -> str:
    without_gpu = run.text("device") == "cpu"
    if without_gpu and run.place != "disk":
        return "host"
    if run.place in ("device", "disk"):
        return run.place
    share = _share_in_host_memory(run)
    words = "host" if share > 0.99 else f"{share:.0%} host"
    return f"{words} pageable" if run.pageable else words


def _share_in_host_memory(run: Run) -> float:
    """Of the stored weights where all are read in a step, else of the layers; all where the record does not say."""
    resident, streamed = run.amount("stream.resident_layers"), run.amount("stream.streamed_layers")
    if resident is None or streamed is None or not resident + streamed > 0:
        return 1.0
    read = (run.amount("stream.fetched_bytes") or 0) + (run.amount("stream.computed_bytes") or 0)
    stored = run.amount("weight_bytes")
    if read > 0 and stored and run.amount("decode_weights_gbps"):
        return min(1.0, read / stored)
    return streamed / (resident + streamed)
