"""What a plan of the stream engine says to people."""

from __future__ import annotations

from zero_inference.engines.base import Job
from zero_inference.engines.stream.cpu_plan import CpuPlan
from zero_inference.engines.stream.residency import Residency
from zero_inference.utils.format import format_bytes, three_digits


def places_in_words(found: Residency) -> str:
    """Where the weights are, of a model that has some in host memory, beside a GPU."""
    hosted = found.layers_of(found.in_host_memory)
    embedding = f"{format_bytes(found.embedding_bytes)} of input embedding"
    if not hosted:
        return f"all layers on the device, {embedding} in host memory"
    host = f"in host memory ({format_bytes(found.host_bytes)}{f' and {embedding}' if found.embedding else ''})"
    if set(found.expert_blocks).issuperset(found.in_host_memory):
        return f"the experts of {len(hosted)} of {found.layers} layers {host}, everything else on the device"
    if len(hosted) == found.layers:
        return f"all {found.layers} layers {host}"
    return f"{found.layers - len(hosted)} of {found.layers} layers on the device, {len(hosted)} {host}"


def others_in_words(job: Job, outside_bytes: int, activations: int, reserve: int, embeds: bool) -> str:
    """Return what takes the device memory that layers do not get; `embeds`: the input embedding is on the device."""
    outside = "embedding and head" if embeds else "the output head"
    return (
        f" by {outside} ({format_bytes(outside_bytes)}), KV cache ({format_bytes(job.cache_device_bytes)}), "
        f"activations ({format_bytes(activations)}) and a reserve ({format_bytes(reserve)}), "
        f"of {format_bytes(job.free_device_bytes or 0)} free"
    )


def experts_in_words(found: Residency) -> list[str]:
    """Return lines about the experts in host memory that the device keeps, and fetches."""
    lines = []
    if slots := found.expert_slots:
        number = sum(found.blocks[block].experts.number for block in found.expert_blocks)
        lines.append(
            f"the device also keeps the {sum(slots.values())} most used of the {number} experts in host memory: "
            f"{format_bytes(found.expert_slot_bytes)}"
        )
    if found.quota:
        lines.append(
            f"of {len(found.quota) - 1} chosen experts that the device does not keep, it fetches {found.quota[-1]} itself, and "
            "the CPU multiplies the others"
        )
    return lines


def cores_in_words(cores: CpuPlan, found: Residency) -> str:
    """What the host's cores do in a decode step."""
    threads = len(cores.cpus)
    who = f"{threads} thread{'s' * (threads > 1)} ({cores.instructions})" if cores.instructions else "the host's cores"
    one = bool(cores.instructions) and threads == 1
    tasks = [f"multipl{'ies' if one else 'y'} {_products_in_words(found)}"] if found.computed else []
    if cores.attends:
        tasks.append(f"attend{'s' * one} over {format_bytes(cores.kv_bytes)} of keys and values")
    for_ranks = f" for {cores.ranks} ranks" if cores.ranks > 1 else ""
    line = f"{who} {' and '.join(tasks)} in host memory{for_ranks}"
    if cores.kv_bytes and cores.ranks > 1:
        line += "; keys and values cross the link, because each rank has its own"
    return line


def prompts_in_words(cores: CpuPlan) -> list[str]:
    """Return a line about the prompts in which the CPU multiplies a share, if there are any."""
    if not cores.prompt_rows:
        return []
    share = f"{cores.prompt_share:.0%} of the weights in host memory"
    return [f"prompts of up to {cores.prompt_rows} tokens: the CPU multiplies {share}, the rest crosses the link"]


def _products_in_words(found: Residency) -> str:
    """Of the cores; of experts, as many as tokens are expected to choose."""
    stored = sum(found.layouts[block].stored_bytes for block in found.computed)
    chosen = f" (the experts that tokens choose, of {format_bytes(stored)})" if stored > found.computed_bytes else ""
    return f"{format_bytes(found.computed_bytes)}{chosen}"


def rates_in_words(cores: CpuPlan) -> list[str]:
    """A line about the rates that the plan is made with, where they are known."""
    if cores.rates is None:
        return []
    rates, tokens = cores.rates, cores.few_rows * cores.ranks
    link, link_alone, found, alone = map(
        three_digits,
        (rates.link_gb_per_s, rates.link_alone_gb_per_s, rates.cores_gb_per_s, rates.cores_alone_gb_per_s),
    )
    return [
        f"working side by side: link{'s' * (cores.ranks > 1)} {link} GB/s (alone {link_alone}), "
        f"cores {found} GB/s (alone {alone}) with {tokens} token{'s' * (tokens > 1)} a pass"
    ]
