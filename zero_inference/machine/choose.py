"""Which machine a plan is for: this one, or that of `--machine` and `--assume`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zero_inference.errors import UsageError
from zero_inference.machine.machine import DescribedMachine, Machine, ThisMachine

if TYPE_CHECKING:
    from zero_inference.link.description import Description


def machine_of(name: str | None, assume: str | None) -> Machine:
    """
    Args:
        name: of a file with a description, or of a typical machine, as `--machine` names it.
        assume: what is said of a machine, see `assume.assumed`.

    Raises:
        UsageError: there is no such machine, or the file or the line says something that cannot be.
    """
    if name is None and assume is None:
        return ThisMachine()
    from zero_inference.machine.assume import assumed

    found = None if name is None else _named(name)
    if assume is not None:
        found = assumed(assume, found)
    assert found is not None, "one of the two was given"
    return DescribedMachine(found)


def _named(name: str) -> Description:
    """A file that is there is taken first; then a typical machine of that name."""
    from zero_inference.link.description_file import read_description
    from zero_inference.machine.typical import NAMES, find_typical, near_names

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
