"""RunConfig: the validated options of one run, from the shell, YAML files or Python, and turned back into options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from zero_inference.config import checks
from zero_inference.config.option import AUTO, Option, hyphens
from zero_inference.config.options import (
    DEFAULTS,
    FIELD_NAMES,
    GROUPS,
    LONGEST_PROMPT,
    OF_DRY_RUNS,
    OPTIONS,
    UNTIL_PLANNED,
    Options,
)
from zero_inference.config.parser import MODEL_GIVEN, Parser, other_option, reword
from zero_inference.errors import RunError, UsageError
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import did_you_mean, first_line
from zero_inference.utils.launch import Launch


class RunConfig(Options):
    """The options of one run.

    `validate` refuses what cannot work before the model's config is loaded; what depends on the model is checked by `planning.plan`
    and the engine's plan, before a weight is read.
    """

    def validate(self) -> RunConfig:
        """Return the configuration with every value in its canonical form (float16 for fp16). Raises UsageError."""
        given = {name: getattr(self, name) for name in OPTIONS}
        read = {name: OPTIONS[name].read(value, auto=False) for name, value in given.items() if value is not None}
        config = replace(self, **read)
        checks.check(config)
        return replace(config, cpu_offload=True) if config.engine == "stream" and not config.disk_offload else config


def make_config(given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration for values by field name, from the shell, YAML or Python; None and missing values are defaults.
    Raises UsageError: it cannot work."""
    found = {name: OPTIONS[name].read(value) for name, value in given.items() if value is not None}
    if found.get("prompt"):
        found = {"batch_size": len(found["prompt"]), "prompt_len": LONGEST_PROMPT} | found
    auto = tuple(name for name in UNTIL_PLANNED if found.get(name) == AUTO)
    for name in ("cpu_offload", "disk_offload"):
        if "engine" in auto and found.get(name):
            flag = OPTIONS[name].flag
            raise UsageError(f"--engine auto decides where the weights are stored: drop {flag}, or name an engine.")
    return RunConfig(**found | {name: UNTIL_PLANNED[name] for name in auto}, auto=auto).validate()


def first_rank_alone(config: RunConfig, launch: Launch) -> bool:
    """Return whether the first of several ranks drives all GPUs of the host, so that the others have nothing to do.
    Raises UsageError: the engine does that, and the ranks are on several hosts."""
    if launch.world_size == 1 or config.engine != "stream" or "engine" in config.auto:
        return False
    if launch.num_nodes > 1:
        raise UsageError(
            f"--engine stream drives the GPUs of one host, and {launch.world_size} ranks were started on "
            f"{launch.num_nodes} hosts: start it on one host, or use --engine deepspeed."
        )
    return True


def non_default_options(config: RunConfig) -> dict[str, Any]:
    """Return the options in which `config` differs from the defaults: names with hyphens, values as YAML and JSON have them.

    Options of a dry run are left out. `parse_options(shell_words(...))` of the result is `config` again.
    """
    found: dict[str, Any] = {}
    for name in FIELD_NAMES:
        value, default = getattr(config, name), DEFAULTS[name]
        if config.prompt:  # which give these
            default = {"batch_size": None, "prompt_len": LONGEST_PROMPT}.get(name, default)
        if name in config.auto:
            found[hyphens(name)] = AUTO
        elif name == "auto" or name in OF_DRY_RUNS or (name == "cpu_offload" and config.engine == "stream"):
            continue
        elif name == "pin_memory" and value is not None:
            found[hyphens(name)] = int(value)
        elif value != default:
            found[hyphens(name)] = list(value) if isinstance(value, tuple) else value
    return found


