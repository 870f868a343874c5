"""Every key of the record as it is declared: what writing checks against, and what `zero-inference report --fields` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_inference.records.field import Key, keys_of
from zero_inference.records.schema import Record

KEYS = keys_of(Record)
REQUIRED = tuple(
    one for one in KEYS if one.required is not None
)  # in the order in which they are written, before all others


@dataclass(frozen=True, slots=True)
class Described:
    """A key with those that it is under: `limit.link_gbps`; `loops[].step_s` where each object of a list has it."""

    key: str
    unit: str
    meaning: str
    only_with: str | None


def described(keys: tuple[Key, ...] = KEYS, under: str = "", only_with: str | None = None) -> Iterator[Described]:
    """All keys, flat, each object before what is in it. What holds for an object holds for all that is in it."""
    for one in keys:
        condition = one.only_with or only_with
        yield Described(f"{under}{one.name}", one.unit, one.meaning, condition)
        yield from described(one.parts, f"{under}{one.name}{'[]' if one.many else ''}.", condition)


def missing_in(record: Mapping[str, Any], failed: bool) -> list[str]:
    """Dotted names of the required keys that `record` lacks; null stands for a whole that was not measured."""
    missing = [one.name for one in REQUIRED if one.name not in record and (one.required == "always" or not failed)]
    for one in REQUIRED:
        value = record.get(one.name)
        items = value if isinstance(value, (list, tuple)) else [value]
        present = [item if isinstance(item, Mapping) else {} for item in items if item is not None]
        needed = [part.name for part in one.parts if part.required is not None]
        missing += [f"{one.name}.{part}" for part in needed if any(part not in item for item in present)]
    return missing


def undeclared_in(value: Any, keys: tuple[Key, ...] = KEYS, under: str = "") -> list[str]:
    """Dotted names of the keys that `value`, an object or a list of objects, has and nobody declares, each once."""
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(name for item in value for name in undeclared_in(item, keys, under)))
    if not isinstance(value, Mapping):
        return []
    by_name = {one.name: one for one in keys}
    odd: list[str] = []
    for name, item in value.items():
        if name not in by_name:
            odd.append(f"{under}{name}")
        elif by_name[name].parts:
            odd += undeclared_in(item, by_name[name].parts, f"{under}{name}.")
    return odd
