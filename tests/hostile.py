"""Programs that misbehave: none of them may pass in the sandbox. As a script, it prints their outcomes as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from zero_inference.quality.sandbox import Limits, Outcome, run_program

KEY = b"zero-inference-test"
_NUMBERS = {
    "x86_64": {"add_key": 248, "keyctl": 250, "clone": 56, "ptrace": 101, "userfaultfd": 323},
    "aarch64": {"add_key": 217, "keyctl": 219, "clone": 220, "ptrace": 117, "userfaultfd": 282},
}
_C = (
    "import ctypes, os, resource, socket, time\nlibc = ctypes.CDLL(None)\n"
    "def call(number, *args): return libc.syscall(ctypes.c_long(number), *args)\n"
)


def _call(name: str, *arguments: str) -> str:
    """The source of a system call by its number on this machine."""
    return f"call({', '.join([str(_NUMBERS.get(os.uname().machine, {}).get(name, -1)), *arguments])})"


HOSTILE = {
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "exit from a thread's end": "raise SystemExit",
    "dies by its own signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "dies by a signal without a name": "import os; os.kill(os.getpid(), 40)",
    "says that it passed": "import sys; print('passed'); sys.exit(1)",
    "signals its group": "import os; os.kill(0, 9)",
    "signals process 1": "import os, signal\nfor pid in (1, os.getppid(), -1):\n  for number in signal.valid_signals() - {19}:\n"
    "    if pid != -1 or number == 0:\n      try: os.kill(pid, number)\n      except OSError: pass\n"
    "raise RuntimeError('still here')",
    "dumps core": "import os; os.abort()",
    "traces process 1": _C + f"assert {_call('ptrace', '16', '1', '0', '0')} == 0",
    "floods stdout": "while True: print('x' * 4096)",
    "floods stderr": "import os\nwhile True: os.write(2, b'x' * 4096)",
    "writes to every descriptor": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'y' * 32)\n"
    "    except OSError: pass",
    "forges the result": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'0' * 32)\n"
    "    except OSError: pass\nos._exit(0)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "starts a program": "import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 100 &'], check=True)",
    "spawns a program": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "becomes another program": "import os; os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "starts a thread": "import threading; threading.Thread(target=print).start()",
    "eats memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "eats the temporary folder": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20)); n += 1",
    "writes a large file": "open('/tmp/large', 'wb').write(b'x' * (1 << 25))",
    "shares memory": _C + "assert libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600) >= 0",
    "queues messages": _C + "assert libc.msgget(0, 0o1600) >= 0",
    "makes semaphores": _C + "assert libc.semget(0, 1, 0o1600) >= 0",
    "writes a file in memory": "import os; os.write(os.memfd_create('x'), b'x' * 4096)",
    "makes a ring for requests": _C + "assert call(425, 4, ctypes.create_string_buffer(256)) >= 0",
    "handles page faults": _C + f"assert {_call('userfaultfd', '1')} >= 0",
    "reads a key": _C + f"assert {_call('keyctl', '10', '-3', repr(b'user'), repr(KEY), '0')} > 0",
    "adds a key": _C + f"assert {_call('add_key', repr(b'user'), repr(b'x'), repr(b'x'), '1', '-3')} > 0",
    "writes outside": "open('/usr/zero-inference-was-here', 'w').write('x')",
    "writes up and out": "open('/tmp/../../zero-inference-was-here', 'w').write('x')",
    "removes the interpreter": "import os, sys; os.remove(os.__file__)",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "sends a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
    "opens a socket of the virtual machine": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "opens a socket of the kernel": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "reads the environment": "import os; assert os.environ, 'nothing there'",
    "reads about processes": "import os; assert os.listdir('/proc')",
    "reads what is none of its business": "open('{private}').read()",
    "reads it through a link": "import os; os.symlink('{private}', '/tmp/link'); open('/tmp/link').read()",
    "asks for input": "input()",
    "waits for root": "import os; os.setuid(0); os.mkdir('/root')",
    "mounts": "import ctypes; assert ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    "makes namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "is born into namespaces": _C + f"assert {_call('clone', hex(0x10000000 | 17), '0', '0', '0', '0')} >= 0",
    "changes its root": "import os; os.mkdir('/tmp/root'); os.chroot('/tmp/root')",
    "calls the kernel as i386 does": "import ctypes, mmap, os\npage = mmap.mmap(-1, 4096, prot=7)\n"
    "page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # getpid\n"
    "code = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
    "assert code() == os.getpid()",
    "calls the kernel as x32 does": _C + "assert call(0x40000000 + 39) == os.getpid()",
    "recursion without end": "def f(): return f()\nf()",
    "half a character": "x = '\ud800'",
    "not Python": "def f(:",
}


ENDLESS = {
    "stops itself": "import os; os.kill(os.getpid(), 19)",
    "closes every descriptor": "import os, time; os.closerange(0, 1024); time.sleep(1000)",
    "patient fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "sleeps": "import time; time.sleep(1000)",
    "computes for ever": "while True: pass",
    "ignores signals": "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(1000)",
    "computes for ever and ignores signals": "import signal\nfor n in signal.valid_signals() - {9, 19, 32, 33}:\n"
    "    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
}
LIMITS = dict.fromkeys(HOSTILE, Limits(wall_s=30.0)) | dict.fromkeys(ENDLESS, Limits(wall_s=2.0, cpu_s=1))


def sandbox_refused() -> str | None:
    """Return why no program can be isolated on this system, found without our code; None where it has to work."""
    if os.uname().machine not in _NUMBERS:
        return f"no numbers of system calls for {os.uname().machine}"
    try:
        done = subprocess.run(
            ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"], capture_output=True, text=True
        )
    except OSError as error:
        return str(error)
    return done.stderr or None


def run_hostile(port: int, private: Path) -> dict[str, Outcome]:
    """Return the outcome of each. The session has a key that they could find."""
    libc = ctypes.CDLL(None)
    numbers = _NUMBERS[os.uname().machine]
    libc.syscall(ctypes.c_long(numbers["keyctl"]), 1, None)  # a session keyring of this thread and those that it starts
    libc.syscall(ctypes.c_long(numbers["add_key"]), b"user", KEY, b"secret", ctypes.c_size_t(6), -3)
    programs = {
        name: source.replace("{port}", str(port)).replace("{private}", str(private))
        for name, source in (ENDLESS | HOSTILE).items()
    }

    def end_of(name: str) -> Outcome:
        try:
            return run_program(programs[name], LIMITS[name])
        except Exception as error:  # it would end the evaluation, so for the tests it is as bad as passing
            return Outcome(True, repr(error), "")

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(programs, pool.map(end_of, programs)))


if __name__ == "__main__":
    print(
        json.dumps(
            {name: asdict(outcome) for name, outcome in run_hostile(int(sys.argv[1]), Path(sys.argv[2])).items()}
        )
    )
