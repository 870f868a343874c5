"""The two ways in which a run ends badly; `cli.py` turns them into exit codes."""


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
