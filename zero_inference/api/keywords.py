"""Keywords of a call become the options of a command, so that both accept the same values and say the same about wrong ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from zero_inference.config.options import DEFAULTS
from zero_inference.config.values import OTHER_OPTIONS
from zero_inference.utils.suggestions import closest


def check_names(function: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Raises TypeError for a keyword that `function` does not have, with the nearest that it has.

    Args:
        elsewhere: what to say of keywords that exist and make no sense here.
    """
    for name in given:
        if name in known:
            continue
        if name in elsewhere:
            raise TypeError(f"{function}() has no keyword {name!r}: {elsewhere[name]}")
        near = _of_another_tool(name, known) or closest(name, known)
        meant = f"did you mean {', '.join(near)}?" if near else f"help(zero_inference.{function}) lists them."
        raise TypeError(f"{function}() got an unexpected keyword {name!r}; {meant}")


def _of_another_tool(name: str, known: Collection[str]) -> list[str]:
    """Return the keyword that has the meaning of another tool's `name`, as far as the function has it."""
    advice = OTHER_OPTIONS.get(name.replace("_", "-"), ())
    found = (each.partition(" ")[0].strip("-,").replace("-", "_") for each in advice)
    return [each for each in found if each in known][:1]


def options_from(keywords: Mapping[str, Any]) -> list[str]:
    """The words of a command line: `{"cpu_offload": True, "quant_bits": 4}` gives `--cpu-offload --quant-bits=4`.

    None stands for the default. Several values are joined by commas.

    Raises:
        TypeError: False for an option that is not a switch.
    """
    words = []
    for name, value in keywords.items():
        option = f"--{name.replace('_', '-')}"
        if name == "pin_memory" and value is not None:
            words.append(f"{option}={int(value)}")
        elif name == "prompt" and isinstance(value, (list, tuple)):
            words += [f"{option}={_text(each)}" for each in value]  # a text may have commas
        elif value is True:
            words.append(option)
        elif value is False and DEFAULTS.get(name) is not False:
            raise TypeError(f"{name}=False: give a value, or leave it out for the default")
        elif value is not None and value is not False:
            words.append(f"{option}={_text(value)}")
    return words


def several(name: str, value: Any) -> list[str]:
    """The words of an option that takes one value or several, one behind the other; none for None."""
    if value is None:
        return []
    values = value if isinstance(value, (list, tuple, range, set)) else [value]
    return [f"--{name.replace('_', '-')}", *map(_text, values)]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    if isinstance(value, Mapping):  # assume={"host": "128GiB"}
        return ",".join(f"{name}={_text(part)}" for name, part in value.items())
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
