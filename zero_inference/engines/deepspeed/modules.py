"""DeepSpeed's compiled modules: each built once a machine, by one process at a time, and never stuck behind a killed build.

torch marks a build under way with a file that a killed process leaves behind, and waits for it for ever. Ours is a lock
a module that ends with its holder; whoever has it may clear such a mark, because the folder is used by nobody else.
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

FLAGS = ("-g0",)  # DeepSpeed compiles with -g, which takes the compiler longer
TOGETHER = {"pin_memory": "pin_memory", "async_io": "py_lib"}  # module: the folder whose sources can be compiled as one
# These need tensors and Python's view of them; torch/extension.h also has all of torch.nn, torch.optim and torch.data.
LIGHT = ("deepspeed_shm_comm", "pin_memory", "async_io")
LIGHT_HEADER = """#pragma once
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
"""
SOURCES = "-sources"  # suffix of the folder that holds a module's sources
APART = "apart"  # the file in it that says that its sources are compiled one by one, with all headers
SHARED = Path("/dev/shm")
_loaded: set[str] = set()
AIO_HEADERS = "libaio's headers (Debian and Ubuntu: apt install libaio-dev; RHEL: dnf install libaio-devel)"


def set_build_folder(device_type: str) -> None:
    """One build folder an environment (a build names its paths), our flags and kind of device (async_io is built otherwise for CUDA),
    unless TORCH_EXTENSIONS_DIR says where."""
    how = [sys.prefix, *FLAGS, *TOGETHER, *TOGETHER.values(), *LIGHT, LIGHT_HEADER, SOURCES]
    built_with = hashlib.sha256(" ".join(how).encode()).hexdigest()[:8]
    pair = f"torch-{torch.__version__}-deepspeed-{version('deepspeed')}-{built_with}"
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR", str(user_cache() / EXTENSIONS / (f"{pair}-cuda" if device_type == "cuda" else pair))
    )


def check_aio(use_gds: bool) -> None:
    """Raises UsageError where NVMe cannot be read the way that was asked for."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    with real_stderr():
        found = AsyncIOBuilder().is_compatible(verbose=False)
    if not found:
        try:
            find_compiler()  # by which DeepSpeed looks for libaio
        except RuntimeError as error:
            raise UsageError(f"--disk-offload: DeepSpeed compiles what reads NVMe: {error}.") from error
        raise UsageError(
            f"--disk-offload reads NVMe through libaio, which cannot be compiled against here: install {AIO_HEADERS}."
        )
    if use_gds and not GDSBuilder().is_compatible(verbose=False):
        raise UsageError("--use-gds: this machine has no GPUDirect Storage (libcufile); drop --use-gds.")


@contextmanager
def real_stderr() -> Iterator[None]:
    """Where stderr has no file descriptor, as in some notebooks: DeepSpeed's probes for libaio want one, or find nothing."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError):
        with redirect_stderr(sys.__stderr__):
            yield
    else:
        yield


def build_modules(disk: bool, use_gds: bool, dequantize_on_gpu: bool, say: Callable[[str], None] | None) -> None:
    """Load what this run will need, compiling it if this is the first time here.

    Args:
        disk: libaio reads, or GPUDirect Storage with `use_gds`.
        dequantize_on_gpu: the float16 dequantization kernel.
        say: told what takes a minute, where it does; None is not told.
    """
    folder = make_folder(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    for builder in needed_modules(disk, use_gds, dequantize_on_gpu):
        if builder.name in _loaded or not builder.is_compatible(verbose=False):
            continue
        kept = folder / builder.name
        compiles = not _is_kept(builder)
        if say is not None and compiles:
            say(f"compiling DeepSpeed's {builder.name} module (once per machine, may take minutes) ...")
        waiting = current_progress().slow(f"compiling or loading DeepSpeed's {builder.name} module", QUIET_S)
        with waiting, redirect_stdout(sys.stderr), time_compiling() if compiles else nullcontext():
            with hold_lock(folder / f"{builder.name}.lock"):
                _load(builder, kept)
        _loaded.add(builder.name)


def needed_modules(disk: bool, use_gds: bool, dequantize_on_gpu: bool) -> list[Any]:
    """Return DeepSpeed's builders of the modules that `build_modules` loads."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder, QuantizerBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    builders = []
    if get_accelerator().device_name() == "cpu":
        builders.append(get_accelerator().create_op_builder("ShareMemCommBuilder"))
    if disk:  # both load pin_memory themselves, but with DeepSpeed's flags and without a lock
        builders += [PinMemoryBuilder(), GDSBuilder() if use_gds else AsyncIOBuilder()]
    if dequantize_on_gpu:
        builders.append(QuantizerBuilder())
    return [builder for builder in builders if builder is not None]


