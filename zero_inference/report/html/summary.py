"""The headlines of the page: the fastest configuration of each model and length, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_inference.report.advice import FAR_FROM_THE_LIMIT
from zero_inference.report.run import BOUND_NAMES, Run
from zero_inference.utils.format import format_bytes, format_number, three_digits

LEADERS_NAMED = 3
UNSTEADY = 2.0  # times the slowest throughput: from here on the headline is a range
LINK_CAUSES = {
    "slot_wait_s": "the device computes longer than a layer copies",
    "host_late_s": "the host asked too late for the next layer",
    "step_start_s": "steps began late (the host prepares the token)",
}


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
