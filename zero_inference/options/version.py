"""--version: this package and the libraries that do the work, without importing them."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from typing import Any

LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate")


def version_line() -> str:
    """Such as: zero-inference 0.1.0 (torch 2.13.0, transformers 5.23.0, deepspeed 0.19.8, accelerate 1.15.0)."""
    own = sys.modules[
        __name__.partition(".")[0]
    ].__version__  # of the code that runs, which need not be the one that is installed
    return f"zero-inference {own} ({', '.join(f'{name} {_version(name)}' for name in LIBRARIES)})"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


class Version(argparse.Action):
    """Prints the line and ends."""

    def __init__(self, option_strings: Any, dest: str, **_: Any) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help="show versions and exit"
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version_line())
        parser.exit()
