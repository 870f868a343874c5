"""The process that measures engine overhead: a process of its own, because an engine's library stays where it was imported.

It starts first, loads libraries and compiles DeepSpeed's kernel while this process measures other things, and measures when asked to, while
nothing else happens. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from zero_inference.config.options import ENGINES
from zero_inference.utils.processes import isolated_module

TIMEOUT_S = 600  # of what takes 20 s unless kernels are compiled
READY = "ready"


class OverheadProcess:
    """`zero-inference link --engines`, started at once; `close` ends it and all its children at any point.

    Args:
        timeout_s: from its start, after which it is ended.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            isolated_module("zero_inference", "link", "--engines"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # a process group with its compilers
        )
        self._timeout_s, self._timed_out = timeout_s, False
        self._timer = threading.Timer(timeout_s, self._end_late)
        self._timer.daemon = True
        self._timer.start()

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Wait until it has loaded its libraries or has ended; `say` reports what takes longer."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                return
            say(line.strip())

    def measure(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Let it measure, and return what `print_engine_overheads` prints; nothing if it failed, which `say` reports."""
        last = (self._process.communicate("go\n")[0].splitlines() or [""])[-1]
        self._timer.cancel()
        errors = self._stderr_lines()
        for line in errors:
            if line.startswith(ENGINES):
                say(f"warning: not measured: {line}")
        if not self._process.returncode and last.startswith("{"):
            return json.loads(last)
        why = errors[-1] if errors else "it printed no reason"
        if self._timed_out:
            why = f"it took longer than {self._timeout_s:g} s"
        say(f"warning: engines were not measured: {why}")
        return {}

    def close(self) -> None:
        self._timer.cancel()
        self._end_group()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _stderr_lines(self) -> list[str]:
        self._errors.seek(0)
        return self._errors.read().strip().splitlines()

    def _end_late(self) -> None:
        self._timed_out = True
        self._end_group()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and its id may have been reused
            os.killpg(self._process.pid, signal.SIGKILL)


def signal_ready() -> bool:
    """In that process: report that everything is loaded, wait, and return whether to measure."""
    print(READY, flush=True)
    return bool(sys.stdin.readline())
