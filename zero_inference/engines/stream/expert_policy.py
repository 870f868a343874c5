"""Which experts are worth their place in device memory: those used most, where what was long ago counts less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# Decode passes behind which a use counts half. With eight of 128 experts a token, each is used four times in so many passes of one
# sequence: fewer would be a matter of chance. A choice of design; no trace of a router was evaluated for it.
HALF_LIFE_PASSES = 64
# Passes between two looks at what was used. Each costs Python some microseconds a layer, and a use more or less in four passes
# changes no order that has lasted for sixty.
PERIOD_PASSES = 4
LONG_PASS_KEEPS = 0.5  # of former uses, when a pass of many tokens is counted: its prompt is another text
# What is copied at most for a look, of all layers together, or one expert if that is larger: 1.2 ms of a link of 55 GB/s in four
# steps, each of which takes milliseconds. The ring's copies wait for it.
MOST_BYTES = 64 << 20
# A newcomer was used by this factor more than what it replaces, and by two uses: with experts that are used alike, chance alone would
# otherwise change places in every look, and each change costs a copy and saves nothing.
FACTOR, MORE_USES = 1.25, 2.0


class Exchange(NamedTuple):
    """An expert that comes to the device, and the slot of the one that goes."""

    cache: int
    expert: int
    slot: int


def decayed(uses: torch.Tensor, passes: int) -> torch.Tensor:
    """What `uses` count after so many passes."""
    return uses * 0.5 ** (passes / HALF_LIFE_PASSES)


def exchanges(
    uses: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], sizes: Sequence[int], most_bytes: int = MOST_BYTES
) -> list[Exchange]:
    """The exchanges that are worth most, by the difference in uses, over all layers.

    In each layer the most used expert outside is set against the least used one inside, the second against the second and so on.

    Args:
        uses: float32 [experts] of each layer, decayed.
        tables: int64 [experts] of each layer, the slot of each expert or -1.
        sizes: bytes of an expert of each layer.
        most_bytes: of all that come; one may come whatever its size.
    """
    worth: list[tuple[float, Exchange]] = []
    for cache, (used, table) in enumerate(zip(uses, tables)):
        if _gain(used, table) < MORE_USES:  # as it is in most layers and looks
            continue
        counts, slots = used.tolist(), table.tolist()  # tensors of one element cost several times what numbers do
        going = sorted((count, expert) for expert, count in enumerate(counts) if slots[expert] >= 0)
        coming = sorted((-count, expert) for expert, count in enumerate(counts) if slots[expert] < 0)
        for (less, new), (fewest, old) in zip(coming, going):
            if -less - fewest < MORE_USES or -less < FACTOR * fewest:
                break
            worth.append((-less - fewest, Exchange(cache, new, slots[old])))
    chosen: list[Exchange] = []
    left = most_bytes
    for _, exchange in sorted(worth, key=lambda pair: (-pair[0], pair[1])):
        if chosen and sizes[exchange.cache] > left:
            break
        chosen.append(exchange)
        left -= sizes[exchange.cache]
    return chosen


def _gain(used: torch.Tensor, table: torch.Tensor) -> float:
    """By how much the most used expert outside was used more than the least used one inside."""
    outside, inside = used.masked_fill(table >= 0, -math.inf), used.masked_fill(table < 0, math.inf)
    return float(outside.max() - inside.min())
