"""RunConfig: the validated options of one run, made from what was given and turned back into options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_inference.config import checks
from zero_inference.config.option import hyphens
from zero_inference.config.options import (
    AUTO,
    DEFAULTS,
    FIELD_NAMES,
    LONGEST_PROMPT,
    OF_DRY_RUNS,
    OPTIONS,
    UNTIL_PLANNED,
    Options,
)
from zero_inference.errors import UsageError


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
        return replace(config, cpu_offload=True) if config.engine == "stream" else config


def make_config(given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration for values by field name, from the shell, YAML or Python; None and missing values are defaults.

    Raises:
        UsageError: it cannot work.
    """
    found = {name: OPTIONS[name].read(value) for name, value in given.items() if value is not None}
    if found.get("prompt"):
        found = {"batch_size": len(found["prompt"]), "prompt_len": LONGEST_PROMPT} | found
    auto = tuple(name for name in UNTIL_PLANNED if found.get(name) == AUTO)
    for name in ("cpu_offload", "disk_offload"):
        if "engine" in auto and found.get(name):
            flag = OPTIONS[name].flag
            raise UsageError(f"--engine auto decides where the weights are stored: drop {flag}, or name an engine.")
    return RunConfig(**found | {name: UNTIL_PLANNED[name] for name in auto}, auto=auto).validate()


def non_default_options(config: RunConfig) -> dict[str, Any]:
    """Return the options in which `config` differs from the defaults: names with hyphens, values as YAML and JSON have them.

    Options of a dry run are left out. `parse_options(shell_words(...))` of the result is `config` again.
    """
    found: dict[str, Any] = {}
    for name in FIELD_NAMES:
        value = getattr(config, name)
        if name in config.auto:
            found[hyphens(name)] = AUTO
        elif name == "auto" or name in OF_DRY_RUNS or (name == "cpu_offload" and config.engine == "stream"):
            continue
        elif name == "pin_memory" and value is not None:
            found[hyphens(name)] = int(value)
        elif name == "prompt_len" and config.prompt:
            found |= {} if value == LONGEST_PROMPT else {hyphens(name): value}
        elif value != DEFAULTS[name] or (name == "batch_size" and config.prompt):
            found[hyphens(name)] = list(value) if isinstance(value, tuple) else value
    return found


def shell_words(options: Mapping[str, Any]) -> list[str]:
    """Return the words to type for options by name (hyphens or underscores) and value."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{hyphens(name)}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
            continue
        if isinstance(value, Mapping):
            value = [f"{key}={part}" for key, part in value.items()]
        if isinstance(value, (list, tuple)):
            texts = value if flag == "--prompt" else [",".join(map(str, value))]
        else:
            texts = [repr(value).removesuffix(".0") if isinstance(value, float) else str(value)]
        for text in texts:  # in one word where the value would be taken for an option
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words
