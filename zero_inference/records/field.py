"""How a dataclass declares the keys of the record: each field says its unit and its meaning once, where it stands."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

Required = Literal["always", "when measured"]
_DECLARED = "key"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What `key` notes of a field.

    Attributes:
        record_name: the key where it is not the attribute's own name.
        required: a record without it is refused; "when measured" only if its run was a good one.
        only_with: what a run must be asked for, or have, for this key to be there; where it is None then, the key is left out.
        inline: the field's own keys stand beside those of its owner, and are left out all together where it is None.
        parts: the dataclass that declares the keys of a mapping, where the type of the field does not say it.
    """

    unit: str
    meaning: str
    record_name: str | None
    required: Required | None
    only_with: str | None
    inline: bool
    parts: type | None


def key(
    unit: str,
    meaning: str,
    record_name: str | None = None,
    *,
    required: Required | None = None,
    only_with: str | None = None,
    parts: type | None = None,
    default: Any = MISSING,
    init: bool = True,
) -> Any:
    """A dataclass field that is written into the record; see `Declaration`."""
    declared = Declaration(unit, meaning, record_name, required, only_with, False, parts)
    return field(default=default, init=init, metadata={_DECLARED: declared})


def inline(default: Any = MISSING, default_factory: Callable[[], Any] | None = None) -> Any:
    """A dataclass field whose own keys are written beside the others."""
    metadata = {_DECLARED: Declaration("", "", None, None, None, True, None)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it stands in the record, with the keys of the object under it, or of each object in the list under it (`many`).

    No `parts`: whatever is under it is not declared here (numbers, or what another program names).
    """

    name: str
    unit: str
    meaning: str
    required: Required | None
    only_with: str | None
    many: bool
    parts: tuple[Key, ...]


def keys_of(owner: type) -> tuple[Key, ...]:
    """The keys that a dataclass declares, in its order; fields without a declaration are not written."""
    hints = typing.get_type_hints(owner)
    found: list[Key] = []
    for each in fields(owner):
        declared: Declaration | None = each.metadata.get(_DECLARED)
        if declared is None:
            continue
        nested = [declared.parts] if declared.parts is not None else dataclasses_in(hints[each.name])
        parts = _merged([keys_of(one) for one in nested])
        if declared.inline:
            found += parts
            continue
        found.append(
            Key(
                declared.record_name or each.name,
                declared.unit,
                declared.meaning,
                declared.required,
                declared.only_with,
                _is_list(hints[each.name]),
                parts,
            )
        )
    return tuple(found)


def as_mapping(part: Any) -> dict[str, Any]:
    """The keys and values of one dataclass, and of those under it, as plain dicts and lists."""
    found: dict[str, Any] = {}
    for each in fields(part):
        declared: Declaration | None = each.metadata.get(_DECLARED)
        if declared is None:
            continue
        value = getattr(part, each.name)
        if declared.inline:
            found |= {} if value is None else as_mapping(value)
        elif value is not None or declared.only_with is None:
            found[declared.record_name or each.name] = _nested(value)
    return found


def _nested(value: Any) -> Any:
    if is_dataclass(value):
        return as_mapping(value)
    if isinstance(value, dict):
        return {name: _nested(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nested(item) for item in value]
    return value


def dataclasses_in(hint: Any) -> list[type]:
    """Those that a type hint names, itself or in a union or a list; not those of a dict's values."""
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    if typing.get_origin(hint) in (list, tuple, typing.Union, types.UnionType):
        return [one for argument in typing.get_args(hint) for one in dataclasses_in(argument)]
    return []


def _is_list(hint: Any) -> bool:
    """A list of objects."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_list(argument) for argument in typing.get_args(hint))
    return typing.get_origin(hint) in (list, tuple) and bool(dataclasses_in(hint))


def _merged(kinds: list[tuple[Key, ...]]) -> tuple[Key, ...]:
    """The keys of objects of several kinds under one name, each once."""
    by_name: dict[str, Key] = {}
    for kind in kinds:
        for one in kind:
            by_name.setdefault(one.name, one)
    return tuple(by_name.values())
