"""The two ways in which a run ends badly; `cli.py` turns them into exit codes."""

# How --dry-run begins the line that says why a run would fail whose plan can be made nevertheless; `zero-inference compare` looks for it.
ONLY_PLANNED = "warning: planned from the built-in configuration; a run would fail:"


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


class RunError(Exception):
    """A run that was asked for correctly and failed: exit code 1."""