def shell_words(options: Mapping[str, Any]) -> list[str]:
    """Return the words to type for options by name (hyphens or underscores) and value."""
    words: list[str] = []
    for name, value in options.items():
        flag, option = f"--{hyphens(name)}", OPTIONS.get(name.replace("-", "_"))
        if isinstance(value, bool):
            if option is None or option.kind == "bool":
                words.append(flag if value else f"--no-{flag[2:]}")
                continue
            value = int(value)  # the option takes 0 or 1
        if isinstance(value, Mapping):
            value = [f"{key}={part}" for key, part in value.items()]
        if isinstance(value, (list, tuple)):
            texts = value if flag == "--prompt" else [",".join(map(str, value))]
        else:
            texts = [repr(value).removesuffix(".0") if isinstance(value, float) else str(value)]
        for text in texts:  # in one word where the value would be taken for an option
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run. What is not typed is not in the namespace: a YAML file may have it."""
    parser.usage = "%(prog)s [MODEL] [options]"  # which are too many for a line of usage
    groups = {title: parser.add_argument_group(title, text) for title, text in GROUPS.items()}
    add_model(groups["most used"])
    for option in OPTIONS.values():
        if option.name != "model":
            option.add_to(groups[option.group])
    groups["output"].add_argument("--local-rank", type=int, metavar="N", help="set by the deepspeed launcher")
    text = (
        "read options from a YAML file with lines such as `batch-size: 8` and `cpu-offload: true`. Options that are typed win, and "
        "--no-cpu-offload turns off what the file turns on. May be repeated: later files win"
    )
    groups["plan and options in a file"].add_argument("--config", action="append", metavar="FILE", help=text)
    parser._action_groups.append(parser._action_groups.pop(1))  # -h and --version


def add_model(group: argparse._ActionsContainer, option: Option = OPTIONS["model"]) -> None:
    """Add the model as the first argument and as --model; `model_argument` gives the one that was used."""
    text = "the same as --model MODEL; write it first, before the options"
    group.add_argument(MODEL_GIVEN, metavar="MODEL", nargs="?", help=text)
    option.add_to(group)


def model_argument(args: argparse.Namespace) -> str | None:
    """Return the model that was given as the first argument or as --model; None without either.
    Raises UsageError: both were given, and differ."""
    first, named = getattr(args, MODEL_GIVEN), getattr(args, "model", None)
    if first is not None and named is not None and first != named:
        raise UsageError(f"two models were given, {first} and --model {named}: keep one of the two.")
    return named if first is None else first


def config_from_args(args: argparse.Namespace) -> RunConfig:
    """Return the validated configuration for parsed arguments of `add_run_arguments` and their --config files. Raises UsageError."""
    return make_config(_given(args))


class _OptionParser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(reword(message))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the namespace for options that are a part of another command's. Raises UsageError."""
    parser = _OptionParser(prog="run_model.py", add_help=False)
    add_run_arguments(parser)
    return parser.parse_args(list(words))


def parse_options(words: Sequence[str]) -> RunConfig:
    """Return the validated configuration for options of run_model.py. Raises UsageError."""
    return config_from_args(_parse(words))


def expand_config_files(words: Sequence[str]) -> list[str]:
    """Return `words` with the options of --config files in place of these. Raises UsageError."""
    args = _parse(words)
    return shell_words(_given(args)) if args.config else list(words)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values by field name; what was typed wins over files, and later files over earlier ones."""
    found: dict[str, Any] = {}
    for path in args.config or ():
        found |= read_options(path)
    found |= {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    model = model_argument(args)
    return found if model is None else found | {"model": model}


def read_options(path: str) -> dict[str, Any]:
    """Return the values in a YAML file of options, by field name.
    Raises UsageError: no such file, no mapping, an unknown option or a value that it cannot have; names the file and the key."""
    import yaml

    if not os.path.isfile(expanded := os.path.expanduser(path)):
        raise UsageError(f"--config {path or repr('')}: no such file; --dry-run --save-config FILE writes one.")
    try:
        with open(expanded, encoding="utf-8-sig") as file:
            mapping = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: cannot be read ({first_line(error)}).") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        problem = " ".join(str(error).split())
        raise UsageError(f"--config {path}: not YAML ({problem}); write lines such as batch-size: 8.") from error
    if not isinstance(mapping, dict):
        raise UsageError(f"--config {path}: not a mapping of options to values; write lines such as batch-size: 8.")
    known = {hyphens(name): option for name, option in OPTIONS.items() if name != "save_config"}
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        name = hyphens(str(key).strip().removeprefix("--"))
        if name not in known:
            near = other_option(name, str(value), {f"--{each}" for each in known}) or did_you_mean(name, known)
            raise UsageError(f"--config {path}: there is no option {key}" + (f"; {near}" if near else "."))
        if known[name].name in found:
            raise UsageError(f"--config {path}: {name} is there twice; keep one.")
        if value is not None:
            found[known[name].name] = known[name].read(value, f"--config {path}: {name}")
    return found


def save_options(path: str, options: Mapping[str, Any], command: str) -> None:
    """Write `options` (names with hyphens) to a YAML file, with `command` in a comment on top. Raises RunError if it cannot be written."""
    import yaml

    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True) if options else "{}\n"
    try:
        with write_atomically(path) as part:
            part.write_text(f"# {command}\n{text}", encoding="utf-8")
    except OSError as error:
        raise RunError(f"--save-config {path}: {error.strerror or error}.") from error
