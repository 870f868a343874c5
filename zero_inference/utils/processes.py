"""Start children that run no file of the current folder, end them with all that they started, and end with the own launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zero_inference.utils.format import printable
from zero_inference.utils.signals import held

if TYPE_CHECKING:
    import psutil

GRACE_S = 15
POLL_S = 0.1
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_PRELUDE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
LOOK_S = 1.0
# Launchers by what Python runs: a script, a module, or the code of `isolated_python`.
LAUNCHERS = re.compile(
    r"(deepspeed|torchrun|accelerate|zero-inference|run_model\.py)$|(deepspeed\.launcher|torch\.distributed|accelerate\.commands)\."
    r"|zero_inference($|\.)|[\s\S]*(run_module\('torch\.distributed\.run'|run_module\('zero_inference'|processes import lead)"
)


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


def isolated_ranks(name: str, ranks: int, *arguments: str) -> list[str]:
    """The same in `ranks` processes of this machine, started by torchrun where they are several."""
    command = isolated_module(name, *arguments)
    if ranks == 1:
        return command
    return isolated_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python", *command
    )


def run_with_group(
    command: Sequence[str], output: Path, env: Mapping[str, str] | None = None, limit_s: float | None = None
) -> int:
    """Run `command` in a process group of its own, all that it prints in `output`; its exit code.

    However this ends, also by an exception or SIGKILL, nothing of the group goes on: a rank left behind would keep its memory. So a
    process between, which sees the end of this one by that of a pipe, leads the group and what else is in its session.
    (PR_SET_PDEATHSIG reaches the first process alone, and deepspeed's launcher, for one, tells its ranks nothing.)

    Raises:
        OSError: `output` cannot be written.
        subprocess.TimeoutExpired: it took longer than `limit_s`, and was ended.
    """
    with output.open("w") as out, group(command, stdout=out, stderr=subprocess.STDOUT, env=env) as leader:
        return leader.wait(limit_s)


@contextlib.contextmanager
def group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start `command` in a process group of its own, and end what is left of it at the end of the block.

    Also SIGKILL of this process leaves nothing: see `run_with_group`.

    Args:
        options: of subprocess.Popen, but not stdin.

    Yields:
        a process that ends as `command` does, when all of the group has ended.
    """
    leader = None
    try:
        with held():  # a signal between its start and its name here would leave it running
            leader = subprocess.Popen(
                isolated_python(_LEAD, *command), stdin=subprocess.PIPE, start_new_session=True, **options
            )
        yield leader
    finally:
        if leader is not None and leader.stdin is not None:
            leader.stdin.close()
            try:
                leader.wait()
            except (KeyboardInterrupt, SystemExit):  # a further stop signal: go on without waiting
                leader.terminate()
                leader.wait()


def run_for(parent: int, command: Sequence[str]) -> NoReturn:
    """Run `command` in a process group, and end with its exit code, or with the process `parent`, which has started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process, if it ends
    with group(command) as leader:
        while os.getppid() == parent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                os._exit(leader.wait(POLL_S) & 0xFF)
    os._exit(1)


_LEAD = "from zero_inference.utils.processes import lead; lead(sys.argv[1:])"


def lead(command: Sequence[str]) -> NoReturn:
    """Run `command` in a session of its own and end as it does, but end the session where stdin ends, and at once on SIGTERM."""
    import psutil  # noqa: F401 (the handler of a signal cannot begin to import it)

    process: subprocess.Popen | None = None
    signal.signal(signal.SIGTERM, lambda *_: process is not None and _send(process, signal.SIGKILL))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        sys.stdin.read()
        _end_group(process)

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = process.wait()
    _end_group(process)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # the thread may be reading


def _end_group(process: subprocess.Popen) -> None:
    """End the session that `process` leads, harder after `GRACE_S` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline, sent = time.monotonic() + GRACE_S, int(number)
        while _send(process, sent) and time.monotonic() < deadline:
            process.poll()  # reaps the first process
            sent = 0 if number == signal.SIGTERM else sent
            time.sleep(0.05)


def _send(process: subprocess.Popen, number: int) -> bool:
    """Return whether anything runs in the session that `process` leads. Sends it a signal, or none for 0.

    The group alone is not enough: ninja gives each compiler a group of its own, and leaves it running when ninja is killed (by SIGKILL, or
    by SIGPIPE because its reader has ended).
    """
    import psutil

    found = False
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):  # it has ended, or is not ours
            if os.getsid(pid) == process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found = True
                os.kill(pid, number)
    return found


def end_now(reason: str) -> None:
    """Print `reason` and end this process, whatever its main thread waits for."""
    with contextlib.suppress(OSError):
        print(f"error: {printable(reason)}.", file=sys.stderr, flush=True)
    os._exit(1)


class LauncherWatch:
    """Ends this process when a launcher above it has ended, also by SIGKILL.

    Launchers are torchrun, both processes of deepspeed, accelerate, and this package's own commands. Shells are not: a run that
    was started with nohup or setsid outlives its shell.

    Attributes:
        end: called with the reason; a run that has a record to leave replaces it.
    """

    def __init__(self) -> None:
        self.end: Callable[[str], None] = end_now
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Call it early: a launcher that has ended before this is not found. Later calls do nothing."""
        if self._thread is None:
            launchers = launchers_above()
            self._thread = threading.Thread(target=self._look, args=(launchers,), name="launcher watch", daemon=True)
            if launchers:
                self._thread.start()

    def _look(self, launchers: list[psutil.Process]) -> None:
        while all(map(_is_alive, launchers)):
            time.sleep(LOOK_S)
        self.end("the launcher has ended")


launcher_watch = LauncherWatch()


def launchers_above() -> list[psutil.Process]:
    """Return the launchers that started this process, nearest first, also with shells between."""
    import psutil  # later, because it is not needed by all that starts processes

    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):  # of another user
                if _is_launcher(process.cmdline()):
                    found.append(process)
    return found


def _is_launcher(words: Sequence[str]) -> bool:
    if not words or "python" not in os.path.basename(words[0]):
        return False
    for number, word in enumerate(words[1:], 1):
        if word in ("-m", "-c"):
            return LAUNCHERS.match("".join(words[number + 1 : number + 2])) is not None
        if not word.startswith("-"):
            return LAUNCHERS.match(os.path.basename(word)) is not None
    return False


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
