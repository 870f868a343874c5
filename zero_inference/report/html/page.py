"""Fills page.html with runs and figures: one self-contained file. Its headlines: the fastest configuration of each model and length,
and what bounds it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.errors import UsageError
from zero_inference.report.advice import FAR_FROM_THE_LIMIT
from zero_inference.report.run import BOUND_NAMES, OF_SPEED, Run, clean, differing_options
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import format_bytes, format_number, three_digits

UNSTEADY = 2.0  # times the slowest throughput: from here on the headline is a range
LINK_CAUSES = {
    "slot_wait_s": "the device computes longer than a layer copies",
    "host_late_s": "the host asked too late for the next layer",
    "step_start_s": "steps began late (the host prepares the token)",
}
LEADERS_NAMED = 3
SHORT_TEXT = 32  # characters that the table does not break
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A row for each run: `texts[row][column]` is shown, `values[row][column]` (a number, a text or None) sorts.

    in_order: the rows are in the order of `runs.in_order`.
    """

    headers: list[str]
    numeric: list[bool]
    texts: list[list[str]]
    values: list[list[Any]]
    in_order: bool


def write_page(path: Path, source: str, runs: list[Run], table: Table) -> None:
    """Write the page about `runs`, which were read from the folders `source`.

    Raises:
        UsageError: the file cannot be written.
    """
    page = render_page(source, runs, table)
    try:
        with write_atomically(path) as file:
            file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written ({error.strerror}); name a file in a folder that can be written."
        ) from error


def render_page(source: str, runs: list[Run], table: Table) -> str:
    """Return the page. All text from records is escaped: by Jinja in the page, by ElementTree in the drawings."""
    from jinja2 import Environment, StrictUndefined

    from zero_inference.report.html.figures import all_figures

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    runs = label_runs(runs)
    figures = all_figures(runs)
    scores = list(dict.fromkeys(score.metric for run in runs for score in run.quality))
    return template.render(
        source=clean(source),
        name=clean(_last_parts(source)),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        # Only this script may run, whatever a record holds, and nothing is fetched.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        counted=count_in_words(runs),
        machines=_machines(runs),
        days=_days(runs),
        findings=findings(runs),
        figures=figures,
        headers=list(zip(map(clean, table.headers), table.numeric)) + [(score, True) for score in scores],
        in_order=table.in_order,
        rows=[(run, _cells(run, texts, values, scores)) for run, texts, values in zip(runs, table.texts, table.values)],
        short_text=SHORT_TEXT,
        failed=[run for run in runs if run.failed],
    )


def label_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs numbered in their order; `rest` and `options` of each distinguish it from the others."""
    several_gpus = len({name for run in runs for name in run.gpu_names}) > 1
    several_models = len({run.model for run in runs}) > 1
    differing = {
        key: words
        for key, words in (("batch_size", "batch {}"), ("prompt_len", "prompt {}"), ("gen_len", "{} generated"))
        if len({getattr(run.request, key) for run in runs}) > 1
    }
    labelled = []
    for number, run in enumerate(runs, start=1):
        known = {words: getattr(run.request, key) for key, words in differing.items()}
        rest = [words.format(value) for words, value in known.items() if value is not None]
        rest = [run.short_model] * several_models + rest
        labelled.append(dataclasses.replace(run, number=number, several_gpus=several_gpus, rest=", ".join(rest)))
    alike: dict[tuple, list[Run]] = {}
    for run in labelled:
        alike.setdefault((run.group, run.setting), []).append(run)
    options: dict[int, list[str]] = {}  # that set the speed and differ between runs of one model, length and setting
    for runs_alike in alike.values():
        for name, values in differing_options(runs_alike).items():
            for run, value in zip(runs_alike, values):
                if name in OF_SPEED and value is not None:
                    options.setdefault(run.number, []).append(clean(f"{name} {value}"))
    return [dataclasses.replace(run, options=tuple(options.get(run.number, ()))) for run in labelled]


def _cells(run: Run, texts: list[str], values: list[Any], scores: list[str]) -> list[tuple[str, Any]]:
    """Return (text, value to sort by) of a row of the table."""
    cells = [(clean(text), clean(value) if isinstance(value, str) else value) for text, value in zip(texts, values)]
    found = {score.metric: (score.text, score.value) for score in run.quality}
    return cells + [found.get(score, ("-", None)) for score in scores]


def _last_parts(source: str) -> str:
    names = [folder.rstrip("/").rpartition("/")[2] or folder for folder in source.split(", ")]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _machines(runs: list[Run]) -> str:
    counts = Counter(
        run.gpus or ("no GPU" if run.record.result.environment else "machine not recorded") for run in runs
    )
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{name} ({count} run{'s' * (count != 1)})" for name, count in counts.most_common(6))


def _days(runs: list[Run]) -> str:
    days = sorted(time[:10] for run in runs if (time := run.request.timestamp))
    return "" if not days else days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


@dataclass(frozen=True)
class Finding:
    """The fastest run of one model and length, and those within the spread of its loops.

    Attributes:
        group: model and lengths.
        throughput, phase: token/s, a range if it varies widely, and in which phase.
        share: "93.0% of the link limit (24.2 GiB a step at 55.4 GB/s)"; empty if unknown.
        leaders: number and name, the fastest first; `more` are not listed.
        claim: "is fastest: 342 token/s in decode, ...".
        cause: what the first spent its time with if it is far from its limit.
    """

    group: str
    throughput: str
    phase: str
    share: str
    leaders: list[tuple[int, str]]
    more: int
    claim: str
    cause: str


def count_in_words(runs: list[Run]) -> str:
    failed = sum(run.failed for run in runs)
    models = len({run.model for run in runs})
    text = f"{len(runs)} run{'s' * (len(runs) != 1)} of {models} model{'s' * (models != 1)}"
    return text + (f"; {failed} failed." if failed else "; none failed." if len(runs) > 1 else ".")


def findings(runs: list[Run]) -> list[Finding]:
    """Return one for each group with a throughput, those with the most runs first."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    found = (_finding(group) for group in sorted(groups.values(), key=len, reverse=True))
    return [finding for finding in found if finding]


