"""The sizes of the log and of the contract's keys of the record, by the formulas that users know (`zero_inference.utils`)."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.engines.base import Job
from zero_inference.utils import cache_bytes, hidden_bytes, model_bytes


@dataclass(frozen=True)
class LogSizes:
    """At 2 bytes an element, over all ranks; nothing is decided by them."""

    model_bytes: int
    cache_bytes: int
    hidden_bytes: int


def log_sizes(job: Job) -> LogSizes:
    config, batch = job.spec.config, job.config.batch_size
    return LogSizes(
        model_bytes(config, parameters=job.sizes.parameters),
        cache_bytes(config, batch, job.length),
        hidden_bytes(config, batch, job.length),
    )
