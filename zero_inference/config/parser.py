"""The parser of every command: one-line errors with suggestions, help with examples, rows for the documentation."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

from zero_inference.config.other_tools import OTHER_COMMANDS, other_option
from zero_inference.config.values import not_among
from zero_inference.errors import UsageError
from zero_inference.utils.format import printable
from zero_inference.utils.suggestions import did_you_mean

# Messages of argparse, and what is printed instead.
_IN_PLAIN_WORDS = (
    (re.compile(r"argument (\S+): expected (?:one|at least one) argument"), r"\1 needs a value"),
    (re.compile(r"argument (?:-\w/)?(\S+): ignored explicit argument .*"), r"\1 takes no value"),
    (re.compile(r"argument (\S+): "), r"\1: "),
)
_ANSWERED = re.compile(
    r"did you mean|choose|use --|no option \S+; |must be|give |write "
)  # these need no pointer to --help
LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate")


class Formatter(argparse.HelpFormatter):
    """Wraps prose to the width of the terminal, and not the indented lines, which are examples."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # names of options stay whole

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        shown: list[str] = []
        prose: list[str] = []

        def wrap_prose() -> None:
            shown.extend(textwrap.wrap(" ".join(prose), width, initial_indent=indent, subsequent_indent=indent))
            prose.clear()

        for line in text.strip("\n").splitlines():
            if line.startswith("  ") or not line.strip():
                wrap_prose()
                shown.append((indent + line).rstrip())
            else:
                prose.append(line.strip())
        wrap_prose()
        return "\n".join(shown)


class Refused(argparse.ArgumentError):
    """A value that an option cannot have; the message names the option."""

    def __str__(self) -> str:
        return self.message


class Parser(argparse.ArgumentParser):
    """Accepts `_` for `-` in option names, and reports bad usage in one line with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", Formatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Refuse unknown words here, in the parser of the subcommand, which knows what was probably meant."""
        args = [_hyphenated(arg) for arg in (sys.argv[1:] if args is None else args)]
        self._refuse_abbreviated(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._about_unknown(unknown, args))
        return found, []

    def error(self, message: str) -> NoReturn:
        words = plain(message)
        hint = "" if _ANSWERED.search(words) else f"; see {self.prog} --help"
        self.exit(2, f"error: {printable(words + hint)}\n")

    def option_names(self) -> list[str]:
        """Return the long names of all options that the help shows."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def _about_unknown(self, words: Sequence[str], args: Sequence[str]) -> str:
        word = next((word for word in words if word.startswith("-")), None)
        if word is None:
            return f"unexpected argument {words[0]}"
        option, equals, value = word.partition("=")
        if not equals:  # its value may have been taken for the model
            value = "".join(args[args.index(word) + 1 :][:1])
        if other := other_option(option.lstrip("-"), value, self.option_names()):
            return f"there is no option {option}; {other}"
        bare = [name[2:] for name in self.option_names()]  # dashes alike in both would count as likeness
        near = did_you_mean(option.lstrip("-"), bare).replace("did you mean ", "did you mean --")
        return f"there is no option {option}" + (f"; {near}" if near else "")

    def _refuse_abbreviated(self, words: Sequence[str]) -> None:
        """Refuse another tool's option that argparse would read as an abbreviation of an option here."""
        for word in words if self.allow_abbrev else ():
            name, _, value = word.partition("=")
            abbreviates = any(own.startswith(name) and own != name for own in self._option_string_actions)
            if name.startswith("--") and abbreviates and name not in self._option_string_actions:
                if other := other_option(name[2:], value, self.option_names()):
                    self.error(f"there is no option {name}; {other}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            other = OTHER_COMMANDS.get(str(value), "")
            near = f"use {other}" if other in action.choices else did_you_mean(str(value), action.choices)
            known = f"choose one of {', '.join(action.choices)}"
            raise Refused(action, f"there is no command {value}; {near or known}")
        words = not_among(_name(action), value, tuple(action.choices)).removesuffix(".")
        raise Refused(action, words + self._advice_on_model(action, str(value)))

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """Return `text` converted by the option's type. Raises Refused, with the option, the value and the reason in one line."""
        try:
            return super()._get_value(action, text)
        except UsageError as error:  # from Option.read: it names the option already
            message = str(error)
        except argparse.ArgumentError as error:
            invalid = re.fullmatch(r"invalid (.+) value: .*", error.message, re.DOTALL)
            reason = f"not a {_KINDS.get(invalid[1], invalid[1])}" if invalid else error.message
            message = f"{_name(action)} {text}: {reason}"
        raise Refused(action, message.removesuffix(".") + self._advice_on_model(action, text))

    def _advice_on_model(self, action: argparse.Action, text: str) -> str:
        """Return advice if `text` is probably the model, read as a value of the option of several values before it; else ""."""
        has_model = any(each.dest == MODEL_GIVEN for each in self._actions)
        like_a_model = re.search("[A-Za-z]", text) and re.search("[-/]", text)
        if action.nargs != "+" or not has_model or not like_a_model:
            return ""
        return f"; if {text} is the model, write it first, or as --model {text}"


_KINDS = {"int": "whole number", "float": "number"}
MODEL_GIVEN = "model_given"  # dest of the positional model


def plain(message: str) -> str:
    """Return argparse's message, reworded."""
    for pattern, words in _IN_PLAIN_WORDS:
        if pattern.match(message):
            return pattern.sub(words, message, count=1)
    return message


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _hyphenated(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def examples(*lines: str) -> str:
    """Return the help text that shows `lines` as they are typed."""
    return "\n".join(["Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])


def add_verbose(parser: argparse._ActionsContainer) -> None:
    """Add --verbose to a command that is not a run."""
    parser.add_argument(
        "--verbose",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="0: no progress and no warnings; 2: a traceback with an error (default: 1)",
    )


class Version(argparse.Action):
    """Print the versions of this package and of its libraries, without importing these."""

    def __init__(self, option_strings: Any, dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0)
        self.help = "show versions and exit"

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        own = sys.modules[__name__.partition(".")[0]].__version__  # of the code that runs, installed or not
        print(f"zero-inference {own} ({', '.join(f'{name} {_version(name)}' for name in LIBRARIES)})")
        parser.exit()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


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
    """Return the options that the help of `parser` shows, in its order, without -h and subcommands."""
    rows = []
    for group in parser._action_groups:
        for action in group._group_actions:
            hidden = action.help == argparse.SUPPRESS
            if not hidden and not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
                rows.append(_row(str(group.title), action, parser))
    return rows


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    """Return the subcommands of `parser` and theirs by name: {'plan': ..., 'micro matmul': ...}."""
    found: dict[str, Parser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[name] = command
                found |= {f"{name} {inner}": each for inner, each in commands_of(command).items()}
    return found


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
