"""How much a copy by the cores has to touch for their caches to hold little of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

LEAST_BYTES, MOST_BYTES = 64 << 20, 512 << 20
UNKNOWN_BYTES = 256 << 20
CPUS = Path("/sys/devices/system/cpu")


def block_bytes() -> int:
    """Bytes of a block for copies by the cores: twice what their last-level caches hold, so source and target are four times that.

    Not larger than it has to be, because touching memory for the first time takes longer than copying it, above all in a virtual
    machine; and never beyond MOST_BYTES, which a few processors' caches exceed. All of torch's threads copy, and
    Linux spreads them over as many caches as there are.
    """
    try:
        caches = sorted(_last_level_caches(), reverse=True)
    except (OSError, ValueError):  # a machine that does not tell, or in other words
        caches = []
    held = sum(caches[: torch.get_num_threads()])
    return max(LEAST_BYTES, min(MOST_BYTES, 2 * held)) if held else UNKNOWN_BYTES


def _last_level_caches() -> list[int]:
    """Bytes of each last-level cache of the cores that this process may use."""
    found = {}
    for core in os.sched_getaffinity(0):
        levels = [(int(_text(index, "level")), index) for index in (CPUS / f"cpu{core}" / "cache").glob("index*")]
        if levels:
            level, index = max(levels)
            found[level, _text(index, "shared_cpu_list")] = _bytes(_text(index, "size"))
    return list(found.values())


def _text(index: Path, name: str) -> str:
    return (index / name).read_text().strip()


def _bytes(size: str) -> int:
    """Of such as 32768K."""
    return int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]] if size[-1:] in ("K", "M", "G") else int(size)
