"""DeepSpeed's compiled modules: built once per machine, by one process at a time, never blocked by a killed build.

torch marks a running build with a file, which a killed process leaves, and waits for it forever. Here each module has a lock that ends
with its holder, who may delete such a file because no other program uses the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from zero_inference.utils.format import first_line
from zero_inference.utils.progress import QUIET_S, current_progress
from zero_inference.utils.ranks import Ranks

FLAGS = ("-g0",)  # DeepSpeed compiles with -g, which is slower
JOINED = {"pin_memory": "pin_memory", "async_io": "py_lib"}  # module: folder whose sources can be compiled as one file
# These need only tensors and pybind11; torch/extension.h also includes all of torch.nn, torch.optim and torch.data.
LIGHT = ("deepspeed_shm_comm", "pin_memory", "async_io")
LIGHT_HEADER = """#pragma once
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
"""
SOURCES = "-sources"  # suffix of the folder of a module's joined sources
APART = "apart"  # file in it: joined sources failed to compile, so compile them one by one with all headers
SHARED = Path("/dev/shm")
_loaded: set[str] = set()
AIO_HEADERS = "libaio's headers (Debian and Ubuntu: apt install libaio-dev; RHEL: dnf install libaio-devel)"


def set_build_folder(device_type: str) -> None:
    """Set TORCH_EXTENSIONS_DIR, unless it is set, to a folder for this environment (builds contain its paths), our flags and the device
    type (async_io differs for CUDA)."""
    inputs = [sys.prefix, *FLAGS, *JOINED, *JOINED.values(), *LIGHT, LIGHT_HEADER, SOURCES]
    digest = hashlib.sha256(" ".join(inputs).encode()).hexdigest()[:8]
    pair = f"torch-{torch.__version__}-deepspeed-{version('deepspeed')}-{digest}"
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR", str(user_cache() / EXTENSIONS / (f"{pair}-cuda" if device_type == "cuda" else pair))
    )


def check_aio(use_gds: bool) -> None:
    """Raise UsageError if libaio, or GPUDirect Storage with `use_gds`, is missing."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    with real_stderr():
        found = AsyncIOBuilder().is_compatible(verbose=False)
    if not found:
        try:
            find_compiler()  # DeepSpeed needs it to find libaio
        except RuntimeError as error:
            raise UsageError(f"--disk-offload: DeepSpeed compiles the module that reads NVMe: {error}.") from error
        raise UsageError(
            f"--disk-offload reads NVMe through libaio, which cannot be compiled against here: install {AIO_HEADERS}."
        )
    if use_gds and not GDSBuilder().is_compatible(verbose=False):
        raise UsageError("--use-gds: this machine has no GPUDirect Storage (libcufile); drop --use-gds.")


@contextmanager
def real_stderr() -> Iterator[None]:
    """Use the process's stderr where sys.stderr has no file descriptor, as in some notebooks: DeepSpeed's probe for libaio needs one."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError):
        with redirect_stderr(sys.__stderr__):
            yield
    else:
        yield


def build_modules(disk: bool, use_gds: bool, dequantize_on_gpu: bool, say: Callable[[str], None] | None) -> None:
    """Load the modules that a run needs; compile those that are not on this machine.

    Args:
        disk: reads by libaio, or by GPUDirect Storage with `use_gds`.
        dequantize_on_gpu: the float16 dequantization kernel.
        say: gets a line before something is compiled; None for silence.
    """
    folder = make_folder(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    for builder in needed_modules(disk, use_gds, dequantize_on_gpu):
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


def needed_modules(disk: bool, use_gds: bool, dequantize_on_gpu: bool) -> list[Any]:
    """Return DeepSpeed's builders for `build_modules`."""
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


