"""Whether a run fits, how fast it is predicted to be, and what would fit where it does not: the first line of `--dry-run`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.engines.base import EnginePlan, Job
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import ProfiledMachine
from zero_inference.planning.changes import changes_that_fit, more_memory, one_of
from zero_inference.planning.cost import (
    peers_s,
    rate_in_words,
    seconds_in_words,
    unknown_in_words,
    unknown_rates,
    why_unknown,
)
from zero_inference.planning.memory import DEVICE_MEMORY, HOST_MEMORY, PAGE_LOCKED, shown
from zero_inference.planning.plan import Plan
from zero_inference.planning.roofline import step_bounds, step_work
from zero_inference.planning.search import Candidate, SearchResult, command_of, pareto_front, ranked
from zero_inference.records.hardware import RATE_WORDS, Rates
from zero_inference.utils.format import (
    LONG_S,
    format_bytes,
    format_bytes_pair,
    format_gib,
    format_gib_rounded_up,
    format_seconds,
    significant,
)
from zero_inference.utils.tables import PIPED_WIDTH, Column, terminal_table, texts_of

if TYPE_CHECKING:
    from zero_inference.hardware.profile import HardwareProfile
    from zero_inference.planning.cost import Times


NOT_MEASURED = "there are no current measurements of this machine (zero-inference link --save makes them, once)"


@dataclass(frozen=True)
class Faster:
    """A change of options that is predicted to decode clearly faster.

    Attributes:
        options: to add to the command, such as `--quant-bits 4`.
        tokens_per_s: of decoding with them.
        times: how many times the token/s without them.
        at_most: they are an upper bound.
    """

    options: str
    tokens_per_s: float
    times: float
    at_most: bool


def faster_in_words(found: Sequence[Faster]) -> str:
    """Such as "--quant-bits 4 gives 3.39 token/s (4.8 times as many), --batch-size 64 gives 38.3 token/s (54 times)"."""
    return ", ".join(
        f"{each.options} gives {'at most ' if each.at_most else ''}{significant(each.tokens_per_s)} token/s "
        f"({significant(each.times) if each.times >= 10 else f'{each.times:.1f}'} times{' as many' if not number else ''})"
        for number, each in enumerate(found)
    )


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        why: it does not fit, a sentence; None where it does.
        changes: what to add to the command so that it fits, each for itself; empty where it fits, or where nothing helps.
        unpredicted: why nobody knows how fast it is; None where that is predicted, or where it does not fit.
        said: all of it in a line that begins with `word`.
    """

    fits: bool
    why: str | None
    changes: list[str]
    unpredicted: str | None
    said: str

    @property
    def word(self) -> str:
        return DoesNotFit.FITS if self.fits else DoesNotFit.VERDICT


def verdict_of(job: Job, plan: Plan | DoesNotFit) -> Verdict:
    """Of the plan of `job`, or of why there is none."""
    if isinstance(plan, Plan) and plan.fits:
        unpredicted = _why_unpredicted(plan)
        return Verdict(True, None, [], unpredicted, f"{DoesNotFit.FITS} {_speed(plan, unpredicted)}")
    why = _shortages(plan) if isinstance(plan, Plan) else str(plan)
    changes = changes_that_fit(job)
    advice = (
        f"It would fit with {one_of(changes)}."
        if changes
        else f"No change of options makes it fit, nor do two together: use {more_memory(job)}."
    )
    return Verdict(False, why, changes, None, f"{DoesNotFit.VERDICT} {why} {advice}")


def _shortages(plan: Plan) -> str:
    return f"It needs {' and '.join(need.shortage() for need in shown(plan.needs) if not need.fits)}."


def _why_unpredicted(plan: Plan) -> str | None:
    if plan.times is not None:
        return None
    description = plan.job.machine.profile()
    return NOT_MEASURED if description is None else why_unknown(plan.weights, description)


