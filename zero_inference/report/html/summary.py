"""The page's headlines: which configuration is fastest, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_inference.report.advice import FAR_FROM_THE_LIMIT
from zero_inference.report.run import Run
from zero_inference.utils.format import format_bytes, format_number, three_digits

LIMIT_WORDS = {
    "link": "the link's limit",
    "link_and_cores": "the limit of link and cores",
    "disk": "the disk's limit",
    "device_memory": "device memory's limit",
    "host_memory": "host memory's limit",
    "matmul": "the limit of matrix products",
}
LEADERS_NAMED = 3
UNSTEADY = 2.0  # times the slowest: from here on one throughput is no headline
LINK_CAUSES = {
    "slot_wait_s": "the device computes longer than a layer copies",
    "host_late_s": "the host asked too late for the next layer",
    "step_start_s": "steps began late (the host prepares the token)",
}


@dataclass(frozen=True)
class Finding:
    """The fastest run of one model at one length, and those too close to it for the spread of the loops to tell apart.

    `leaders` are numbers and names, the fastest first, of which `more` are not named; `claim` is what can be said of them; `bound`
    is about the first, as are `figure` (its token/s), `phase` and `share` (of its limit, in words; empty where that is not known).
    """

    group: str
    leaders: list[tuple[int, str]]
    more: int
    claim: str
    speed: str
    bound: str
    figure: str
    phase: str
    share: str


def counted(runs: list[Run]) -> str:
    """How many runs of how many models, and how many failed."""
    failed = sum(run.failed for run in runs)
    models = len({run.model for run in runs})
    text = f"{len(runs)} run{'s' * (len(runs) != 1)} of {models} model{'s' * (models != 1)}"
    return text + (f"; {failed} failed." if failed else "; none failed." if len(runs) > 1 else ".")


def findings(runs: list[Run]) -> list[Finding]:
    """One for each group that has a good run, groups with the most runs first."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    found = [_finding(group) for group in sorted(groups.values(), key=len, reverse=True)]
    return [finding for finding in found if finding is not None]


def _finding(runs: list[Run]) -> Finding | None:
    def decode(run: Run) -> float | None:
        return run.decode_throughput

    def total(run: Run) -> float | None:
        return None if run.failed else run.measured.total_throughput

    of, phase, key = (decode, "decode", "decode_s") if any(decode(run) for run in runs) else (total, "total", "total_s")
    ranked = sorted((run for run in runs if of(run)), key=of, reverse=True)
    if not ranked:
        return None
    best, others = ranked[0], dict[str, Run]()
    for run in ranked[1:]:  # the best of each other configuration
        if _named(run) != _named(best):
            others.setdefault(_named(run), run)
    equal = [run for run in others.values() if _within_spread(best, run, of, key)]
    rival = next((run for run in others.values() if run.setting != best.setting), None)
    leaders = [best, *equal]
    named = [(run.number, _named(run)) for run in leaders[:LEADERS_NAMED]]
    speeds = format_number(of(best)) + (f" to {format_number(of(leaders[-1]))}" if equal else "")
    speed, claim = f"{speeds} token/s in {phase}", "is fastest" if len(ranked) > 1 else "is the only run"
    if equal:
        claim = "are the fastest, too close for the spread of their loops to tell apart"
    elif rival is not None:
        times = of(best) / of(rival)
        speed += f", {times:.{2 if times < 1.1 else 1 if times < 100 else 0}f} times the next setting "
        speed += f"({_named(rival)}: {format_number(of(rival))})"
        if best.loop_spread(key) is None and rival.loop_spread(key) is None:
            speed += "; the spread of their loops was not recorded"
    low, high = _range(best, [run for run in ranked if _named(run) == _named(best)], of, key)
    figure = format_number(of(best))
    if high > UNSTEADY * low:
        figure = f"{format_number(low)} to {format_number(high)}"
        speed += f"; its runs or loops differ {high / low:.{0 if high >= 10 * low else 1}f}-fold, so other work was on the machine"
    share = "" if best.share_of_limit is None else f"{best.share_of_limit:.1%} of {_limit_in_short(best)}"
    return Finding(
        best.group_name,
        named,
        len(leaders) - len(named),
        claim,
        speed,
        bound_in_words(best),
        figure,
        phase,
        share,
    )


