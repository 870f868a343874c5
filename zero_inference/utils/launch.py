"""Read what a launcher (deepspeed, torchrun) sets for its ranks, without importing torch, and hide it from a run of one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from zero_inference.errors import UsageError

HOW_TO_LAUNCH = "start with deepspeed or torchrun, or unset it to run one process"
# Set by launchers; libraries (accelerate, transformers, DeepSpeed) take them for those of a process group.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


class Launch(NamedTuple):
    """This process among those that were started together; one alone without a launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)


def read_launch(local_rank: int | None = None) -> Launch:
    """Return the ranks by the launcher's environment, whose LOCAL_RANK overrides `local_rank`.
    Raises UsageError: the values contradict each other."""
    world = _launched("WORLD_SIZE", 1, 1, 1 << 20)
    size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"  # torchrun's, deepspeed's
    node = _launched(size, world, 1, world)
    rank = _launched("RANK", 0, 0, world - 1)
    local = _launched("LOCAL_RANK", max(local_rank or 0, 0), 0, node - 1)
    if world > 1:
        if not os.environ.get("MASTER_ADDR"):
            raise UsageError(f"WORLD_SIZE is {world} and MASTER_ADDR is not set; {HOW_TO_LAUNCH}.")
        _launched("MASTER_PORT", 0, 1, 65535)
    return Launch(rank, world, local, node)


def _launched(name: str, default: int, least: int, most: int) -> int:
    """Return a number from the launcher's environment. Raises UsageError outside [least, most]."""
    text = os.environ.get(name, str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not least <= value <= most:
        raise UsageError(f"{name}={text[:40]!r} is no number from {least} to {most}; {HOW_TO_LAUNCH}.")
    return value


@contextlib.contextmanager
def hide_launch() -> Iterator[None]:
    """Take the launcher's variables out of the environment within the block: this process runs alone."""
    names = [name for name in os.environ if name in VARIABLES or name.startswith("TORCHELASTIC_")]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)
