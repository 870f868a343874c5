"""`python -m zero_inference` is the `zero-inference` command."""

import sys

from zero_inference.cli import console_main

if __name__ == "__main__":
    sys.exit(console_main())
