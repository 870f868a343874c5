"""The options that a run was started with: those its record lists, or in older records those of its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from zero_inference.config.options import DEFAULTS, FIELD_NAMES, PATHS, STREAM_OPTIONS
from zero_inference.records.read import number_of

# Fields that a table shows in other columns, that say where something lies, or how long was measured.
_TOLD_ELSEWHERE = {
    *("model", "engine", "batch_size", "prompt_len", "gen_len", "quant_bits", "cpu_offload", "disk_offload", "kv_offload"),
    *("pin_memory", "offload_dir", "trace", "log_file", "log_dir", "machine", "assume", "auto", "goal"),
    *("loops", "warmup", "warmup_spread", "verbose", "dry_run", "dtype"),
}  # fmt: skip
# Those that can make a run faster or slower, so that others with the same value are repetitions.
OF_SPEED = tuple(
    name.replace("_", "-")
    for name in (*STREAM_OPTIONS, "norm_kernels", "quant_group_size", "ds_config", "async_kv_offload", "use_gds")
)
TOLD = tuple(name for name in FIELD_NAMES if name not in _TOLD_ELSEWHERE and "quality" not in name)


def given_options(record: Mapping[str, Any]) -> dict[str, str]:
    """The options by field name; a flag without a value is `yes`. Of `argv` the last one counts."""
    listed = record.get("options")
    if isinstance(listed, dict):
        return {
            str(name).replace("-", "_"): _as_typed(value)
            for name, value in listed.items()
            if value not in (None, False)
        }
    argv = record.get("argv")
    words = [word for word in argv if isinstance(word, str)] if isinstance(argv, list) else []
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value or "yes"
        elif name is not None:
            found[name] = word if found[name] == "yes" else f"{found[name]} {word}"
    return found


def _as_typed(value: Any) -> str:
    if value is True:
        return "yes"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def told_options(record: Mapping[str, Any]) -> dict[str, str]:
    """What tells this run from one with the default options, beside model, engine, lengths and places: name as typed, and value."""
    told = {}
    for name, value in given_options(record).items():
        if name in TOLD and value != str(DEFAULTS[name]):
            told[name.replace("_", "-")] = PurePath(value).name if name in PATHS else value
    return told


def given_number(record: Mapping[str, Any], name: str) -> float | None:
    """The value of an option that is a number; None where it was not given or is none."""
    value = given_options(record).get(name)
    return None if value is None else number_of(value)


def differing_options(records: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """The options in which runs differ, as typed but without the dashes: for each record its value, None where it was not given."""
    told = [told_options(record) for record in records]
    names = dict.fromkeys(name for each in told for name in each)
    given = {name: [_in_brief(each.get(name)) for each in told] for name in names}
    return {name: values for name, values in given.items() if len(set(values)) > 1}


def _in_brief(value: str | None) -> str | None:
    """A number in three digits; anything else as it is."""
    number = None if value is None else number_of(value)
    return value if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"
