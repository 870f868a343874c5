"""Our CUDA operators (`torch.ops.zero_inference`): one library of the sources in csrc but csrc/cpu, compiled by `pip install` where a CUDA
torch and nvcc are there (setup.py), else at first use on a machine.

The sources keep to torch's stable ABI of version 2.11. A build that cannot be made costs speed, never a run: whoever uses an
operator has a way in PyTorch that gives the same. With torch 2.11 and CUDA an operator that raises ends the process, so callers
check what it takes before they call it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from zero_inference.kernels.build import check_nvcc, new_build, time_compiling, torch_build_environment
from zero_inference.utils.files import extensions_folder, hold_lock, make_folder
from zero_inference.utils.progress import QUIET_S, current_progress

SWITCH = "ZERO_INFERENCE_BUILD_CUDA"
PREBUILT = "prebuilt"  # folder in an installed package
COMPLETE = "complete"  # file beside a finished library, with its digest
CPU_SOURCES = "cpu"  # folder of csrc with sources of a library of its own (zero_inference/cpu/library.py)
WITHOUT_DEVICES = ("8.0", "9.0", "10.0")  # what is compiled for where no device says: A100, H100 and H200, B200
DEFINES = [
    "-DUSE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
]  # USE_CUDA: the stable headers' CUDA declarations

_reason: str | None = "not asked for yet"
_tried = False


def load_extension(progress_message: Callable[[str], None] | None = None) -> bool:
    """Make `torch.ops.zero_inference` available, compiling it if this is the first time here; later calls only answer.

    False without a CUDA device, with ZERO_INFERENCE_BUILD_CUDA=0, and where the build fails, which is told once.

    Args:
        progress_message: gets the line that says what takes a minute, and the warning that it failed; stderr if None.
    """
    global _tried, _reason
    if not _tried:
        _tried = True
        _reason = _load(progress_message or (lambda line: print(line, file=sys.stderr, flush=True)))
    return _reason is None


def why_unavailable() -> str | None:
    """Why the last `load_extension` said False, in a few words; None where it said True."""
    return _reason


def operators_of(owner: str) -> torch.library.Library:
    """Return a new fragment of `torch.ops.zero_inference`, in place of what an earlier import of the module `owner` defined: a notebook
    may remove modules from sys.modules to import them again."""
    fragments = vars(torch.ops.zero_inference).setdefault("_fragments", {})
    if owner in fragments:
        fragments[owner]._destroy()
    fragments[owner] = torch.library.Library("zero_inference", "FRAGMENT")
    return fragments[owner]


def package_folder() -> Path:
    """zero_inference, as it is installed or in a checkout."""
    return Path(__file__).resolve().parents[1]


def source_folder() -> Path:
    """csrc, inside an installed package or beside it in a checkout."""
    package = package_folder()
    return package / "csrc" if (package / "csrc").is_dir() else package.parent / "csrc"


def sources() -> list[Path]:
    """All files to compile. Their names differ, because torch names the objects after them and not after their folders."""
    return [path for path in _files(source_folder()) if path.suffix in (".cu", ".cpp")]


def _files(folder: Path) -> list[Path]:
    """Whatever this library depends on in `folder`, csrc."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and (folder / CPU_SOURCES) not in path.parents)


def _load(say: Callable[[str], None]) -> str | None:
    """None if the operators are there, else why they are not."""
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
        folder = make_folder(extensions_folder()) / name
        library = folder / f"{name}.so"
        if not is_complete(library):
            with time_compiling(), hold_lock(folder.with_suffix(".lock")):
                if not is_complete(
                    library
                ):  # also a file that lost its end, which would end the process when it is loaded
                    _check_compiler()
                    say("compiling the CUDA kernels (once per machine, about a minute) ...")
                    with current_progress().slow("compiling the CUDA kernels", QUIET_S), new_build(folder) as building:
                        _build(name, building, architectures)
                        (building / COMPLETE).write_bytes(file_digest(building / library.name))
                    return None
        torch.ops.load_library(str(library))
    except Exception as error:  # a missing compiler, a full disk, a version that does not fit: each costs only speed
        reason = compiler_error_line(error)
        say(f"warning: the CUDA kernels could not be compiled, slower PyTorch code is used: {reason}")
        return reason
    return None


