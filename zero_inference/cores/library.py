"""The library of csrc/cpu: compiled by `pip install` (setup.py) or at first use on a machine, and loaded with ctypes, which lets other
Python threads run during its calls.

One library serves all x86-64 processors and, in plain C++, others: each file that needs an instruction set turns it on for itself, and
what the processor has is asked when it runs. It takes GCC 10 or later, and depends neither on Python nor on torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zero_inference.cores.matrix import INSTRUCTIONS, Matrix
from zero_inference.runtime.cache_folder import extensions_folder
from zero_inference.runtime.extension import (
    FOR_CORES,
    PREBUILT,
    file_digest,
    in_one_line,
    package_folder,
    source_folder,
)
from zero_inference.runtime.locks import held_lock

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")

_reason: str | None = "not asked for yet"
_library: ctypes.CDLL | None = None
_tried = False


def load_library(progress_message: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The library, compiled if this is the first time here; None where that cannot be done. Later calls only answer.

    Args:
        progress_message: gets the line that says what takes some seconds; stderr if None.
    """
    global _tried, _reason, _library
    if not _tried:
        _tried = True
        try:
            _library = declared(
                find_or_build(progress_message or (lambda line: print(line, file=sys.stderr, flush=True)))
            )
            _reason = None
        except Exception as error:  # no compiler, a full disk, a library of another system: callers have other ways
            _reason = in_one_line(error)
    return _library


def why_unavailable() -> str | None:
    """Why the last `load_library` gave None, in a few words; None where it gave the library."""
    return _reason


def best_instructions() -> str:
    """The best of INSTRUCTIONS that this processor and its system have.

    Raises RuntimeError where there is no library.
    """
    return INSTRUCTIONS[needed_library().zero_inference_best_instructions()]


def needed_library() -> ctypes.CDLL:
    """`load_library`, which raises RuntimeError where there is none."""
    library = load_library()
    if library is None:
        raise RuntimeError(f"products on the cores need the library of csrc/cpu, which is not there: {_reason}")
    return library


def find_or_build(say: Callable[[str], None], extra_flags: Sequence[str] = ()) -> Path:
    """The library that came with the package, or that was or now is compiled on this machine.

    Args:
        say: gets the line that says what takes some seconds.
        extra_flags: for the compiler; tests have some.

    Raises RuntimeError where no compiler is there or it fails, and OSError for files.
    """
    prebuilt = prebuilt_library(package_folder())
    if prebuilt is not None and not extra_flags:
        return prebuilt
    compiler = find_compiler()
    name = library_name(compiler_version(compiler), *extra_flags)
    folder = extensions_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    library, mark = folder / f"{name}.so", folder / "complete"
    with held_lock(folder / "zero-inference.lock"):
        if not (mark.exists() and library.exists() and mark.read_bytes() == file_digest(library)):
            mark.unlink(missing_ok=True)
            say("compiling the kernels for the host's cores (once on this machine, some seconds) ...")
            build(compiler, folder, library, extra_flags)
            mark.write_bytes(file_digest(library))
    return library


def prebuild(folder: Path) -> str:
    """Compile the library into `folder`, for setup.py, and return the machine's type that it was compiled for.

    Raises RuntimeError where no compiler is there or it fails.
    """
    work = folder / "work-cpu"
    work.mkdir(parents=True, exist_ok=True)
    build(find_compiler(), work, folder / f"{library_name(PREBUILT)}.so")
    shutil.rmtree(work)
    return platform.machine()


def prebuilt_library(package: Path) -> Path | None:
    """The library that came with the `package`, if it is of these sources."""
    library = package / PREBUILT / f"{library_name(PREBUILT)}.so"
    return library if library.exists() else None


def sources() -> list[Path]:
    """All files to compile."""
    return sorted((source_folder() / FOR_CORES).glob("*.cpp"))


def library_name(*parts: str) -> str:
    """Named after the sources, the machine's type, the flags and `parts`, so that a change makes a new one beside the old."""
    digest = hashlib.sha256()
    for file in sorted((source_folder() / FOR_CORES).iterdir()):
        if file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for part in (platform.machine(), *FLAGS, *parts):
        digest.update(f"{part}\0".encode())
    return f"zero_inference_cpu_{digest.hexdigest()[:16]}"


def find_compiler() -> str:
    """CXX, else g++ or c++ of PATH: a file turns its instructions on by a pragma that GCC knows, from version 10 on.

    Raises RuntimeError where none is there.
    """
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise RuntimeError(
            f"no C++ compiler: {f'CXX={wanted} was' if wanted else 'g++ and c++ were'} not found on PATH"
        )
    return found


def compiler_version(compiler: str) -> str:
    """All that `compiler` says of itself."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def build(compiler: str, folder: Path, library: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile all sources side by side to objects in `folder`, and link them to `library`.

    Raises RuntimeError with the compiler's line that names the error.
    """
    if not sources():
        raise RuntimeError(f"no sources in {source_folder() / FOR_CORES}")
    flags = [*FLAGS, *extra_flags]
    objects = [folder / f"{source.stem}.o" for source in sources()]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", str(out)] for source, out in zip(sources(), objects, strict=True)
    ]
    _run_all(commands)
    linked = folder / f"{library.name}.new"
    _run_all([[compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)]])
    linked.replace(library)


def _run_all(commands: list[list[str]]) -> None:
    """Run `commands` side by side; all are waited for before the first failure is raised."""
    running = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for line in commands]
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"the C++ compiler failed\n{text}")


def declared(path: Path) -> ctypes.CDLL:
    """The library at `path`, with the types of its functions (csrc/cpu/operators_*.cpp).

    Raises OSError where it cannot be loaded.
    """
    library = ctypes.CDLL(str(path))
    matrix, pointer, double = ctypes.POINTER(Matrix), ctypes.c_void_p, ctypes.c_double
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    count = ctypes.POINTER(int64)
    for name, result, *arguments in (
        ("best_instructions", int32),
        ("product", int32, matrix, int64, int32, pointer, int32, int64, int64, int64, pointer, int64, int32),
        ("measure_products", double, matrix, int64, int64, int32, pointer, int32, int32, pointer, double, count),
        ("measure_reads", double, pointer, int64, int32, int32, pointer, double, count),
        ("read_bytes_sum", ctypes.c_uint64, pointer, int64, int32),
        ("cores_new", pointer, pointer, int64, int64, pointer),
        ("cores_delete", None, pointer),
        ("cores_add_block", int64, pointer, pointer, int64, int32, int32),
        ("cores_add_experts", int64, pointer, pointer, int64, int32, int32, int32, pointer),
        ("cores_reserve", int32, pointer, pointer),
        ("cores_run", int32, pointer, pointer),
        ("cores_submit", None, pointer, pointer, ctypes.c_uint32),
        ("cores_statistics", None, pointer, pointer),
    ):
        function = getattr(library, f"zero_inference_{name}")
        function.restype, function.argtypes = result, arguments
    return library
