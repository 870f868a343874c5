"""The options of a command as rows, for tables in the documentation."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from zero_inference.options.parser import Parser, example_lines

_DEFAULT = re.compile(r"\s*\((default[^:()]*): (.*)\)$", re.DOTALL)


class OptionRow(NamedTuple):
    """One option as `--help` shows it.

    Attributes:
        group: the title under which the help shows it.
        options: its spellings, such as ('--model',); () for an argument without dashes.
        value: its metavar or its choices, such as 'FILE' or 'auto|on|off'; '' for a flag.
        default: in words, without the help's "(default: ...)"; 'off' for a flag, '' where there is none.
        help: the rest of its help.
    """

    group: str
    options: tuple[str, ...]
    value: str
    default: str
    help: str


def option_rows(parser: argparse.ArgumentParser) -> list[OptionRow]:
    """All options that the help of `parser` shows, in its order, without -h and without subcommands."""
    rows = []
    for group in parser._action_groups:
        for action in group._group_actions:
            hidden = action.help == argparse.SUPPRESS
            if not hidden and not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
                rows.append(_row(str(group.title), action, parser))
    return rows


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    """The subcommands of `parser` and theirs, by what is typed: {'plan': ..., 'micro matmul': ...}."""
    found: dict[str, Parser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[name] = command
                found |= {f"{name} {inner}": each for inner, each in commands_of(command).items()}
    return found


def examples_of(parser: argparse.ArgumentParser) -> list[str]:
    """The commands that the help of `parser` shows as examples, each in one line."""
    return example_lines([parser.description, *(group.description for group in parser._action_groups), parser.epilog])


def _row(group: str, action: argparse.Action, parser: argparse.ArgumentParser) -> OptionRow:
    text = parser._get_formatter()._expand_help(action)
    default = "off" if action.nargs == 0 and isinstance(action, argparse._StoreTrueAction) else ""
    if found := _DEFAULT.search(text):
        text, default = text[: found.start()], found[2] if found[1] == "default" else f"{found[2]} ({found[1][8:]})"
    return OptionRow(group, tuple(action.option_strings), _value(action), default, text)


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.metavar is None and action.choices is not None:
        value = "|".join(map(str, action.choices))
    elif value.startswith("{"):
        value = value.strip("{}").replace(",", "|")
    if action.nargs in ("+", "*"):
        return f"{value} ..."
    return f"[{value}]" if action.nargs == "?" and action.option_strings else value
