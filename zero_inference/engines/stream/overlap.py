"""How link and CPU overlap in a pass: the split of the weights between them, and the time of a pass in which they wait for each other.

Both may have time for all that they do and still be late: a large block can only be prefetched when a slot of the ring buffer is free,
which is as many blocks earlier as there are slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.ring import slots_in_use
from zero_inference.hardware.rates import ConcurrentRates
from zero_inference.kernels.products import FUSED_ROWS

SIMULATED_PASSES = 4  # in a row, of which the last counts: the first ones begin with an empty ring


@dataclass(frozen=True)
class BlockTimes:
    copy_s: float | None  # seconds of the link; None for a block that is not streamed
    work_s: float  # seconds of device and CPU


def overlapped_step_s(
    found: Placement, cpu_s: Mapping[int, float], link_s: float, others_s: float, fixed_slots: bool
) -> float:
    """Return the seconds of a decode step, given those of the link and those of device and CPU.

    Args:
        cpu_s: CPU seconds by block; the rest of `others_s` is spread evenly over all blocks.
        fixed_slots: each block is in the same slot in every pass.
    """
    fetched = set(found.streamed)
    if not fetched or not link_s or not others_s:
        return max(link_s, others_s)
    number, of_byte = len(found.layouts), link_s / found.nbytes_of(fetched)
    of_device = max(0.0, others_s - sum(cpu_s.values())) / number
    work_s = [of_device + cpu_s.get(block, 0.0) for block in range(number)]
    scale = others_s / sum(work_s)  # after rebalancing, `cpu_s` may exceed `others_s`
    blocks = [
        BlockTimes(of_byte * found.layouts[block].nbytes if block in fetched else None, scale * seconds)
        for block, seconds in enumerate(work_s)
    ]
    return simulate_passes(blocks, slots_in_steps(found, fixed_slots), fixed_slots)


def slots_in_steps(found: Placement, fixed_slots: bool) -> int:
    """Return the slots of the ring buffer that decode steps use."""
    return slots_in_use(len(found.streamed), found.ring_depth) if fixed_slots and found.streamed else found.ring_depth


def prefill_bytes(found: Placement, fixed_slots: bool) -> int:
    """Return the bytes of blocks that cross the link in a prefill.

    The ring buffer still holds the first blocks of a decode step, from the previous generation; those that the prefill does not need soon
    are dropped. Cached experts do not cross again.
    """
    order = [block for block in found.in_host_memory if block not in found.prompt_cpu_computed]
    prefetched = set(found.streamed[: slots_in_steps(found, fixed_slots)]).intersection(order[: found.ring_depth])
    return found.nbytes_of(order) - found.gathered_bytes - found.nbytes_of(prefetched)


def simulate_passes(blocks: list[BlockTimes], slots: int, fixed_slots: bool) -> float:
    """Return the seconds of one of many passes through `blocks`, in order.

    A copy begins when the previous one has ended and its slot is free, the work on a streamed block when its copy has ended. After the last
    block of a pass come the first ones of the next.
    """
    free_s = [0.0] * max(1, slots)
    copied_s = now_s = began_s = 0.0
    count = 0
    for _ in range(SIMULATED_PASSES):
        began_s = now_s
        count = 0 if fixed_slots else count
        for block in blocks:
            slot = count % len(free_s)
            if block.copy_s is not None:
                copied_s = max(copied_s, free_s[slot]) + block.copy_s
                now_s = max(now_s, copied_s)
            now_s += block.work_s
            if block.copy_s is not None:
                free_s[slot] = now_s
                count += 1
    return now_s - began_s


# Predicted speedup from which `auto` uses the CPU: less is within the spread of two measurements.
MIN_GAIN = 1.05
# While the CPU multiplies, kernels read page-locked memory at `FETCH_RATE` of the rate of copies (H100 hosts: 36 of 44 GB/s, 43 of 45, and
# 46 of 51 where they gather blocks for a prompt, h100-prompts/host2). Experts that are fetched for one pass: the time of the product with
# their last weights, and their greatest number, which bounds their memory.
FETCH_RATE, STAGED_PRODUCTS_S, MAX_STAGED = 0.9, 15e-6, 16

# The device's time for a mixture's prompt, relative to writing and reading its weights (1.8 to 2.3 in predicted times of Qwen3-30B-A3B).
MIXTURE_SLOWNESS = 2.0


@dataclass(frozen=True)
class Split:
    of_experts: float  # share of the bytes of experts in host memory that the CPU multiplies
    of_others: float  # the same of all other blocks
    attends: bool  # whether it attends over keys and values in host memory, which cross the link otherwise
    step_s: float  # seconds of link or CPU in a decode step, whichever are more


def best_split(
    placement: Placement, rates: ConcurrentRates, kv_bytes: int, can_attend: bool, kv_slowness: float = 1.0
) -> Split:
    """Return the split with which link and CPU end a step at the same time; nothing for the CPU where it would gain less than `MIN_GAIN`.

    Args:
        kv_bytes, kv_slowness: as of `CpuPlan`, whose CPU could attend over them if `can_attend`.
    """
    carried = kv_bytes * kv_slowness
    sent = placement.host_bytes - placement.expert_budget + carried  # without the CPU, resident layers use that memory
    alone = Split(0.0, 0.0, False, sent / (rates.link_alone_gb_per_s * 1e9))
    found = []
    for attends in (False, True)[: 1 + can_attend]:
        hand_offs_s = _hand_offs_s(placement.with_cpu_shares(1.0, 1.0), rates)
        for _ in range(2):  # fewer blocks have fewer hand-offs, which leaves the CPU more time
            split, hand_offs_s = _balanced(placement, rates, kv_bytes, carried, attends, hand_offs_s)
            found.append(split)
    best = min(found, key=lambda split: split.step_s)
    return best if alone.step_s >= MIN_GAIN * best.step_s else alone


def fetch_quota(placement: Placement, rates: ConcurrentRates) -> tuple[int, ...]:
    """Return how many of a layer's missed experts the device fetches so that link and CPU end together, by the number of missed ones.

    The link also copies streamed blocks, equally many bytes in each layer. Empty where fetching gains nothing.
    """
    blocks = placement.cpu_experts
    if not blocks:
        return ()
    size = sum(map(placement.expert_bytes, blocks)) / len(blocks)
    forms = [placement.blocks[block].experts for block in blocks]
    link, cpu = FETCH_RATE * rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    ahead_s = placement.nbytes_of(placement.streamed) / placement.layers / (rates.link_gb_per_s * 1e9)

    def seconds(missed: int, fetched: int) -> float:
        left = missed - fetched
        cpu_s = rates.call_overhead_s(left * size, left) + left * size / cpu
        return max(cpu_s, ahead_s + fetched * size / link + STAGED_PRODUCTS_S) if fetched else cpu_s

    most = max(min(form.num_experts, placement.few_tokens * form.top_k) for form in forms)
    quota = tuple(
        min(range(min(missed, MAX_STAGED) + 1), key=lambda fetched: seconds(missed, fetched))
        for missed in range(most + 1)
    )
    return quota if any(quota) else ()


def prompt_split(
    placement: Placement, rates: ConcurrentRates, tokens: int, uses_cache: bool, most: float, graphs: bool
) -> Placement:
    """Return `placement` with the blocks that the CPU computes in short prompts, so that link and CPU end together; unchanged where that
    is predicted to gain less than `MIN_GAIN`.

    Args:
        rates: for as many rows as a weight gets in such a prompt.
        most: share of the bytes of `Placement.prompt_candidates` that the CPU may multiply.
    """
    slowness = MIXTURE_SLOWNESS if placement.expert_blocks else 1.0
    times_plain = 0 if tokens <= FUSED_ROWS else 2  # the device writes and reads dequantized weights

    def times(found: Placement) -> tuple[float, float]:
        """Return the seconds of the link, and of device and CPU."""
        now = found.for_short_prompt(tokens, uses_cache)
        by_device = [layout for block, layout in enumerate(found.layouts) if block not in found.prompt_cpu_computed]
        device_bytes = sum(each.stored_bytes + times_plain * each.dequantized_bytes for each in by_device)
        device_s = slowness * device_bytes / (rates.device_gb_per_s * 1e9)
        cpu_s = now.computed_bytes / (rates.cores_gb_per_s * 1e9) + _hand_offs_s(now, rates)
        return prefill_bytes(found, graphs) / (rates.link_gb_per_s * 1e9), device_s + cpu_s

    alone_s, device_s = times(placement)
    least_s, most_s = times(placement.with_prompt_share(1.0))
    share = _share(alone_s - device_s, alone_s - least_s + most_s - device_s, most)
    found = placement.with_prompt_share(share)
    without_s = max(alone_s * rates.link_gb_per_s / rates.link_alone_gb_per_s, device_s)
    return found if without_s >= MIN_GAIN * max(times(found)) else placement


def _balanced(
    placement: Placement, rates: ConcurrentRates, kv_bytes: int, carried: float, attends: bool, hand_offs_s: float
) -> tuple[Split, float]:
    """Return the split that balances T = max(S / B_link, R / B_cpu + D / B_device + h), and the seconds of its hand-offs.

    S are the bytes sent, R those that the CPU reads, D those of resident blocks, which the device reads while the CPU waits (its reads of
    streamed blocks are short), and h the time of the hand-offs, in which the CPU cannot work. Of experts the CPU reads only a part of what
    would be sent, so they come first: other blocks are CPU-computed only where the link is still later with all experts on the CPU. With an
    expert cache the CPU reads less than R, which assumes evenly used experts; then experts are streamed only where that gains `MIN_GAIN`.
    """
    link, cpu = rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    experts = placement.expert_blocks
    of_experts, read_of_experts = placement.nbytes_of(experts), sum(map(placement.read_bytes, experts))
    of_others = placement.host_bytes - of_experts
    most_of_others = (placement.nbytes_of(placement.computable) - of_experts) / of_others if of_others else 0.0
    sent_s = (placement.host_bytes + (0 if attends else carried)) / link  # if the CPU computes nothing
    resident = sum(map(placement.read_bytes, placement.resident))
    cpu_s = hand_offs_s + resident / (rates.device_gb_per_s * 1e9)
    if attends:
        cpu_s += (
            kv_bytes / (rates.attention_gb_per_s(link_rests=not placement.host_bytes) * 1e9)
            + placement.layers * rates.hand_off_s
        )
    first = second = 0.0
    if experts:
        first = _share(sent_s - cpu_s, of_experts / link + read_of_experts / cpu, 1.0)
        all_s, some_s = (cpu_s + share * read_of_experts / cpu for share in (1.0, first))
        if placement.expert_slots and all_s < MIN_GAIN * some_s:
            first = 1.0
        sent_s, cpu_s = sent_s - first * of_experts / link, cpu_s + first * read_of_experts / cpu
    if of_others and first == (1.0 if experts else 0.0):
        second = _share(sent_s - cpu_s, of_others / link + of_others / cpu, most_of_others)
        sent_s, cpu_s = sent_s - second * of_others / link, cpu_s + second * of_others / cpu
    needed_s = _hand_offs_s(placement.with_cpu_shares(first, second), rates)
    cpu_s += needed_s - hand_offs_s
    return Split(first, second, attends, max(sent_s, cpu_s)), needed_s


def _hand_offs_s(placement: Placement, rates: ConcurrentRates) -> float:
    return sum(rates.call_overhead_s(each.nbytes, each.experts) for calls in placement.calls.values() for each in calls)


def _share(ahead_s: float, all_s: float, most: float) -> float:
    """Return the share, up to `most`, of work that takes `all_s` on both sides together, that balances sides `ahead_s` apart."""
    return min(max(ahead_s / all_s, 0.0), most)
