"""Child processes, signals that stop a process, the launchers above it, and the command lines that start a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from zero_inference.utils.format import printable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 15  # between SIGTERM and SIGKILL
POLL_S = 0.1
LAUNCHER_POLL_S = 1.0
SCRIPT = "run_model.py"
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_PRELUDE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
_LEAD = "from zero_inference.utils.processes import lead; lead(sys.argv[1:])"


def isolated_python(code: str, *arguments: str) -> list[str]:
    """Return a command that runs `code` with `arguments` in sys.argv[1:] and with this process's module path.

    Isolated mode alone would not find the package in a checkout, and without it `python -c` and `python -m` search the current
    folder first, where a file may be called torch.py. (`-P` is newer than Python 3.10.)
    """
    paths = [os.path.abspath(path) for path in sys.path]
    return [sys.executable, "-I", "-c", _PRELUDE + code, json.dumps([*paths, _PACKAGE_PARENT]), *arguments]


def isolated_module(name: str, *arguments: str) -> list[str]:
    """Return the command of `python -m name arguments`, isolated like `isolated_python`."""
    return isolated_python(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)


def isolated_ranks(name: str, ranks: int, *arguments: str) -> list[str]:
    """Return the command of `isolated_module` in `ranks` processes of this host, started by torchrun if there are several."""
    command = isolated_module(name, *arguments)
    if ranks == 1:
        return command
    launch = ("--standalone", "--nproc-per-node", str(ranks), "--no-python")
    return isolated_module("torch.distributed.run", *launch, *command)


@contextlib.contextmanager
def process_group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Run `command` in a session of its own, of which nothing is left at the end of the block, nor after SIGKILL of this process.

    Yields a process that runs `lead`: it ends the session when its stdin closes, which happens however this process ends, and exits as
    `command` does. (PR_SET_PDEATHSIG would reach the first process alone.) `options` are those of subprocess.Popen, except stdin.
    """
    leader = None
    try:
        with defer_signals():  # a signal between Popen and the assignment would leave it running
            leader = subprocess.Popen(
                isolated_python(_LEAD, *command), stdin=subprocess.PIPE, start_new_session=True, **options
            )
        yield leader
    finally:
        if leader is not None and leader.stdin is not None:
            leader.stdin.close()
            try:
                leader.wait()
            except (KeyboardInterrupt, SystemExit):  # a further stop signal: do not wait
                leader.terminate()
                leader.wait()


def run_with_parent(parent: int, command: Sequence[str]) -> NoReturn:
    """Run `command` in a process group and exit with its code; stop it and exit with 1 when `parent`, this process's parent, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal: the parent ends this process, if it ends
    with process_group(command) as leader:
        while os.getppid() == parent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                os._exit(leader.wait(POLL_S) & 0xFF)
    os._exit(1)


def lead(command: Sequence[str]) -> NoReturn:
    """Run `command` in a new session and exit as it does, by its code or signal; end the session when stdin closes, kill it on SIGTERM."""
    process: subprocess.Popen | None = None
    signal.signal(signal.SIGTERM, lambda *_: process is not None and _signal_session(process.pid, signal.SIGKILL))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_session() -> None:
        """Send SIGTERM, and SIGKILL after `GRACE_S`, also to processes that were started meanwhile."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline, send = time.monotonic() + GRACE_S, int(number)
            while _signal_session(process.pid, send) and time.monotonic() < deadline:
                send = 0 if number == signal.SIGTERM else number
                process.poll()  # reaps the first process
                time.sleep(0.05)

    def end_with_parent() -> None:
        sys.stdin.read()
        end_session()

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = process.wait()
    end_session()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # the thread may be reading


def _signal_session(session: int, number: int) -> bool:
    """Send a signal (0 for none) to all processes of a session, and return whether any runs.

    Signalling the process group is not enough: ninja gives each compiler a group of its own, and leaves it running when ninja is
    killed (by SIGKILL, or by SIGPIPE because its reader has ended).
    """
    found = False
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):  # it has ended, or is not ours
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found = True
                os.kill(pid, number)
    return found


# Runs of run_model.py as children, for `zero-inference compare` and scripts/sweep.py.

Record = dict[str, Any]
RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s*")  # written by launchers
# the last line of run_model.py, of argparse, or of a traceback
ERROR_LINE = re.compile(r"(?i:([\w.]+: )?error: )|[\w.]*(Error|Exception): *\S")


@dataclass(frozen=True)
class ChildRun:
    """The outcome of a child run."""

    code: int | None  # negative after a signal; None after a timeout
    output: Path
    record: Record | None = None  # None without one, or if it contradicts the exit code

    def read_output(self) -> str:
        return self.output.read_text(errors="replace")


