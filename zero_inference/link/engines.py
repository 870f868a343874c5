"""What engines take besides the model's work: asked of a process of its own, with which their libraries stay. Loads no torch.

The process starts at once and loads its libraries, and where DeepSpeed is there compiles its kernel once, beside what else is
measured meanwhile; it measures when it is told to, and nothing else happens then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from zero_inference.config.choices import ENGINES
from zero_inference.runtime.processes import isolated_module

MOST_S = 600  # for what takes 15 s where nothing has to be compiled
READY = "ready"


class EnginesProcess:
    """`zero-inference link --engines`, from its start on; `close` ends it, however far it is.

    Args:
        most_s: that it may take from its start on; it is ended then.
    """

    def __init__(self, most_s: float = MOST_S):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            isolated_module("zero_inference", "link", "--engines"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._most_s, self._late = most_s, False
        self._timer = threading.Timer(most_s, self._end_late)
        self._timer.daemon = True
        self._timer.start()

    def measured(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Has it measure; `library_bytes` and `own_work` as `print_own_work` has them. Nothing where it failed, which is told."""
        last = self._wait(say)
        for line in self._told():
            if line.startswith(ENGINES):
                say(f"warning: not measured: {line}")
        if not self._process.returncode and last.startswith("{"):
            return json.loads(last)
        why = f"it took longer than {self._most_s:g} s" if self._late else (self._told() or ["they said nothing"])[-1]
        say(f"warning: engines were not measured: {why}")
        return {}

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _wait(self, say: Callable[[str], None]) -> str:
        """The last line that it prints."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                break
            say(line.strip())
        try:
            return (self._process.communicate("go\n")[0].splitlines() or [""])[-1]
        except BrokenPipeError:  # it is gone, and its exit code says how
            self._process.wait()
            return ""

    def _told(self) -> list[str]:
        self._errors.seek(0)
        return self._errors.read().strip().splitlines()

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()


def say_ready() -> bool:
    """In that process: that all is loaded; whether it is to measure, for which it waits."""
    print(READY, flush=True)
    return bool(sys.stdin.readline())
