"""A run of run_model.py as a child: started in a process group of its own, ended with it, and told by the record it leaves.

`zero-inference compare` and scripts/sweep.py start their runs by this and nothing else.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.utils.processes import run_with_group
from zero_inference.utils.progress import current

Record = dict[str, Any]
STAGE_BYTES = 4096  # of the end of an output: more than its last line
PROGRESS = re.compile(r" so far| to go|\.\.\.\s*$")  # as runtime.progress writes it
LAUNCHED = re.compile(r"^\[rank\d+\]:\s*")
OWN_ERROR = re.compile("error: ")  # how run_model.py begins the line that says why it ends
ANY_ERROR = re.compile(
    r"(?i:([\w.]+: )?error: )|[\w.]*(Error|Exception): *\S"
)  # argparse's, and the end of a traceback


@dataclass(frozen=True)
class Ended:
    """How a child run ended.

    Attributes:
        code: its exit code, negative where a signal ended it; None where it took longer than its limit.
        output: the file with all that it printed.
        record: what it recorded, None where that cannot be told or contradicts the exit code.
    """

    code: int | None
    output: Path
    record: Record | None = None

    def said(self) -> str:
        """All that it printed."""
        return self.output.read_text(errors="replace")


def run_child(
    command: Sequence[str],
    output: Path,
    *,
    env: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    records: Callable[[], list[Record]] = list,
    is_good: Callable[[Record], bool] = lambda record: True,
) -> Ended:
    """Run `command` to its end. A stop signal, an exception or `limit_s` ends all its processes first (see `run_with_group`).

    Args:
        output: file for what it prints.
        limit_s: longest that it may take; None waits for ever.
        records: those that may be of this run, as they are on disk; asked before and after, and what is new counts.
        is_good: whether a record says that the run went well, which a run that ended otherwise cannot have written.

    Raises:
        OSError: `output` cannot be written; nothing was run.
    """
    before = records()
    try:
        with current().with_detail(lambda: stage(output)):
            code = run_with_group(command, output, env, limit_s)
    except subprocess.TimeoutExpired:
        code = None
    new = records()
    for record in before:
        if record in new:
            new.remove(record)
    last = new[-1] if new else None
    return Ended(code, output, last if last is not None and (code == 0 or not is_good(last)) else None)


def stage(output: Path) -> str | None:
    """The last line of progress that a run has written so far, such as "generating: loop 2 of 3, ..."; None where there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - STAGE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return next((LAUNCHED.sub("", line.strip()) for line in reversed(lines) if PROGRESS.search(line)), None)


def last_words(output: str, error: re.Pattern[str] = OWN_ERROR) -> str | None:
    """The last line that begins as `error`, rather than a launcher's remarks after it; else the last line, None where none is.

    `[rank0]: ` before a line, which launchers write, is left out.
    """
    lines = [LAUNCHED.sub("", line.strip()) for line in output.splitlines()]
    lines = [line for line in lines if line]
    return next((line for line in reversed(lines) if error.match(line)), lines[-1] if lines else None)
