"""Sizes of experts, and how many of each layer a byte budget holds in the expert cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from zero_inference.engines.stream.layout import BUFFER_ALIGNMENT, BlockLayout
from zero_inference.models.experts import FusedExperts


def expert_bytes(layout: BlockLayout, experts: FusedExperts) -> int:
    """Return the bytes of one expert as stored, scales and minima included."""
    return sum(piece.nbytes for name in experts.parameters for piece in layout[name].pieces) // experts.number


def expert_memory(layout: BlockLayout, experts: FusedExperts, count: int) -> tuple[int, int]:
    """Return the device bytes of `count` experts: of their first weights, and of their last ones, with biases."""

    def nbytes(*names: str) -> int:
        sizes = [
            count * (piece.nbytes // experts.number) for name in filter(None, names) for piece in layout[name].pieces
        ]
        return sum(-(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT for size in sizes)

    return nbytes(experts.first, experts.first_bias), nbytes(experts.last, experts.last_bias)


def share_out(numbers: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Return how many experts of each layer the budget holds: equally many, or one more in layers that are evenly spread.

    Args:
        numbers: experts of each layer.
        sizes: bytes of one expert of each layer.
    """

    def taken(most: int) -> int:
        return sum(min(most, number) * size for number, size in zip(numbers, sizes))

    most = max(0, bisect_right(range(max(numbers, default=0) + 1), budget, key=taken) - 1)
    slots = [min(most, number) for number in numbers]
    growing = [place for place, number in enumerate(numbers) if number > most]
    for place in spread([sizes[place] for place in growing], budget - taken(most)):
        slots[growing[place]] += 1
    return slots


def spread(sizes: Sequence[int], budget: int) -> set[int]:
    """Return the indices of as many evenly spaced items as the budget holds; `sizes` are their bytes."""
    count = len(sizes)
    for kept in range(count, 0, -1):
        chosen = {int((index + 0.5) * count / kept) for index in range(kept)}
        if sum(sizes[index] for index in chosen) <= budget:
            return chosen
    return set()
