"""Compile native libraries at first use: CUDA (kernels/extension.py), CPU (cpu/library.py) and DeepSpeed's.

One process compiles while others wait. Its compilers end with it; they write to a temporary folder that is renamed when complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from zero_inference.utils.files import extensions_folder, hold_lock, make_folder
from zero_inference.utils.processes import isolated_python
from zero_inference.utils.progress import QUIET_S, current_progress

INSTALL_COMPILER = (
    "install g++ 10 or newer (Debian and Ubuntu: apt install g++; RHEL: dnf install gcc-c++), or set CXX to clang++ 14"
)
# torch starts ninja itself and kills only ninja. This replacement runs compilers in a process group that ends with this process.
NINJA = """#!/bin/sh
[ "$1" != --version ] || exec {ninja} "$@"
case "$({ninja} -n "$@" 2>&1)" in *"no work to do"*) exec {ninja} "$@" ;; esac
exec {in_group} {ninja} "$@"
"""
BUILDING = ".building-"  # prefix of a folder that is being compiled in
COMPLETE = "complete"  # file beside a complete library, with its digest
_compile_s = 0.0


def compile_s() -> float:
    """Return the seconds that this process has spent on compiling or waiting for another process to compile."""
    return _compile_s


@contextlib.contextmanager
def time_compiling() -> Iterator[None]:
    """Add the block's seconds to `compile_s`."""
    global _compile_s
    start = time.perf_counter()
    try:
        yield
    finally:
        _compile_s += time.perf_counter() - start


def hashed_name(prefix: str, folder: Path, files: Iterable[Path], parts: Sequence[str | None]) -> str:
    """Return `prefix` with a hash of `files` below `folder` and of `parts`: each change gives a new library."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    for part in parts:
        digest.update(f"{part}\0".encode())
    return f"{prefix}_{digest.hexdigest()[:16]}"


def cached_library(
    name: str,
    build: Callable[[Path], None],
    what: str,
    duration: str,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> tuple[Path, bool]:
    """Return the path of library `name` in the cache folder, and whether it was compiled now; a truncated one is compiled again.

    Args:
        build: compiles `NAME.so` into a folder.
        what, duration: for the line that `say` gets before compiling.
        check: raises, before that line, if it cannot be compiled.
    """
    folder = make_folder(extensions_folder()) / name
    library = folder / f"{name}.so"
    if _is_complete(library):
        return library, False
    with time_compiling(), hold_lock(folder.with_suffix(".lock")):
        if _is_complete(library):
            return library, False
        check()
        say(f"compiling {what} (once per machine, {duration}) ...")
        with current_progress().slow(f"compiling {what}", QUIET_S), new_build(folder) as building:
            build(building)
            (building / COMPLETE).write_bytes(_digest(building / library.name))
    return library, True


def _is_complete(library: Path) -> bool:
    mark = library.with_name(COMPLETE)
    return mark.exists() and library.exists() and mark.read_bytes() == _digest(library)


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


@contextlib.contextmanager
def new_build(folder: Path) -> Iterator[Path]:
    """Yield a new folder of the same name to compile in, which replaces `folder` at the end; an error removes it.

    Hold a lock on `folder`: folders of killed builds are removed.
    """
    prefix = f"{BUILDING}{folder.name}-"
    for abandoned in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    parent = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        parent.chmod(folder.parent.stat().st_mode & 0o777)  # mkdtemp makes it private
        (parent / folder.name).mkdir()
        yield parent / folder.name
        shutil.rmtree(folder, ignore_errors=True)
        (parent / folder.name).replace(folder)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


@contextlib.contextmanager
def torch_build_environment(folder: Path, **changes: str) -> Iterator[None]:
    """Let torch's extension builds end with this process and use this environment's ninja: another version would distrust the first one's
    log and compile everything again. `folder` gets a script that replaces ninja; `changes` are environment variables.
    """
    path = _search_path()
    if ninja := shutil.which("ninja", path=path):
        script = folder / "bin" / "ninja"
        script.parent.mkdir(exist_ok=True)
        run = "from zero_inference.utils.processes import run_with_parent; run_with_parent(int(sys.argv[1]), sys.argv[2:])"
        in_group = isolated_python(run, str(os.getpid()))
        script.write_text(NINJA.format(ninja=shlex.quote(ninja), in_group=shlex.join(in_group)))
        script.chmod(0o755)
        path = os.pathsep.join([str(script.parent), path])
    if shutil.which("c++", path=path) is None and shutil.which("g++", path=path):
        changes.setdefault("CXX", os.environ.get("CXX") or "g++")  # torch tries only c++
    before = {name: os.environ.get(name) for name in ("PATH", *changes)}
    os.environ.update(changes, PATH=path)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def find_compiler() -> list[str]:
    """Return the command of CXX, which may have arguments ("ccache g++"), or else g++ or c++ from PATH; raise RuntimeError if missing."""
    wanted = os.environ.get("CXX", "").strip()
    command, *arguments = shlex.split(wanted) or ["g++" if shutil.which("g++") else "c++"]
    found = shutil.which(command)
    if found is None:
        asked = f"{command} of CXX={wanted} was" if wanted else "g++ and c++ were"
        change = "unset CXX, or name another one" if wanted else INSTALL_COMPILER
        raise RuntimeError(f"no C++ compiler: {asked} not found on PATH; {change}")
    return [found, *arguments]


def check_nvcc() -> None:
    """Raise RuntimeError if CUDA sources cannot be compiled."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        raise RuntimeError(
            f"nvcc of CUDA {torch.version.cuda} was not found on PATH, in CUDA_HOME or /usr/local/cuda; "
            "install that CUDA toolkit, or set CUDA_HOME to it"
        )
    find_compiler()  # nvcc calls it
    check_ninja()


def check_ninja() -> None:
    """Raise RuntimeError if ninja, which torch's builds need, is missing."""
    if shutil.which("ninja", path=_search_path()) is None:
        raise RuntimeError("ninja was not found on PATH; pip install ninja")


def _search_path() -> str:
    """Return PATH with this environment's programs first; the environment may not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def compiler_error_line(error: Exception) -> str:
    """Return the first line of a compiler's or linker's output that names an error, or else its first line."""
    text = f"{error}\n{error.__cause__ or ''}"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    errors = [
        line for line in lines[1:] if re.search(r"\berror\b|cannot find|cannot open|undefined symbol|not found", line)
    ]
    return (errors or lines)[0][:300]


def print_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
