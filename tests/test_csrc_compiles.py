"""Every CUDA source compiles without a warning for the oldest and the newest devices; the build of the library fails softly."""

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
from dataclasses import dataclass
from pathlib import Path

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
# These are compiled as far as machine code, which takes longest, and for the oldest device, which knows the fewest instructions.
# Together they include every line of assembly. The others are compiled as far as the device's own compiler reads them.
ASSEMBLED = ("rms_norm.cu", "product.cu", "decode_attention.cu", "hand_off.cu")
# Compiled for the newest device, too: a front end that is not asked for the generation says the same of all.
ASKING = ("product.cu", "decode_attention.cu")

UNOPTIMIZED = ["-O0", "-Xcicc", "-O0", "-Xptxas", "-O0"]  # warnings come from the front end; code is thrown away


def find_nvcc() -> str | None:
    installed = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"
    return str(installed) if installed.exists() else shutil.which("nvcc")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("source", CUDA_FILES, ids=lambda path: path.name)
def test_compiles_without_a_warning(source, tmp_path):
    known = subprocess.run([find_nvcc(), "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    numbers = [OLDEST, NEWEST] if source.name in ASKING else [OLDEST]
    numbers = [number for number in numbers if f"sm_{number}" in known]
    codes = ["sm" if source.name in ASSEMBLED and number == OLDEST else "compute" for number in numbers]
    targets = [f"-gencode=arch=compute_{number},code={code}_{number}" for number, code in zip(numbers, codes)]
    assert targets
    headers = [argument for folder in cpp_extension.include_paths() for argument in ("-isystem", folder)]
    done = subprocess.run(
        [
            find_nvcc(),
            "-c",
            f"-std={OLDEST_STANDARD}",
            *UNOPTIMIZED,
            *cpp_extension.COMMON_NVCC_FLAGS,
            "--threads",
            "2",
            *extension.DEFINES,
            *headers,
            *targets,
            "-Werror",
            "all-warnings",
            "-Xcompiler",
            "-Wall,-Wextra,-Werror,-fPIC",
            str(source),
            "-o",
            str(tmp_path / "object.o"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def included(source: Path) -> set[Path]:
    """With the source itself."""
    found, left = set(), [source.resolve()]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [(path.parent / name).resolve() for name in re.findall(r'#include "(.+)"', path.read_text())]
    return found


@pytest.mark.parametrize("header", sorted(CPU_FOLDER.glob("*.h")), ids=lambda path: path.name)
def test_a_header_for_the_cpu_compiles_alone(header, tmp_path):
    if platform.machine() != "x86_64" and any("immintrin.h" in path.read_text() for path in included(header)):
        pytest.skip("instructions of x86-64")
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n')
    command = [*library.find_compiler(), *library.FLAGS, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sources_for_the_cpu_include_before_they_open_a_namespace():
    for path in CPU_FOLDER.iterdir():
        before, _, code = path.read_text().partition("\nnamespace ")
        assert "#include" not in code, path.name


def test_sources_that_ask_for_the_generation_are_compiled_for_each_and_those_with_assembly_as_far_as_machine_code():
    every = {path.resolve() for path in extension.source_folder().rglob("*.cu*")}
    asking = {path.name for path in every if "__CUDA_ARCH__" in path.read_text()}
    assert asking <= set(ASKING)
    assembly = {path for path in every if re.search(r"\basm\b", path.read_text())}
    assembled = {path for source in CUDA_FILES if source.name in ASSEMBLED for path in included(source)}
    assert assembly and assembly <= assembled


def test_launch_sizes_stand_in_one_table():
    folder = extension.source_folder()
    numbers = (
        r"constexpr int k\w*(Threads|Blocks?|Waves|Lanes|Unroll|Parts?|Stages|Budget)\w* = [\d(]",
        r"(Row|Ring)Shape<T, \d",
        r"__launch_bounds__\([^)]*\b\d+\b",
        r"<<<[^>]*\b[1-9]\d+\b",
        r"processors\(\)\}? \* \d",
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.rglob("*.cu*"))
        if path.name != "launch_sizes.cuh"
        for line in path.read_text().splitlines()
        if any(re.search(number, line) for number in numbers)
    ]
    assert not found, found
    table = (folder / "launch_sizes.cuh").read_text()
    assert all(re.search(number, table) for number in numbers[:2])


def test_sources_have_names_of_their_own():
    names = [path.stem for path in extension.sources()]
    assert names and len(names) == len(set(names)), names


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
{more}
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


@dataclass(frozen=True)
class Loaded:
    answers: list[bool]
    reason: str | None
    said: list[str]
    libraries: list[str]
    error: str


@pytest.fixture
def load(fork_server, tmp_path):
    """load(more="", toolkit=True, times=1, **environment): a fresh process that loads the library, `more` being run before it does."""
    programs = tmp_path / "cuda" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("nvcc", NVCC), ("c++", CXX)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    names = ("TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "PYTORCH_NVCC", extension.SWITCH)
    kept = {name: value for name, value in os.environ.items() if name not in names}

    def start(
        more: str = "", toolkit: bool = True, times: int = 1, stop: Callable | None = None, **environment: str
    ) -> Loaded | None:
        program, out, err = tmp_path / "loading.py", tmp_path / "out", tmp_path / "err"
        program.write_text(LOADING.format(root=str(ROOT), more=more))
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


def test_without_a_device_or_switched_off_nothing_is_said(load):
    off = load(times=2, **{extension.SWITCH: "0"})
    assert (off.answers, off.reason, off.said) == ([False, False], f"{extension.SWITCH}=0", [])
    alone = load("torch.cuda.is_available = lambda: False")
    assert (alone.answers, alone.reason, alone.said) == ([False], "no CUDA device", [])


def test_without_nvcc_one_warning_says_why(load):
    done = load(toolkit=False, times=3)
    assert done.answers == [False] * 3 and len(done.said) == 1 and done.said[0].startswith("warning")
    assert "slower PyTorch code" in done.said[0] and "nvcc" in done.said[0] and "nvcc" in done.reason
    assert "warning" not in done.error
    unheard = load(
        "sys.argv[2] = 0; from zero_inference.kernels.extension import load_extension; load_extension()", False
    )
    assert done.said[0] in unheard.error.splitlines(), "whoever does not ask for the line has it on stderr"


def test_a_failed_build_is_told_in_one_line_and_tried_again_by_the_next_process(load, tmp_path):
    for _ in range(2):
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_torch_has_started_to_compile_ends_with_the_process(number, load, tmp_path):
    pids = tmp_path / "pids"

    def stop(process) -> None:
        deadline = time.monotonic() + 60
        while not (pids.exists() and pids.read_text().endswith("\n")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        compilers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        os.kill(process.pid, number)
        process.wait(60)
        alive = psutil.wait_procs(compilers, timeout=20)[1]
        # one that has ended stays as a zombie until the first process of this machine reaps it
        assert compilers and not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]

    load(stop=stop, NVCC_STOPS=str(pids))
    assert not list((tmp_path / EXTENSIONS).glob("zero_inference_*/")) and load().answers == [True]
    assert not list((tmp_path / EXTENSIONS).glob(".building-*"))


def a_device_of_capability_9(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))


@pytest.mark.parametrize(
    "given, chosen",
    [
        ("", "9.0"),
        ("9.0a", "9.0a"),
        ("8.0 9.0", "8.0;9.0"),
        ("7.5;8.0+PTX", "7.5;8.0+PTX"),
        ("8.0;8.6", "9.0"),
        ("10.0a", "9.0"),
        ("Hopper", "9.0"),
        ("native", "9.0"),
    ],
)
def test_architectures_serve_the_devices_that_are_here(given, chosen, monkeypatch):
    a_device_of_capability_9(monkeypatch)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert extension.choose_architectures() == chosen


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


def test_the_library_that_came_with_the_package_is_used_where_it_fits(monkeypatch, tmp_path):
    a_device_of_capability_9(monkeypatch)
    assert extension.prebuilt_library(tmp_path) is None
    library = tmp_path / extension.PREBUILT / f"{extension.library_name(extension.PREBUILT)}.so"
    library.parent.mkdir()
    library.touch()
    for architectures, fits in (("8.0;9.0", True), ("8.0", False), ("8.0+PTX", True)):
        library.with_suffix(".txt").write_text(architectures)
        assert extension.prebuilt_library(tmp_path) == (library if fits else None)
    library.with_suffix(".txt").write_text("9.0")
    monkeypatch.setattr(torch.version, "cuda", "of another build")
    assert extension.prebuilt_library(tmp_path) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="without CUDA"):
        extension.prebuild(tmp_path)
