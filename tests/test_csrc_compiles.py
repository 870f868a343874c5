"""CUDA sources compile without a warning for the oldest and the newest devices; the build of the library fails softly."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from conftest import ROOT, start_python
from forks import LIBRARIES, wait_for_all
from torch.utils import cpp_extension

from zero_inference.cpu import library
from zero_inference.kernels import extension
from zero_inference.utils.files import EXTENSIONS

CPU_FOLDER = extension.source_folder() / extension.CPU_SOURCES
CUDA_FILES = [path for path in extension.sources() if path.suffix == ".cu"]
OLDEST_STANDARD = "c++17"  # what torch 2.11, the oldest that pyproject.toml allows, compiles extensions with
OLDEST, NEWEST = "80", "100"  # A100 and B200
UNOPTIMIZED = ["-O0", "-Xcicc", "-O0", "-Xptxas", "-O0"]  # warnings come from the front end; code is thrown away


def included(source: Path) -> set[Path]:
    """With the source itself."""
    found, left = set(), [source.resolve()]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [(path.parent / name).resolve() for name in re.findall(r'#include "(.+)"', path.read_text())]
    return found


def find_nvcc() -> str | None:
    installed = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"
    return str(installed) if installed.exists() else shutil.which("nvcc")


BY_HEADERS = sorted(CUDA_FILES, key=lambda source: -len(included(source)))


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(
    "source",
    [BY_HEADERS[0], *(pytest.param(source, marks=pytest.mark.slow) for source in BY_HEADERS[1:])],
    ids=lambda path: path.name,
)
def test_compiles_without_a_warning(source, tmp_path):
    """As far as machine code where there is assembly, and for the newest device where the source asks for the generation."""
    text = "".join(path.read_text() for path in included(source))
    code = "sm" if re.search(r"\basm\b", text) else "compute"
    targets = [f"-gencode=arch=compute_{OLDEST},code={code}_{OLDEST}"]
    if "__CUDA_ARCH__" in text:
        targets.append(f"-gencode=arch=compute_{NEWEST},code=compute_{NEWEST}")
    headers = [argument for folder in cpp_extension.include_paths() for argument in ("-isystem", folder)]
    flags = [*cpp_extension.COMMON_NVCC_FLAGS, *extension.DEFINES, "-Werror", "all-warnings"]
    flags += ["-Xcompiler", "-Wall,-Wextra,-Werror,-fPIC"]
    command = [find_nvcc(), "-c", f"-std={OLDEST_STANDARD}", *UNOPTIMIZED, *flags, *headers, *targets]
    done = subprocess.run([*command, str(source), "-o", str(tmp_path / "object.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_headers_for_the_cpu_compile_alone(tmp_path):
    sources = []
    for header in sorted(CPU_FOLDER.glob("*.h")):
        sources.append(tmp_path / f"{header.stem}.cpp")
        sources[-1].write_text(f'#include "{header}"\n')
    command = [*library.find_compiler(), *library.FLAGS, "-fsyntax-only", *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert sources and done.returncode == 0, done.stdout + done.stderr


# A process on a machine with one device of capability 9.0 and the CUDA toolkit in argv[1]: loads the library as often as argv[2]
# says, and prints the answers, why not, and what it said.
LOADING = """
import json, sys
sys.path.insert(0, {root!r})
import torch
from torch.utils import cpp_extension
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda index=0: (9, 0)
torch.version.cuda = "13.0"
cpp_extension.CUDA_HOME = sys.argv[1] or None
from zero_inference.kernels import extension
said = []
answers = [extension.load_extension(said.append) for _ in range(int(sys.argv[2]))]
shared = [library for library in torch.ops.loaded_libraries if "zero_inference" in library]
print(json.dumps([answers, extension.why_unavailable(), said, shared]), flush=True)
"""
# Writes down what it is asked to compile, and fails where it is to fail.
NVCC = """#!/bin/sh
echo "$*" >>"$NVCC_CALLS"
[ -z "$NVCC_STOPS" ] || { echo $$ >>"$NVCC_STOPS"; sleep 100 & wait; }
[ -z "$NVCC_ERROR" ] || { echo "dequantize.cu(7): error: $NVCC_ERROR"; exit 2; }
while [ "$1" != -o ]; do shift; done
: >"$2"
"""
# A linker whose library has nothing in it; else the compiler that it stands for.
CXX = """#!/bin/sh
case " $* " in *" -shared "*) ;; *) exec c++ "$@" ;; esac
while [ "$1" != -o ]; do shift; done
exec c++ -shared -x c++ /dev/null -o "$2"
"""


class Loaded(NamedTuple):
    answers: list[bool]
    reason: str | None
    said: list[str]
    libraries: list[str]
    error: str


@pytest.fixture
def load(fork_server, tmp_path):
    """load(toolkit=True, times=1, **environment): a fresh process that loads the library."""
    programs = tmp_path / "cuda" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("nvcc", NVCC), ("c++", CXX)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    names = ("TORCH_EXTENSIONS_DIR", "PYTORCH_NVCC", extension.SWITCH)
    kept = {name: value for name, value in os.environ.items() if name not in names}

    def start(toolkit=True, times=1, stop: Callable | None = None, **environment: str) -> Loaded | None:
        program, out, err = tmp_path / "loading.py", tmp_path / "out", tmp_path / "err"
        program.write_text(LOADING.format(root=str(ROOT)))
        out.write_text(""), err.write_text("")
        env = kept | {
            "XDG_CACHE_HOME": str(tmp_path),
            "NVCC_CALLS": str(tmp_path / "calls"),
            "CXX": str(programs / "c++"),
            **environment,
        }
        command = [program, programs.parent if toolkit else "", times]
        process = start_python(fork_server(LIBRARIES), command, tmp_path, out, err, env)
        if stop is not None:
            return stop(process)
        assert wait_for_all([process], timeout=120) == [0], err.read_text()
        # ninja's own lines come before
        return Loaded(*json.loads(out.read_text().splitlines()[-1]), err.read_text())

    return start


def test_switched_off_nothing_is_said(load):
    off = load(times=2, **{extension.SWITCH: "0"})
    assert (off.answers, off.reason, off.said) == ([False, False], f"{extension.SWITCH}=0", [])


def test_without_nvcc_one_warning_says_why(load):
    done = load(toolkit=False, times=3)
    assert done.answers == [False] * 3 and len(done.said) == 1 and done.said[0].startswith("warning")
    assert "slower PyTorch code" in done.said[0] and "nvcc" in done.said[0] and "nvcc" in done.reason
    assert "warning" not in done.error


def test_a_failed_build_is_told_in_one_line_and_tried_again_by_the_next_process(load, tmp_path):
    done = load(times=2, NVCC_ERROR="no such thing")
    assert done.answers == [False, False] and len(done.said) == 2, "begun, and failed"
    assert done.said[1].endswith("dequantize.cu(7): error: no such thing") and "\n" not in done.said[1]
    assert done.reason == "dequantize.cu(7): error: no such thing"
    assert not list(tmp_path.rglob("complete"))
    assert load().answers == [True]


def test_a_finished_build_is_loaded_and_made_again_only_where_it_is_damaged(load, tmp_path):
    calls = tmp_path / "calls"
    first = load()
    (library,) = (tmp_path / EXTENSIONS).rglob("*.so")
    compiled = calls.read_text().splitlines()
    assert first.answers == [True] and first.reason is None and len(first.said) == 1
    assert len(compiled) == len(CUDA_FILES) and all("compute_90" in line for line in compiled)
    again = load()
    assert again.answers == [True] and again.said == [] and again.libraries == [str(library)]
    assert len(calls.read_text().splitlines()) == len(compiled)
    whole = library.read_bytes()
    library.write_bytes(whole[:100])
    (library.parent / "lock").touch()  # what a killed build leaves, for which torch would wait for ever
    third = load()
    assert third.answers == [True] and len(third.said) == 1 and library.stat().st_size == len(whole)


def test_what_torch_has_started_to_compile_ends_with_the_process(load, tmp_path):
    pids = tmp_path / "pids"

    def stop(process) -> None:
        deadline = time.monotonic() + 60
        while not (pids.exists() and pids.read_text().endswith("\n")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        compilers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        alive = psutil.wait_procs(compilers, timeout=20)[1]
        # one that has ended stays as a zombie until the first process of this machine reaps it
        assert compilers and not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]

    load(stop=stop, NVCC_STOPS=str(pids))
    assert not list((tmp_path / EXTENSIONS).glob("zero_inference_*/")) and load().answers == [True]
    assert not list((tmp_path / EXTENSIONS).glob(".building-*"))


def test_the_name_follows_sources_and_versions(monkeypatch, tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(extension.source_folder(), copy)
    assert extension.library_name("9.0", copy) == extension.library_name("9.0"), "not where the sources lie"
    names = [extension.library_name("9.0", copy), extension.library_name("8.0", copy)]
    (copy / "header.cuh").write_text("// another\n")
    names.append(extension.library_name("9.0", copy))
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    names.append(extension.library_name("9.0", copy))
    assert len(set(names)) == 4 and all(re.fullmatch(r"zero_inference_[0-9a-f]{16}", name) for name in names)