def _speed(plan: Plan, unpredicted: str | None) -> str:
    loading = None if plan.load_s is None else f"loading {seconds_in_words(plan.load_s, plan.load_range_s)}"
    if plan.times is None:
        return f"No speed is predicted: {unpredicted}." + (f" Predicted: {loading}." if loading else "")
    return f"Predicted: {', '.join(filter(None, (plan.times.in_words(plan.job.config.batch_size), loading)))}."


def limit_in_words(plan: EnginePlan, predicted_step_s: float | None = None) -> str | None:
    """The most token/s of decoding with `plan` by one rate of the machine alone; None where that is what is predicted anyway, and where
    the plan is for this machine, whose rates a run measures."""
    machine = plan.job.machine
    if not isinstance(machine, ProfiledMachine):
        return None
    if missing := rates_missing_for_bound(plan, machine.hardware_profile):
        return f"not known without the rate of {' and '.join(missing)}"
    found = step_bound(plan, machine.hardware_profile)
    if found is None:
        return "not known, because the description of the machine has no rates"
    bound_by, step_s = found
    if bound_by == "device_memory" and not plan.job.on_gpu:
        bound_by = "host_memory"
    if predicted_step_s is not None and significant(step_s) == significant(predicted_step_s):
        return None
    most = plan.job.config.batch_size / step_s
    bound = (
        "about" if plan.cost_terms.depends_on_routing else "at most"
    )  # tokens may choose other experts than are expected
    counted = "; the host's cores are not counted" if plan.cost_terms.cpu_rate_unknown else ""
    return f"{bound} {significant(most)} token/s ({format_seconds(step_s)} a step) by the rate of {RATE_WORDS[bound_by]} alone{counted}"


def experts_in_words(plan: EnginePlan) -> str | None:
    """Return a line about experts that a decode step copies, or reads from disk, though no token chose them; None where it moves none of
    these."""
    sizes, (number, chosen), job = plan.job.sizes, plan.job.spec.experts, plan.job
    idle = sizes.idle_expert_bytes / max(1, sizes.parameter_bytes)
    copies = job.on_gpu or plan.cost_terms.copies_within_host
    if not idle or (
        plan.fetched_bytes - plan.cost_terms.chosen_expert_bytes if copies else plan.disk_bytes
    ) <= plan.weight_bytes * (1 - idle):
        return None
    how = "copies" if copies else "reads from disk"
    where = "" if job.on_gpu or not copies else " within host memory"
    return f"{job.config.engine} {how} all {number} experts of a layer{where} in each step, a token uses {chosen}: {plan.why_whole_layers}"


def first_token_in_words(plan: EnginePlan, times: Times) -> str | None:
    """Return why the first token is predicted to take less than a step; None where it is not."""
    if times.prefill.seconds >= times.step.seconds:
        return None
    if plan.cost_terms.prefill_fetched_bytes < plan.fetched_bytes:
        return "the first token takes less than a step: its first layers are still on the device from the generation before"
    return "the first token takes less than a step, which also copies the KV cache" if plan.carried_kv_bytes else None


def rates_missing_for_bound(plan: EnginePlan, description: HardwareProfile) -> list[str]:
    """What a step moves without a rate being known for it."""
    moved = plan.moved_per_step()
    over_link = plan.job.on_gpu and moved.host_to_device_bytes_per_step and not description.link_gb_per_s
    from_disk = moved.disk_read_bytes_per_step and not description.disk_gb_per_s
    return [name for name, lacks in (("the link", over_link), ("the disk", from_disk)) if lacks]


