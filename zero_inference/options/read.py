"""A command line, and the file of options that it may name, become a RunConfig; a RunConfig becomes options again."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from zero_inference.config import AUTO, DEFAULTS, FIELD_NAMES, RunConfig
from zero_inference.config.choices import OWN_LENGTH, STREAM_OPTIONS
from zero_inference.errors import UsageError
from zero_inference.options.parser import MODEL_GIVEN, Parser, plain
from zero_inference.options.run import add_run_arguments

# Of what may be `auto`, until the plan has found it: an engine that any option goes with, and the defaults.
STAND_INS: dict[str, Any] = {"engine": "stream", "quant_bits": 16, "batch_size": 1}
# About a dry run and not about a run.
OF_A_DRY_RUN = ("dry_run", "save_config", "machine", "assume")


def config_of(args: argparse.Namespace) -> RunConfig:
    """What the options of `add_run_arguments` ask for, validated.

    Raises:
        UsageError: they cannot be meant, or the file of --config cannot.
    """
    return _configured(_of_files(args.config) | _given(args))


def run_config(options: Sequence[str]) -> RunConfig:
    """The configuration that `options` of run_model.py ask for. Raises UsageError where they cannot be meant."""
    return config_of(_inner_parser().parse_args(list(options)))


def without_file(options: Sequence[str]) -> list[str]:
    """The same options with those of the --config file among them written out. Raises UsageError."""
    args = _inner_parser().parse_args(list(options))
    return words_of(_of_files(args.config) | _given(args)) if args.config else list(options)


def model_of(args: argparse.Namespace) -> str | None:
    """The model that was given as the first argument or as --model; None where neither was.

    Raises:
        UsageError: both were given, and differ.
    """
    first, named = getattr(args, MODEL_GIVEN), getattr(args, "model", None)
    if first is not None and named is not None and first != named:
        raise UsageError(f"two models were given, {first} and --model {named}: keep one of the two.")
    return named if first is None else first


def options_asked(config: RunConfig) -> dict[str, Any]:
    """The options of run_model.py that `config` differs in from the defaults: names with hyphens, and values as YAML and JSON have them.

    Options about a dry run alone are left out. `run_config(words_of(options_asked(config)))` is `config` again.
    """
    found: dict[str, Any] = {}
    for name in FIELD_NAMES:
        value = getattr(config, name)
        if name in config.auto:
            found[_hyphens(name)] = AUTO
        elif name == "auto" or name in OF_A_DRY_RUN or (name == "cpu_offload" and config.engine == "stream"):
            continue
        elif name == "pin_memory" and value is not None:
            found[_hyphens(name)] = int(value)
        elif name == "prompt_len" and config.prompt:
            found |= {} if value == OWN_LENGTH else {_hyphens(name): value}
        elif value != DEFAULTS[name] or (name == "batch_size" and config.prompt):
            found[_hyphens(name)] = list(value) if isinstance(value, tuple) else value
    return found


def words_of(options: Mapping[str, Any]) -> list[str]:
    """What to type for them; names with hyphens or underscores."""
    return [word for name, value in options.items() for word in _words(_hyphens(name), value)]


def _words(name: str, value: Any) -> Iterator[str]:
    option = f"--{name}"
    if isinstance(value, bool):
        yield option if value else f"--no-{name}"
    elif name == "prompt":
        for text in value:
            yield from _pair(option, text)
    elif isinstance(value, (list, tuple)):
        yield from _pair(option, ",".join(map(str, value)))
    else:
        yield from _pair(option, repr(value).removesuffix(".0") if isinstance(value, float) else str(value))


def _pair(option: str, value: str) -> tuple[str, ...]:
    """In one word where the value would be taken for an option."""
    return (f"{option}={value}",) if value.startswith("-") else (option, value)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of RunConfig that were typed."""
    given = {name: getattr(args, name) for name in FIELD_NAMES if hasattr(args, name)}
    if (model := model_of(args)) is not None:
        given["model"] = model
    return given


def _of_files(paths: Sequence[str] | None) -> dict[str, Any]:
    """The fields that they say; of two files the later one wins."""
    if not paths:
        return {}
    from zero_inference.options.file import read_options

    parser = _inner_parser()
    found: dict[str, Any] = {}
    for path in paths:
        found |= read_options(path, parser)
    return found


def _configured(given: Mapping[str, Any]) -> RunConfig:
    values = {**DEFAULTS, **given}
    values["prompt"] = tuple(values["prompt"])
    if values["prompt"]:
        values["batch_size"] = given.get("batch_size", len(values["prompt"]))
        values["prompt_len"] = given.get("prompt_len", OWN_LENGTH)
    values["auto"] = tuple(name for name in STAND_INS if values[name] == AUTO)
    values |= {name: STAND_INS[name] for name in values["auto"]}
    if "engine" in values["auto"]:
        _refuse_what_auto_decides(values)
    if values["pin_memory"] is not None:
        values["pin_memory"] = bool(values["pin_memory"])
    return RunConfig(**values).validate()


def _refuse_what_auto_decides(values: Mapping[str, Any]) -> None:
    for name in ("cpu_offload", "disk_offload"):
        if values[name]:
            raise UsageError(
                f"--engine auto decides where the weights are kept: drop --{_hyphens(name)}, or name an engine."
            )
    for name, engine in {**dict.fromkeys(STREAM_OPTIONS, "stream"), "ds_config": "deepspeed"}.items():
        if values[name] != DEFAULTS[name]:
            raise UsageError(
                f"--{_hyphens(name)} belongs to --engine {engine}: name that engine instead of auto, or drop it."
            )


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


class _Inner(Parser):
    """Reads options that stand inside another command's: what is wrong with them is for that command to say."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(plain(message))


def _inner_parser() -> _Inner:
    parser = _Inner(prog="run_model.py", allow_abbrev=False, add_help=False)
    add_run_arguments(parser)
    return parser
