"""What a run is called on the page: its number, its setting, and what else tells it from the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zero_inference.report.run import OF_SPEED, Run, clean, differing_options

# What tells runs apart beside their setting, in words.
_WORK: dict[str, Callable[[Any], str]] = {
    "batch_size": "batch {}".format,
    "prompt_len": "prompt {}".format,
    "gen_len": "{} generated".format,
}


def make_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs numbered in their order, each labelled by what distinguishes it from the others."""
    several_gpus = len({name for run in runs for name in run.gpu_names}) > 1
    runs = [
        dataclasses.replace(run, number=number, several_gpus=several_gpus) for number, run in enumerate(runs, start=1)
    ]
    models = len({run.model for run in runs}) > 1
    work = {key: words for key, words in _WORK.items() if len({getattr(run.request, key) for run in runs}) > 1}
    options = _options(runs)
    labelled = []
    for run in runs:
        known = [words(value) for key, words in work.items() if (value := getattr(run.request, key)) is not None]
        rest = ", ".join([run.short_model] * models + known)
        labelled.append(dataclasses.replace(run, options=tuple(options[run.number]), rest=rest))
    return labelled


def _options(runs: list[Run]) -> dict[int, list[str]]:
    """By run number, the options that set the speed and in which runs of one model, length and kind differ."""
    alike: dict[tuple, list[Run]] = {}
    for run in runs:
        alike.setdefault((run.group, run.setting), []).append(run)
    found: dict[int, list[str]] = {run.number: [] for run in runs}
    for each in alike.values():
        for name, values in differing_options(each).items():
            for run, value in zip(each, values):
                if name in OF_SPEED and value is not None:
                    found[run.number].append(clean(f"{name} {value}"))
    return found
