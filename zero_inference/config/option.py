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

MAX_COUNT = 2**31 - 1  # of whatever is counted


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: keyword and attribute; the shell option and the YAML key have hyphens.
        help: without the default, which is added.
        group: title of its group in --help.
        reader: makes the value of a text, a YAML value or a Python value; see `values`. By default that of the default's type.
        metavar: the value in --help (default: the choices).
        choices: allowed values, or allowed elements of a list.
        least, most: bounds of a number.
        default_help: the default in words.
        path: "path" for a file or folder, "home" where ~ is expanded; "" for other values.
        engines: engines that have it; () for all.
        needs: options without which it has no effect; "quality=humaneval" needs that task among those of --quality.
        until_planned: the value in place of `auto` until the plan has found one; None where auto is no value.
        recorded: the record has a key of its name with the value as given.
        of_load: `load` has a keyword of its name.
        repeated: typed once for each element of its list.
    """

    name: str
    default: Any
    help: str
    group: str = ""
    reader: Callable[[Any], Any] = values.text
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float = MAX_COUNT
    default_help: str | None = None
    path: str = ""
    engines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    until_planned: Any = None
    recorded: bool = False
    of_load: bool = False
    repeated: bool = False

    @property
    def flag(self) -> str:
        """As typed in a shell."""
        return "--" + hyphens(self.name)

    @property
    def is_switch(self) -> bool:
        return self.reader is values.flag

    def read(self, value: Any, shown_as: str = "", auto: bool = True) -> Any:
        """Return the value of the option for `value`, from the shell, YAML or Python.

        Args:
            shown_as: the option's name in messages, where it is not that of the shell.
            auto: whether `auto` is a value of options that can be planned.

        Raises:
            UsageError: the option cannot have this value.
        """
        name = shown_as or self.flag
        planned = auto and self.until_planned is not None
        if planned and str(value).strip().lower() == AUTO:
            return AUTO
        try:
            found = self.reader(value)
        except ValueError as error:
            shown = f"{value!s:.80}" if not isinstance(value, bool) else str(value).lower()
            reason = "not a whole number or auto" if planned and self.reader is values.whole_number else error
            raise UsageError(f"{name} {shown or repr('')}: {reason}.") from None
        if self.choices:
            for each in found if isinstance(found, tuple) else (found,):
                if each not in self.choices:
                    raise UsageError(not_among(name, each, (*self.choices, AUTO) if planned else self.choices))
        if self.least is not None:
            if not found >= self.least:
                raise UsageError(f"{name} {found}: must be at least {self.least}.")
            if found > self.most:
                raise UsageError(f"{name} {found}: must be at most {self.most}.")
        if self.path:
            self._check_path(name, found)
        return found

    def _check_path(self, name: str, path: str) -> None:
        if not path:  # an unset variable of a script
            raise UsageError(f"{name} is empty: give it a name, or drop it.")
        # a folder called ~ is one that people remove with their home
        if (os.path.expanduser(path) if self.path == "home" else path).startswith("~"):
            raise UsageError(f"{name} {path}: this ~ is not expanded to a home folder; write it out, or ./{path}.")

    def add_to(self, group: argparse._ActionsContainer, **settings: Any) -> None:
        """Add the option to a parser's group, without a default in the namespace; `settings` are of `add_argument`."""
        text = self.help.replace("%", "%%") + self._default_in_help()
        common = {"dest": self.name, "default": argparse.SUPPRESS, **settings}
        if self.is_switch:
            group.add_argument(self.flag, action="store_true", help=text, **common)
            off = f"--no-{hyphens(self.name)}"  # turns off what a file of options turned on
            group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **common)
            return
        allowed = (*self.choices, *([AUTO] if self.until_planned is not None else []))
        metavar = self.metavar or f"{{{','.join(map(str, allowed))}}}"
        kind: dict[str, Any] = {"action": "append"} if self.repeated else {"type": self.read}
        group.add_argument(self.flag, help=text, metavar=metavar, **kind, **common)

    def _default_in_help(self) -> str:
        if self.is_switch or (self.default_help is None and self.default in (None, ())):
            return ""
        return f" (default: {self.default if self.default_help is None else self.default_help})"


def hyphens(name: str) -> str:
    return name.replace("_", "-")


def option(default: Any, text: str, **attributes: Any) -> Any:
    """Declare an option as the field of a dataclass: its default, its help, and other attributes of `Option`."""
    if "reader" not in attributes:
        by_type = {bool: values.flag, int: values.whole_number, float: values.number}
        attributes["reader"] = by_type.get(type(default), values.text)
    return field(default=default, metadata={"option": {"default": default, "help": text, **attributes}})
