"""What NVIDIA's datasheets say a card can do. The numbers and where they come from are in cards.json."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).resolve().parent / "cards.json"
MAKER = {"nvidia", "tesla", "quadro", "geforce"}
_SIZE = re.compile(r"\d+gb")
RATES = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True)
class Rate:
    """One figure of a datasheet: TFLOP/s (1e12) or GB/s (1e9), and the document it stands in."""

    value: float
    source: str


@dataclass(frozen=True)
class Card:
    """One form of a card.

    Attributes:
        name: what people call it.
        matches: words of the name that CUDA gives the device; all have to be in it.
        tflops: dense rates (no sparsity) by type; fp32 is that of the CUDA cores, the others are of the tensor cores
            accumulating in float32. A type without a rate is not in it.
        memory: bandwidth of the device memory.
        nvlink: to other cards, both ways together; None where that takes a bridge or the card has none.
        memory_bytes: its size without what its error correction takes; None where a card is sold with several.
    """

    name: str
    matches: tuple[str, ...]
    tflops: dict[str, Rate]
    memory: Rate
    nvlink: Rate | None = None
    memory_bytes: int | None = None


@functools.cache
def cards() -> tuple[Card, ...]:
    """All cards of the table, in its order."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))

    def rate(pair: list) -> Rate:
        value, source = pair
        return Rate(value, table["sources"][source])

    return tuple(
        Card(
            name=row["name"],
            matches=tuple(row["matches"]),
            tflops={kind: rate(row["tflops"][kind]) for kind in RATES if kind in row["tflops"]},
            memory=rate(row["memory_gbps"]),
            nvlink=rate(row["nvlink_gbps"]) if "nvlink_gbps" in row else None,
            memory_bytes=_memory_bytes(row),
        )
        for row in table["cards"]
    )


def _memory_bytes(row: dict) -> int | None:
    """Makers' GB of memory are GiB: an A100 of 40 GB has 40960 MiB. GDDR6 has no bits of its own for error correction, for which a T4 of
    16 GB keeps 1 and a L40S of 48 GB keeps 3."""
    if "memory_gb" not in row:
        return None
    nbytes = int(row["memory_gb"][0] * (1 << 30))
    return nbytes - nbytes // 16 if row.get("ecc_in_memory") else nbytes


def card_of(name: str) -> Card:
    """The card that people call `name`."""
    return next(card for card in cards() if card.name == name)


def find_card(device_name: str) -> Card | None:
    """The card that CUDA calls `device_name` (such as "NVIDIA H200"), or None for one that is not in the table.

    Every word of the name has to be accounted for, by the card, as its maker or as a memory size: an RTX 3090 Ti, a laptop's
    RTX 4090 or a MIG slice of an H100 is another card than the one whose name it begins with.
    """
    words = set(device_name.lower().replace("-", " ").split())
    for card in cards():
        parts = {part.lower() for part in card.matches}
        if parts <= words and not {word for word in words - parts - MAKER if not _SIZE.fullmatch(word)}:
            return card
    return None
