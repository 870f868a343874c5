"""DeepSpeed's compiled modules: built once per machine, by one process at a time, never blocked by a killed build.

torch marks a running build with a file, which a killed process leaves, and waits for it forever. Here each module has a lock that ends
with its holder, who may delete such a file because no other program uses the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from zero_inference.errors import UsageError
from zero_inference.kernels.build import (
    BUILDING,
    check_ninja,
    check_nvcc,
    find_compiler,
    new_build,
    time_compiling,
    torch_build_environment,
)
from zero_inference.utils.files import EXTENSIONS, hold_lock, make_folder, user_cache
from zero_inference.utils.progress import QUIET_S, current_progress
from zero_inference.utils.ranks import Ranks

FLAGS = ("-g0",)  # DeepSpeed compiles with -g, which is slower
# The compiler spends nearly all its time on torch's headers, once per source: all modules took 231 s of CPU time apart, 94 s with these
# folders' sources joined, and 59 s with few headers (cpu/deepspeed_modules.txt).
JOINED = {"pin_memory": "pin_memory", "async_io": "py_lib"}  # module: folder whose sources are compiled as one file
# These need only tensors and pybind11; torch/extension.h also includes all of torch.nn, torch.optim and torch.data.
LIGHT = ("deepspeed_shm_comm", "pin_memory", "async_io")
LIGHT_HEADER = """#pragma once
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
"""
SOURCES = "-sources"  # suffix of the folder of a module's joined sources
SHARED = Path("/dev/shm")
_loaded: set[str] = set()
AIO_HEADERS = "libaio's headers (Debian and Ubuntu: apt install libaio-dev; RHEL: dnf install libaio-devel)"


def set_build_folder(device_type: str) -> None:
    """Set TORCH_EXTENSIONS_DIR, unless it is set, to a folder for this environment (builds contain its paths), our flags and the device
    type (async_io differs for CUDA)."""
    inputs = [sys.prefix, *FLAGS, *JOINED, *JOINED.values(), *LIGHT, LIGHT_HEADER, SOURCES]
    digest = hashlib.sha256(" ".join(inputs).encode()).hexdigest()[:8]
    name = f"torch-{torch.__version__}-deepspeed-{version('deepspeed')}-{digest}{'-cuda' * (device_type == 'cuda')}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(user_cache() / EXTENSIONS / name))


@contextmanager
def stderr_with_descriptor() -> Iterator[None]:
    """Use the process's stderr where `sys.stderr` has no file descriptor, as in some notebooks: DeepSpeed's probe for libaio needs one."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError):
        with redirect_stderr(sys.__stderr__):
            yield
    else:
        yield


