"""How the library of the cores' kernels is built, once, and what is said where it cannot be."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, start_python
from forks import LIBRARIES

from zero_inference.cpu import library
from zero_inference.kernels import extension


def test_no_function_of_one_instruction_set_can_be_linked_into_another():
    folder = library.find_or_build(print).parent
    for name in ("product_avx2", "product_avx512", "product_amx", "attention_avx2", "attention_avx512"):
        said = subprocess.run(
            ["nm", "-C", "--defined-only", folder / f"{name}.o"], capture_output=True, text=True, check=True
        )
        shared = [line for line in said.stdout.splitlines() if line.split()[1] in "uvVwW"]
        assert not shared, "weak symbols, of which the linker keeps any one"


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
    said: list[str] = []
    path = library.find_or_build(said.append)
    assert path.read_text() == "made\n" and len(said) == 1 and "once" in said[0]
    made = len(calls.read_text().splitlines())
    assert made == 1 + len(library.sources()) + 1, "asked for its version, each source, linked"
    assert library.find_or_build(said.append) == path and len(said) == 1
    path.write_text("cut off")
    assert library.find_or_build(said.append) == path and len(said) == 2 and path.read_text() == "made\n"


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
    program, said = no_cache / "building.py", no_cache / "said"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BUILDING}")
    process = start_python(fork_server(LIBRARIES), [program], no_cache, said, said, dict(os.environ))
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().splitlines()) < len(library.sources()):
        assert time.monotonic() < deadline and process.poll() is None, said.read_text()
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
    monkeypatch.setenv("CXX", "g++ 'half")
    with pytest.raises(RuntimeError, match="CXX=g[+][+] 'half is no command line: No closing quotation"):
        library.find_compiler()
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


def test_the_cuda_library_is_without_these_sources(tmp_path):
    folder = extension.source_folder()
    assert library.sources() and not set(library.sources()) & set(extension.sources())
    assert all(path.is_relative_to(folder / extension.CPU_SOURCES) for path in library.sources())
    (tmp_path / "one.cu").write_text("// kernel\n")
    before = extension.library_name("9.0", tmp_path)
    (tmp_path / extension.CPU_SOURCES).mkdir()
    (tmp_path / extension.CPU_SOURCES / "product.cpp").write_text("// product\n")
    assert extension.library_name("9.0", tmp_path) == before
