"""Writing a record: composed of what is declared, checked against it, and appended as one line of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.records.field import as_mapping
from zero_inference.records.fields import REQUIRED, missing_in, undeclared_in
from zero_inference.records.schema import SCHEMA_VERSION, STATUS_FAILED, STATUS_OK, Record, Request, Result
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.files import append_bytes, check_appendable
from zero_inference.utils.log import LOG_LINES


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


@dataclass
class RunLog:
    """Where a run writes its four lines (`log`) and its record (`record`, one line of JSON), and what goes there.

    Attributes:
        request: the part of the record that is known before the run.
        result: filled on the way, so that what is known stays known if a later part fails.
        unwritten: in words, what was to be written beside these two and could not be.
    """

    log: Path
    record: Path
    request: Request
    result: Result
    unwritten: list[str] = field(default_factory=list)

    @classmethod
    def at(cls, log: Path, request: Request, result: Result | None = None) -> RunLog:
        """The log at `log`, the record beside it.

        Raises:
            UsageError: the log has the record's name.
        """
        return cls(log, cls._beside(log), request, result or Result())

    def move(self, log: Path, request: Request) -> None:
        """Write to `log`, and to the record beside it, before anything is written. Raises as `at` and `check`."""
        self.log, self.record, self.request = log, self._beside(log), request
        self.check()

    @staticmethod
    def _beside(log: Path) -> Path:
        if not log.name:
            raise UsageError(f"--log-file {log} is a folder; name a file, or use --log-dir.")
        if log.suffix == ".jsonl":
            raise UsageError(f"--log-file {log}: the record beside the log ends in .jsonl; end the log's name in .log.")
        return log.with_suffix(".jsonl") if log.suffix == ".log" else log.with_name(log.name + ".jsonl")

    def check(self) -> None:
        """Raises UsageError where one of the two cannot be written: better now than after the measurement."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the log folder {self.log.parent} cannot be created ({error.strerror}); choose another --log-dir."
            ) from error
        for what, path in (("log", self.log), ("record", self.record)):
            try:
                check_appendable(path)
            except OSError as error:
                raise UsageError(
                    f"the {what} {path} is not writable ({error.strerror}); choose another --log-dir or --log-file."
                ) from error

    def write(self) -> None:
        """Append the block and the record, each whether or not the other can be written."""
        with self.noting("log", self.log):
            write_benchmark_log(self.log, *self._values())
        with self.noting("record", self.record):
            append_record(self.record, self._succeeded())

    def as_written(self) -> dict[str, Any]:
        """The record of a run that went well, as `write` has it."""
        return complete(as_mapping(self._succeeded()))

    def write_failure(self, reason: str) -> None:
        """Append a record of a run that failed."""
        with self.noting("record", self.record):
            append_record(
                self.record, Record(status=STATUS_FAILED, request=self.request, result=self.result, error=reason)
            )

    @contextmanager
    def noting(self, what: str, path: str | Path) -> Iterator[None]:
        """A file that cannot be written costs no measurement: it is named at the end."""
        try:
            yield
        except OSError as error:
            self.unwritten.append(f"the {what} was not written to {path} ({error.strerror or error})")
        except (ValueError, TypeError) as error:  # a key or a value that the record has no place for
            self.unwritten.append(f"the {what} was not written to {path} ({error})")

    def _succeeded(self) -> Record:
        return Record(status=STATUS_OK, request=self.request, result=self.result)

    def _values(self) -> list[float | None]:
        assert self.result.measured is not None, "a run that failed has no block"
        measured = as_mapping(self.result.measured)
        values = {key: measured[key] for line in LOG_LINES for _, _, key in line}
        return list((values | {"peak_gpu_bytes": values["peak_gpu_bytes"] or 0}).values())


def refuse_shared_files(config: RunConfig, files: RunLog, model: Path | None, questions: Iterable[str | Path]) -> None:
    """Raises UsageError where a file that the run writes is another one of it, or one that it reads: it would be replaced, or end in
    lines of a log.

    Args:
        model: the checkpoint's folder; None without one. Logs may lie there.
        questions: the files that --quality-data stands for.
    """
    of_model = [file for file in model.iterdir() if file.suffix not in (".log", ".jsonl")] if model is not None else []
    read = [
        ("--prompts", config.prompts),
        ("--ds-config", config.ds_config),
        *(("--model", file) for file in of_model),
        *(("--quality-data", file) for file in questions),
    ]
    taken = {_identity(path): f"is read for {option}" for option, path in read if path}
    for option, path in (
        ("the log", files.log),
        ("the record", files.record),
        ("--trace", config.trace),
        ("--quality-items", config.quality_items),
    ):
        if path:
            if (what := taken.get(_identity(path))) is not None:
                raise UsageError(f"{option} {path} {what}; choose another name.")
            taken[_identity(path)] = f"is already used by {option}"


def _identity(path: str | Path) -> Any:
    """Equal for two names of one file, hard links too."""
    try:
        found = os.stat(path)
    except OSError:  # not there yet
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
