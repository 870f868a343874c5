"""How long a pass copies: over the link, from the other GPUs, and from disk. Of what is not known the seconds are None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description


def copies_of_step(plan: EnginePlan, description: Description) -> dict[str, float | None]:
    """Seconds by key of `RATE_WORDS`, of a decode step of mean length."""
    beside = plan.beside_link()
    of_links = 1 if beside else plan.job.ranks.world_size  # beside the cores the rate is that of all links
    weights_s = _seconds(plan.fetched_bytes / of_links, beside[0] if beside else _weights_gb_per_s(plan, description))
    kv_s = _seconds(plan.carried_kv_bytes / plan.job.ranks.world_size, _kv_gb_per_s(plan, description, beside))
    over_link_s, others_s = peers_s(plan, description, plan.fetched_bytes)
    link_s = None if weights_s is None or kv_s is None else weights_s + kv_s + over_link_s
    return {"link": link_s, "peers": others_s, "disk": _disk_s(plan, description)}


def copies_of_prefill(plan: EnginePlan, description: Description) -> dict[str, float | None]:
    """The same of a prefill, whose keys and values are written to host memory while weights come."""
    job = plan.job
    written = job.kv_bytes(job.config.prompt_len) if job.on_gpu and job.config.kv_offload else 0
    rate = plan.prefill_link_gb_per_s or _weights_gb_per_s(plan, description)
    fetched_s = _seconds(plan.prefill_fetched_bytes / job.ranks.world_size, rate)
    written_s = _seconds(written, _kv_gb_per_s(plan, description))
    over_link_s, others_s = peers_s(plan, description, plan.prefill_fetched_bytes)
    link_s = None if fetched_s is None or written_s is None else max(fetched_s + over_link_s, written_s)
    return {"link": link_s, "peers": others_s, "disk": _disk_s(plan, description)}


def missing_rates(plan: EnginePlan, description: Description) -> list[str]:
    """Those that such copies take and the machine lacks, by the names that `--assume` has for them."""
    job = plan.job
    pinned = []  # whether, of what crosses the link
    if plan.prefill_fetched_bytes and (job.on_gpu or plan.copies_on_cpu):
        pinned.append(_weights_locked(plan))
    if job.on_gpu and job.config.kv_offload:
        pinned.append(job.config.pin_kv_cache)
    link = "the link" if job.on_gpu else "copies in host memory"
    missing = {
        f"{link} (link=)": any(pinned) and description.link_gb_per_s is None,
        "pageable copies (pageable=)": not all(pinned) and description.pageable_link_gb_per_s is None,
        "the disk (disk=)": bool(plan.disk_bytes) and description.disk_gb_per_s is None,
    }
    return [name for name, lacks in missing.items() if lacks]


def lacks_peers(plan: EnginePlan, description: Description) -> bool:
    """Whether GPUs send each other weights, and it is not known how fast."""
    return bool(plan.exchanged_bytes(plan.fetched_bytes)) and description.peers_gb_per_s is None


def peers_s(plan: EnginePlan, description: Description, fetched_bytes: int) -> tuple[float, float]:
    """Seconds in which each GPU gets its weights from the others, in a pass that fetches so many bytes over all links: over its link, and
    by ways of their own. Nothing where the rate is not known."""
    peers, exchanged = description.peers_gb_per_s, plan.exchanged_bytes(fetched_bytes)
    if not plan.job.on_gpu or peers is None:
        return 0.0, 0.0
    if peers == "link":
        return _seconds(exchanged, description.link_gb_per_s) or 0.0, 0.0
    return 0.0, exchanged / (peers * 1e9)


def _weights_locked(plan: EnginePlan) -> bool:
    """Whether weights in host memory are page-locked, or there is no GPU for which that matters."""
    return plan.pinned or not plan.job.on_gpu


def _weights_gb_per_s(plan: EnginePlan, description: Description) -> float | None:
    if not plan.job.on_gpu and not plan.copies_on_cpu:
        return float("inf")
    return description.link_gb_per_s if _weights_locked(plan) else description.pageable_link_gb_per_s


def _kv_gb_per_s(plan: EnginePlan, description: Description, beside: tuple[float, float] | None = None) -> float | None:
    """Of one link, for keys and values in host memory; `beside` has the rate of all of them beside the cores where these work, too."""
    if not plan.job.config.pin_kv_cache:
        return description.pageable_link_gb_per_s
    return beside[0] / plan.job.ranks.world_size if beside else description.link_gb_per_s


def _disk_s(plan: EnginePlan, description: Description) -> float | None:
    rate = description.disk_gb_per_s
    return _seconds(plan.disk_bytes, rate * plan.job.ranks.num_nodes if rate else None)


def _seconds(nbytes: float, gb_per_s: float | None) -> float | None:
    """None where there is something to move, and no rate."""
    if not nbytes:
        return 0.0
    return nbytes / (gb_per_s * 1e9) if gb_per_s else None
