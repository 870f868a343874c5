"""Child processes: started so that no file of the current folder is run, and ended with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zero_inference.signals import held

GRACE_S = 15
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])
_PRELUDE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"


def isolated_python(code: str, *arguments: str) -> list[str]:
    """A command that runs `code` with `arguments` in sys.argv[1:], and with this process's own module path.

    Isolated mode alone would not find the package in a checkout, and without it `python -c` and `python -m` look for modules in
    the current folder first, where a file may be called torch.py. (`-P` is newer than Python 3.10.)
    """
    paths = [os.path.abspath(path) for path in sys.path]
    return [sys.executable, "-I", "-c", _PRELUDE + code, json.dumps([*paths, _PACKAGE_PARENT]), *arguments]


def isolated_module(name: str, *arguments: str) -> list[str]:
    """`python -m name arguments`, as of `isolated_python`."""
    return isolated_python(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)


def run_with_group(command: Sequence[str], output: Path, env: Mapping[str, str] | None = None) -> int:
    """Run `command` in a process group of its own, all that it prints in `output`; its exit code.

    However this ends, also by an exception or SIGKILL, nothing of the group goes on: a rank left behind would keep its memory.
    """
    process = guard = None
    try:
        with output.open("w") as out, held():  # a signal between its start and its name here would leave it behind
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                       start_new_session=True, env=env)
            guard = subprocess.Popen(isolated_python(_GUARD, str(process.pid)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL, start_new_session=True)
        return process.wait()
    finally:
        if process is not None:
            end_group(process.pid, process.poll)
        if guard is not None:
            guard.communicate()


# Sees the end of this process by that of a pipe. Its first process would get PR_SET_PDEATHSIG, but the ranks of a launcher would not.
_GUARD = "import sys; from zero_inference.processes import end_group; sys.stdin.read(); end_group(int(sys.argv[1]))"


def end_group(leader: int, reap: Callable[[], object] = lambda: None) -> None:
    """End the group that process `leader` leads, harder after `GRACE_S` seconds. A further stop signal goes on without waiting.

    Args:
        reap: of the leader, where it is a child: as a zombie it would keep the group alive.
    """
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, KeyboardInterrupt, SystemExit):
            os.killpg(leader, sent)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                reap()
                os.killpg(leader, 0)
                time.sleep(0.05)
