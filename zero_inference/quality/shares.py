"""Which items a rank works on, and all ranks' results in the order of the items."""

from __future__ import annotations

from zero_inference.utils.ranks import Ranks


def share_of(items: list, ranks: Ranks) -> list:
    """Every n-th item for each of n ranks: neighbours, which often take equally long, are spread over them."""
    return items[ranks.rank :: ranks.world_size]


def joined(mine: list, ranks: Ranks) -> list:
    """What all ranks made of their `share_of` the items, one result an item, in the order of the items; on every rank."""
    shares = ranks.gather_objects(mine)
    results = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        results[rank :: ranks.world_size] = share
    return results
