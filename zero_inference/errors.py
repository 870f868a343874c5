"""The two ways in which a run ends badly; `cli.py` turns them into exit codes."""


class UsageError(Exception):
    """Bad usage, or a configuration that cannot work: exit code 2, before anything is loaded."""


class DoesNotFit(UsageError):
    """The device has too little memory for what was asked; `--dry-run` goes on and says what would fit."""


class RunError(Exception):
    """A run that was asked for correctly and failed: exit code 1."""
