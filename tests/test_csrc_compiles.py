"""Every CUDA source compiles without a warning for the oldest and the newest devices; the build of the library fails softly."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from zero_inference.runtime import extension
from zero_inference.runtime.cache_folder import OURS

CUDA_FILES = [path for path in extension.sources() if path.suffix == ".cu"]
OLDEST_STANDARD = "c++17"  # what torch 2.11, the oldest that pyproject.toml allows, compiles extensions with
GENERATIONS = ("80", "100")  # the oldest, A100, and the newest, B200: nothing in the sources asks for one between them
# These are compiled as far as machine code, which takes longest, and for the oldest device, which knows the fewest instructions.
# Together they include every line of assembly.
ASSEMBLED = ("rms_norm.cu", "dequantize.cu")


UNOPTIMIZED = ["-O0", "-Xcicc", "-O0", "-Xptxas", "-O0"]  # warnings come from the front end; code is thrown away


def find_nvcc() -> str | None:
    installed = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"
    return str(installed) if installed.exists() else shutil.which("nvcc")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("source", CUDA_FILES, ids=lambda path: path.name)
def test_compiles_without_a_warning(source, tmp_path):
    known = subprocess.run([find_nvcc(), "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    numbers = [number for number in GENERATIONS if f"sm_{number}" in known]
    codes = ["sm" if source.name in ASSEMBLED and number == numbers[0] else "compute" for number in numbers]
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


@pytest.fixture
def cuda_machine(monkeypatch, tmp_path):
    """As if this were a fresh process on a machine with one device of capability 9.0; gives the lines that were told."""
    monkeypatch.setattr(extension, "_tried", False)
    monkeypatch.setattr(extension, "_reason", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", extension.SWITCH):
        monkeypatch.delenv(name, raising=False)
    return []


def test_without_a_device_or_switched_off_nothing_is_said(cuda_machine, monkeypatch):
    monkeypatch.setenv(extension.SWITCH, "0")
    assert not extension.load_extension(cuda_machine.append) and extension.why_unavailable() == f"{extension.SWITCH}=0"
    monkeypatch.setattr(extension, "_tried", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not extension.load_extension(cuda_machine.append) and extension.why_unavailable() == "no CUDA device"
    assert cuda_machine == []


def test_without_nvcc_one_warning_says_why(cuda_machine, monkeypatch, capsys):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert not extension.load_extension() and not extension.load_extension()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning")
    assert "slower PyTorch code" in lines[0] and "nvcc" in lines[0]


def test_a_failed_build_is_told_in_one_line_and_tried_again_by_the_next_process(cuda_machine, monkeypatch, tmp_path):
    def build(*_, **__):
        raise RuntimeError(
            "Error building extension\n[1/2] nvcc ...\ndequantize.cu(7): error: no such thing\nninja: build stopped"
        )

    monkeypatch.setattr(extension, "_check_compiler", lambda: None)
    monkeypatch.setattr(extension, "_build", build)
    assert not extension.load_extension(cuda_machine.append)
    assert cuda_machine[1].endswith("dequantize.cu(7): error: no such thing") and "\n" not in cuda_machine[1]
    assert not list(tmp_path.rglob("complete"))


def test_a_finished_build_is_loaded_and_made_again_only_where_it_is_damaged(cuda_machine, monkeypatch, tmp_path):
    built, loaded = [], []

    def build(name, folder, architectures):
        built.append((folder / "lock").exists() or (folder / f"{name}.so").exists())
        (folder / f"{name}.so").write_bytes(b"a library")

    monkeypatch.setattr(extension, "_check_compiler", lambda: None)
    monkeypatch.setattr(extension, "_build", build)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    folder = tmp_path / OURS / extension._library_name("9.0")
    folder.mkdir(parents=True)
    (folder / "lock").touch()  # what a killed build leaves, for which torch would wait for ever
    assert extension.load_extension(cuda_machine.append)
    library = folder / f"{folder.name}.so"
    monkeypatch.setattr(extension, "_tried", False)
    assert extension.load_extension(cuda_machine.append)
    assert built == [False] and loaded == [str(library)] and len(cuda_machine) == 1
    library.write_bytes(b"a lib")
    monkeypatch.setattr(extension, "_tried", False)
    assert extension.load_extension(cuda_machine.append)
    assert built == [False, False] and library.read_bytes() == b"a library" and len(loaded) == 1


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
def test_architectures_serve_the_devices_that_are_here(given, chosen, cuda_machine, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert extension._architectures() == chosen


def test_the_name_follows_sources_and_versions(cuda_machine, monkeypatch, tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(extension.source_folder(), copy)
    monkeypatch.setattr(extension, "source_folder", lambda: copy)
    names = [extension._library_name("9.0"), extension._library_name("8.0")]
    (copy / "header.cuh").write_text("// another\n")
    names.append(extension._library_name("9.0"))
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    names.append(extension._library_name("9.0"))
    assert len(set(names)) == 4 and all(re.fullmatch(r"zero_inference_[0-9a-f]{16}", name) for name in names)
