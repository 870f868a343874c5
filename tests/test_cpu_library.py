"""The library of the CPU kernels is built once; where it cannot be, a message says why."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, start_python
from forks import LIBRARIES

from zero_inference.cpu import library


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def a_compiler(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# Writes down that it was called, and makes empty files.
COMPILER = """echo called >>{calls}; while [ $# -gt 1 ] && [ "$1" != -o ]; do shift; done; [ "$1" != -o ] || echo made >"$2" """


def test_a_build_is_made_once_and_again_where_it_is_damaged(no_cache, monkeypatch):
    calls = no_cache / "calls"
    monkeypatch.setenv("CXX", a_compiler(no_cache, COMPILER.format(calls=calls)))
    messages: list[str] = []
    path = library.find_or_build(messages.append)
    assert path.read_text() == "made\n" and len(messages) == 1 and "once" in messages[0]
    made = len(calls.read_text().splitlines())
    assert made == 1 + len(library.sources()) + 1, "asked for its version, each source, linked"
    assert library.find_or_build(messages.append) == path and len(messages) == 1
    path.write_text("cut off")
    assert library.find_or_build(messages.append) == path and len(messages) == 2 and path.read_text() == "made\n"


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
@pytest.mark.parametrize("name", ["portable", "avx2", "avx512", "amx"])
def test_no_function_of_an_instruction_set_is_linked_in_place_of_anothers(name):
    objects = Path(library.require_library()._name).parent
    symbols = subprocess.run(["nm", "-C", objects / f"{name}.o"], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"^.* [WVu] .*$", symbols, re.MULTILINE), "the linker keeps one of all files"


BUILDING = "from pathlib import Path; from zero_inference.cpu import library; library.find_or_build(print)"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_compilers_end_with_the_process_that_compiles_and_the_next_one_begins_anew(
    number, no_cache, monkeypatch, fork_server
):
    pids = no_cache / "pids"
    slow = (
        f"""case "$*" in *--version*) exit;; esac; echo $$ >>{pids}; sleep 100 & wait; {COMPILER.format(calls=pids)}"""
    )
    monkeypatch.setenv("CXX", a_compiler(no_cache, slow))
    program, messages = no_cache / "building.py", no_cache / "messages"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BUILDING}")
    process = start_python(fork_server(LIBRARIES), [program], no_cache, messages, messages, dict(os.environ))
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().splitlines()) < len(library.sources()):
        assert time.monotonic() < deadline and process.poll() is None, messages.read_text()
        time.sleep(0.05)
    compilers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    compilers += [child for one in compilers for child in one.children()]
    os.kill(process.pid, number)
    assert process.wait(60) == -number
    assert len(compilers) == 2 * len(library.sources()) and not psutil.wait_procs(compilers, timeout=20)[1]
    assert len(list(no_cache.glob(".building-*"))) == 1
    monkeypatch.setenv(
        "CXX", a_compiler(no_cache, f'case "$*" in *--version*) exit;; esac; {COMPILER.format(calls=pids)}')
    )
    assert library.find_or_build(print).read_text() == "made\n" and not list(no_cache.glob(".building-*"))


def test_a_compiler_with_arguments(no_cache, monkeypatch):
    source = no_cache / "a source.cpp"
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    monkeypatch.setattr(library, "sources", lambda: [source])
    for answer in (42, 43):
        monkeypatch.setenv("CXX", f"env OF='two words' g++ -DANSWER={answer}")
        assert ctypes.CDLL(str(library.find_or_build(print))).answer() == answer
    monkeypatch.setenv("CXX", " ")
    assert Path(library.find_compiler()[0]).name in ("g++", "c++")


def test_why_there_is_no_library_is_said(no_cache, monkeypatch):
    for name, value in (("_tried", False), ("_library", None), ("_reason", None)):
        monkeypatch.setattr(library, name, value)
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert library.load_library(print) is None
    words = "no C++ compiler: no-such-compiler of CXX=no-such-compiler -O3 was not found on PATH; unset CXX"
    assert library.why_unavailable().startswith(words)
    with pytest.raises(RuntimeError, match="not found on PATH"):
        library.require_library()
    for path, why in ((no_cache, "apt install g++"), (no_cache / "file", "remove what is in its way")):
        monkeypatch.setattr(library, "_tried", False)
        (no_cache / "file").touch()
        with monkeypatch.context() as changed:
            changed.setenv("TORCH_EXTENSIONS_DIR", str(path / "cache"))
            changed.setenv("PATH", "" if path == no_cache else os.environ["PATH"])
            changed.delenv("CXX")
            assert library.load_library(print) is None and why in library.why_unavailable()
    monkeypatch.setattr(library, "_tried", False)
    failing = 'case "$*" in *portable*) echo "product.cpp:3: error: no such thing"; exit 1;; esac'
    monkeypatch.setenv("CXX", a_compiler(no_cache, failing))
    assert library.load_library(print) is None
    assert library.why_unavailable() == "product.cpp:3: error: no such thing"