def run_child(
    command: Sequence[str],
    output: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    records: Callable[[], list[Record]] = list,
) -> ChildRun:
    """Run `command` to its end. A stop signal, an exception or the timeout ends all its processes first (`process_group`).

    Args:
        output: file for what it prints; OSError if it cannot be written.
        records: reads the records that may be of this run; called before and after, and the new ones count.
    """
    before = records()
    code = None
    with output.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        with process_group(command, stdout=out, stderr=subprocess.STDOUT, env=env) as leader:
            code = leader.wait(timeout_s)
    new = records()
    for record in before:
        if record in new:
            new.remove(record)
    plausible = bool(new) and (code == 0 or new[-1].get("status") != "ok")
    return ChildRun(code, output, new[-1] if plausible else None)


def last_error_line(output: str) -> str | None:
    """Return the last error, rather than a launcher's remarks after it; else the last line, None without one."""
    lines = [RANK_PREFIX.sub("", line.strip()) for line in output.splitlines()]
    lines = [line for line in lines if line]
    return next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1] if lines else None)


# The launchers above this process.

# Launchers by what Python runs: a script, a module, or the code of `isolated_python`.
LAUNCHERS = re.compile(
    r"(deepspeed|torchrun|accelerate|zero-inference|run_model\.py)$|(deepspeed\.launcher|torch\.distributed|accelerate\.commands)\."
    r"|zero_inference($|\.)|[\s\S]*(run_module\('torch\.distributed\.run'|run_module\('zero_inference'|processes import lead)"
)


def end_now(reason: str) -> None:
    """Print `reason` and end this process, whatever its main thread waits for."""
    with contextlib.suppress(OSError):
        print(f"error: {printable(reason)}.", file=sys.stderr, flush=True)
    os._exit(1)


class LauncherWatch:
    """Ends this process when a launcher above it has ended, also by SIGKILL.

    Launchers are torchrun, both processes of deepspeed, accelerate, and this package's commands. Shells are not: a run that was
    started with nohup or setsid outlives its shell.

    Attributes:
        on_end: called with the reason; a run that has a record to write replaces it.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[str], None] = end_now
        self._started = False

    def start(self) -> None:
        """Start watching, early in a process: a launcher that has already ended is not found. Later calls do nothing."""
        launchers = [] if self._started else _launchers_above()
        self._started = True
        if launchers:
            threading.Thread(target=self._poll, args=(launchers,), name="launcher watch", daemon=True).start()

    def _poll(self, launchers: list[psutil.Process]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in launchers):
                time.sleep(LAUNCHER_POLL_S)
        self.on_end("the launcher has ended")


launcher_watch = LauncherWatch()


def _launchers_above() -> list[psutil.Process]:
    """Return the launchers that started this process, nearest first, also with shells between."""
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


# Signals that ask a process to end. They become exceptions, so that what it holds is released and a record is written. Only the main
# thread runs signal handlers, and can set them: in another thread nothing changes.


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def exit_on_stop() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit(128 + number), as SIGINT raises KeyboardInterrupt; ignored ones (nohup) stay ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if _in_main_thread() and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, frame: sys.exit(128 + received))


def ignore_stop() -> None:
    """Let only SIGKILL interrupt this process from here on: it is ending, and prints why."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def restore_signals() -> Iterator[None]:
    """Restore the signal handlers at the end of the block."""
    before = {number: signal.getsignal(number) for number in STOPPING if _in_main_thread()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be set from here either
                signal.signal(number, handler)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Let stop signals take effect at the end of the block. A launcher sends a second one right after the first."""
    arrived: dict[int, None] = {}  # each once, in order
    try:
        with restore_signals():
            for number in STOPPING:
                if _in_main_thread() and signal.getsignal(number) is not None:
                    signal.signal(number, lambda received, frame: arrived.setdefault(received))
            yield
    finally:
        for received in arrived:
            signal.raise_signal(received)


# Command lines that start a run: run_model.py in a clone, else `zero-inference run`.


def run_command(options: Sequence[str], launched_ranks: int | None = None) -> str:
    """Return the shell command that runs with `options` in the current folder; `launched_ranks` are of the deepspeed launcher."""
    in_clone = Path(SCRIPT).is_file()
    if launched_ranks is None:
        words = ["python", SCRIPT] if in_clone else ["zero-inference", "run"]
    else:
        words = ["deepspeed", "--num_gpus", str(launched_ranks)]
        words += [SCRIPT] if in_clone else ["--module", "zero_inference", "run"]
    return shlex.join([*words, *options])


def as_installed_command(text: str) -> str:
    """Return `text` with its commands for a clone as commands of the installed package."""
    return text.replace(f"python {SCRIPT}", "zero-inference run").replace(f" {SCRIPT}", " --module zero_inference run")


def move_rank_option(argv: list[str]) -> list[str]:
    """Return `argv` with --local-rank after the command's name: the deepspeed launcher (`--module`) writes it before."""
    if len(argv) > 2 and argv[1].replace("_", "-").startswith("--local-rank="):
        return [argv[0], argv[2], argv[1], *argv[3:]]
    return argv
