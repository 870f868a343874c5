"""Errors that end a run; `cli.py` turns them into exit codes."""

# Begins the line of --dry-run about a run that would fail though it can be planned; `zero-inference compare` looks for it.
ONLY_PLANNED = "warning: planned from the built-in configuration; a run would fail:"


# Messages of Linux, PyTorch on a CPU and PyTorch on a GPU about missing memory.
NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "not enough memory", "out of memory", "unable to mmap")


class UsageError(Exception):
    """Bad usage, or a configuration that cannot work: exit code 2, before anything is loaded."""


class DoesNotFit(UsageError):
    """Too little memory; `--dry-run` prints what would fit.

    Attributes:
        FITS, VERDICT: begin the first line of `--dry-run` for a run that fits, and for one that does not; `zero-inference compare`
            looks for the latter.
    """

    FITS = "It fits."
    VERDICT = "It does not fit."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was missing, also by a library's message."""
    while True:
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


class RunError(Exception):
    """A valid run that failed: exit code 1."""
