"""What a program in the sandbox sees of this machine's files: an interpreter, its packages, and no home folder."""

from __future__ import annotations

import functools
import os
import pwd
import sys
import sysconfig
from pathlib import Path

SYSTEM = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache"]


def interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def package_folders() -> list[str]:
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


@functools.cache
def binds() -> list[str]:
    """What the program may read, outermost folders only, except what lies in a hidden home.

    Never a home folder or what one lies in, wherever Python is installed.
    """
    prefixes = {
        sys.base_prefix,
        sys.base_exec_prefix,
        os.path.dirname(os.path.dirname(interpreter())),
    }  # the last without links
    libraries = [
        sysconfig.get_path(name, vars={"installed_base": prefix, "platbase": prefix})
        for prefix in prefixes
        for name in ("stdlib", "platstdlib")
    ]
    python = [interpreter(), *libraries, *map(os.path.dirname, libraries), *package_folders()]
    homes = _homes()
    python += [os.path.realpath(path) for path in python]  # where links inside what is shown lead to
    wanted = SYSTEM + [path for path in python if not any(home.is_relative_to(Path(path).resolve()) for home in homes)]
    chosen: list[str] = []
    for path in sorted({path for path in wanted if os.path.exists(path)}):
        own = [
            home for home in homes if Path(path).resolve().is_relative_to(home)
        ]  # which may be hidden in what is outside
        if not any(
            path.startswith(outer + "/") and not any(Path(outer).resolve() in home.parents for home in own)
            for outer in chosen
        ):
            chosen.append(path)
    return chosen


@functools.cache
def hidden() -> list[str]:
    """Home folders that lie in what is shown, such as /usr/local/somebody: empty folders stand in their places."""
    shown = [(path, Path(path).resolve(), home) for path in binds() for home in _homes()]
    found = {os.path.join(path, home.relative_to(real)) for path, real, home in shown if real in home.parents}
    return sorted(path for path in found if os.path.isdir(path))


def _homes() -> set[Path]:
    return {Path(home).resolve() for home in (os.path.expanduser("~"), _account_home())}


def _account_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user of a container without an account
        return "/"
