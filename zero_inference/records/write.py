"""Writing a record: composed of what is declared, checked against it, and appended as one line of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from zero_inference.records.fields import REQUIRED, missing_in, undeclared_in
from zero_inference.records.key import as_mapping
from zero_inference.records.schema import SCHEMA_VERSION, STATUS_FAILED, STATUS_OK, Record
from zero_inference.utils.append import append_bytes


def append_record(path: str | os.PathLike[str], record: Record | Mapping[str, Any]) -> dict[str, Any]:
    """Appends `record` to `path` as one line of strict JSON, flushed to disk, and returns it as written.

    nan and infinities become null; numpy and torch numbers and arrays, and paths, are converted. With
    status 'failed' the measured fields may be left out and are written as null. Processes may append
    to one file at once.

    Raises ValueError for missing keys and for undeclared ones, naming them all, TypeError for a value JSON has no form for,
    and OSError when not all of the line could be written (then none of it is).
    """
    line = complete(as_mapping(record) if isinstance(record, Record) else record)
    text = json.dumps(line, allow_nan=False)
    append_bytes(path, (text + "\n").encode(), sync=True, on_new_line=True)
    return line


def complete(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` checked against what is declared; the required keys in their order, the others after them; as plain JSON values."""
    record = {"schema_version": SCHEMA_VERSION, **record}
    if record["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"record has schema_version {record['schema_version']!r}, this writes {SCHEMA_VERSION}")
    status = record.get("status")
    if status not in (None, STATUS_OK, STATUS_FAILED):
        raise ValueError(f"record has status {status!r}, it must be {STATUS_OK!r} or {STATUS_FAILED!r}")
    failed = status == STATUS_FAILED
    missing = missing_in(record, failed)
    if failed and not record.get("error"):
        missing.append("error")
    if missing:
        raise ValueError(f"record lacks {', '.join(missing)}")
    if odd := undeclared_in(record):
        raise ValueError(f"record has {', '.join(odd)}, which zero_inference.records.schema does not declare")
    ordered = {one.name: record.get(one.name) for one in REQUIRED}
    return {name: _plain(value, name) for name, value in {**ordered, **record}.items()}


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _plain(value.tolist(), where)
    raise TypeError(f"record field {where} is a {type(value).__name__}, which JSON has no form for")
