"""Where the weights and the KV cache of a run lay, and which options set it apart, in a few characters."""

from __future__ import annotations

from collections.abc import Sequence

from zero_inference.config.choices import PAGE_LOCKING_ENGINES
from zero_inference.records.read import number_of
from zero_inference.report.given import told_options
from zero_inference.report.html.runs import Run


def where(run: Run) -> str | None:
    """Offload, page-locking and place of the KV cache, such as `cpu pinned, KV cpu`; None for a run that says nothing of it."""
    if run.record.get("cpu_offload") is None and run.record.get("disk_offload") is None:
        return None
    place = {"host": "cpu", "device": "gpu"}.get(run.place, run.place)
    pinned = run.record.get("pin_memory")
    if place == "cpu" and run.engine in PAGE_LOCKING_ENGINES and isinstance(pinned, bool):
        place += " pinned" if pinned else " pageable"
    return f"{place}, KV cpu" if run.record.get("kv_offload") else place


def differing_options(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """The options in which the runs differ, as typed but without the dashes: for each run its value, None where it was not given."""
    told = [told_options(run.record) for run in runs]
    names = dict.fromkeys(name for each in told for name in each)
    given = {name: [_in_brief(each.get(name)) for each in told] for name in names}
    return {name: values for name, values in given.items() if len(set(values)) > 1}


def _in_brief(value: str | None) -> str | None:
    """A number in three digits; anything else as it is."""
    number = None if value is None else number_of(value)
    return value if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"
