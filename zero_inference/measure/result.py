"""What the loops gave, put together for the record."""

from __future__ import annotations

import hashlib
from typing import Any

from zero_inference.measure import steadiness
from zero_inference.measure.session import Session
from zero_inference.planning import roofline
from zero_inference.planning.memory import log_sizes
from zero_inference.records.schema import Measured, MovedPerStep
from zero_inference.utils.environment import peak_host_bytes
from zero_inference.utils.ranks import Ranks


def measured_of(session: Session, load_s: float, compile_s: float) -> Measured:
    """Sums and maxima are over all ranks, which call it together."""
    job, loaded, measurement, around = session.plan.job, session.loaded, session.measurement, session.around
    config, ranks, log = job.config, job.ranks, log_sizes(job)
    batch, steps = config.batch_size, config.gen_len - 1
    prefill_s, decode_s, total_s = (measurement.median(name) for name in ("prefill_s", "decode_s", "total_s"))
    moved = _over_ranks(measurement.loops[-1].moved, ranks)
    all_read = steps and not job.sizes.chooses_experts
    work = roofline.step_work(job, loaded.weight_bytes, moved.cores_bytes_per_step or 0)
    ahead_bytes = ranks.total(around.ahead_bytes)
    limit = roofline.decode_roofline(session.rates, moved, ahead_bytes, work, job.on_gpu, steps, decode_s)
    peak_gpu_bytes, host_bytes, compile_s = ranks.maximum(
        [float(around.peak_gpu_bytes or 0), float(peak_host_bytes()), compile_s]
    )
    return Measured(
        model_bytes=log.model_bytes,
        cache_bytes=log.cache_bytes,
        hidden_bytes=log.hidden_bytes,
        weight_bytes=loaded.weight_bytes,
        load_s=load_s,
        compile_s=compile_s,
        cold_total_s=measurement.cold_total_s,
        warmup_total_s=measurement.warmup_s,
        warmed_up=measurement.warmed_up,
        settling_s=measurement.settling_s,
        loops=measurement.loops,
        evenness=steadiness.decode_evenness(measurement.loops),
        prefill_latency_s=prefill_s,
        prefill_throughput=batch * config.prompt_len / prefill_s,
        decode_latency_s=decode_s,
        decode_throughput=batch * steps / decode_s if steps else None,
        total_latency_s=total_s,
        total_throughput=batch * config.gen_len / total_s,
        peak_gpu_bytes=int(peak_gpu_bytes) if around.peak_gpu_bytes is not None else None,
        peak_host_bytes=int(host_bytes),
        output_ids_sha256=output_ids_sha256(measurement.output_ids),
        transfers=moved,
        decode_weights_gb_per_s=loaded.weight_bytes * steps / decode_s / 1e9 if all_read else None,
        limit=limit,
        link_use=around.last_use,
        device=str(ranks.device.type),
        experts=measurement.loops[-1].experts,
        predicted=session.plan.predicted,
    )


def _over_ranks(mine: MovedPerStep, ranks: Ranks) -> MovedPerStep:
    def total(value: float | None) -> int | None:
        return None if value is None else ranks.total(int(value))

    return MovedPerStep(
        host_to_device_bytes_per_step=total(mine.host_to_device_bytes_per_step),
        device_to_host_bytes_per_step=total(mine.device_to_host_bytes_per_step),
        disk_read_bytes_per_step=total(mine.disk_read_bytes_per_step),
        cores_bytes_per_step=total(mine.cores_bytes_per_step),
        cores_busy_s_per_step=mine.cores_busy_s_per_step,
    )


def output_ids_sha256(ids: Any) -> str:
    """SHA-256, in hex, of generated ids [B, G] as int64 little-endian, row by row.

    `ids` is a torch tensor of any device, a numpy array or nested lists. Raises ValueError if it has not
    two dimensions or is not of integers.
    """
    import numpy as np

    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.ndim != 2 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"ids must be integers [B, G], got {array.dtype} of shape {list(array.shape)}")
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()
