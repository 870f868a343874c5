"""What engines take besides the model's work: asked of a process of its own, with which their libraries stay. Loads no torch.

The process starts at once and loads its libraries, and where DeepSpeed is there compiles its kernel once, beside what else is
measured meanwhile; it measures when it is told to, and nothing else happens then.
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

TIMEOUT_S = 600  # for what takes 20 s where nothing has to be compiled
READY = "ready"


class OverheadProcess:
    """`zero-inference link --engines`, from its start on; `close` ends it with all that it has started, however far it is.

    Args:
        timeout_s: that it may take from its start on; it is ended then.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            isolated_module("zero_inference", "link", "--engines"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # a group of its own, with its compilers
        )
        self._timeout_s, self._timed_out = timeout_s, False
        self._timer = threading.Timer(timeout_s, self._end_late)
        self._timer.daemon = True
        self._timer.start()

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Until it has loaded its libraries, or has ended; `say` is told what takes longer."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                return
            say(line.strip())

    def measured(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Has it measure, when it is ready, and returns what `print_own_work` prints; nothing where it failed, which is told."""
        last = (self._process.communicate("go\n")[0].splitlines() or [""])[-1]
        self._timer.cancel()
        for line in self._stderr_lines():
            if line.startswith(ENGINES):
                say(f"warning: not measured: {line}")
        if not self._process.returncode and last.startswith("{"):
            return json.loads(last)
        silent = ["it printed no reason"]
        why = f"it took longer than {self._timeout_s:g} s" if self._timed_out else (self._stderr_lines() or silent)[-1]
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and its number may be another's
            os.killpg(self._process.pid, signal.SIGKILL)


def signal_ready() -> bool:
    """In that process: that all is loaded; whether it is to measure, for which it waits."""
    print(READY, flush=True)
    return bool(sys.stdin.readline())