def check_compilers(disk: bool, use_gds: bool, dequantize_on_gpu: bool) -> None:
    """Raise UsageError if a module of `build_modules` has to be compiled but its compiler is missing."""
    make_folder(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    for builder in needed_modules(disk, use_gds, dequantize_on_gpu):
        try:
            if not _is_compiled(builder):
                find_compiler()
                check_ninja()
                if builder.name == "quantizer":
                    check_nvcc()
        except RuntimeError as error:
            raise UsageError(f"DeepSpeed's {builder.name} module has to be compiled here: {error}.") from error


def _is_compiled(builder) -> bool:
    """Return whether its module is compiled, by us or by DeepSpeed's installation."""
    from deepspeed.git_version_info import installed_ops

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return bool(list(folder.glob(f"{builder.name}/*.so"))) or installed_ops.get(builder.name, False)


def _load(builder, folder: Path) -> None:
    """Load its module from `folder`, or compile it. Hold its lock."""
    ours = EXTENSIONS in str(folder)
    if ours:  # in a shared folder other flags would compile everything again
        (folder / "lock").unlink(missing_ok=True)
        cxx_args = builder.cxx_args
        builder.cxx_args = lambda: [*cxx_args(), *FLAGS]
    with ExitStack() as stack:
        if not list(folder.glob("*.so")) and (ours or not folder.exists()):  # otherwise others may be compiling there
            parent = stack.enter_context(new_build(folder)).parent
            stack.enter_context(torch_build_environment(parent, TORCH_EXTENSIONS_DIR=str(parent)))
        else:
            parent = Path(
                stack.enter_context(TemporaryDirectory(prefix=f"{BUILDING}{folder.name}-", dir=folder.parent))
            )
            stack.enter_context(torch_build_environment(parent))
        if ours:
            _load_joined(builder, folder.with_name(f"{folder.name}{SOURCES}"))
        else:
            builder.load(verbose=False)


def _load_joined(builder, folder: Path) -> None:
    """Load a module compiled from joined sources (`JOINED`) and with few headers (`LIGHT`); if that failed once, source by source.

    The compiler spends nearly all its time on torch's headers, once per source: all modules took 231 s of CPU time apart, 94 s joined, and
    59 s with few headers (cpu/deepspeed_modules.txt).
    """
    from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

    if builder.name not in (*JOINED, *LIGHT) or (folder / APART).exists():
        builder.load(verbose=False)
        return
    original = builder.sources, builder.include_paths
    if builder.name in JOINED:
        sources = [builder.deepspeed_src_path(source) for source in builder.sources()]
        joined = join_sources(sources, JOINED[builder.name], folder)
        builder.sources = lambda: joined
    if builder.name in LIGHT:
        headers, include_paths = str(write_light_header(folder)), builder.include_paths
        builder.include_paths = lambda: [headers, *include_paths()]  # evaluated in `load`, which detects CUDA first
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError) as error:  # ImportError: undefined symbol
        print(f"DeepSpeed's {builder.name} is compiled source by source: {first_line(error)}", file=sys.stderr)
        builder.sources, builder.include_paths = original
        JIT_EXTENSION_VERSIONER.entries.pop(builder.name, None)  # otherwise torch adds a version to the name
        builder.load(verbose=False)
        (folder / APART).touch()


def write_light_header(folder: Path) -> Path:
    """Return an include folder whose torch/extension.h has only what LIGHT needs."""
    header = folder / "headers" / "torch" / "extension.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    _write_if_changed(header, LIGHT_HEADER)
    return folder / "headers"


def join_sources(sources: Sequence[str], name: str, folder: Path) -> list[str]:
    """Return `sources` with those from a folder called `name` replaced by one file in `folder` that includes them.

    Headers are imported first: not all of DeepSpeed's have include guards, and `#import` includes a file only once.
    """
    joined_sources = [source for source in sources if Path(source).parent.name == name]
    headers = sorted({header for source in joined_sources for header in Path(source).parent.glob("*.h")})
    lines = [*(f'#import "{header}"' for header in headers), *(f'#include "{source}"' for source in joined_sources)]
    text, joined = "\n".join([*lines, ""]), folder / f"{name}_joined.cpp"
    folder.mkdir(parents=True, exist_ok=True)
    _write_if_changed(joined, text)
    return [*(source for source in sources if source not in joined_sources), str(joined)]


def _write_if_changed(path: Path, text: str) -> None:
    """Write only changes: a newer file would be compiled again."""
    if not path.exists() or path.read_text() != text:
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
        SHARED.joinpath(f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{ranks.rank}").unlink(
            missing_ok=True
        )
