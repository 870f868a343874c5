"""Programs that misbehave fail and harm nothing; where a program cannot be isolated, nothing runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from hostile import ENDLESS, HOSTILE, LIMITS, run_hostile, sandbox_refused

from zero_inference.quality.sandbox import REFUSED_CALLS, Limits, Outcome, check_isolation, run_program

REFUSED = sandbox_refused()
needs_isolation = pytest.mark.skipif(REFUSED is not None, reason=f"no code can be run here: {REFUSED}")
SHORT = Limits(wall_s=10.0, cpu_s=5)
AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
ASK = (
    "import sys\nfrom zero_inference.errors import UsageError\nfrom zero_inference.quality import sandbox\n"
    "try: sandbox.check_isolation()\nexcept UsageError as error: print(error)\n"
    "else: print('passed', sandbox.run_program(sys.argv[1] if sys.argv[1:] else ''))"
)


def run_text(command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def ask(source: str = "", before=(), **options) -> subprocess.CompletedProcess:
    return run_text([*before, sys.executable, "-c", ASK, source], **options)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Outcomes of hostile programs started by this user, and by one who is not root."""
    private = tmp_path_factory.mktemp("outside") / "private"
    private.write_text("secret")
    before = processes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        port = server.getsockname()[1]
        other = subprocess.Popen(
            [*AS_USER, sys.executable, str(ROOT / "tests" / "hostile.py"), str(port), str(private)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        outcomes = {"this user": run_hostile(port, private)}
        outcomes["not root"] = {
            name: Outcome(**fields) for name, fields in json.loads(other.communicate(timeout=200)[0]).items()
        }
        with pytest.raises(TimeoutError):
            server.accept()
    assert private.read_text() == "secret"
    for folder in ("/", "/usr"):
        assert not Path(folder, "zero-inference-was-here").exists()
    assert os.path.exists(os.__file__)
    nothing_is_left(before)
    return outcomes


@needs_isolation
@pytest.mark.parametrize("name", ENDLESS | HOSTILE)
@pytest.mark.parametrize("user", ["this user", "not root"])
def test_a_hostile_program_fails_and_harms_nothing(user, name, ended):
    outcome = ended[user][name]
    assert not outcome.passed and outcome.reason not in ("", "passed")
    assert len(outcome.output) <= LIMITS[name].output_bytes
    if name in ENDLESS:
        assert re.match("still running after 2 s|killed by SIGKILL|killed by SIGXCPU", outcome.reason), outcome
    else:
        assert "still running" not in outcome.reason and "could not be" not in outcome.reason
    if name == "signals process 1":
        assert outcome.reason == "exit status 1: RuntimeError: still here"


@needs_isolation
def test_what_runs_to_its_end_passes():
    check_isolation()
    outcome = run_program(
        "import collections, hashlib, math, re, dataclasses, sys\n"
        "@dataclasses.dataclass\nclass P:\n    x: int\n"
        "open('/tmp/scratch', 'w').write('x')\nassert P(3).x == 3 and __name__ != '__main__'\n"
        "print('done')",
        SHORT,
    )
    assert outcome == Outcome(True, "passed", "done\n")
    outcome = run_program(
        "import asyncio, numpy, shutil, sqlite3, subprocess, tempfile\n"
        "assert numpy.linalg.inv(numpy.eye(200)).sum() == 200\n"
        "base = sqlite3.connect('/tmp/base')\nbase.execute('create table t (a)')\nbase.commit()\n"
        "shutil.copy2('/tmp/base', tempfile.mkdtemp())\nasyncio.run(asyncio.sleep(0.01))",
        SHORT,
    )
    assert outcome.passed, outcome


@needs_isolation
def test_processes_end_with_the_one_that_asked(tmp_path):
    """A killed run leaves no program running."""
    code = (
        "from zero_inference.quality.sandbox import *; print('up', flush=True); "
        "run_program('import time; time.sleep(1000)', Limits(wall_s=500))"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    asker.stdout.readline()
    deadline = time.monotonic() + 20
    while len(started := psutil.Process(asker.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started) == 3  # bwrap, process 1 of the sandbox, program
    asker.kill()
    asker.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_without_isolation_nothing_runs_unless_unsafe_code_is_allowed(tmp_path):
    """A bwrap that fails, as it does where user namespaces are forbidden, and none at all."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    for path, words in ((tmp_path, "No permissions.*Allow user namespaces"), ("/nowhere", "apt install bubblewrap")):
        done = ask(env={**os.environ, "PATH": str(path)})
        assert re.search(words, done.stdout, re.DOTALL) and "--allow-unsafe-code" in done.stdout, done
        assert "passed" not in done.stdout


@needs_isolation
@pytest.mark.parametrize("limit", ["max_user_namespaces", "max_net_namespaces"])
def test_where_the_kernel_allows_no_namespaces_nothing_runs_and_the_reason_is_said(limit):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("no user namespace can be made here to set its limits")
    shell = f'echo 0 > /proc/sys/user/{limit} && exec {sys.executable} -c "$0"'
    done = run_text(["unshare", "-Ur", "sh", "-c", shell, ASK])
    assert "bwrap: Creating new namespace failed" in done.stdout and "drop humaneval" in done.stdout, done
    assert "passed" not in done.stdout


def test_a_processor_whose_system_calls_are_not_known_is_refused():
    if shutil.which("linux32") is None or subprocess.run(["linux32", "true"], capture_output=True).returncode:
        pytest.skip("the name of the processor cannot be changed here")
    done = ask(before=["linux32"])
    assert "supported: Linux on x86_64 and aarch64; found: linux on " in done.stdout, done
    assert "passed" not in done.stdout


def test_resource_limits_alone(tmp_path):
    programs = {
        "open('file', 'w').write('x'); print('done')": "passed",
        "x = bytearray(1 << 29)": "exit status 1: MemoryError",
        "import time; time.sleep(1000)": "still running after 2 s",
        "while True: pass": "killed by SIG(XCPU|KILL)|still running after 2 s",
        "open('large', 'wb').write(b'x' * (1 << 25))": "exit status 1: OSError",
        "import os; assert os.environ, 'nothing there'": ".*nothing there",
        "while True: print('x' * 4096)": "over 65536 bytes of output|exit status 1",
    }
    code = (
        "import json, sys\nfrom zero_inference.quality.sandbox import Limits, run_program\n"
        "limits = Limits(wall_s=2.0, cpu_s=1, memory_bytes=1 << 28)\n"
        "print(json.dumps([run_program(source, limits, allow_unsafe_code=True).reason for source in json.loads(sys.argv[1])]))"
    )
    env = {**os.environ, "PATH": "/nowhere"}
    done = run_text([sys.executable, "-c", code, json.dumps(list(programs))], env=env)
    for reason, expected in zip(json.loads(done.stdout), programs.values()):
        assert re.match(expected, reason), (reason, expected)


@needs_isolation
@pytest.mark.parametrize("way, link", [([], ""), (AS_USER, "/link")], ids=["this user", "not root, by a link"])
def test_an_interpreter_installed_into_the_home_folder_does_not_show_it(way, link):
    """Under /tmp, too, where the program has a folder of its own, and with a umask that hides new folders from others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        os.chmod(home, 0o755)
        for folder in ("bin", "lib", ".ssh"):
            Path(home, folder).mkdir()
        Path(home, ".ssh", "key").write_text("secret")
        library = Path(sysconfig.get_path("stdlib"))
        shutil.copy(os.path.realpath(sys._base_executable), f"{home}/bin/{library.name}")
        Path(home, "link").symlink_to(home)
        python = f"{home}{link}/bin/{library.name}"
        Path(home, "lib", library.name).symlink_to(library)
        started = run_text([python, "-c", "import sys; print(sys.base_prefix)"], env={})
        if started.stdout.strip() != home + link:
            pytest.skip(f"a copy of this interpreter does not run: {started}")
        source = f"import os; print(os.__file__); print(open('{home}/.ssh/key').read())"
        env = {"HOME": home, "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        done = run_text([*way, python, "-B", "-c", ASK, source], umask=0o077, env=env)
        assert "passed Outcome(passed=False" in done.stdout and "No such file" in done.stdout, done
        assert f"{home}/lib/{library.name}/os.py" in done.stdout and "secret" not in done.stdout


@needs_isolation
@pytest.mark.parametrize("way", [[], AS_USER], ids=["this user", "not root"])
def test_a_home_folder_among_those_of_the_system_is_not_shown(way):
    """It could be read, as all of /usr can; /lib is another name of /usr/lib."""
    if not os.access("/usr/lib", os.W_OK):
        pytest.skip("no home can be made in /usr/lib")
    with tempfile.TemporaryDirectory(dir="/usr/lib") as home:
        os.chmod(home, 0o755)
        Path(home, "key").write_text("secret")
        source = (
            f"import os\nfor home in {(home, home.removeprefix('/usr'))!r}:\n"
            "    if os.path.exists(home):\n        assert os.listdir(home) == []\n"
            "        try: open(home + '/x', 'w')\n        except OSError: print('shut')"
        )
        done = ask(source, before=way, env={"HOME": home, "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]})
        assert "passed Outcome(passed=True" in done.stdout and "shut" in done.stdout, done


@pytest.mark.parametrize(
    "machine, header", [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_refused_system_calls_have_the_numbers_of_the_kernels_headers(machine, header):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    names = {int(number): name for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", path.read_text())}
    refused = "clone clone3 unshare setns shmget msgget semget memfd_create io_uring_setup userfaultfd".split()
    refused += "add_key request_key keyctl ptrace bpf perf_event_open socket".split()
    refused += ["fork", "vfork"] if machine == "x86_64" else []
    assert {names[number] for number in REFUSED_CALLS[machine][1]} == set(refused)


def processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


def nothing_is_left(before: set[int]) -> None:
    deadline = time.monotonic() + 10
    while not processes() <= before and time.monotonic() < deadline:  # process 1 of a sandbox dies after bwrap
        time.sleep(0.05)
    assert processes() <= before
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if "zero-inference-" in line]
