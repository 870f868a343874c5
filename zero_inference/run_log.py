"""The two files of a run: its log and its record. They are tried before anything is loaded and written after all is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from zero_inference.append import check_appendable
from zero_inference.errors import UsageError
from zero_inference.records import append_record
from zero_inference.utils import LOG_LINES, benchmark_block, write_benchmark_log


@dataclass(frozen=True)
class RunLog:
    """Where a run writes its four lines (`log`) and its record (`record`, one line of JSON)."""

    log: Path
    record: Path

    @classmethod
    def at(cls, log: Path) -> RunLog:
        """The log at `log`, the record beside it.

        Raises:
            UsageError: the log has the record's name.
        """
        if not log.name:
            raise UsageError(f"--log-file {log} is a folder; name a file, or use --log-dir.")
        if log.suffix == ".jsonl":
            raise UsageError(f"--log-file {log}: .jsonl is the record's name beside the log; end the log's in .log.")
        return cls(log, log.with_suffix(".jsonl") if log.suffix == ".log" else log.with_name(log.name + ".jsonl"))

    def check(self) -> None:
        """Raises UsageError where one of the two cannot be written: better now than after the measurement."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the log folder {self.log.parent} cannot be made ({error.strerror}); choose another --log-dir.") from error
        for what, path in (("log", self.log), ("record", self.record)):
            try:
                check_appendable(path)
            except OSError as error:
                raise UsageError(f"the {what} {path} cannot be written to ({error.strerror}); "
                                 "choose another --log-dir or --log-file.") from error

    def block(self, record: Mapping[str, Any]) -> str:
        """The log's four lines of `record`, as they are printed and logged."""
        return benchmark_block(*_values(record))

    def write(self, record: Mapping[str, Any]) -> list[str]:
        """Append the block and the record, each whether or not the other can be written; what could not be, in words."""
        problems = []
        for what, path, append in (("log", self.log, lambda path: write_benchmark_log(path, *_values(record))),
                                   ("record", self.record, lambda path: append_record(path, record))):
            try:
                append(path)
            except OSError as error:
                problems.append(not_written(what, path, error))
        return problems


def not_written(what: str, path: str | Path, error: OSError) -> str:
    return f"the {what} was not written to {path} ({error.strerror or error})"


def _values(record: Mapping[str, Any]) -> list[float | None]:
    values = {key: record[key] for line in LOG_LINES for _, _, key in line}
    return list((values | {"peak_gpu_bytes": values["peak_gpu_bytes"] or 0}).values())