def step_bound(plan: EnginePlan, description: HardwareProfile) -> tuple[str, float] | None:
    """The rate that binds a decode step, a key of `RATE_WORDS`, and the seconds that the step takes at least; None without any rate."""
    job, moved = plan.job, plan.moved_per_step()
    work = step_work(job, plan.weight_bytes, moved.cores_bytes_per_step or 0)
    floors = step_bounds(_rates(plan, description), moved, work, job.on_gpu).as_dict()
    over_link_s, others_s = peers_s(plan, description, plan.fetched_bytes)
    floors |= {
        "cores": plan.cost_terms.cpu_alone_s,
        "peers": others_s,
        "link": (floors.get("link") or 0.0) + over_link_s,
    }
    known = {name: seconds for name, seconds in floors.items() if seconds}
    return max(known.items(), key=lambda each: each[1]) if known else None


def _rates(plan: EnginePlan, description: HardwareProfile) -> Rates:
    """As a run there would measure them. Each GPU has a link of its own, each node a disk."""
    job, terms = plan.job, plan.cost_terms
    return Rates(
        link_gb_per_s=(description.link_gb_per_s or float("inf")) * job.ranks.world_size,
        link_spread=0.0,
        link_kind="",
        device_copy_gb_per_s=description.device_gb_per_s,
        matmul_tflops=description.matmul_tflops.get(job.spec.dtype_name),
        disk_gb_per_s=None if description.disk_gb_per_s is None else description.disk_gb_per_s * job.ranks.num_nodes,
        link_beside_cores_gb_per_s=terms.link_beside_cpu_gb_per_s,
        cores_gb_per_s=terms.cpu_beside_link_gb_per_s,
    )


DEVICE = "free device memory"


def least_machine(plans: list[Plan]) -> str:
    """What that one of `plans` needs which asks for least beyond what is there, in words; device memory, of which it is hardest to get
    more, counts first."""
    plan = min(plans, key=_needed_beyond)
    gpus, config = plan.job.ranks.world_size, plan.job.config
    needs = " and ".join(
        f"{format_gib_rounded_up(nbytes)} of {place}{f' on each of {gpus} GPUs' if place == DEVICE and gpus > 1 else ''}"
        for place, nbytes in _needed(plan).items()
    )
    least = f" --gpu-memory 0 --ring-depth {MIN_RING_DEPTH}" if config.ring_depth else ""
    return (
        f"{needs} (--engine {config.engine} --quant-bits {config.quant_bits} --batch-size {config.batch_size}{least})"
    )


def _needed_beyond(plan: Plan) -> tuple[int, int, int]:
    """Bytes of device memory that are not there, of host memory and disk that are not there or not known, and of all that it needs."""
    there = {need.place: need.available or 0 for need in plan.needs} | {DEVICE: plan.job.free_device_bytes or 0}
    needed = _needed(plan)
    short = {place: max(0, nbytes - there[place]) for place, nbytes in needed.items()}
    gpus = plan.job.ranks.world_size
    short_on_device, on_device = gpus * short.pop(DEVICE, 0), gpus * needed.pop(DEVICE, 0)
    return short_on_device, sum(short.values()), on_device + sum(needed.values())


def _needed(plan: Plan) -> dict[str, int]:
    """Free bytes by place; what is page-locked is host memory too."""
    return {
        DEVICE if need.place == DEVICE_MEMORY else need.place: need.with_reserve
        for need in plan.needs
        if need.with_reserve and need.place != PAGE_LOCKED
    }


GAP = 2  # characters between columns, 1 where the table would not fit
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# By key of `RATE_WORDS`, short enough for a column.
BOUND_BY = {
    "device_memory": "memory",
    "host_memory": "memory",
    "matmul": "products",
    "link": "link",
    "peers": "GPU copies",
    "link_and_cores": "link+cores",
    "cores": "cores",
    "disk": "disk",
    "launches": "launches",
}
# Numbers are texts by then: a bound stands before them.
COLUMNS = (
    Column("place", ""),
    Column("configuration", "engine: weights, KV cache", dtype="string"),
    Column("gpus", "GPUs"),
    Column("batch_size", "batch"),
    Column("tokens_per_s", "token/s"),
    Column("range", "9 in 10\nwithin"),
    Column("measured", "measured\ntoken/s"),
    Column("step_s", "step\n(s)"),
    Column("prefill_s", "first\ntoken (s)"),
    Column("total_s", "total\n(s)"),
    Column("device", "device\n(GiB)"),
    Column("host", "host\n(GiB)"),
    Column("cores", "on the\ncores"),
    Column("bound_by", "bound by", dtype="string"),
)
UNKNOWN = "?"
ONLY_WITH_ALL = ("total_s", "cores")


