"""A YAML file of options: read for --config, written for --save-config."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from zero_inference.config import FIELD_NAMES
from zero_inference.config.spellings import other_option
from zero_inference.errors import RunError, UsageError
from zero_inference.options.parser import Parser
from zero_inference.utils.near import did_you_mean
from zero_inference.utils.replace import replacing
from zero_inference.utils.text import first_line

LISTS = ("prompt", "quality", "pass_at_k")  # of which a file may have a list
NOT_IN_A_FILE = ("save_config",)
MOST_BYTES = 1 << 20
# YAML reads the words on and off as true and false.
SWITCHES = {True: "on", False: "off"}


def read_options(path: str, parser: Parser) -> dict[str, Any]:
    """The fields of RunConfig that the file says, each read as the option of that name is.

    Args:
        parser: with the options of run_model.py; its errors have to be exceptions.

    Raises:
        UsageError: no such file, no mapping, an unknown option or a value that it cannot have; names the file and the key.
    """
    known = {
        action.option_strings[0][2:]: action
        for action in reversed(parser._actions)  # of two with one dest, the one that the help shows
        if action.dest in FIELD_NAMES
        and action.dest not in NOT_IN_A_FILE
        and action.help != argparse.SUPPRESS
        and action.option_strings
    }
    found: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).strip().removeprefix("--").replace("_", "-")
        if name not in known:
            near = other_option(name, str(value), {f"--{each}" for each in known}) or did_you_mean(name, known)
            raise UsageError(f"--config {path}: there is no option {key}" + (f"; {near}" if near else "."))
        action = known[name]
        if action.dest in found:
            raise UsageError(f"--config {path}: {name} is there twice; say it once.")
        if value is not None:
            found[action.dest] = _value(path, name, value, action, parser)
    return found


def save_options(path: str, options: Mapping[str, Any], command: str) -> None:
    """Write `options` (names with hyphens) in place of the file, with `command` in a comment on top.

    Raises:
        RunError: it cannot be written.
    """
    import yaml

    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True) if options else "{}\n"
    try:
        with replacing(path) as part:
            part.write_text(f"# {command}\n{text}", encoding="utf-8")
    except OSError as error:
        raise RunError(f"--save-config {path}: {error.strerror or error}.") from error


def _mapping(path: str) -> dict[Any, Any]:
    import yaml

    expanded = os.path.expanduser(path)
    if not path or not os.path.isfile(expanded):
        raise UsageError(f"--config {path or repr('')}: no such file; --dry-run --save-config FILE writes one.")
    try:
        with open(expanded, encoding="utf-8-sig") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UsageError(f"--config {path}: more than {MOST_BYTES >> 20} MiB; this is no file of options.")
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: cannot be read ({first_line(error)}).") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        where = getattr(error, "problem_mark", None)
        line = f"line {where.line + 1}: " if where else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UsageError(f"--config {path}: not YAML ({line}{problem}); write lines such as batch-size: 8.") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"--config {path}: not a mapping of options to values; write lines such as batch-size: 8.")
    return found


def _value(path: str, name: str, value: Any, action: argparse.Action, parser: Parser) -> Any:
    """As the option itself would have read it."""
    where = f"--config {path}: {name}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {_shown(value)}: write true or false.")
        return value
    if isinstance(value, list) and action.dest in LISTS:
        texts = [_text(where, each, action) for each in value]
    else:
        texts = [_text(where, value, action)]
    if action.dest != "prompt":
        texts = [",".join(texts)]
    try:
        read = [parser._get_value(action, text) for text in texts]
        for each in read:
            parser._check_value(action, each)
    except argparse.ArgumentError as error:
        raise UsageError(f"--config {path}: {str(error).removeprefix('--')}") from error
    return read if action.dest == "prompt" else read[0]


def _text(where: str, value: Any, action: argparse.Action) -> str:
    """What would have been typed for `value`."""
    if isinstance(value, bool):
        of_switches = action.choices is not None and SWITCHES[value] in action.choices
        if of_switches or (action.dest == "cpu_compute" and value is False):
            return SWITCHES[value]
        if action.dest == "pin_memory":
            return str(int(value))
    elif isinstance(value, str) or (isinstance(value, (int, float)) and action.dest != "prompt"):
        return str(value)
    what = "a list of texts" if action.dest == "prompt" else "one value" if action.dest not in LISTS else "a list"
    raise UsageError(f"{where} is {_shown(value)}: write {what}, in quotes where YAML would read something else.")


def _shown(value: Any) -> str:
    return "true" if value is True else "false" if value is False else f"{value!r:.80}"