def _finding(runs: list[Run]) -> Finding | None:
    phase, rate = "decode", _decode_rate
    if not any(map(rate, runs)):
        phase, rate = "total", _total_rate
    ranked = sorted((run for run in runs if rate(run)), key=rate, reverse=True)
    if not ranked:
        return None
    best, others = ranked[0], dict[str, Run]()  # others: the fastest run of each other configuration
    for run in ranked[1:]:
        if _named(run) != _named(best):
            others.setdefault(_named(run), run)
    equal = [run for run in others.values() if _within_spread(best, run, rate, f"{phase}_s")]
    leaders = [best, *equal]
    if equal:
        claim = "are the fastest and differ by less than the spread of their loops: "
        claim += f"{format_number(rate(best))} to {format_number(rate(equal[-1]))} token/s in {phase}"
    else:
        claim = "is fastest" if len(ranked) > 1 else "is the only run"
        claim += f": {format_number(rate(best))} token/s in {phase}"
        if rival := next((run for run in others.values() if run.setting != best.setting), None):
            times = rate(best) / rate(rival)
            claim += f", {times:.{2 if times < 1.1 else 1}f} times the next setting "
            claim += f"({_named(rival)}: {format_number(rate(rival))})"
            if best.loop_spread(f"{phase}_s") is None and rival.loop_spread(f"{phase}_s") is None:
                claim += "; the spread of their loops was not recorded"
    rates = [rate(run) for run in ranked if _named(run) == _named(best)]
    rates += best.loop_rates(f"{phase}_s", rate(best))
    throughput = format_number(rate(best))
    if max(rates) > UNSTEADY * min(rates):
        throughput = f"{format_number(min(rates))} to {format_number(max(rates))}"
        claim += f"; its runs or loops differ {max(rates) / min(rates):.2g}-fold, so other work was on the machine"
    named = [(run.number, _named(run)) for run in leaders[:LEADERS_NAMED]]
    more = len(leaders) - len(named)
    share, cause = share_in_words(best), cause_in_words(best)
    return Finding(best.group_name, throughput, phase, share, named, more, f"{claim}.", cause)


def _decode_rate(run: Run) -> float | None:
    return run.decode_throughput


def _total_rate(run: Run) -> float | None:
    return None if run.failed else run.measured.total_throughput


def _within_spread(best: Run, other: Run, rate: Callable[[Run], float], key: str) -> bool:
    """Return whether two throughputs differ by no more than the ranges of both runs' loops together.

    A run of one loop is assumed to spread as the other. The ranges' sum, not their overlap: the ranges of two times two equal loops
    miss each other once in three.
    """
    spreads = [run.loop_spread(key) for run in (best, other)]
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return False
    first, second = (known[0] if spread is None else spread for spread in spreads)
    return rate(best) - rate(other) <= first * rate(best) + second * rate(other)


def _named(run: Run) -> str:
    batch = run.request.batch_size
    return run.setting if batch is None else f"{run.setting}, batch {batch}"


def share_in_words(run: Run) -> str:
    """Return such as "93.0% of the link limit (24.2 GiB a step at 55.4 GB/s)"; empty if unknown."""
    if run.share_of_limit is None:
        return ""
    rates, moved = run.limit.rates, run.measured.transfers
    rate, nbytes = {
        "link": (rates.link_gb_per_s, moved.host_to_device_bytes_per_step),
        "disk": (rates.disk_gb_per_s, moved.disk_read_bytes_per_step),
        run.memory: (rates.device_copy_gb_per_s, None),
        "matmul": (rates.matmul_tflops, None),
    }.get(run.bound_by, (None, None))
    text = f"{run.share_of_limit:.1%} of the {BOUND_NAMES.get(run.bound_by, run.bound_by)} limit"
    if run.bound_by == "link_and_cores" and rates.link_beside_cores_gb_per_s and rates.cores_gb_per_s:
        return (
            f"{text} ({three_digits(rates.link_beside_cores_gb_per_s)} and {three_digits(rates.cores_gb_per_s)} GB/s)"
        )
    if not rate:
        return text
    per_step = f"{format_bytes(nbytes)} a step at " if nbytes and nbytes > 0 else ""
    return f"{text} ({per_step}{three_digits(rate)} {'TFLOP/s' if run.bound_by == 'matmul' else 'GB/s'})"


def cause_in_words(run: Run) -> str:
    """Return what a run far from its limit spent its time with, or how to find that out."""
    if run.share_of_limit is None or run.share_of_limit >= FAR_FROM_THE_LIMIT:
        return ""
    use = run.link_use
    worst = max(LINK_CAUSES, key=use.get) if use else None
    if worst and run.bound_by == "link" and use[worst] > 0.02 * sum(use.values()):
        return f"The link was idle mostly because {LINK_CAUSES[worst]}."
    if run.bound_by in ("device_memory", "host_memory", "matmul"):
        return "The rest is computing and starting operators, which a larger --batch-size shares."
    if run.bound_by == "disk":
        return "Weights in host memory need no disk (--cpu-offload), if it is large enough."
    if run.request.engine in ("deepspeed", "accelerate"):
        return "Copies wait for the computation; --engine stream copies meanwhile."
    return "--trace FILE shows what the copies and the layers waited for."