def _range(best: Run, alike: list[Run], of: Callable[[Run], float | None], key: str) -> tuple[float, float]:
    """The slowest and the fastest of the runs `alike`, and of the loops of `best`."""
    found = [*(of(run) for run in alike), *best.loop_rates(key, of(best))]
    return min(found), max(found)


def _limit_in_short(run: Run) -> str:
    return LIMIT_WORDS.get(run.bound_by, f"the limit of {run.bound_by}")


def _within_spread(best: Run, other: Run, of: Callable[[Run], float], key: str) -> bool:
    """Whether two throughputs differ by no more than the ranges of both runs' loops together; a run of one loop is taken to spread
    as the other does. The ranges' sum, not their overlap: the ranges of two times two equal loops miss each other once in three."""
    spreads = [run.loop_spread(key) for run in (best, other)]
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return False
    first, second = (known[0] if spread is None else spread for spread in spreads)
    return of(best) - of(other) <= first * of(best) + second * of(other)


def _named(run: Run) -> str:
    batch = run.request.batch_size
    return run.setting if batch is None else f"{run.setting}, batch {batch}"


def bound_in_words(run: Run) -> str:
    """What bounds a decode step of this run, and how near it comes."""
    share = run.share_of_limit
    if share is None:
        return "What bounds it was not measured."
    what = _limit_named(run)
    if share >= FAR_FROM_THE_LIMIT:
        return f"It is bound by {what} and reaches {share:.1%} of that limit."
    return f"It reaches {share:.1%} of the nearest limit, {what}: {_what_took_the_rest(run)}."


def _what_took_the_rest(run: Run) -> str:
    """Return what a run far from its limit spent its time with, or how to find that out."""
    use = run.link_use
    worst = max(LINK_CAUSES, key=use.get) if use else None
    if worst and run.bound_by == "link" and use[worst] > 0.02 * sum(use.values()):
        return f"the link was idle mostly because {LINK_CAUSES[worst]}"
    if run.bound_by in ("device_memory", "host_memory", "matmul"):
        return "the rest is computing and starting operators, which a larger --batch-size shares"
    if run.bound_by == "disk":
        return "weights in host memory need no disk (--cpu-offload), if it is large enough"
    if run.request.engine in ("deepspeed", "accelerate"):
        return "copies wait for the computation, and --engine stream copies meanwhile"
    return "--trace FILE shows what the copies and the layers waited for"


def _limit_named(run: Run) -> str:
    def with_rate(name: str, rate: float | None, unit: str, size: float | None = None) -> str:
        of_step = f"{format_bytes(size)} a step at " if size and size > 0 else ""
        return name + (f" ({of_step}{three_digits(rate)} {unit})" if rate else "")

    names = {
        "link": lambda: with_rate(
            "the host-to-device link",
            run.limit.rates.link_gb_per_s,
            "GB/s",
            run.measured.transfers.host_to_device_bytes_per_step,
        ),
        "link_and_cores": lambda: (
            with_rate("the link", run.limit.rates.link_beside_cores_gb_per_s, "GB/s")
            + with_rate(" and the host's cores", run.limit.rates.cores_gb_per_s, "GB/s")
        ),
        "disk": lambda: with_rate(
            "the disk", run.limit.rates.disk_gb_per_s, "GB/s", run.measured.transfers.disk_read_bytes_per_step
        ),
        "device_memory": lambda: with_rate("device memory", run.limit.rates.device_copy_gb_per_s, "GB/s"),
        "host_memory": lambda: with_rate("host memory", run.limit.rates.device_copy_gb_per_s, "GB/s"),
        "matmul": lambda: with_rate("matrix products", run.limit.rates.matmul_tflops, "TFLOP/s"),
    }
    return names.get(run.bound_by, lambda: run.bound_by)()
