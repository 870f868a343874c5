"""Our CUDA operators (`torch.ops.zero_inference`): one library of all sources in csrc except csrc/cpu.

It is compiled by `pip install` if a CUDA torch and nvcc are found (setup.py), otherwise at first use on a machine. The sources use torch's
stable ABI of version 2.11. Without the library each operator has a PyTorch fallback with the same result. With torch 2.11 and CUDA an
operator that raises ends the process, so callers check its arguments first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from zero_inference.kernels.build import (
    cached_library,
    check_nvcc,
    compiler_error_line,
    hashed_name,
    new_build,
    print_stderr,
    torch_build_environment,
)

SWITCH = "ZERO_INFERENCE_BUILD_CUDA"
PREBUILT = "prebuilt"  # folder of an installed package
CPU_SOURCES = "cpu"  # folder of csrc for cpu/library.py
DEFAULT_ARCHITECTURES = ("8.0", "9.0", "10.0")  # without a device: A100, H100 and H200, B200
DEFINES = [
    "-DUSE_CUDA",  # for the stable headers' CUDA declarations
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
]

_reason: str | None = "not loaded yet"
_tried = False


def load_extension(progress_message: Callable[[str], None] | None = None) -> bool:
    """Load `torch.ops.zero_inference`, compiled if needed, and return whether it is available; later calls return the first result.

    `progress_message` gets a line before compiling, and a warning if that failed; None prints to stderr.
    """
    global _tried, _reason
    if not _tried:
        _tried = True
        _reason = _load(progress_message or print_stderr)
    return _reason is None


def why_unavailable() -> str | None:
    """Return the reason why `load_extension` returned False, or None."""
    return _reason


def operator_library(owner: str) -> torch.library.Library:
    """Return a new fragment of `torch.ops.zero_inference`.

    It replaces that of an earlier import of module `owner`: notebooks may delete modules from sys.modules to import them again.
    """
    fragments = vars(torch.ops.zero_inference).setdefault("_fragments", {})
    if owner in fragments:
        fragments[owner]._destroy()
    fragments[owner] = torch.library.Library("zero_inference", "FRAGMENT")
    return fragments[owner]


def package_folder() -> Path:
    return Path(__file__).resolve().parents[1]


def source_folder() -> Path:
    """Return csrc, inside an installed package or beside it in a checkout."""
    package = package_folder()
    return package / "csrc" if (package / "csrc").is_dir() else package.parent / "csrc"


def sources() -> list[Path]:
    """Return the files to compile; their names are unique, because torch names objects without folders."""
    return [path for path in _files(source_folder()) if path.suffix in (".cu", ".cpp")]


def _files(folder: Path) -> list[Path]:
    """Return all files of csrc that this library depends on."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and (folder / CPU_SOURCES) not in path.parents)


def _load(say: Callable[[str], None]) -> str | None:
    """Load the library; return the reason if it is unavailable."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no CUDA device"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    try:
        prebuilt = prebuilt_library(package_folder())
        if prebuilt is not None:
            torch.ops.load_library(str(prebuilt))
            return None
        architectures = choose_architectures()
        name = library_name(architectures)

        def build(folder: Path) -> None:
            _build_and_load(name, folder, architectures)

        library, loaded = cached_library(name, build, "the CUDA kernels", "about a minute", say, _check_compiler)
        if not loaded:
            torch.ops.load_library(str(library))
    except Exception as error:  # missing compiler, full disk, wrong version: each costs only speed
        reason = compiler_error_line(error)
        say(f"warning: the CUDA kernels could not be compiled, slower PyTorch code is used: {reason}")
        return reason
    return None


def prebuild(folder: Path) -> str:
    """Compile the library into `folder`, for setup.py, and return its architectures. Raises RuntimeError if that is not possible."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is without CUDA")
    _check_compiler()
    if torch.cuda.is_available():
        architectures = choose_architectures()
    else:
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or _architectures_of_nvcc()
    name = library_name(PREBUILT)
    folder.mkdir(parents=True, exist_ok=True)
    with new_build(folder / "work") as work:
        _build_and_load(name, work, architectures)
        shutil.move(work / f"{name}.so", folder / f"{name}.so")
    (folder / f"{name}.txt").write_text(architectures)
    shutil.rmtree(folder / "work")
    return architectures


def prebuilt_library(package: Path) -> Path | None:
    """Return the prebuilt library of `package`, if it matches these sources, this torch and all devices here."""
    library = package / PREBUILT / f"{library_name(PREBUILT)}.so"
    if not library.exists():
        return None
    entries = re.split(r"[;, ]+", library.with_suffix(".txt").read_text())
    return library if _serve_all(entries, _capabilities()) else None


def _architectures_of_nvcc() -> str:
    from torch.utils import cpp_extension

    nvcc = str(Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    return ";".join(number for number in DEFAULT_ARCHITECTURES if f"sm_{number.replace('.', '')}" in known)


def _check_compiler() -> None:
    """Raise RuntimeError if sources or compilers are missing."""
    if not sources():
        raise RuntimeError(f"no sources in {source_folder()}")
    check_nvcc()


def _build_and_load(name: str, folder: Path, architectures: str) -> None:
    from torch.utils import cpp_extension

    with torch_build_environment(folder.parent, TORCH_CUDA_ARCH_LIST=architectures):
        cpp_extension.load(
            name,
            [str(file) for file in sources()],
            extra_cflags=["-O3", *DEFINES],
            extra_cuda_cflags=["-O3", *DEFINES],
            build_directory=str(folder),
            is_python_module=False,
        )


def choose_architectures() -> str:
    """Return TORCH_CUDA_ARCH_LIST if it is set and serves the devices here, else the list of those devices."""
    devices = _capabilities()
    entries = [entry for entry in re.split(r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")) if entry]
    if entries and _serve_all(entries, devices):
        return ";".join(entries)
    return ";".join(f"{major}.{minor}" for major, minor in devices)


def _capabilities() -> list[tuple[int, int]]:
    return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})


def _serve_all(entries: list[str], devices: list[tuple[int, int]]) -> bool:
    return all(any(_serves(entry, device) for entry in entries) for device in devices)


def _serves(entry: str, device: tuple[int, int]) -> bool:
    """Return whether code for `entry` ("8.0", "8.0+PTX", "9.0a") runs on this capability; False for unknown names."""
    parts = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
    if parts is None:
        return False
    version = int(parts[1]), int(parts[2])
    if parts[3]:
        return version == device
    return version <= device and (parts[4] is not None or version[0] == device[0])


def library_name(architectures: str, folder: Path | None = None) -> str:
    """Return a name with a hash of all that the library depends on; `folder` has the sources."""
    folder = folder or source_folder()
    parts = (torch.__version__, torch.version.cuda, architectures, sys.prefix, *DEFINES)
    return hashed_name("zero_inference", folder, _files(folder), parts)
