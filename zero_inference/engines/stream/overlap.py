"""How the copies of a decode step and its other work follow each other: what each of the two waits for the other.

Both may have time for all that they do and still be late: a large block can only be sent for when a slot of the ring is free, which is as
many blocks before it as there are slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.ring import slots_in_use
from zero_inference.hardware.rates import ConcurrentRates
from zero_inference.kernels.products import FUSED_ROWS

PASSES = 4  # in a row, of which the last counts: the first ones begin with an empty ring


@dataclass(frozen=True)
class BlockTimes:
    """Of a block in a pass, in seconds.

    Attributes:
        copy_s: of the link; None where it is not fetched.
        work_s: of device and cores.
    """

    copy_s: float | None
    work_s: float


def overlapped_step_s(
    found: Placement, of_cores: Mapping[int, float], link_s: float, others_s: float, keeps_places: bool
) -> float:
    """Seconds of a decode step that takes the link, and device and cores, as long as this.

    Args:
        of_cores: seconds of the cores in each block that they multiply; the rest of `others_s` is spread evenly over all blocks.
        keeps_places: as of `simulate_passes`.
    """
    fetched = set(found.streamed)
    if not fetched or not link_s or not others_s:
        return max(link_s, others_s)
    number, of_byte = len(found.layouts), link_s / found.nbytes_of(fetched)
    of_device = max(0.0, others_s - sum(of_cores.values())) / number
    work_s = [of_device + of_cores.get(block, 0.0) for block in range(number)]
    scale = others_s / sum(work_s)  # blocks that changed hands took their time with them
    blocks = [
        BlockTimes(of_byte * found.layouts[block].nbytes if block in fetched else None, scale * seconds)
        for block, seconds in enumerate(work_s)
    ]
    return simulate_passes(blocks, slots_in_steps(found, keeps_places), keeps_places)


def slots_in_steps(found: Placement, keeps_places: bool) -> int:
    """Of the ring, that decode steps go round in."""
    return slots_in_use(len(found.streamed), found.ring_depth) if keeps_places and found.streamed else found.ring_depth


def prefill_bytes(found: Placement, keeps_places: bool) -> int:
    """Return the bytes of blocks that cross the link in a prefill. When it begins, the ring is full of what a decode step fetches first: it
    follows another generation. What the prefill does not need soon is dropped then. Experts that the device keeps do not come again."""
    order = [block for block in found.in_host_memory if block not in found.prompt_cpu_computed]
    ahead = set(found.streamed[: slots_in_steps(found, keeps_places)]).intersection(order[: found.ring_depth])
    return found.nbytes_of(order) - found.gathered_bytes - found.nbytes_of(ahead)


def simulate_passes(blocks: list[BlockTimes], slots: int, keeps_places: bool) -> float:
    """Seconds of one of many passes through `blocks`, in order.

    A copy begins when the one before it has ended and its slot is free, and the work on a fetched block when it is there. The order is
    circular: behind the last block of a pass come the first ones of the next.

    Args:
        slots: of the ring.
        keeps_places: each block comes into the same slot in every pass.
    """
    free_s = [0.0] * max(1, slots)
    copied_s = now_s = began_s = 0.0
    count = 0
    for _ in range(PASSES):
        began_s = now_s
        count = 0 if keeps_places else count
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


# Predicted, from which on the cores are used by themselves: less is within what two measurements differ by.
LEAST_GAIN = 1.05
# While the CPU multiplies, kernels read page-locked memory at `FETCH_RATE` of what copies do (H100 hosts: 36 of 44 GB/s, 43 of 45, and 46
# of 51 where they put blocks together for a prompt, h100-prompts/host2). Experts that are fetched for one pass: the time to multiply
# them by their last weights afterwards, and the most of them, which bounds their memory.
FETCH_RATE, STAGED_PRODUCTS_S, MOST_STAGED = 0.9, 15e-6, 16

# The device takes this many times as long for a mixture's prompt as writing and reading its weights would (1.8 to 2.3 in predicted times of
# Qwen3-30B-A3B).
MIXTURE_SLOWNESS = 2.0


@dataclass(frozen=True)
class Split:
    """
    Attributes:
        of_experts, of_others: shares of the bytes of experts and of other blocks in host memory, that the cores multiply.
        attends: whether they attend over keys and values in host memory, which cross the link otherwise.
        step_s: seconds of link or cores in a decode step, whichever are more.
    """

    of_experts: float
    of_others: float
    attends: bool
    step_s: float


def best_split(
    placement: Placement, rates: ConcurrentRates, kv_bytes: int, can_attend: bool, carried_bytes: float | None = None
) -> Split:
    """The division in which link and cores end a step at the same time; nothing for the cores where they would hardly help.

    Args:
        kv_bytes: keys and values in host memory that a step reads.
        can_attend: whether the cores could read them.
        carried_bytes: of weights, that take the link as long as keys and values, which may not be page-locked; None for as many as these
            have.
    """
    carried = kv_bytes if carried_bytes is None else carried_bytes
    sent = placement.host_bytes - placement.expert_budget + carried  # without cores whole layers stay in that memory
    alone = Split(0.0, 0.0, False, sent / (rates.link_alone_gb_per_s * 1e9))
    found = []
    for attends in (False, True)[: 1 + can_attend]:
        meetings_s = _meetings_s(placement.with_cpu_shares(1.0, 1.0), rates)
        for _ in range(2):  # fewer blocks meet more seldom, which leaves the cores more time
            split, meetings_s = _balanced(placement, rates, kv_bytes, carried, attends, meetings_s)
            found.append(split)
    best = min(found, key=lambda split: split.step_s)
    return best if alone.step_s >= LEAST_GAIN * best.step_s else alone


def fetch_quota(placement: Placement, rates: ConcurrentRates) -> tuple[int, ...]:
    """Return how many of a layer's missed experts the device fetches so that link and CPU end together, by the number of missed ones.

    The link also copies what `placement` fetches ahead, an equal part of it in each layer. Empty where fetching gains nothing.
    """
    blocks = placement.cpu_computed.intersection(placement.expert_blocks)
    if not blocks:
        return ()
    size = sum(map(placement.expert_bytes, blocks)) / len(blocks)
    forms = [placement.blocks[block].experts for block in blocks]
    link, cores = FETCH_RATE * rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    ahead_s = placement.nbytes_of(placement.streamed) / placement.layers / (rates.link_gb_per_s * 1e9)

    def seconds(missed: int, fetched: int) -> float:
        left = missed - fetched
        cpu_s = rates.call_overhead_s(left * size, left) + left * size / cores
        return max(cpu_s, ahead_s + fetched * size / link + STAGED_PRODUCTS_S) if fetched else cpu_s

    most = max(min(form.number, placement.few_tokens * form.chosen) for form in forms)
    quota = tuple(
        min(range(min(missed, MOST_STAGED) + 1), key=lambda fetched: seconds(missed, fetched))
        for missed in range(most + 1)
    )
    return quota if any(quota) else ()


def prompt_split(
    placement: Placement, rates: ConcurrentRates, tokens: int, keeps: bool, most: float, graphs: bool
) -> Placement:
    """Return `placement` with the blocks that the cores multiply in short prompts, so that link and cores end together; unchanged
    where that is predicted to gain less than `LEAST_GAIN`.

    Args:
        rates: with as many rows as a weight has in such a prompt.
        tokens, keeps: as of `Placement.for_short_prompt`.
        most: of the bytes of `Placement.prompt_candidates`, that the cores may multiply.
        graphs: decode steps are CUDA graphs, as of `prefill_bytes`.
    """
    slowness = MIXTURE_SLOWNESS if placement.expert_blocks else 1.0
    times_plain = 0 if tokens <= FUSED_ROWS else 2  # the device writes and reads what it dequantizes

    def times(found: Placement) -> tuple[float, float]:
        """Return the seconds of the link, and of device and cores."""
        now = found.for_short_prompt(tokens, keeps)
        by_device = [layout for block, layout in enumerate(found.layouts) if block not in found.prompt_cpu_computed]
        device_bytes = sum(each.stored_bytes + times_plain * each.dequantized_bytes for each in by_device)
        device_s = slowness * device_bytes / (rates.device_gb_per_s * 1e9)
        cores_s = now.computed_bytes / (rates.cores_gb_per_s * 1e9) + _meetings_s(now, rates)
        return prefill_bytes(found, graphs) / (rates.link_gb_per_s * 1e9), device_s + cores_s

    alone_s, device_s = times(placement)
    least_s, most_s = times(placement.with_prompt_share(1.0))
    share = _share(alone_s - device_s, alone_s - least_s + most_s - device_s, most)
    found = placement.with_prompt_share(share)
    without_s = max(alone_s * rates.link_gb_per_s / rates.link_alone_gb_per_s, device_s)
    return found if without_s >= LEAST_GAIN * max(times(found)) else placement


def _balanced(
    placement: Placement, rates: ConcurrentRates, kv_bytes: int, carried: float, attends: bool, meetings_s: float
) -> tuple[Split, float]:
    """T = max(S / B_link, R / B_cores + D / B_device + h), with S the bytes that are sent, R those that the cores read, D those of blocks
    that stay on the device, which reads them while the cores wait (what it reads of fetched ones is little), and h the time of their
    meetings, in which they cannot work. Of experts the cores read a part of what would be sent, so they come first: other blocks are the
    cores' only where these would wait for the link with all experts. Where the device keeps some experts, the cores read less than R,
    which takes all to be used alike; then experts are sent only where that promises as much as cores have to.

    Returns:
        the division, with the step that it takes with the meetings that it has; and the seconds of these.
    """
    link, cores = rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    experts = placement.expert_blocks
    of_experts, read_of_experts = placement.nbytes_of(experts), sum(map(placement.read_bytes, experts))
    of_others = placement.host_bytes - of_experts
    most_of_others = (placement.nbytes_of(placement.computable) - of_experts) / of_others if of_others else 0.0
    sent_s = (placement.host_bytes + (0 if attends else carried)) / link  # if the cores multiply nothing
    resident = sum(map(placement.read_bytes, placement.resident))
    cores_s = meetings_s + resident / (rates.device_gb_per_s * 1e9)
    if attends:
        cores_s += (
            kv_bytes / (rates.attention_gb_per_s(link_rests=not placement.host_bytes) * 1e9)
            + placement.layers * rates.hand_off_s
        )
    first = second = 0.0
    if experts:
        first = _share(sent_s - cores_s, of_experts / link + read_of_experts / cores, 1.0)
        all_s, some_s = (cores_s + share * read_of_experts / cores for share in (1.0, first))
        if placement.expert_slots and all_s < LEAST_GAIN * some_s:
            first = 1.0
        sent_s, cores_s = sent_s - first * of_experts / link, cores_s + first * read_of_experts / cores
    if of_others and first == (1.0 if experts else 0.0):
        second = _share(sent_s - cores_s, of_others / link + of_others / cores, most_of_others)
        sent_s, cores_s = sent_s - second * of_others / link, cores_s + second * of_others / cores
    needed_s = _meetings_s(placement.with_cpu_shares(first, second), rates)
    cores_s += needed_s - meetings_s
    return Split(first, second, attends, max(sent_s, cores_s)), needed_s


def _meetings_s(placement: Placement, rates: ConcurrentRates) -> float:
    return sum(rates.call_overhead_s(each.nbytes, each.experts) for calls in placement.calls.values() for each in calls)


def _share(ahead_s: float, all_s: float, most: float) -> float:
    """Of work that takes `all_s` from one side and gives it to the other, what brings them level if one is `ahead_s` the longer."""
    return min(max(ahead_s / all_s, 0.0), most)
