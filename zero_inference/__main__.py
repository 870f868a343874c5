"""`python -m zero_inference` is the `zero-inference` command."""

import os
import sys

from zero_inference.cli import console_main


def program() -> None:
    """Entry point of the installed command: runs it, and ends the process with its exit code."""
    code = console_main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see run_model.py; a plan saves a second


if __name__ == "__main__":
    program()