def rows_of(candidates: Sequence[Candidate], everyone: Sequence[Candidate]) -> list[dict[str, Any]]:
    """A row of `candidates` each; those on the Pareto front of `everyone` are marked."""
    front = {id(each) for each in pareto_front(everyone)}
    return [
        _row(place, each.plan)
        | {
            "prefill_s": each.times.prefill.seconds,
            "step_s": each.times.step.seconds,
            "tokens_per_s": each.tokens_per_s,
            "tokens_per_s_range": each.times.tokens_per_s_range(each.config.batch_size),
            "prefill_range_s": each.times.prefill_range_s,
            "step_range_s": each.times.step_range_s,
            "at_most": each.times.at_least,
            "total_s": each.total_s,
            "measured_tokens_per_s": each.measured_tokens_per_s,
            "bound_by": each.times.step.bound_by,
            "tried": "failed" if each.failed else None,
            "front": id(each) in front,
        }
        for place, each in enumerate(candidates, 1)
    ]


def rows_without_times(plans: Sequence[Plan], first: int) -> list[dict[str, Any]]:
    """Return rows of configurations that fit and are not predicted, numbered from `first` on."""
    times = ("prefill_s", "step_s", "tokens_per_s", "total_s", "measured_tokens_per_s", "bound_by", "tried")
    unknown = (*times, "tokens_per_s_range", "prefill_range_s", "step_range_s")
    return [
        _row(place, plan) | dict.fromkeys(unknown) | {"at_most": False, "front": False}
        for place, plan in enumerate(plans, first)
    ]


def _row(place: int, plan: Plan) -> dict[str, Any]:
    """Return the part of a row that needs no prediction."""
    config = plan.job.config
    return {
        "place": place,
        "engine": config.engine,
        "quant_bits": config.quant_bits,
        "gpus": plan.job.ranks.world_size if plan.job.on_gpu else 0,
        "weights": weights_in_words(plan),
        "keys_and_values": "host" if config.kv_offload or not plan.job.on_gpu else "device",
        "batch_size": config.batch_size,
        "device_bytes": plan.weights.device_peak_bytes if plan.job.on_gpu else None,
        "host_bytes": next(need.needed for need in plan.needs if need.place == HOST_MEMORY),
    }


def weights_in_words(plan: Plan) -> str:
    """Where they are, and what share of the layers, or of their experts, the host's cores multiply."""
    words, cores = place_of_weights(plan), max(plan.weights.cost_terms.step_cpu[:2])
    if not plan.weights.footprint.host or not plan.job.on_gpu:
        return words
    if plan.weights.cost_terms.cpu_rate_unknown:
        return f"{words} (cores not known)"
    return f"{words} (cores {cores:.0%})" if cores else words


def place_of_weights(plan: Plan) -> str:
    """`host`, `85% host` (the rest is on the device), `device` or `disk`."""
    weights = plan.weights
    host = weights.footprint.host * plan.job.ranks.local_world_size
    if weights.footprint.disk:
        return "disk"
    if not plan.job.on_gpu:
        return "host"
    if not host:
        return "device"
    return "host" if host > 0.99 * weights.weight_bytes else f"{host / max(1, weights.weight_bytes):.0%} host"


def kind_of_weights(plan: Plan) -> str:
    """`int4`, or the dtype: `bf16`."""
    config = plan.job.config
    return f"int{config.quant_bits}" if config.quantized else SHORT_DTYPES[plan.job.spec.dtype_name]


