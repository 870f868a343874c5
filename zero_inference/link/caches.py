"""How much a copy has to touch for the caches of this machine's cores to hold little of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

MOST_BYTES = 256 << 20  # also where the caches are not known
LEAST_BYTES = 32 << 20
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def block_bytes() -> int:
    """Bytes of a block that the cores copy: twice what their last-level caches hold, so source and target are four times that.

    Touching memory for the first time takes longer than copying it, above all in a virtual machine (1 GB/s), so a block is not larger
    than it has to be. All of torch's threads copy; each last-level cache serves so many of them as share it.
    """
    caches = [(int(_text(index, "level")), _bytes(_text(index, "size")), _cores(_text(index, "shared_cpu_list")))
              for index in sorted(CACHES.glob("index*")) if _text(index, "size")]
    if not caches:
        return MOST_BYTES
    _, nbytes, shared_by = max(caches)
    return max(LEAST_BYTES, min(MOST_BYTES, 2 * nbytes * math.ceil(torch.get_num_threads() / shared_by)))


def _text(index: Path, name: str) -> str:
    try:
        return (index / name).read_text().strip()
    except OSError:  # not every machine tells
        return ""


def _bytes(size: str) -> int:
    """Of such as 32768K."""
    return int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)


def _cores(listed: str) -> int:
    """How many a list such as 0-3,8 names; at least one."""
    ranges = [part.split("-") for part in listed.split(",") if part]
    return max(1, sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges))
