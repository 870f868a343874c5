"""The two ways in which a run ends badly; `cli.py` turns them into exit codes."""

# How --dry-run begins the line that says why a run would fail whose plan can be made nevertheless; `zero-inference compare` looks for it.
ONLY_PLANNED = "warning: planned from the built-in configuration; a run would fail:"


# How Linux, PyTorch on a CPU and PyTorch on a GPU report missing memory.
NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "not enough memory", "out of memory", "unable to mmap")


class UsageError(Exception):
    """Bad usage, or a configuration that cannot work: exit code 2, before anything is loaded."""


class DoesNotFit(UsageError):
    """Too little memory for what was asked; `--dry-run` goes on and says what would fit.

    Attributes:
        FITS, VERDICT: how the first line of `--dry-run` begins where a run fits, and where it does not; `zero-inference compare` looks
            for the latter.
    """

    FITS = "It fits."
    VERDICT = "It does not fit."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was missing, also by the words of a library: then no file that was being read is to blame."""
    while True:
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


class RunError(Exception):
    """A run that was asked for correctly and failed: exit code 1."""
