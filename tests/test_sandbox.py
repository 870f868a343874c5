"""Programs that misbehave fail and harm nothing; where a program cannot be shut in, nothing runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from zero_inference.errors import UsageError
from zero_inference.quality.sandbox import Limits, Outcome, check_isolation, run_program


def isolation_refused() -> str | None:
    try:
        check_isolation()
    except UsageError as error:
        return str(error)
    return None


REFUSED = isolation_refused()
needs_isolation = pytest.mark.skipif(REFUSED is not None, reason=f"no code can be run here: {REFUSED}")
SHORT = Limits(wall_s=3.0, cpu_s=2)
HOSTILE = {
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "exit from a thread's end": "raise SystemExit",
    "dies by its own signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "floods stdout": "while True: print('x' * 4096)",
    "floods stderr": "import os\nwhile True: os.write(2, b'x' * 4096)",
    "writes to every descriptor": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'y' * 32)\n"
                                  "    except OSError: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "patient fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "starts a program": "import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 100 &'], check=True)",
    "sleeps": "import time; time.sleep(1000)",
    "computes for ever": "while True: pass",
    "ignores signals": "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(1000)",
    "eats memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "eats the temporary folder": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20)); n += 1",
    "writes a large file": "open('/tmp/large', 'wb').write(b'x' * (1 << 25))",
    "writes outside": "open('/usr/zero-inference-was-here', 'w').write('x')",
    "writes up and out": "open('/tmp/../../zero-inference-was-here', 'w').write('x')",
    "removes the interpreter": "import os, sys; os.remove(os.__file__)",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "sends a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
    "reads the environment": "import os; assert os.environ, 'nothing there'",
    "reads what is none of its business": "open('{private}').read()",
    "asks for input": "input()",
    "waits for root": "import os; os.setuid(0); os.mkdir('/root')",
    "mounts": "import ctypes; assert ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    "makes namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "recursion without end": "def f(): return f()\nf()",
    "not Python": "def f(:",
}


@needs_isolation
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_fails_and_harms_nothing(name, tmp_path):
    private = tmp_path / "private"
    private.write_text("secret")
    before = processes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        source = HOSTILE[name].replace("{port}", str(server.getsockname()[1])).replace("{private}", str(private))
        start = time.monotonic()
        outcome = run_program(source, SHORT)
        assert time.monotonic() - start < 30
        with pytest.raises(TimeoutError):
            server.accept()
    assert not outcome.passed and outcome.reason
    assert len(outcome.output) <= SHORT.output_bytes
    for folder in ("/", "/usr"):
        assert not Path(folder, "zero-inference-was-here").exists()
    assert os.path.exists(os.__file__)
    assert private.read_text() == "secret"
    nothing_is_left(before)


@needs_isolation
def test_it_cannot_kill_those_above_it():
    before = processes()
    outcome = run_program("import os\nfor pid in (1, os.getppid(), -1):\n    try: os.kill(pid, 9)\n    except OSError: pass\n"
                          "raise RuntimeError('still here')", SHORT)
    assert outcome == Outcome(False, "RuntimeError: still here", outcome.output)
    nothing_is_left(before)


@needs_isolation
def test_what_runs_to_its_end_passes():
    outcome = run_program("import collections, hashlib, math, re, dataclasses, sys\n"
                          "@dataclasses.dataclass\nclass P:\n    x: int\n"
                          "open('/tmp/scratch', 'w').write('x')\nassert P(3).x == 3 and __name__ != '__main__'\n"
                          "print('done')", SHORT)
    assert outcome == Outcome(True, "passed", "done\n")
    assert run_program("import numpy\nassert numpy.arange(4).sum() == 6").passed, "packages of this environment can be imported"


@needs_isolation
def test_processes_end_with_the_one_that_asked(tmp_path):
    """A killed run leaves no program running."""
    asker = subprocess.Popen([sys.executable, "-c", "from zero_inference.quality.sandbox import *; print('up', flush=True); "
                                                    "run_program('import time; time.sleep(1000)', Limits(wall_s=500))"],
                             cwd=ROOT, stdout=subprocess.PIPE)
    asker.stdout.readline()
    deadline = time.monotonic() + 20
    while len(started := psutil.Process(asker.pid).children(recursive=True)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started) == 4  # keeper, founder, warden, program
    asker.kill()
    asker.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("spoil", ["echo 0 > /proc/sys/user/max_user_namespaces", "echo 0 > /proc/sys/user/max_net_namespaces"])
def test_without_isolation_nothing_runs_and_the_reason_is_said(spoil, tmp_path):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("a system that refuses namespaces cannot be made here, because it refuses them")
    code = ("from zero_inference.quality import sandbox; from zero_inference.errors import UsageError\n"
            "try: sandbox.check_isolation()\nexcept UsageError as error: print(error)\nelse: print('it ran')")
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", f"{spoil} && exec {sys.executable} -c \"$0\"", code], cwd=ROOT,
                          capture_output=True, text=True)
    assert "shut in" in done.stdout and "No space left" in done.stdout and "leave humaneval out" in done.stdout, done


def processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


def nothing_is_left(before: set[int]) -> None:
    assert processes() <= before
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if "zero-inference-" in line]