def prebuild(folder: Path) -> str:
    """Compile the library into `folder`, for setup.py, and return what it was compiled for.

    Raises RuntimeError where torch is without CUDA, nvcc is not there or the build fails.
    """
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is without CUDA")
    _check_compiler()
    architectures = (
        choose_architectures()
        if torch.cuda.is_available()
        else os.environ.get("TORCH_CUDA_ARCH_LIST") or _known_to_nvcc()
    )
    name = library_name(PREBUILT)
    folder.mkdir(parents=True, exist_ok=True)
    with new_build(folder / "work") as work:
        _build(name, work, architectures)
        shutil.move(work / f"{name}.so", folder / f"{name}.so")
    (folder / f"{name}.txt").write_text(architectures)
    shutil.rmtree(folder / "work")
    return architectures


def prebuilt_library(package: Path) -> Path | None:
    """The library that came with the `package`, if it is of these sources and this torch and serves the devices that are here."""
    library = package / PREBUILT / f"{library_name(PREBUILT)}.so"
    if not library.exists():
        return None
    entries = re.split(r"[;, ]+", library.with_suffix(".txt").read_text())
    devices = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return library if all(any(_serves(entry, device) for entry in entries) for device in devices) else None


def _known_to_nvcc() -> str:
    from torch.utils import cpp_extension

    known = subprocess.run(
        [str(Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc"), "--list-gpu-code"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return ";".join(number for number in WITHOUT_DEVICES if f"sm_{number.replace('.', '')}" in known)


def _check_compiler() -> None:
    """Raises RuntimeError where a build need not be tried."""
    if not sources():
        raise RuntimeError(f"no sources in {source_folder()}")
    check_nvcc()


def _build(name: str, folder: Path, architectures: str) -> None:
    """Compile, link and load; raises whatever went wrong."""
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
    """TORCH_CUDA_ARCH_LIST if it is set and serves the devices that are here, else a list of those devices."""
    devices = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    entries = [entry for entry in re.split(r"[;, ]+", given) if entry]
    if entries and all(any(_serves(entry, device) for entry in entries) for device in devices):
        return ";".join(entries)
    return ";".join(f"{major}.{minor}" for major, minor in devices)


def _serves(entry: str, device: tuple[int, int]) -> bool:
    """Whether code for `entry` ("8.0", "8.0+PTX", "9.0a") runs on a device of this capability; unknown names do not."""
    parts = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
    if parts is None:
        return False
    version = int(parts[1]), int(parts[2])
    if parts[3]:
        return version == device
    return version <= device and (parts[4] is not None or version[0] == device[0])


def library_name(architectures: str, folder: Path | None = None) -> str:
    """Named after all that the library depends on, so that a changed source or torch makes a new one beside the old.

    Args:
        folder: of the sources; `source_folder()` where not given.
    """
    digest = hashlib.sha256()
    folder = folder or source_folder()
    for file in _files(folder):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    for part in (torch.__version__, torch.version.cuda, architectures, sys.prefix, *DEFINES):
        digest.update(f"{part}\0".encode())
    return f"zero_inference_{digest.hexdigest()[:16]}"


def is_complete(library: Path) -> bool:
    """Return whether `library` was compiled to its end and has not changed since."""
    mark = library.with_name(COMPLETE)
    return mark.exists() and library.exists() and mark.read_bytes() == file_digest(library)


def file_digest(file: Path) -> bytes:
    """What the mark of a finished build holds."""
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def trial_mark(*parts: str) -> Path:
    """A file that says that kernels of this library passed a trial under the conditions `parts`."""
    return extensions_folder() / "trials" / re.sub(r"[^\w.-]+", "_", "-".join((library_name("trial"), *parts)))


def compiler_error_line(error: Exception) -> str:
    """The line of a compiler's or linker's output that names the error, else the first line there is."""
    text = f"{error}\n{error.__cause__ or ''}"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = [
        line for line in lines[1:] if re.search(r"\berror\b|cannot find|cannot open|undefined symbol|not found", line)
    ]
    return (telling or lines)[0][:300]