def configuration_in_words(plan: Plan) -> str:
    """Without batch and GPUs: `stream: int4 85% host, KV device`."""
    config = plan.job.config
    keys = "host" if config.kv_offload or not plan.job.on_gpu else "device"
    return f"{config.engine}: {kind_of_weights(plan)} {place_of_weights(plan)}, KV {keys}"


def in_json(rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The same rows with their commands, what is not in their times, and what both passes give together."""
    return [
        row
        | {
            "bounds_because": list(each.times.bounds_because),
            "with_host": each.times.with_host,
            "without_cores": each.times.without_cores,
            "total_tokens_per_s": each.config.batch_size * each.config.gen_len / each.total_s,
            "command": each.command(),
        }
        for row, each in zip(rows, candidates)
    ]


def without_times_in_json(plans: Sequence[Plan], first: int) -> list[dict[str, Any]]:
    """The rows of configurations that are not predicted, with their commands."""
    return [
        row | {"command": command_of(plan.job.config, plan.job.ranks.world_size)}
        for row, plan in zip(rows_without_times(plans, first), plans)
    ]


def table(
    rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate], every_column: bool, unknown: Sequence[Plan] = ()
) -> str:
    """For the terminal, or `PIPED_WIDTH` wide; with every column as wide as that takes where it is no terminal.

    Args:
        rows: of `candidates`, and below them of `unknown`.
    """
    terminal = sys.stdout.isatty()
    width = None if every_column and not terminal else shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    texts = [_texts(row, each) for row, each in zip(rows, [*(each.plan for each in candidates), *unknown])]
    columns = [
        column
        for column in COLUMNS
        if (every_column or column.name not in ONLY_WITH_ALL) and any(row[column.name] for row in texts)
    ]
    without_range = [column for column in columns if column.name != "range"]
    tried = ((columns, GAP), (columns, 1), (without_range, GAP), (without_range, 1))
    shown, gap = next((each for each in tried if width is None or _width(texts, *each) <= width), tried[-1])
    return terminal_table(shown, texts_of(texts, shown), terminal, width, gap)


def _width(texts: Sequence[dict[str, Any]], columns: Sequence[Column], gap: int) -> int:
    """Return how wide the table is."""
    return max(map(len, terminal_table(columns, texts_of(texts, columns), False, None, gap).splitlines()))


def _texts(row: dict[str, Any], plan: Plan) -> dict[str, str | None]:
    most, least = ("≤", "≥") if row["at_most"] else ("", "")
    measured = row["measured_tokens_per_s"]
    cores = max(plan.weights.cost_terms.step_cpu[:2])
    return {
        "place": f"{'*' if row['front'] else ''}{row['place']}",
        "configuration": configuration_in_words(plan),
        "gpus": str(row["gpus"]) if plan.job.machine.gpus() > 1 else None,
        "batch_size": str(row["batch_size"]),
        "tokens_per_s": UNKNOWN if row["tokens_per_s"] is None else most + significant(row["tokens_per_s"]),
        "range": None if row["tokens_per_s_range"] is None else "-".join(map(significant, row["tokens_per_s_range"])),
        "measured": row["tried"] if measured is None else significant(measured),
        "device": None if row["device_bytes"] is None else format_gib(row["device_bytes"]),
        "host": format_gib(row["host_bytes"]),
        "cores": UNKNOWN if plan.weights.cost_terms.cpu_rate_unknown else f"{cores:.0%}" if cores else None,
        "bound_by": UNKNOWN if row["bound_by"] is None else BOUND_BY[row["bound_by"]],
    } | {name: _seconds(row[name], least) for name in ("step_s", "prefill_s", "total_s")}


def _seconds(value: float | None, bound: str) -> str:
    """The number alone, or a duration where that is easier to read."""
    return UNKNOWN if value is None else bound + format_seconds(value).removesuffix(" s" if value < LONG_S else "")


FIRST = {"throughput": "Fastest", "latency": "Shortest decode step", "memory": "Least memory"}  # by goal


def headline(best: Sequence[Candidate], goal: str) -> str:
    """What comes first, and beside it how fast a single sequence is; where that comes first, how fast the largest rate is.

    Args:
        best: all that fit, the best first.
    """
    first = best[0]
    line = f"{FIRST[goal]}: {in_short(first)}: {speed(first, goal)}."
    good = [each for each in best if not each.failed]
    if first.config.batch_size > 1:
        others = [each for each in ranked(good, "latency") if each.config.batch_size == 1]
        about = "For one sequence"
    else:
        others, about = ranked(good, "throughput"), "Most token/s"
    if others and others[0] is not first:
        line += f" {about}: {in_short(others[0])}: {speed(others[0], goal)}."
    return line


def in_short(candidate: Candidate) -> str:
    """Return such as "stream engine, int4, batch 1"."""
    gpus = f", {candidate.world_size} GPUs" if candidate.world_size > 1 else ""
    kind = kind_of_weights(candidate.plan)
    return f"{candidate.config.engine} engine, {kind}, batch {candidate.config.batch_size}{gpus}"


def speed(candidate: Candidate, goal: str) -> str:
    """Return the token/s of `candidate`, with a step's time or the memory where `goal` ranks by these."""
    most, least = ("at most ", "at least ") if candidate.times.at_least else ("", "")
    within = candidate.times.tokens_per_s_range(candidate.config.batch_size)
    predicted = rate_in_words(candidate.tokens_per_s, within)
    if candidate.measured_tokens_per_s is not None:
        return f"{significant(candidate.measured_tokens_per_s)} token/s measured, {most}{predicted} predicted"
    parts = [f"{most}{predicted} token/s"]
    if goal == "latency":
        step_s = seconds_in_words(candidate.times.step.seconds, candidate.times.step_range_s)
        parts.insert(0, f"{least}{step_s} a step")
    if goal == "memory":
        parts.insert(0, f"{format_bytes(candidate.memory_bytes)} of device and host memory")
    return f"{', '.join(parts)} predicted"


def notes(candidates: Sequence[Candidate]) -> list[str]:
    """What to know about the times in a table of `candidates`."""
    lines = []
    reasons = dict.fromkeys(reason for each in candidates for reason in each.times.bounds_because)
    if reasons:
        lines.append(f"≤, ≥: bounds, because {'; '.join(reasons)}")
    left_out = dict.fromkeys(what for each in candidates for what in each.times.left_out())
    if left_out:
        lines.append(f"not counted: {'; '.join(left_out)}")
    others = [
        line
        for each in candidates
        for line in (first_token_in_words(each.plan.weights, each.times), experts_in_words(each.plan.weights))
    ]
    return [*lines, *dict.fromkeys(filter(None, others))]


def gpus_in_words(candidates: Sequence[Candidate]) -> str | None:
    """Return what a batch of 1 leaves unused of several GPUs, and what would use them; None where nothing is to be said."""
    gpus = max((each.plan.job.machine.gpus() for each in candidates), default=0)
    if gpus < 2 or all(each.config.batch_size > 1 for each in candidates):
        return None
    every = "both" if gpus == 2 else f"all {gpus}"
    return f"batch 1 runs on one of the {gpus} GPUs, because they divide the batch: --batch-size {gpus} uses {every}"


def ranked_behind(best: Sequence[Candidate], goal: str) -> list[str]:
    """Engines with a better bound than some that come before them, a line for each: what they leave out is not known.

    Args:
        best: all that fit, the best first.
    """
    known = [each for each in best if not (each.lacks_overhead or each.failed)]
    behind: dict[str, Candidate] = {}
    for each in best:
        if each.lacks_overhead and goal != "memory" and any(_is_better(each, other, goal) for other in known):
            behind.setdefault(each.config.engine, each)
    return [
        f"{engine} is ranked after the others, because its overhead is not in its bound: {in_short(each)}: {speed(each, goal)}"
        for engine, each in behind.items()
    ]


def _is_better(each: Candidate, other: Candidate, goal: str) -> bool:
    if goal == "latency":
        return each.best_step_s < other.best_step_s
    return each.best_tokens_per_s > other.best_tokens_per_s


def what_does_not_fit(plans: Sequence[Plan]) -> list[str]:
    """A line for each engine and number of bits, with what would make it fit."""
    lines = []
    for plan in plans:
        config = plan.job.config
        short = next(
            (need for need in plan.needs if not need.fits), plan.needs[0]
        )  # its engine may refuse it all the same
        where = " on the device" if plan.job.on_gpu else " in host memory"
        place = {"cpu": " in host memory", "disk": " on disk"}.get(config.offload, where)
        gpus = f", {plan.job.ranks.world_size} GPUs" if plan.job.ranks.world_size > 1 else ""
        name = f"{config.engine} {kind_of_weights(plan)}{'' if config.engine == 'stream' else place}{gpus}"
        needed, there, unit = format_bytes_pair(short.with_reserve, short.available or 0)
        line = f"{name}: {needed} {unit} of {short.place}, {there} {unit} free"
        if changes := changes_that_fit(plan.job):
            line += f"; fits with {changes[0]}"
        lines.append(line)
    return lines


def why_none(found: SearchResult, model: str) -> str:
    """Why no configuration of `model` can be shown; of one that fits nowhere, the smallest machine that would do."""
    if found.unknown:
        many, why = len(found.unknown) > 1, why_not_predicted(found.unknown)
        remedy = "" if "link --save" in why else "; measure it with zero-inference link --save, or add it to --assume"
        fit = f"{len(found.unknown)} configurations of {model} fit" if many else f"1 configuration of {model} fits"
        return f"{fit}, but how fast {'they are' if many else 'it is'} is not known: {why}{remedy}."
    if not found.too_large:
        return f"{model}: none of these engines can run it with these options; drop some of them."
    available = {
        need.name: need.available
        for plan in found.too_large
        for need in plan.needs
        if need.available is not None and need.place != PAGE_LOCKED
    }
    there = ", ".join(f"{format_bytes(nbytes)} of {place}" for place, nbytes in available.items())
    return (
        f"none of {len(found.too_large)} ways to run {model} fits ({there}); the smallest machine that could run it has "
        f"{least_machine(found.too_large)}."
    )


def why_not_predicted(plans: Sequence[Plan]) -> str:
    """Return why no speed is predicted for them; each reason, and each rate that is not known, once."""
    rates: dict[str, None] = {}
    reasons: dict[str, None] = {}
    for plan in plans:
        description = plan.job.machine.profile()
        names = [] if description is None else unknown_rates(plan.weights, description)
        rates |= dict.fromkeys(names)
        if description is None:
            reasons[NOT_MEASURED] = None
        elif not names:
            reasons[why_unknown(plan.weights, description)] = None
    of_rates = [unknown_in_words(list(rates), plans[0].job.machine.is_here)] if rates else []
    return "; ".join([*of_rates, *reasons])


def commands(plans: Sequence[tuple[int, Plan]], where: str) -> list[str]:
    """Return how to run `plans`, each with its place in the table, the command on a line of its own to be copied.

    Args:
        where: the options that name the machine, which a run does not take; they follow as a comment.
    """
    lines = []
    for place, plan in plans:
        config, gpus = plan.job.config, plan.job.ranks.world_size
        several = f", {gpus} GPUs" if gpus > 1 else ""
        lines.append(f"{place}. {configuration_in_words(plan)}{several}, batch {config.batch_size}:")
        lines.append(f"   {command_of(config, gpus)}{f'  # {where}' if where else ''}")
    return lines