def check_compilers(disk: bool, use_gds: bool, dequantize_on_gpu: bool) -> None:
    """Raises UsageError where a module has to be compiled, and what compiles it is not there.

    Args:
        as of `build_modules`.
    """
    make_folder(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    for builder in needed_modules(disk, use_gds, dequantize_on_gpu):
        try:
            if not _is_kept(builder):
                find_compiler()
                check_ninja()
                if builder.name == "quantizer":
                    check_nvcc()
        except RuntimeError as error:
            raise UsageError(f"DeepSpeed's {builder.name} module has to be compiled here: {error}.") from error


def _is_kept(builder) -> bool:
    """Return whether its module is compiled already, here or by DeepSpeed's installation."""
    from deepspeed.git_version_info import installed_ops

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return bool(list(folder.glob(f"{builder.name}/*.so"))) or installed_ops.get(builder.name, False)


def _load(builder, kept: Path) -> None:
    """Load its module from the folder `kept`, or compile it; hold its lock."""
    ours = EXTENSIONS in str(kept)
    if ours:
        (kept / "lock").unlink(missing_ok=True)
        _add_flags(builder)  # not in a folder that others share: a change of flags compiles everything again
    with ExitStack() as within:
        if not list(kept.glob("*.so")) and (ours or not kept.exists()):  # else others may be compiling there
            place = within.enter_context(new_build(kept)).parent
            within.enter_context(torch_build_environment(place, TORCH_EXTENSIONS_DIR=str(place)))
        else:
            place = Path(within.enter_context(TemporaryDirectory(prefix=f"{BUILDING}{kept.name}-", dir=kept.parent)))
            within.enter_context(torch_build_environment(place))
        if ours:
            _load_joined(builder, kept.with_name(f"{kept.name}{SOURCES}"))
        else:
            builder.load(verbose=False)


def _add_flags(builder) -> None:
    plain = builder.cxx_args
    builder.cxx_args = lambda: [*plain(), *FLAGS]


def _load_joined(builder, folder: Path) -> None:
    """Load it, compiled with those of its sources that TOGETHER names as one file and, of LIGHT, with few of torch's headers; or each
    source by itself and with all headers where that failed once.

    Nearly all that the compiler does is to read torch's headers, for each source: all modules took 231 s of CPU time apart and 94
    together; with few headers they take 59 (cpu/deepspeed_modules.txt).
    """
    from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

    if builder.name not in (*TOGETHER, *LIGHT) or (folder / APART).exists():
        builder.load(verbose=False)
        return
    plain = builder.sources, builder.include_paths
    if builder.name in TOGETHER:
        sources = [builder.deepspeed_src_path(source) for source in builder.sources()]
        joined = join_sources(sources, TOGETHER[builder.name], folder)
        builder.sources = lambda: joined
    if builder.name in LIGHT:
        headers, others = str(write_light_header(folder)), builder.include_paths
        builder.include_paths = lambda: [headers, *others()]  # which know only as they load whether it is for CUDA
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError) as error:  # the second is a symbol that nothing of what was compiled has
        print(f"DeepSpeed's {builder.name} is compiled source by source: {first_line(error)}", file=sys.stderr)
        builder.sources, builder.include_paths = plain
        JIT_EXTENSION_VERSIONER.entries.pop(builder.name, None)  # else other sources are a second version, named so
        builder.load(verbose=False)
        (folder / APART).touch()  # they compile so, and only so


def write_light_header(folder: Path) -> Path:
    """A folder to be searched before torch's, in which torch/extension.h includes no more than LIGHT needs."""
    header = folder / "headers" / "torch" / "extension.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    _write_if_other(header, LIGHT_HEADER)
    return folder / "headers"


def join_sources(sources: Sequence[str], place: str, folder: Path) -> list[str]:
    """The same sources, but a file in `folder` that includes them for those that lie in a folder named `place`.

    Headers come first and once: not all of DeepSpeed's guard themselves, and what was imported is not included again.
    """
    together = [source for source in sources if Path(source).parent.name == place]
    headers = sorted({header for source in together for header in Path(source).parent.glob("*.h")})
    lines = [*(f'#import "{header}"' for header in headers), *(f'#include "{source}"' for source in together)]
    text, joined = "\n".join([*lines, ""]), folder / f"{place}_joined.cpp"
    folder.mkdir(parents=True, exist_ok=True)
    _write_if_other(joined, text)
    return [*(source for source in sources if source not in together), str(joined)]


def _write_if_other(path: Path, text: str) -> None:
    """A newer file would be compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def init_distributed(ranks: Ranks) -> None:
    """Wrap the process group that is there for DeepSpeed; all ranks call it.

    On a CPU the ranks of one launcher then share 66 MiB each in /dev/shm, which DeepSpeed never removes. Once all have mapped
    them, their names are needed no more, and without names they go with the processes.
    """
    import deepspeed

    with redirect_stdout(io.StringIO()):  # it prints in each run that a module was built, though it was kept
        deepspeed.init_distributed(verbose=False)
    if ranks.device.type == "cpu" and "LOCAL_SIZE" in os.environ:  # set by the launcher whose ranks share memory
        ranks.barrier()
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        SHARED.joinpath(f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{ranks.rank}").unlink(
            missing_ok=True
        )
