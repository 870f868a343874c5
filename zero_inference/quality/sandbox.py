"""Running code that nobody has read: in namespaces of its own, with limits, or not at all. `jail.py` is the process that does it,
`sandbox_view.py` says which files a program sees, `system_calls.py` what it may ask of the kernel.

What a program can do is spend its time, its memory and its output, all limited, and be wrong. Whether its test finished is
told by a secret that comes back only after the last statement: ending early, in whatever way, is a failure. (A program made
to find that secret in its own process could call itself right; it could harm nothing beyond that.)
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.quality.sandbox_probe import PROBE
from zero_inference.quality.sandbox_view import binds, hidden, interpreter, package_folders
from zero_inference.quality.system_calls import ARCHITECTURES, Architecture, filter_program

JAIL = Path(__file__).with_name("jail.py")
SETUP_S = 30.0

_DRIVER = """
import json, os, sys, types
def drive():
    task = json.loads(sys.stdin.buffer.read())
    os.environ.clear()
    os.putenv("OMP_NUM_THREADS", "1")  # numpy must not start threads, as it may not; os.environ stays empty
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.extend(task["paths"])
    module = types.ModuleType("program")
    sys.modules["program"] = module
    exec(compile(task["source"], "program.py", "exec"), module.__dict__)
    sys.stdout.flush()
    os.write(3, task["secret"].encode())
    os._exit(0)
drive()
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        wall_s: from the start of its interpreter to its end; `cpu_s` bounds its processor time, in whole seconds.
        memory_bytes: address space of the program, which is one process without threads.
        file_bytes: the largest file; `disk_bytes` is all of /tmp, which is in memory.
        output_bytes: of stdout and stderr together; more is a failure.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 32 << 20
    output_bytes: int = 64 << 10


@dataclass(frozen=True)
class Outcome:
    """How a program ended: whether it ran to its last statement, else why not, and what it printed (cut at the limit)."""

    passed: bool
    reason: str
    output: str


class IsolationError(RuntimeError):
    """The namespaces could not be made; the program was not run."""


def run_program(source: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program and see whether it reaches its end.

    Args:
        source: the program. What it imports comes from the standard library or this environment's packages.

    Raises:
        IsolationError: this system does not give the isolation; nothing was run.
    """
    architecture, secret = _architecture(), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="zero-inference-") as base:
        task = {
            "asker": os.getpid(),
            "base": os.path.realpath(base),
            "binds": binds(),
            "hidden": hidden(),
            "python": interpreter(),
            "driver": _DRIVER,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "disk_bytes": limits.disk_bytes,
            "filter": filter_program(architecture).hex(),
            "pivot_root": architecture.pivot_root,
            "keyctl": architecture.keyctl,
            "program": {"source": source, "secret": secret, "paths": package_folders()},
        }
        return _watch(json.dumps(task).encode(), secret, limits)


@functools.cache
def check_isolation() -> None:
    """Try once whether a program is really isolated here.

    Raises:
        UsageError: it is not; the reason is in the message.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"code written by a model runs only in Linux namespaces, and this is {sys.platform}; drop humaneval."
        )
    try:
        probe = (
            f"OUTSIDE = {sysconfig.get_path('purelib')!r}\nSECRET_FOLDER = {str(Path(__file__).parent)!r}\n"
            f"KEYCTL = {_architecture().keyctl}\n{PROBE}"
        )
        outcome = run_program(probe, Limits(wall_s=30.0, cpu_s=30))
    except (IsolationError, OSError) as error:
        raise UsageError(
            f"code written by a model runs only where it can be isolated, which this system does not allow ({error}).\n"
            "Needed: Linux 5.12 with user namespaces and seccomp (in a container, allow both, or run elsewhere); "
            "or drop humaneval."
        ) from error
    if not outcome.passed:
        raise UsageError(
            "code written by a model runs only where it can be isolated, and the test program for the sandbox failed "
            f"({outcome.reason}).\nThe sandbox shows {', '.join(binds())}, run by {interpreter()}; "
            "or drop humaneval."
        )


def _architecture() -> Architecture:
    machine = os.uname().machine if sys.maxsize > 1 << 32 else f"32-bit Python on {os.uname().machine}"
    if machine not in ARCHITECTURES:
        raise IsolationError(f"system calls are filtered on {' and '.join(ARCHITECTURES)}, and this is {machine}")
    return ARCHITECTURES[machine]


def _watch(task: bytes, secret: str, limits: Limits) -> Outcome:
    report_out, report_in = os.pipe()
    result_out, result_in = os.pipe()
    command = [interpreter(), "-I", "-S", "-B", str(JAIL), str(report_in), str(result_in)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(report_in, result_in),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        os.close(report_out)
        os.close(result_out)
        raise
    finally:
        os.close(report_in)
        os.close(result_in)
    streams = {"output": process.stdout.fileno(), "report": report_out, "result": result_out}
    seen = dict.fromkeys(streams, b"")
    most = {"output": limits.output_bytes, "report": 4096, "result": len(secret)}
    failure = None
    try:
        with selectors.DefaultSelector() as selector:
            for name, fd in streams.items():
                selector.register(fd, selectors.EVENT_READ, name)
            try:
                process.stdin.write(task)
                process.stdin.close()
            except BrokenPipeError:
                pass
            deadline, started = time.monotonic() + SETUP_S, False
            while selector.get_map() and failure is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    failure = f"still running after {limits.wall_s:g} s" if started else "not started in time"
                for key, _ in ready:
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                    seen[key.data] += data
                    if len(seen[key.data]) > most[key.data]:
                        much = f"over {limits.output_bytes} bytes of output"
                        failure = much if key.data == "output" else "wrote where it must not"
                if not started and seen["report"].startswith(b"started"):
                    deadline, started = time.monotonic() + limits.wall_s, True
    finally:
        _kill(process)
        process.stdout.close()
        os.close(report_out)
        os.close(result_out)
    return _judge(seen, secret, failure, limits)


def _judge(seen: dict[str, bytes], secret: str, failure: str | None, limits: Limits) -> Outcome:
    output = seen["output"][: limits.output_bytes].decode(errors="replace")
    report = seen["report"].decode(errors="replace").splitlines()
    refused = [line.removeprefix("refused ") for line in report if line.startswith("refused ")]
    if refused or not report:
        raise IsolationError(
            refused[0] if refused else failure or output.strip()[-200:] or "the namespaces could not be made"
        )
    status = next((int(line.split()[1]) for line in report if line.startswith("ended ")), None)
    if failure is None and status == 0 and seen["result"] == secret.encode():
        return Outcome(True, "passed", output)
    if failure is None:
        last = output.strip().splitlines()[-1:] if status and status > 0 else []
        ended = f"killed by {_signal_name(-status)}" if status is not None and status < 0 else f"exit status {status}"
        failure = f"{ended}: {last[0][:200]}" if last else f"{ended} before its test had finished"
    return Outcome(False, failure, output)


def _signal_name(number: int) -> str:
    return (
        signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    )  # most real-time ones have no name


def _kill(process: subprocess.Popen) -> None:
    """The keeper's group: founder and warden are in it, and with the warden goes everything in its process namespace."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
