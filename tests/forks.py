"""Fork server: processes start as copies of one that has imported the libraries, which takes most of a small model's run.

Each copy has its own arguments, environment, folder, output and exit code. What Python or a library reads of the environment as it starts
(PYTHONHASHSEED, OMP_NUM_THREADS) is that of the copied process, so all copies order their sets alike. Not for tests of the start itself,
and not with a GPU, because CUDA does not work in a copy of a process that has used it.

All test processes of a session share the servers. Each listens on a socket in a folder of the session, and ends when the session's first
process has ended. Servers are themselves copies of one that has imported `ENVIRONMENT_FREE`.

`write_copier` is for programs that start Python themselves: their Python is a program that asks for a copy.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

QUICKLY = "measure_quickly"  # among names of modules: call that function
# These read nothing of the environment that a test may change; those of `ENVIRONMENT_BOUND`, which import the hub's client, do.
ENVIRONMENT_FREE = (
    *("numpy", "scipy.optimize", "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("PIL.Image", "asyncio", "http.cookiejar", "jinja2", "psutil", "regex", "yaml"),
)
ENVIRONMENT_BOUND = (
    "transformers.modeling_utils",
    "transformers.convert_slow_tokenizer",
    "transformers.generation.utils",
    "transformers.integrations.mistral",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.opt.modeling_opt",
    "rich.live",
    "rich.table",
    "zero_inference.runner",
    "zero_inference.engines.stream.engine",
)
LIBRARIES = (*ENVIRONMENT_FREE, QUICKLY)  # for runs with a changed environment
PROGRAM = (*ENVIRONMENT_FREE, *ENVIRONMENT_BOUND, QUICKLY)
AS_USERS = (*ENVIRONMENT_FREE, *ENVIRONMENT_BOUND)
SMALL_BLOCK = 16 << 20
QUICK = {  # constants that `measure_quickly` sets
    **{
        f"zero_inference.hardware.bench_copies.{name}": SMALL_BLOCK
        for name in ("MIN_UNCACHED_BYTES", "MAX_UNCACHED_BYTES", "DEFAULT_UNCACHED_BYTES")
    },
    "zero_inference.cli.FIRST_RANK_SPEAKS_S": 1.0,
    "zero_inference.utils.timing.LINK_S": {"cpu": 0.01},
    "zero_inference.utils.timing.PRODUCT_S": {"cpu": 0.01},
    "zero_inference.utils.timing.PRODUCT_SIZE": {"cpu": 256},
}
START_S = 300  # limit of the first copy's start, for which the libraries are imported
# Environment variable FOLDER:PID with the folder of sockets and the session's first process, for all processes of the session.
SESSION = "ZERO_INFERENCE_TESTS_COPIES"
ENDED = "the process to be copied ended; {}.err says why"


class Forked:
    """A started copy with the methods of Popen that tests need; `connection` is to its parent (`_keep`), which sends pid and exit code."""

    def __init__(self, connection: socket.socket, server: str):
        self.connection, self.server = connection, server
        self.text = ""
        self.returncode: int | None = None
        self.pid = int(self._line(START_S))

    def wait(self, timeout: float = START_S) -> int:
        """Return the exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _line(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while "\n" not in self.text:
            if not select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("a copied process", timeout)
            try:
                more = self.connection.recv(100).decode()
            except ConnectionResetError:
                more = ""
            if not more:
                raise RuntimeError(ENDED.format(self.server))
            self.text += more
        line, _, self.text = self.text.partition("\n")
        return line


class ForkServer:
    """Starts copies of a process that has imported `modules` in the environment `env`; that process starts with the first copy."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]):
        self.modules = modules
        self.env = {**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path, session: bool = False
    ) -> Forked:
        """Run the Python file argv[0] with the rest of `argv`; what it prints is appended to the files `out` and `err`.

        With `session` it leads a session of its own, as Popen has it with `start_new_session`.
        """
        return start_copy(self.path(), argv, env, cwd, out, err, session)

    def path(self) -> str:
        """Return the path of the socket on which the process listens, and start it if no test process has yet."""
        base = None if tuple(self.modules) == ENVIRONMENT_FREE else ForkServer(ENVIRONMENT_FREE, self.env).path()
        folder, anchor = session()
        # variables of pytest differ between test processes, which share a server all the same
        env = {} if base is None else {name: value for name, value in self.env.items() if not name.startswith("PYTEST")}
        key = hashlib.sha256(json.dumps([list(self.modules), sorted(env.items())]).encode()).hexdigest()[:12]
        path = os.path.join(folder, key)
        command, said = [__file__, path, anchor, ",".join(self.modules)], Path(f"{path}.err")
        with open(os.path.join(folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path
            if base is None:
                with said.open("ab") as err:
                    files = dict(stdin=subprocess.DEVNULL, stdout=err, stderr=err)
                    process: Process = subprocess.Popen([sys.executable, *command], env=self.env, **files)
            else:
                process = start_copy(base, command, self.env, Path(folder), said, said)
            RUNNING.append(process)
            while not os.path.exists(path):
                if process.poll() is not None:
                    raise RuntimeError(ENDED.format(path))
                time.sleep(0.01)
        return path


Process = Forked | subprocess.Popen
RUNNING: list[Process] = []  # until the session ends: none of them is waited for


def session() -> tuple[str, str]:
    """Return the folder of the session's sockets, and the id of its first process."""
    if SESSION not in os.environ:
        os.environ[SESSION] = f"{tempfile.mkdtemp(prefix='copies-')}:{os.getpid()}"
        atexit.register(shutil.rmtree, os.environ[SESSION].rpartition(":")[0], ignore_errors=True)
    folder, _, anchor = os.environ[SESSION].rpartition(":")
    return folder, anchor


def write_copier(server: ForkServer, path: Path) -> None:
    """Write a program that takes arguments as Python does and runs them in a copy, which ends with it. It is the copy's sys.executable, so
    what the copy starts are copies too."""
    words = [sys.executable, "-ISB", str(Path(__file__).with_name("copied.py")), server.path(), str(path)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)


def start_copy(
    path: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path, session: bool = False
) -> Forked:
    """Do `ForkServer.start` with the process that listens at `path`."""
    request = dict(argv=[str(word) for word in argv], env=dict(env), session=session, cwd=str(cwd), bound=False)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        with open(os.devnull) as nothing, open(out, "ab") as stdout, open(err, "ab") as stderr:
            socket.send_fds(connection, [b"\n"], [file.fileno() for file in (nothing, stdout, stderr)])
        connection.sendall(json.dumps(request).encode() + b"\n")
        return Forked(connection, path)
    except BaseException:
        connection.close()
        raise


def measure_quickly() -> dict[str, Any]:
    """Let this process measure host memory and products with small blocks and matrices: usual ones take longer than a small model's run.
    Return the values before, by "module.name".
    """
    before = {}
    for place, value in QUICK.items():
        module, _, name = place.rpartition(".")
        where = importlib.import_module(module)
        before[place] = getattr(where, name)
        setattr(where, name, value)
    return before


def rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the variables that a launcher of one machine sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def wait_for_all(processes: list[Process], timeout: float) -> list[int]:
    """Return the exit codes. Raises subprocess.TimeoutExpired if not all end within `timeout` seconds; an error kills all."""
    deadline = time.monotonic() + timeout
    try:
        return [process.wait(timeout=max(0.0, deadline - time.monotonic())) for process in processes]
    except BaseException:
        kill_all(processes)
        raise


def start_all(start: Callable[..., Process], arguments: Iterable) -> list[Process]:
    """Call `start` with each of the `arguments` and return the processes; if one cannot be started, those before it are killed."""
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


def serve(path: str, anchor: str, modules: Sequence[str]) -> None:
    """Import `modules`, and copy this process for each connection to `path`, until the process `anchor` has ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(100)
    os.rename(f"{path}.new", path)  # whoever finds it can connect, and waits
    gc.disable()
    for name in modules:
        if name == QUICKLY:
            measure_quickly()
        else:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "fork copies one thread alone"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes of `_keep` are reaped at once
    while os.path.exists(f"/proc/{anchor}"):
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def _keep(connection: socket.socket) -> NoReturn:
    """Start the copy that a request describes, and send its id and exit code. A bound copy is killed when the connection closes."""
    files = socket.recv_fds(connection, 1, 3)[1]
    with connection.makefile("rb") as asked:
        request = json.loads(asked.readline())
    woken, wake = os.pipe()  # readable once the copy has ended
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (connection.detach(), woken, wake):
            os.close(number)
        _become(request, files)
    for number in files:
        os.close(number)
    with contextlib.suppress(OSError):
        connection.sendall(f"{pid}\n".encode())
    if request["bound"] and woken not in select.select([woken, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict, files: Sequence[int]) -> NoReturn:
    """Run the request's program in this process, with `files` as stdin, stdout and stderr."""
    if request["session"]:
        os.setsid()
    for number, (file, name) in enumerate(zip(files, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(file, number)
        os.close(file)
        before = getattr(sys, name)  # replaced: it was made for another kind of file, such as one that can seek
        options = dict(encoding=before.encoding, errors=before.errors, closefd=False)
        stream = open(number, "r" if name == "stdin" else "w", 1 if name == "stderr" else -1, **options)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.executable = request.get("executable", sys.executable)
    run_as_python(request["argv"])
    sys.exit()


def run_as_python(words: list[str]) -> None:
    """Do what `python` does with these arguments: -c, -m or a file, after -I and -u."""
    while words[0] in ("-I", "-u"):
        sys.stdout.reconfigure(line_buffering=words[0] == "-u" or sys.stdout.line_buffering)
        words = words[1:]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    serve(sys.argv[1], sys.argv[2], sys.argv[3].split(","))
