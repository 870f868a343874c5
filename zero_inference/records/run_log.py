"""What a run leaves: its log and its record. Both are tried before anything is loaded and written after all is measured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.records.key import as_mapping
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK, Record, Request, Result
from zero_inference.records.write import append_record, complete
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.append import check_appendable
from zero_inference.utils.log import LOG_LINES


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
