"""Run programs that a model wrote, each in a bubblewrap sandbox: no network, a read-only system without home folders, limits.

A program passes if it reaches its end: only then does the driver, which runs it, send back a secret. Exiting early is a failure. A program
that finds the secret in its own memory could pass without being right, and gains nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from zero_inference.errors import RunError, UsageError
from zero_inference.utils.progress import Task

START_S = 30.0  # for the sandbox and the interpreter
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin")
DEVICES = ("null", "zero", "random", "urandom")
NOBODY = "65534"  # user and group inside
# By RLIMIT_* name. A core limit of 1 byte, unlike 0, keeps the kernel from starting the core dump handler.
FIXED_LIMITS = {"NPROC": 0, "CORE": 1, "NOFILE": 64, "MEMLOCK": 0, "MSGQUEUE": 0}

# System calls that reach what namespaces and resource limits do not cover: AUDIT_ARCH_*, then the numbers. One process without threads:
# fork, vfork, clone, clone3 (RLIMIT_NPROC does not hold for root); further namespaces: unshare, setns; memory outside RLIMIT_AS: shmget,
# msgget, semget, memfd_create, io_uring_setup, userfaultfd; the session's keys: add_key, request_key, keyctl; and ptrace, bpf,
# perf_event_open and socket (vsock has no namespace).
REFUSED_CALLS = {
    "x86_64": (0xC000003E, (57, 58, 56, 435, 272, 308, 29, 68, 64, 319, 425, 323, 248, 249, 250, 101, 321, 298, 41)),
    "aarch64": (0xC00000B7, (220, 435, 97, 268, 194, 186, 190, 279, 425, 282, 217, 218, 219, 117, 280, 241, 198)),
}

_DRIVER = """
import ctypes, json, os, resource, signal, sys, types
def drive():
    task = json.loads(sys.stdin.buffer.read())
    if task["die_with_parent"]:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.environ.clear()
    os.putenv("OMP_NUM_THREADS", "1")  # numpy must not start threads, as it may not; os.environ stays empty
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.extend(task["paths"])
    module = types.ModuleType("program")
    sys.modules["program"] = module
    for name, value in task["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    os.write(task["result_fd"], b"+")
    exec(compile(task["source"], "program.py", "exec"), module.__dict__)
    sys.stdout.flush()
    os.write(task["result_fd"], task["secret"].encode())
    os._exit(0)
drive()
"""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    wall_s: float = 10.0  # seconds from its first statement to its end
    cpu_s: int = 10  # whole seconds of CPU time
    memory_bytes: int = 1 << 30  # address space
    file_bytes: int = 16 << 20  # largest file, stdout and stderr included
    disk_bytes: int = 32 << 20  # size of /tmp, which is in memory
    output_bytes: int = 64 << 10  # of stdout and stderr together; more is a failure


@dataclass(frozen=True)
class Outcome:
    """`passed` if the program ran to its last statement, else the `reason`; `output` is cut at the limit."""

    passed: bool
    reason: str
    output: str


class IsolationError(RuntimeError):
    """The program was not run, because the sandbox could not be made."""


def check_isolation(allow_unsafe_code: bool = False) -> None:
    """Raise UsageError, with the remedy, where programs cannot be isolated and `allow_unsafe_code` is not set."""
    problem = isolation_problem()
    if problem and not allow_unsafe_code:
        remedy = (
            "Allow user namespaces (Docker: --security-opt seccomp=unconfined; "
            "Ubuntu 24.04: sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
        )
        if shutil.which("bwrap") is None:
            remedy = "Install bubblewrap (apt install bubblewrap)"
        raise UsageError(
            f"--quality humaneval: programs cannot be isolated here ({problem}).\n"
            f"{remedy}; or drop humaneval, or run them with resource limits alone: --allow-unsafe-code."
        )


@functools.cache
def isolation_problem() -> str | None:
    """Return why this machine cannot isolate programs, found by running an empty one; None if it can."""
    if sys.platform != "linux" or os.uname().machine not in REFUSED_CALLS:
        return f"supported: Linux on {' and '.join(REFUSED_CALLS)}; found: {sys.platform} on {os.uname().machine}"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        outcome = _run("", Limits(wall_s=30.0, cpu_s=30), isolated=True)
    except (IsolationError, OSError) as error:
        return str(error)
    return None if outcome.passed else outcome.reason


def run_program(source: str, limits: Limits = Limits(), allow_unsafe_code: bool = False) -> Outcome:
    """Run a Python program to its end or limits. It may import the standard library and this environment's packages.

    Args:
        allow_unsafe_code: where it cannot be isolated, run it with `limits` alone.

    Raises:
        IsolationError: it cannot be isolated; nothing was run.
    """
    problem = isolation_problem()
    if problem and not allow_unsafe_code:
        raise IsolationError(problem)
    return _run(source, limits, isolated=problem is None)


def run_programs(
    programs: list[str], limits: Limits, workers: int, task: Task | None = None, allow_unsafe_code: bool = False
) -> list[Outcome]:
    """Return the outcome of each program, without its output: thousands of outputs would fill memory.

    Raises:
        RunError: a program could not be isolated.
    """

    def run(program: str) -> Outcome:
        return replace(run_program(program, limits, allow_unsafe_code), output="")

    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for outcome in pool.map(run, programs):
                outcomes.append(outcome)
                if task:
                    task.at(f"humaneval {len(outcomes)} of {len(programs)} programs run", len(outcomes))
        except IsolationError as error:
            raise RunError(
                f"humaneval: a program could not be isolated ({error}), so no more programs are run."
            ) from error
    return outcomes


def _run(source: str, limits: Limits, isolated: bool) -> Outcome:
    secret = secrets.token_hex(16)
    result_out, result_in = os.pipe()  # "+" when the program starts, the secret when it has ended
    os.set_blocking(result_out, False)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, result_out)
        closing = stack.enter_context(contextlib.ExitStack())  # of our copy of what the program writes to
        closing.callback(os.close, result_in)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-inference-"))
        task, output, call_filter = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        settings = {
            "source": source,
            "secret": secret,
            "result_fd": result_in,
            "paths": _package_folders(),
            "limits": {"CPU": limits.cpu_s, "AS": limits.memory_bytes, "FSIZE": limits.file_bytes, **FIXED_LIMITS},
            "die_with_parent": not isolated,
        }
        task.write(json.dumps(settings).encode())
        task.seek(0)
        command = [_interpreter(), "-I", "-S", "-B", "-c", _DRIVER]
        if isolated:
            call_filter.write(_call_filter())
            call_filter.seek(0)
            command = [*_bwrap_command(limits, call_filter.fileno()), *command]
        process = subprocess.Popen(
            command,
            stdin=task,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(result_in, call_filter.fileno()),
            env={},
            cwd=folder,
            start_new_session=True,
        )
        closing.close()
        status = None
        try:
            started = select.select([result_out], [], [], START_S)[0] and os.read(result_out, 1) == b"+"
            if started:
                status = process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # bwrap, and with it everything inside
            process.wait()
        output.seek(0)
        data = output.read(limits.output_bytes + 1)
        text = data[: limits.output_bytes].decode(errors="replace")
        if not started:
            raise IsolationError(text.strip()[-200:] or f"the interpreter did not start within {START_S:g} s")
        finished = b""
        with contextlib.suppress(BlockingIOError):
            finished = os.read(result_out, 4096)
    if status is None:
        return Outcome(False, f"still running after {limits.wall_s:g} s", text)
    if len(data) > limits.output_bytes:
        return Outcome(False, f"over {limits.output_bytes} bytes of output", text)
    if status == 0 and finished == secret.encode():
        return Outcome(True, "passed", text)
    number = status - 128 if status > 128 else -status  # bwrap adds 128 to the signal that ended the program
    if 0 < number <= signal.SIGRTMAX:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Outcome(False, f"killed by {name}", text)
    last = text.strip().splitlines()[-1:] if status else []
    reason = f": {last[0][:200]}" if last else " before its test had finished"
    return Outcome(False, f"exit status {status}{reason}", text)


def _bwrap_command(limits: Limits, filter_fd: int) -> list[str]:
    """Return the bwrap command line, to be followed by the interpreter's. Mounts are made in this order."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--seccomp", str(filter_fd)]
    for path in SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    has_size = _has_tmpfs_size()
    command += [*(["--size", str(limits.disk_bytes)] if has_size else []), "--tmpfs", "/tmp"]
    hidden, python_paths = _homes_and_python()
    for home in hidden:
        command += ["--tmpfs", home]
    for path in python_paths:
        command += ["--ro-bind", path, path]
    for path in [*hidden, "/", *([] if has_size else ["/tmp"])]:
        command += ["--remount-ro", path]
    return [*command, "--chdir", "/tmp", "--"]


@functools.cache
def _has_tmpfs_size() -> bool:
    """Return True for bubblewrap 0.7 or newer; an older one gives a /tmp that is read-only, because its size has no bound."""
    return "--size" in subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout


def _homes_and_python() -> tuple[list[str], list[str]]:
    """Return the home folders, to be hidden, and the paths of the interpreter, its libraries and packages that SYSTEM does not show.

    A home that holds the system's folders or /tmp is not hidden; a home or a folder around one is not shown.
    """
    names = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a user of a container without an account
        names.add(pwd.getpwuid(os.getuid()).pw_dir)
    homes = {Path(name).resolve() for name in names}
    hidden = [
        home
        for home in sorted(homes)
        if home.is_dir() and not any(Path(each).is_relative_to(home) for each in (*SYSTEM, "/tmp"))
    ]
    prefix = os.path.dirname(os.path.dirname(_interpreter()))
    installed = {"installed_base": prefix, "platbase": prefix}
    libraries = [sysconfig.get_path(name, vars=installed) for name in ("stdlib", "platstdlib")]
    paths = {_interpreter(), *libraries, *map(os.path.dirname, libraries), *_package_folders()}
    shown = list(SYSTEM)
    for path in sorted(filter(os.path.exists, paths | {os.path.realpath(path) for path in paths})):
        around = [home for home in hidden if Path(path).is_relative_to(home)]
        outer = [each for each in shown if Path(path).is_relative_to(each)]
        is_shown = any(not any(home.is_relative_to(each) for home in around) for each in outer)
        if not is_shown and not any(home.is_relative_to(path) for home in homes):
            shown.append(path)
    return list(map(str, hidden)), shown[len(SYSTEM) :]


def _interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _package_folders() -> list[str]:
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def _call_filter() -> bytes:
    """Return the seccomp filter that answers EPERM to REFUSED_CALLS: classic BPF over `struct seccomp_data` (linux/seccomp.h)."""
    architecture, numbers = REFUSED_CALLS[os.uname().machine]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ, BPF_JGE, BPF_RET
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050001  # SECCOMP_RET_KILL_PROCESS, _ALLOW, _ERRNO | EPERM
    tests = [(at_least, 0x40000000), *((equal, number) for number in numbers)]  # x32 repeats all calls from 1 << 30
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    # a test that holds jumps to the last step
    steps += [(code, len(tests) - at, 0, value) for at, (code, value) in enumerate(tests)]
    steps += [(end, 0, 0, allow), (end, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
