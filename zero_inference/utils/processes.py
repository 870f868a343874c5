"""Start children that run no file of the current folder, end them with all that they started, and end with the own launcher."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zero_inference.utils.format import printable
from zero_inference.utils.progress import current_progress

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


def run_in_group(
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
    with output.open("w") as out, process_group(command, stdout=out, stderr=subprocess.STDOUT, env=env) as leader:
        return leader.wait(limit_s)


@contextlib.contextmanager
def process_group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start `command` in a process group of its own, and end what is left of it at the end of the block.

    Also SIGKILL of this process leaves nothing: see `run_in_group`.

    Args:
        options: of subprocess.Popen, but not stdin.

    Yields:
        a process that ends as `command` does, when all of the group has ended.
    """
    leader = None
    try:
        with defer_signals():  # a signal between its start and its name here would leave it running
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


def run_with_parent(parent: int, command: Sequence[str]) -> NoReturn:
    """Run `command` in a process group, and end with its exit code, or with the process `parent`, which has started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process, if it ends
    with process_group(command) as leader:
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


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_stop() -> None:
    """SIGTERM and SIGHUP raise SystemExit(128 + number), as SIGINT raises KeyboardInterrupt. What is ignored (nohup) stays so.

    Only the main thread can say so; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, frame: sys.exit(128 + received))


def ignore_stop() -> None:
    """From here on nothing but SIGKILL interrupts this process: it is ending, and says why."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def restore_signals() -> Iterator[None]:
    """At the end signals do what they did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be set from here either
                signal.signal(number, handler)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Signals that arrive inside take effect at its end. A launcher sends a second one right behind the first.

    Only the main thread runs signal handlers; in another one there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: dict[int, None] = {}  # each once, in order
    before = {
        number: signal.signal(number, lambda received, frame: arrived.setdefault(received)) for number in STOPPING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for received in arrived:
            signal.raise_signal(received)


Record = dict[str, Any]
STAGE_BYTES = 4096  # of the end of an output: more than its last line
PROGRESS = re.compile(r" so far| to go|\.\.\.\s*$")  # as runtime.progress writes it
LAUNCHED = re.compile(r"^\[rank\d+\]:\s*")
OWN_ERROR = re.compile("error: ")  # how run_model.py begins the line that says why it ends
ANY_ERROR = re.compile(
    r"(?i:([\w.]+: )?error: )|[\w.]*(Error|Exception): *\S"
)  # argparse's, and the end of a traceback


@dataclass(frozen=True)
class ChildRun:
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
) -> ChildRun:
    """Run `command` to its end. A stop signal, an exception or `limit_s` ends all its processes first (see `run_in_group`).

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
        with current_progress().with_detail(lambda: last_progress(output)):
            code = run_in_group(command, output, env, limit_s)
    except subprocess.TimeoutExpired:
        code = None
    new = records()
    for record in before:
        if record in new:
            new.remove(record)
    last = new[-1] if new else None
    return ChildRun(code, output, last if last is not None and (code == 0 or not is_good(last)) else None)


def last_progress(output: Path) -> str | None:
    """The last line of progress that a run has written so far, such as "generating: loop 2 of 3, ..."; None where there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - STAGE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return next((LAUNCHED.sub("", line.strip()) for line in reversed(lines) if PROGRESS.search(line)), None)


def last_error_line(output: str, error: re.Pattern[str] = OWN_ERROR) -> str | None:
    """The last line that begins as `error`, rather than a launcher's remarks after it; else the last line, None where none is.

    `[rank0]: ` before a line, which launchers write, is left out.
    """
    lines = [LAUNCHED.sub("", line.strip()) for line in output.splitlines()]
    lines = [line for line in lines if line]
    return next((line for line in reversed(lines) if error.match(line)), lines[-1] if lines else None)


SCRIPT = "run_model.py"
LOCAL_RANK = "--local-rank"


def run_command(options: Sequence[str], launched_ranks: int | None = None) -> str:
    """A line for the shell that runs with `options`.

    Args:
        launched_ranks: how many the deepspeed launcher starts; None starts a single process without a launcher.
    """
    in_clone = Path(SCRIPT).is_file()
    if launched_ranks is None:
        words = ["python", SCRIPT] if in_clone else ["zero-inference", "run"]
    else:
        words = ["deepspeed", "--num_gpus", str(launched_ranks)]
        words += [SCRIPT] if in_clone else ["--module", "zero_inference", "run"]
    return shlex.join([*words, *options])


def as_installed_command(text: str) -> str:
    """Commands with run_model.py as they are typed without a clone."""
    return text.replace(f"python {SCRIPT}", "zero-inference run").replace(f" {SCRIPT}", " --module zero_inference run")


def move_rank_option(argv: list[str]) -> list[str]:
    """The deepspeed launcher writes the rank before all other words, also before the command whose option it is (`--module`)."""
    if len(argv) > 2 and argv[1].replace("_", "-").startswith(f"{LOCAL_RANK}="):
        return [argv[0], argv[2], argv[1], *argv[3:]]
    return argv
