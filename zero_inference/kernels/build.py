"""Compiling at first use: compilers end with this process, and write to a folder that takes its place only when it is complete."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from zero_inference.utils.processes import isolated_python

HOW_TO_INSTALL = (
    "install g++ 10 or newer (Debian and Ubuntu: apt install g++; RHEL: dnf install gcc-c++), or set CXX to clang++ 14"
)
# torch starts ninja itself, and kills it alone. This stands in for it: what compiles runs in a group that ends with this process.
NINJA = """#!/bin/sh
[ "$1" != --version ] || exec {ninja} "$@"
case "$({ninja} -n "$@" 2>&1)" in *"no work to do"*) exec {ninja} "$@" ;; esac
exec {in_group} {ninja} "$@"
"""
_IN_GROUP = (
    "from zero_inference.utils.processes import run_with_parent; run_with_parent(int(sys.argv[1]), sys.argv[2:])"
)
BUILDING = ".building-"  # begins the name of a folder that is being compiled in
_compiled_s = 0.0


def compile_s() -> float:
    """Return the seconds that this process has compiled, or waited for another process that did."""
    return _compiled_s


@contextlib.contextmanager
def time_compiling() -> Iterator[None]:
    """Count the block as compiling."""
    global _compiled_s
    start = time.perf_counter()
    try:
        yield
    finally:
        _compiled_s += time.perf_counter() - start


@contextlib.contextmanager
def new_build(folder: Path) -> Iterator[Path]:
    """Yield a new folder to compile in, of the same name. It replaces `folder` at the end; an error removes it.

    Hold a lock on `folder` meanwhile: what builds of it left that were killed is removed.
    """
    beginning = f"{BUILDING}{folder.name}-"
    for left in folder.parent.glob(f"{beginning}*"):
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=beginning, dir=folder.parent))
    try:
        place.chmod(folder.parent.stat().st_mode & 0o777)  # mkdtemp's is for this user alone
        (place / folder.name).mkdir()
        yield place / folder.name
        shutil.rmtree(folder, ignore_errors=True)
        (place / folder.name).replace(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def torch_build_environment(place: Path, **changes: str) -> Iterator[None]:
    """Within it torch's extension builds end with this process, and use this environment's ninja: another version does not trust the log
    of the first and compiles everything again.

    Args:
        place: folder for a program that stands in for ninja.
        changes: of the environment.
    """
    path = _search_path()
    if ninja := shutil.which("ninja", path=path):
        script = place / "bin" / "ninja"
        script.parent.mkdir(exist_ok=True)
        words = isolated_python(_IN_GROUP, str(os.getpid()))
        script.write_text(NINJA.format(ninja=shlex.quote(ninja), in_group=shlex.join(words)))
        script.chmod(0o755)
        path = os.pathsep.join([str(script.parent), path])
    if shutil.which("c++", path=path) is None and shutil.which("g++", path=path):
        changes.setdefault("CXX", os.environ.get("CXX") or "g++")  # torch knows no other name
    before = {name: os.environ.get(name) for name in ("PATH", *changes)}
    os.environ.update(changes, PATH=path)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_compiler() -> list[str]:
    """Return the command of CXX, which may bring arguments ("ccache g++"), else g++ or c++ of PATH.

    Raises RuntimeError where none is there.
    """
    wanted = os.environ.get("CXX", "").strip()
    try:
        command, *arguments = shlex.split(wanted) or ["g++" if shutil.which("g++") else "c++"]
    except ValueError as error:
        raise RuntimeError(f"CXX={wanted} is no command line: {error}") from error
    found = shutil.which(command)
    if found is None:
        if wanted:
            raise RuntimeError(
                f"no C++ compiler: {command} of CXX={wanted} was not found on PATH; unset CXX, or name another one"
            )
        raise RuntimeError(f"no C++ compiler: g++ and c++ were not found on PATH; {HOW_TO_INSTALL}")
    return [found, *arguments]


def check_nvcc() -> None:
    """Raises RuntimeError where CUDA sources cannot be compiled."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        raise RuntimeError(
            f"nvcc of CUDA {torch.version.cuda} was not found on PATH, in CUDA_HOME or /usr/local/cuda; "
            "install that CUDA toolkit, or set CUDA_HOME to it"
        )
    find_compiler()  # which nvcc calls
    check_ninja()


def check_ninja() -> None:
    """Raises RuntimeError where torch's builds cannot be started."""
    if shutil.which("ninja", path=_search_path()) is None:
        raise RuntimeError("ninja was not found on PATH; pip install ninja")


def _search_path() -> str:
    """Return PATH with this environment's programs first, which need not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
