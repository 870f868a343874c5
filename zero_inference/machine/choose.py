"""Which machine a plan is for: this one, or that of `--machine` and `--assume`."""

from __future__ import annotations

import os
from pathlib import Path

from zero_inference.machine.machine import DescribedMachine, Machine, ThisMachine


def machine_of(file: str | None, assume: str | None) -> Machine:
    """
    Args:
        file: of a description, as `--machine` names it.
        assume: what is said of a machine, see `assume.assumed`.

    Raises:
        UsageError: the file or the line says something that cannot be.
    """
    if file is None and assume is None:
        return ThisMachine()
    from zero_inference.link.description import read_description
    from zero_inference.machine.assume import assumed

    read = None if file is None else read_description(Path(os.path.expanduser(file)))
    if assume is not None:
        read = assumed(assume, read)
    assert read is not None, "one of the two was given"
    return DescribedMachine(read)
