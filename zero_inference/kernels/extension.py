"""Our CUDA operators (`torch.ops.zero_inference`): one library of all sources in csrc except csrc/cpu, compiled at first use on a machine.

The sources use torch's stable ABI of version 2.11. Without the library each operator has a PyTorch fallback with the same result. With
torch 2.11 and CUDA an operator that raises ends the process, so callers check its arguments first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from zero_inference.kernels.build import (
    cached_library,
    check_nvcc,
    compiler_error_line,
    hashed_name,
    print_stderr,
    torch_build_environment,
)

SWITCH = "ZERO_INFERENCE_BUILD_CUDA"  # 0: do not use the library
CPU_SOURCES = "cpu"  # folder of csrc for cpu/library.py
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


def source_folder() -> Path:
    """Return csrc, inside an installed package or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "csrc" if (package / "csrc").is_dir() else package.parent / "csrc"


def sources() -> list[Path]:
    """Return the files to compile; their names are unique, because torch names objects without folders."""
    return [path for path in _files(source_folder()) if path.suffix in (".cu", ".cpp")]


def _files(folder: Path) -> list[Path]:
    """Return all files of csrc (`folder`) that this library depends on."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and (folder / CPU_SOURCES) not in path.parents)


def library_name(architectures: str, folder: Path | None = None) -> str:
    """Return a name with a hash of all that the library depends on; `folder` has the sources."""
    folder = folder or source_folder()
    parts = (torch.__version__, torch.version.cuda, architectures, sys.prefix, *DEFINES)
    return hashed_name("zero_inference", folder, _files(folder), parts)


def _load(say: Callable[[str], None]) -> str | None:
    """Load the library; return the reason if it is unavailable."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no CUDA device"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    try:
        capabilities = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
        architectures = ";".join(f"{major}.{minor}" for major, minor in capabilities)
        name = library_name(architectures)

        def build_and_load(folder: Path) -> None:
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

        library, compiled = cached_library(name, build_and_load, "the CUDA kernels", "about a minute", say, check_nvcc)
        if not compiled:  # else `build_and_load` has loaded it
            torch.ops.load_library(str(library))
    except Exception as error:  # missing compiler, full disk, wrong version: each costs only speed
        reason = compiler_error_line(error)
        say(f"warning: the CUDA kernels could not be compiled, slower PyTorch code is used: {reason}")
        return reason
    return None
