"""Which machine a plan is for: this one, or that of `--machine` and `--assume`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zero_inference.errors import UsageError

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description
    from zero_inference.hardware.machine import Machine


def machine_of(name: str | None, assume: str | None) -> Machine:
    """Return this machine, or the one that `description_of` describes. Raises as that."""
    from zero_inference.hardware.machine import DescribedMachine, ThisMachine

    found = description_of(name, assume)
    return ThisMachine() if found is None else DescribedMachine(found)


def description_of(name: str | None, assume: str | None) -> Description | None:
    """Return the machine that was named or assumed, or None for this one. Imports no torch, so a bad line is refused at once.

    Args:
        name: of a file with a description, or of a typical machine, as `--machine` names it.
        assume: what is said of a machine, see `assume.assumed`.

    Raises:
        UsageError: there is no such machine, or the file or the line says something that cannot be.
    """
    if name is None and assume is None:
        return None
    from zero_inference.hardware.assume import assumed

    found = None if name is None else _named(name)
    return found if assume is None else assumed(assume, found)


def _named(name: str) -> Description:
    """A file that is there is taken first; then a typical machine of that name."""
    from zero_inference.hardware.description_file import read_description
    from zero_inference.hardware.typical import NAMES, find_typical, near_names

    path = Path(os.path.expanduser(name))
    if not os.path.lexists(path) and (typical := find_typical(name)) is not None:
        return typical
    if os.path.lexists(path) or os.sep in name or path.suffix:
        return read_description(path)
    near = near_names(name)
    meant = f" (did you mean {', '.join(near)}?)" if near else ""
    raise UsageError(
        f"--machine {name}: no such file, and no typical machine of that name{meant}. There are {', '.join(NAMES)}, with several GPUs as "
        f"in 2x{NAMES[0]}; zero-inference link --save FILE writes a file."
    )
