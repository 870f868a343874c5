"""The log and the record of a run: both are checked before anything is loaded and written after all is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json, to_json

from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK, Record, Request, Result
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.files import LOG_LINES, append_bytes, check_appendable


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Append `record` to `path` as one line of strict JSON, flushed to disk. Processes may append to one file at once.

    Raises ValueError for a value without a JSON form, and OSError if not all of the line could be written; then none of it is.
    """
    append_bytes(path, (json.dumps(as_json(record)) + "\n").encode(), sync=True, on_new_line=True)


def as_json(record: Record) -> dict[str, Any]:
    """Return `record` as written: nan and infinities are null, numpy and torch values and paths are converted."""
    line: dict[str, Any] = from_json(
        to_json(record.as_dict(), inf_nan_mode="null", fallback=lambda value: value.tolist())
    )
    return line


@dataclass
class RunLog:
    """Writes a run's four-line log to `log` and its record beside it."""

    log: Path
    request: Request  # known before the run
    result: Result  # filled during the run, so that a failure loses nothing that is known
    unwritten: list[str] = field(default_factory=list)  # messages about files that could not be written

    @property
    def record_path(self) -> Path:
        """The record's file; UsageError if the log has the name of a folder or a record."""
        if not self.log.name:
            raise UsageError(f"--log-file {self.log} is a folder; name a file, or use --log-dir.")
        if self.log.suffix == ".jsonl":
            raise UsageError(
                f"--log-file {self.log}: the record beside the log ends in .jsonl; end the log's name in .log."
            )
        return self.log.with_name(f"{self.log.stem if self.log.suffix == '.log' else self.log.name}.jsonl")

    def move(self, log: Path, request: Request) -> None:
        """Change the log and the request before anything is written; raises UsageError as `check` does."""
        self.log, self.request = log, request
        self.check()

    def check(self) -> None:
        """Raise UsageError if one of the files cannot be written: better now than after the measurement."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the log folder {self.log.parent} cannot be created ({error.strerror}); choose another --log-dir."
            ) from error
        for what, path in (("log", self.log), ("record", self.record_path)):
            try:
                check_appendable(path)
            except OSError as error:
                raise UsageError(
                    f"the {what} {path} is not writable ({error.strerror}); choose another --log-dir or --log-file."
                ) from error

    def write(self) -> None:
        """Append the block and the record, each whether or not the other can be written."""
        assert self.result.measured is not None, "a run that failed has no block"
        measured = self.result.measured.as_dict()
        sizes_and_times = {key: measured[key] for line in LOG_LINES for _, _, key in line}
        sizes_and_times["peak_gpu_bytes"] = sizes_and_times["peak_gpu_bytes"] or 0
        with self.noting("log", self.log):
            write_benchmark_log(self.log, *sizes_and_times.values())
        with self.noting("record", self.record_path):
            append_record(self.record_path, self._as_record(STATUS_OK))

    def as_written(self) -> dict[str, Any]:
        """Return the record of a run that succeeded, as `write` appends it."""
        return as_json(self._as_record(STATUS_OK))

    def write_failure(self, reason: str) -> None:
        """Append the record of a run that failed."""
        with self.noting("record", self.record_path):
            append_record(self.record_path, self._as_record(STATUS_FAILED, reason))

    def _as_record(self, status: Literal["ok", "failed"], error: str | None = None) -> Record:
        return Record(status=status, request=self.request, result=self.result, error=error)

    @contextmanager
    def noting(self, what: str, path: str | Path) -> Iterator[None]:
        """Note a file that cannot be written in `unwritten`, so that no measurement is lost."""
        try:
            yield
        except (OSError, ValueError, TypeError) as error:  # the last two: a value without a JSON form
            reason = getattr(error, "strerror", None) or error
            self.unwritten.append(f"the {what} was not written to {path} ({reason})")


def refuse_shared_files(config: RunConfig, files: RunLog, model: Path | None, questions: Iterable[str | Path]) -> None:
    """Raise UsageError if a file that the run writes is one that it reads, or is written twice.

    Args:
        model: the checkpoint's folder, which may contain logs; None without one.
        questions: the files of --quality-data.
    """
    of_model = [file for file in model.iterdir() if file.suffix not in (".log", ".jsonl")] if model is not None else []
    read = [
        ("--prompts", config.prompts),
        ("--ds-config", config.ds_config),
        *(("--model", file) for file in of_model),
        *(("--quality-data", file) for file in questions),
    ]
    taken = {_identity(path): f"is read for {option}" for option, path in read if path}
    outputs = (files.log, files.record_path, config.trace, config.quality_items)
    for option, path in zip(("the log", "the record", "--trace", "--quality-items"), outputs):
        if path:
            if (what := taken.get(_identity(path))) is not None:
                raise UsageError(f"{option} {path} {what}; choose another name.")
            taken[_identity(path)] = f"is already used by {option}"


def _identity(path: str | Path) -> Any:
    """Return a value that is equal for two names of one file, hard links included."""
    try:
        found = os.stat(path)
    except OSError:  # not there yet
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
