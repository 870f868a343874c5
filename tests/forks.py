"""Processes that start as copies of one that has imported the libraries: importing them is most of what a run of a small model takes.

Each has arguments, environment, folder, output and exit code of its own. What Python or a library reads of the environment as it starts
(PYTHONHASHSEED, OMP_NUM_THREADS) is that of the first process, so all copies order their sets alike. Not for tests of the start itself,
and not where there is a GPU, which a process must not have seen before it is copied.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

QUICKLY = "measure_with_small_blocks"  # among modules
# These read nothing of the environment that a test may change. The hub's libraries, which do, come in only where nothing is changed.
OTHERS = (
    "numpy",
    "scipy.optimize",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "PIL.Image",
    "asyncio",
    "filelock",
    "http.cookiejar",
    "jinja2",
    "psutil",
    "regex",
    "yaml",
)
OURS = (
    "transformers.modeling_utils",
    "transformers.generation",
    "zero_inference.running",
    "zero_inference.engines.stream.engine",
)
LIBRARIES = (*OTHERS, QUICKLY)
PROGRAM = (*OTHERS, *OURS, QUICKLY)
AS_USERS = (*OTHERS, *OURS)
SMALL_BLOCK = 16 << 20
START_S = 300  # of the first copy, which the libraries are imported for


class Forked:
    """A process that was started, with the methods of a Popen that tests need; the one that copies itself waits for it."""

    def __init__(self, told: int, server: subprocess.Popen):
        self.told, self.server = told, server
        self.text = ""
        self.returncode: int | None = None
        self.pid = int(self._line(START_S))

    def wait(self, timeout: float = START_S) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
            os.close(self.told)
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _line(self, timeout: float) -> str:
        """The next line of the pipe, which reads as if it had ended until somebody opens it to write."""
        deadline = time.monotonic() + timeout
        while "\n" not in self.text:
            if not select.select([self.told], [], [], max(0.0, min(1.0, deadline - time.monotonic())))[0]:
                if self.server.poll() is not None:
                    raise RuntimeError(
                        f"the process to be copied ended with {self.server.returncode}; its stderr says why"
                    )
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("a copied process", timeout)
                continue
            more = os.read(self.told, 100).decode()
            if not more:
                raise RuntimeError("the process that waits for a copy has ended")
            self.text += more
        line, _, self.text = self.text.partition("\n")
        return line


class ForkServer:
    """Copies of a process that has imported `modules` in the environment `env`; it is started with the first."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]):
        self.modules = modules
        self.env = {**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process: subprocess.Popen | None = None

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path, session: bool = False
    ) -> Forked:
        """Run the Python file argv[0] with the rest of `argv`; what it prints is appended to the files `out` and `err`.

        With `session` it leads a session of its own, as Popen has it with `start_new_session`.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, ",".join(self.modules)], stdin=subprocess.PIPE, text=True, env=self.env
            )
        with tempfile.TemporaryDirectory() as folder:
            fifo = os.path.join(folder, "told")
            os.mkfifo(fifo)
            told = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            files = dict(cwd=str(cwd), out=str(out), err=str(err), told=fifo)
            request = dict(argv=[str(word) for word in argv], env=dict(env), session=session, **files)
            try:
                print(json.dumps(request), file=self.process.stdin, flush=True)
                return Forked(told, self.process)
            except BaseException:
                os.close(told)
                raise

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()


def measure_with_small_blocks() -> dict[str, int]:
    """Without a GPU a run measures how fast it copies in host memory, with blocks for which this machine's caches are too small: a
    gigabyte where they are large, and to touch that takes longer than a small model's run. From here on this process takes small ones.

    Returns what it took before, by name in `link.caches`.
    """
    caches = importlib.import_module("zero_inference.link.caches")
    before = {name: getattr(caches, name) for name in ("LEAST_BYTES", "MOST_BYTES", "UNKNOWN_BYTES")}
    for name in before:
        setattr(caches, name, SMALL_BLOCK)
    return before


Process = Forked | subprocess.Popen


def rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """What a launcher on this machine alone would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def wait_for_all(processes: list[Process], timeout: float) -> list[int]:
    """Their exit codes; where one does not end within `timeout` seconds, subprocess.TimeoutExpired. No process is left."""
    deadline = time.monotonic() + timeout
    try:
        return [process.wait(timeout=max(0.0, deadline - time.monotonic())) for process in processes]
    except BaseException:
        kill_all(processes)
        raise


def start_all(start: Callable[..., Process], arguments: Iterable) -> list[Process]:
    """`start` of each of the `arguments`; where one cannot be started, those before it are killed."""
    started: list[Process] = []
    try:
        for each in arguments:
            started.append(start(each))
    except BaseException:
        kill_all(started)
        raise
    return started


def kill_all(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=60)


def serve(modules: Sequence[str]) -> None:
    gc.disable()
    for name in modules:
        if name == QUICKLY:
            measure_with_small_blocks()
        else:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not come along"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(json.loads(line))


def _keep(request: dict) -> None:
    told = os.open(request["told"], os.O_WRONLY)
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _become(request)
    os.write(told, f"{pid}\n".encode())
    status = os.waitpid(pid, 0)[1]
    os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict) -> None:
    if request["session"]:
        os.setsid()
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    serve(sys.argv[1].split(","))
