"""A child process that answers requests one at a time, so that what breaks it breaks nothing else.

Requests and answers are JSON, one a line, over the child's stdin and stdout.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class WorkerFailed(Exception):
    """A request was not answered; its message is the reason in one line."""


class Worker:
    """The parent's side. A child that failed is ended, and the next request starts another."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None):
        self.command, self.environment = command, environment
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the child if there is none, so that it can import what it needs before the first request."""
        if self._process is None:
            self._process = subprocess.Popen(
                self.command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment
            )

    def ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        """Return the child's answer. Raises WorkerFailed if it reports an error, dies, or takes longer than `timeout_s` seconds."""
        self.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has ended: reading reports how
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.close()
            raise WorkerFailed(f"no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            raise WorkerFailed(f"its process ended with exit code {code}")
        reply = json.loads(line)
        if "error" in reply:
            self.close()
            raise WorkerFailed(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The child's side: answer requests until the parent closes stdin. The first that raises is the last."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there
    for line in sys.stdin:
        try:
            reply = {"answer": answer(json.loads(line))}
        except Exception as error:
            lines = str(error).strip().splitlines()
            reply = {"error": f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)
        if "error" in reply:
            os._exit(1)  # a capture that failed leaves CUDA in a state that not even a normal exit survives
