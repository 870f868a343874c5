"""The base of the record's models: declared keys, from which writing, tolerant reading and the list of all keys follow.

A field says its unit and meaning once, in `key`. An `inline` field's own keys are written beside those of its owner.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticUndefined
from typing_extensions import Self

from zero_inference.utils.format import printable

READING = {"reading": True}  # validation context of files: what cannot be used is None
Number = int | float  # an int stays one in the file
SMALLEST, LARGEST = 1e-15, 1e20  # of any quantity of a run, in SI units


def key(
    unit: str,
    meaning: str,
    name: str | None = None,
    only_with: str | None = None,
    *,
    required: bool = False,
    default: Any = PydanticUndefined,
    **more: Any,
) -> Any:
    """Declare a key of the record.

    Args:
        name: the key, where it is not the attribute's name.
        required: every record has it, as null where it is unknown.
        only_with: what a run must be asked for, or have, for the key to be there; it is left out where the value is None.
    """
    declared: dict[str, Any] = {"unit": unit, "required": required, "only_with": only_with}
    return Field(default, alias=name, description=meaning, json_schema_extra=declared, **more)


def inline(default: Any = PydanticUndefined) -> Any:
    """Declare a field whose keys are written beside the others, and left out all together where it is None."""
    return Field(default, json_schema_extra={"inline": True})


class Part(BaseModel):
    """An object of the record. Construction refuses undeclared keys and wrong types; `read` takes what it can use."""

    # Validators are built at their first use: `--help` imports these classes.
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=(), defer_build=True
    )

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> Self:
        """Return the part from a file's object: what is missing or of another kind is None, an empty list or an empty part."""
        return cls.model_validate(data, context=READING)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys and values to write, of the parts below too."""
        written: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value, declared = getattr(self, name), _declared(field)
            if field.exclude:
                continue
            if declared.get("inline"):
                written |= {} if value is None else value.as_dict()
            elif value is not None or not declared["only_with"]:
                written[field.alias or name] = _as_plain(value)
        return written

    @model_validator(mode="before")
    @classmethod
    def _take_declared(cls, data: Any, info: Any) -> Any:
        """When reading: what is missing is None, what is not declared is left out, inline fields take from the same object."""
        if not info.context or isinstance(data, Part):
            return data
        if not isinstance(data, dict | None):
            raise ValueError("not an object")
        data, taken = data or {}, {}
        for name, field in cls.model_fields.items():
            at = field.alias or name
            if _declared(field).get("inline"):
                taken[at] = data
            elif field.is_required() or at in data:
                taken[at] = data.get(at)
        return taken

    @field_validator("*", mode="wrap")
    @classmethod
    def _take_usable(cls, value: Any, handler: Any, info: Any) -> Any:
        """When reading: a value of another kind is None, an empty list or an empty part."""
        if not info.context:
            return handler(value)
        try:
            value = handler(value)
        except ValidationError:
            kind = cls.model_fields[info.field_name].annotation
            if typing.get_origin(kind) is list:
                return []
            return kind.read({}) if isinstance(kind, type) and issubclass(kind, Part) else None
        if isinstance(value, str):
            return printable(value)
        return value if not isinstance(value, float | int) or as_number(value) is not None else None


def as_number(value: Any) -> float | None:
    """Return `value` as a float; None if it is no number, not finite, or so large or small that sums and ratios would not be."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == 0 or SMALLEST <= abs(number) <= LARGEST else None


def _declared(field: Any) -> dict[str, Any]:
    return field.json_schema_extra or {}


def _as_plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_as_plain(item) for item in value]
    return value


class KeyInfo(NamedTuple):
    """A key by its path: `limit.link_gbps`; `loops[].step_s` where each object of a list has it."""

    key: str
    unit: str
    meaning: str
    only_with: str | None
    required: bool


def list_keys(part: type[Part], under: str = "", only_with: str | None = None) -> Iterator[KeyInfo]:
    """Yield all keys of a part, each object before what is in it. A condition of an object holds for all that is in it."""
    seen = set()
    for name, field in part.model_fields.items():
        declared, hint = _declared(field), str(field.annotation)
        if field.exclude:
            continue
        below, condition = under, only_with
        if not declared.get("inline"):
            at, condition = f"{under}{field.alias or name}", declared["only_with"] or only_with
            yield KeyInfo(at, declared["unit"], field.description or "", condition, declared["required"])
            below = f"{at}[]." if hint.startswith("list") or "[list" in hint else f"{at}."
        for inner in _parts_of(field.annotation):
            for each in list_keys(inner, below, condition):
                if each.key not in seen:
                    seen.add(each.key)
                    yield each


def _parts_of(hint: Any) -> list[type[Part]]:
    """Return the parts that a type hint names: itself, in a union or in a list."""
    if isinstance(hint, type) and issubclass(hint, Part):
        return [hint]
    return [part for argument in typing.get_args(hint) for part in _parts_of(argument)]
