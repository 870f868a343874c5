"""How a run is started: what to type where the user is (run_model.py in a clone, else `zero-inference run`), and what a launcher adds."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

SCRIPT = "run_model.py"
LOCAL_RANK = "--local-rank"


def run_command(options: Sequence[str], launched_ranks: int | None = None) -> str:
    """A line for the shell that runs with `options`.

    Args:
        launched_ranks: how many the deepspeed launcher starts; None starts a single process without a launcher.
    """
    in_clone = Path(SCRIPT).is_file()
    if launched_ranks is None:
        words = ["python", SCRIPT] if in_clone else ["zero-inference", "run"]
    else:
        words = ["deepspeed", "--num_gpus", str(launched_ranks)]
        words += [SCRIPT] if in_clone else ["--module", "zero_inference", "run"]
    return shlex.join([*words, *options])


def as_installed(text: str) -> str:
    """Commands with run_model.py as they are typed without a clone."""
    return text.replace(f"python {SCRIPT}", "zero-inference run").replace(f" {SCRIPT}", " --module zero_inference run")


def behind_the_command(argv: list[str]) -> list[str]:
    """The deepspeed launcher writes the rank before all other words, also before the command whose option it is (`--module`)."""
    if len(argv) > 2 and argv[1].replace("_", "-").startswith(f"{LOCAL_RANK}="):
        return [argv[0], argv[2], argv[1], *argv[3:]]
    return argv


def first_rank() -> bool:
    """Whether this is the process that speaks, before anything is known about the others."""
    return os.environ.get("RANK", "0") == "0"