@stderr_with_descriptor()
def check_aio(use_gds: bool) -> None:
    """Raise UsageError if libaio, or GPUDirect Storage with `use_gds`, is missing."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        try:
            find_compiler()  # DeepSpeed needs it to find libaio
        except RuntimeError as error:
            raise UsageError(f"--disk-offload: DeepSpeed compiles the module that reads NVMe: {error}.") from error
        raise UsageError(
            f"--disk-offload reads NVMe through libaio, which cannot be compiled against here: install {AIO_HEADERS}."
        )
    if use_gds and not GDSBuilder().is_compatible(verbose=False):
        raise UsageError("--use-gds: this machine has no GPUDirect Storage (libcufile); drop --use-gds.")


@stderr_with_descriptor()
def build_modules(disk: bool, use_gds: bool, dequantize_on_gpu: bool, say: Callable[[str], None] | None) -> None:
    """Load the modules that a run needs; compile those that are not on this machine.

    Args:
        disk: reads by libaio, or by GPUDirect Storage with `use_gds`.
        dequantize_on_gpu: the float16 dequantization kernel.
        say: gets a line before something is compiled; None for silence.
    """
    folder = make_folder(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    for builder in _builders(disk, use_gds, dequantize_on_gpu):
        if builder.name in _loaded or not builder.is_compatible(verbose=False):
            continue
        compiles = not _is_compiled(builder)
        if say is not None and compiles:
            say(f"compiling DeepSpeed's {builder.name} module (once per machine, may take minutes) ...")
        slow = current_progress().slow(f"compiling or loading DeepSpeed's {builder.name} module", QUIET_S)
        with slow, redirect_stdout(sys.stderr), time_compiling() if compiles else nullcontext():
            with hold_lock(folder / f"{builder.name}.lock"):
                _load(builder, folder / builder.name)
        _loaded.add(builder.name)


def check_compilers(disk: bool, use_gds: bool, dequantize_on_gpu: bool) -> None:
    """Raise UsageError if a module of `build_modules` has to be compiled but its compiler is missing."""
    make_folder(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    for builder in _builders(disk, use_gds, dequantize_on_gpu):
        try:
            if not _is_compiled(builder):
                find_compiler()
                check_ninja()
                if builder.name == "quantizer":
                    check_nvcc()
        except RuntimeError as error:
            raise UsageError(f"DeepSpeed's {builder.name} module has to be compiled here: {error}.") from error


def _builders(disk: bool, use_gds: bool, dequantize_on_gpu: bool) -> list[Any]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder, QuantizerBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    builders = []
    if get_accelerator().device_name() == "cpu":
        builders.append(get_accelerator().create_op_builder("ShareMemCommBuilder"))
    if disk:  # both would load pin_memory with DeepSpeed's flags and without a lock
        builders += [PinMemoryBuilder(), GDSBuilder() if use_gds else AsyncIOBuilder()]
    if dequantize_on_gpu:
        builders.append(QuantizerBuilder())
    return [builder for builder in builders if builder is not None]


def _is_compiled(builder) -> bool:
    """Return whether the builder's module is compiled, by us or by DeepSpeed's installation."""
    from deepspeed.git_version_info import installed_ops

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return bool(list(folder.glob(f"{builder.name}/*.so"))) or installed_ops.get(builder.name, False)


def _load(builder, folder: Path) -> None:
    """Load the builder's module, compiled into `folder` if it is not there; the caller holds the module's lock."""
    ours = EXTENSIONS in str(folder)
    if ours:  # in a folder that TORCH_EXTENSIONS_DIR names, our flags would compile everything again
        (folder / "lock").unlink(missing_ok=True)
        cxx_args = builder.cxx_args
        builder.cxx_args = lambda: [*cxx_args(), *FLAGS]
        _speed_up_compiling(builder, folder.with_name(f"{folder.name}{SOURCES}"))
    with ExitStack() as stack:
        if not list(folder.glob("*.so")) and (ours or not folder.exists()):  # otherwise others may be compiling there
            parent = stack.enter_context(new_build(folder)).parent
            stack.enter_context(torch_build_environment(parent, TORCH_EXTENSIONS_DIR=str(parent)))
        else:
            parent = Path(
                stack.enter_context(TemporaryDirectory(prefix=f"{BUILDING}{folder.name}-", dir=folder.parent))
            )
            stack.enter_context(torch_build_environment(parent))
        builder.load(verbose=False)


def _speed_up_compiling(builder, folder: Path) -> None:
    """Let `builder` compile sources joined in `folder` (`JOINED`), with few headers (`LIGHT`).

    Headers are imported first: not all of DeepSpeed's have include guards, and `#import` includes a file only once.
    """
    if builder.name in JOINED:
        sources = [builder.deepspeed_src_path(source) for source in builder.sources()]
        joined = [source for source in sources if Path(source).parent.name == JOINED[builder.name]]
        headers = sorted({header for source in joined for header in Path(source).parent.glob("*.h")})
        lines = [f'#import "{header}"' for header in headers] + [f'#include "{source}"' for source in joined]
        file = folder / f"{JOINED[builder.name]}_joined.cpp"
        _write_if_changed(file, "\n".join([*lines, ""]))
        builder.sources = lambda: [*(source for source in sources if source not in joined), str(file)]
    if builder.name in LIGHT:
        _write_if_changed(folder / "headers" / "torch" / "extension.h", LIGHT_HEADER)
        include_paths = builder.include_paths  # called in `load`, which detects CUDA first
        builder.include_paths = lambda: [str(folder / "headers"), *include_paths()]


def _write_if_changed(path: Path, text: str) -> None:
    """Write only changes: a newer file would be compiled again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def init_distributed(ranks: Ranks) -> None:
    """Wrap the existing process group for DeepSpeed; all ranks call it.

    On a CPU the ranks of one launcher then share 66 MiB each in /dev/shm, which DeepSpeed never removes. Once all ranks have mapped the
    files they are unlinked, so that the memory is freed with the processes.
    """
    import deepspeed

    with redirect_stdout(io.StringIO()):  # it prints that a module was built even if it was not
        deepspeed.init_distributed(verbose=False)
    if ranks.device.type == "cpu" and "LOCAL_SIZE" in os.environ:  # set by the launcher whose ranks share memory
        ranks.barrier()
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        file = SHARED / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{ranks.rank}"
        file.unlink(missing_ok=True)
