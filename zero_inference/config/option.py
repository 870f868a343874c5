"""Option: one declaration that gives the shell option, the YAML key, the Python keyword, their check and their documentation."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zero_inference.config import values
from zero_inference.config.values import AUTO, not_among
from zero_inference.errors import UsageError

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: keyword and attribute; the shell option and the YAML key have hyphens.
        help: without the default, which is added.
        group: title of its group in --help.
        reader: makes the value of a text, a YAML value or a Python value; see `values`.
        metavar: the value in --help; "" is derived from the other attributes.
        choices: allowed values, or allowed elements of a list.
        least, most: bounds of a number.
        default_help: the default in words.
        path: "path" for a file or folder, "home" where ~ is expanded; "" for other values.
        engines: engines that have it; () for all.
        needs: options without which it has no effect; "quality=humaneval" needs that task among those of --quality.
        until_planned: the value in place of `auto` until the plan has found one; None where auto is no value.
        of_load: `load` has a keyword of its name.
        repeated: typed once for each element of its list.
    """

    name: str
    default: Any
    help: str
    group: str = ""
    reader: Callable[[Any], Any] = values.text
    metavar: str = ""
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float = MAX_COUNT
    default_help: str | None = None
    path: str = ""
    engines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    until_planned: Any = None
    of_load: bool = False
    repeated: bool = False

    @property
    def flag(self) -> str:
        return "--" + hyphens(self.name)

    @property
    def allowed(self) -> tuple[Any, ...]:
        return (*self.choices, AUTO) if self.until_planned is not None else self.choices

    def read(self, value: Any, shown_as: str = "", auto: bool = True) -> Any:
        """Return the value of the option for `value`, from the shell, YAML or Python.

        Args:
            shown_as: the option's name in messages; its flag by default.
            auto: whether `auto` is a value of options that can be planned.

        Raises:
            UsageError: the option cannot have this value.
        """
        name, planned = shown_as or self.flag, auto and self.until_planned is not None
        if planned and str(value).strip().lower() == AUTO:
            return AUTO
        try:
            found = self.reader(value)
        except ValueError as error:
            shown = str(value).lower() if isinstance(value, bool) else f"{value!s:.80}" or repr("")
            raise UsageError(f"{name} {shown}: {error}{' or auto' * planned}.") from None
        for each in found if isinstance(found, tuple) else (found,):
            if self.choices and each not in self.choices:
                raise UsageError(not_among(name, each, self.allowed if auto else self.choices))
        if self.least is not None and not self.least <= found <= self.most:
            bound = f"most {self.most}" if found > self.most else f"least {self.least}"
            raise UsageError(f"{name} {found}: must be at {bound}.")
        if self.path and not found:  # an unset variable of a script
            raise UsageError(f"{name} is empty: give it a name, or drop it.")
        if self.path and (os.path.expanduser(found) if self.path == "home" else found).startswith("~"):
            # a folder called ~ is one that people remove with their home
            raise UsageError(f"{name} {found}: this ~ is not expanded to a home folder; write it out, or ./{found}.")
        return found

    def add_to(self, group: argparse._ActionsContainer, **settings: Any) -> None:
        """Add the option to a parser's group, without a default in the namespace; `settings` are of `add_argument`."""
        text = self.help.replace("%", "%%")
        common = {"dest": self.name, "default": argparse.SUPPRESS, **settings}
        if self.reader is values.flag:
            group.add_argument(self.flag, action="store_true", help=text, **common)
            off = f"--no-{hyphens(self.name)}"  # turns off what a file of options turned on
            group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **common)
            return
        default = self.default if self.default_help is None else self.default_help
        if default not in (None, ()):
            text += f" (default: {default})"
        metavar = self.metavar or ("FILE" if self.path else "N")
        if self.choices and not self.metavar:
            metavar = f"{{{','.join(map(str, self.allowed))}}}"
        kind: dict[str, Any] = {"action": "append"} if self.repeated else {"type": self.read}
        group.add_argument(self.flag, help=text, metavar=metavar, **kind, **common)


def hyphens(name: str) -> str:
    return name.replace("_", "-")


def option(default: Any, text: str, **attributes: Any) -> Any:
    """Declare an option as the field of a dataclass; `attributes` are of `Option`, whose reader follows from the field's type."""
    return field(default=default, metadata={"option": {"default": default, "help": text, **attributes}})
