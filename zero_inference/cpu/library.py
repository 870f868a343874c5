"""The C++ library of csrc/cpu: compiled once per machine at first use (a few seconds), loaded with ctypes, which releases the GIL.

Wheels do not contain it, because a binary only runs with system libraries as new as those it was built with. One library serves all
processors: each source file enables its own instruction set, and the best one is chosen at run time. Needs GCC 10 or clang 14; depends
on neither Python nor torch.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zero_inference.kernels.build import cached_library, compiler_error_line, find_compiler, hashed_name, print_stderr
from zero_inference.kernels.extension import CPU_SOURCES, source_folder
from zero_inference.utils.processes import process_group

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # zero_inference::cpu::Dtype, of models
SCALE_DTYPES = {**DTYPES, torch.float8_e8m0fnu: 3, torch.float8_e4m3fn: 4}
INSTRUCTIONS = ("portable", "avx2", "avx512", "amx")  # zero_inference::cpu::Instructions, ascending
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")

_reason: str | None = "not asked for yet"
_library: ctypes.CDLL | None = None
_tried = False


def load_library(progress_message: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """Return the library, compiled if needed; None where that fails. Later calls return the first result.

    `progress_message` gets the line that announces the compilation; None prints to stderr.
    """
    global _tried, _reason, _library
    if not _tried:
        _tried = True
        try:
            _library = open_library(find_or_build(progress_message or print_stderr))
            _reason = None
        except Exception as error:  # no compiler, a full disk, a library of another system: callers can do without
            _reason = compiler_error_line(error)
    return _library


def why_unavailable() -> str | None:
    """Return why `load_library` returned None, in a few words; None where it returned the library."""
    return _reason


def best_instructions() -> str:
    """Return the best of INSTRUCTIONS that this processor and its system support. Raises RuntimeError without the library."""
    return INSTRUCTIONS[require_library().zero_inference_best_instructions()]


def require_library() -> ctypes.CDLL:
    """Return the library; raise RuntimeError where it is not available."""
    library = load_library()
    if library is None:
        raise RuntimeError(f"CPU products need the library of csrc/cpu, which is not available: {_reason}")
    return library


def find_or_build(progress_message: Callable[[str], None], extra_flags: Sequence[str] = ()) -> Path:
    """Return the path of the library, compiled now if it is not in the cache folder; `progress_message` as of `load_library`.

    Raises RuntimeError if there is no compiler or it fails, and OSError for files.
    """
    compiler = find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    folder, command = source_folder() / CPU_SOURCES, [*compiler, *FLAGS, *extra_flags]
    files = sorted(file for file in folder.iterdir() if file.suffix in (".h", ".cpp"))
    name = hashed_name("zero_inference_cpu", folder, files, (platform.machine(), *command, version))

    def build(building: Path) -> None:
        objects = {str(source): str(building / f"{source.stem}.o") for source in sources()}
        _run_all([[*command, "-c", source, "-o", out] for source, out in objects.items()])
        _run_all([[*command, "-shared", *objects.values(), "-o", str(building / f"{name}.so")]])

    return cached_library(name, build, "the CPU kernels", "some seconds", progress_message)[0]


def sources() -> list[Path]:
    return sorted((source_folder() / CPU_SOURCES).glob("*.cpp"))


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one C type for a ctypes.Structure."""
    return [(name, kind) for name in names.split()]


def _run_all(commands: list[list[str]]) -> None:
    """Run `commands` in parallel, in process groups that end with this process; wait for all before raising the first failure."""
    with ExitStack() as groups:
        files: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running = [groups.enter_context(process_group(line, **files)) for line in commands]
        outputs = [(process.stdout.read(), process.wait()) for process in running if process.stdout is not None]
    for text, code in outputs:
        if code:
            raise RuntimeError(f"the C++ compiler failed\n{text}")


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare the types of its functions (csrc/cpu/operators_*.cpp). Raises OSError."""
    library = ctypes.CDLL(str(path))
    pointer, double, int32, int64 = ctypes.c_void_p, ctypes.c_double, ctypes.c_int32, ctypes.c_int64
    count = ctypes.POINTER(int64)
    for name, result, *arguments in (
        ("best_instructions", int32),
        ("product", int32, pointer, int64, int32, pointer, int32, int64, int64, int64, pointer, int64, int32),
        ("measure_products", double, pointer, int64, int64, int32, pointer, int32, int32, pointer, double, count),
        ("measure_reads", double, pointer, int64, int32, int32, pointer, double, count),
        ("read_bytes_sum", ctypes.c_uint64, pointer, int64, int32),
        ("quantize", int32, pointer, int32, int64, int64, int32, int32, pointer, pointer, pointer, int32, int32),
        ("attention", int32, pointer, int32, int64),
        ("cpu_pool_new", pointer, pointer, int64, int64, pointer, int64),
        ("cpu_pool_delete", None, pointer),
        ("cpu_pool_add_block", int64, pointer, pointer, int64, int32, int32),
        ("cpu_pool_add_experts", int64, pointer, pointer, int64, pointer, int32, int32, pointer),
        ("cpu_pool_add_attention", int64, pointer, pointer, int32),
        ("cpu_pool_reserve", int32, pointer, pointer),
        ("cpu_pool_run", int32, pointer, pointer),
        ("cpu_pool_submit", None, pointer, pointer, int64, ctypes.c_uint32),
        ("cpu_pool_statistics", None, pointer, pointer),
    ):
        function = getattr(library, f"zero_inference_{name}")
        function.restype, function.argtypes = result, arguments
    return library
