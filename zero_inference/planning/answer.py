"""The output of `zero-inference plan`: the best configuration in a sentence, the table, remarks on it, and commands."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zero_inference.engines.base import Job
from zero_inference.errors import UsageError
from zero_inference.models.spec import checkpoint_refusal
from zero_inference.planning.arguments import SHOWN
from zero_inference.planning.explain import (
    faster_in_words,
    format_of_weights,
    headline,
    in_short,
    notes,
    place_of_weights,
    speed,
    weights_in_words,
    what_does_not_fit,
    why_none,
    why_not_predicted,
)
from zero_inference.planning.memory import HOST_MEMORY
from zero_inference.planning.plan import Plan
from zero_inference.planning.search import (
    Candidate,
    SearchResult,
    command_of,
    faster_than,
    pareto_front,
    ranked,
    verify,
)
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import LONG_S, format_gib, format_seconds, significant
from zero_inference.utils.tables import PIPED_WIDTH, Column, terminal_table, texts_of

COMMANDS = 3
GAP = 2  # characters between columns; 1 if the table would not fit
# Keys of `RATE_WORDS`, short enough for a column.
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
# The columns of the table; `_cells` returns their texts.
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


def print_answer(args: argparse.Namespace, job: Job, found: SearchResult, say: Callable[[str], None]) -> None:
    """Print the table, or the JSON object; draw the picture and run configurations if asked.

    Raises:
        UsageError: nothing fits, or nothing is predicted and that was to be drawn or run.
    """
    if not found.candidates and (not found.unknown or args.verify or args.plot):
        raise UsageError(why_none(found, args.model))
    best = ranked(found.candidates, args.goal)
    if args.verify:
        best = verify(best, args.verify, args.goal, say)
    if args.plot is not None:
        draw(best, args.plot, f"{args.model}, prompt {args.prompt_len}, {args.gen_len} new tokens: predicted")
        say(f"picture: {args.plot}")
    first_line = headline(best, args.goal) if best else why_none(found, args.model)
    if args.json:
        print(_to_json(args, job, found, best, first_line))
        return
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    most = None if args.all else SHOWN
    shown, unknown = best[:most], [] if best and not args.all else found.unknown[:most]
    for line in (first_line, _work_and_machine(args, job)):
        print(textwrap.fill(line, width, break_on_hyphens=False, break_long_words=False))
    print()
    rows = [
        *rows_of(shown, best),
        *({"place": number} | row_of(plan) for number, plan in enumerate(unknown, len(shown) + 1)),
    ]
    print(table(rows, [*(each.plan for each in shown), *unknown], args.all), end="")
    for line in _remarks(args, found, best, len(shown), len(unknown)):
        print(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False))
    print()
    machine = " ".join(
        f"--{name} {shlex.quote(value)}" for name in ("machine", "assume") if (value := getattr(args, name))
    )
    numbered = [(number, each.plan) for number, each in enumerate(shown, 1) if not each.failed]
    for number, plan in (numbered or list(enumerate(unknown, 1)))[:COMMANDS]:
        config, gpus = plan.job.config, plan.job.ranks.world_size
        several = f", {gpus} GPUs" if gpus > 1 else ""
        print(f"{number}. {_configuration(plan)}{several}, batch {config.batch_size}:")
        # a comment, because only a dry run takes these options
        print(f"   {command_of(config, gpus)}{f'  # {machine}' if machine else ''}")
    print(f"For the details of one, add {' '.join(filter(None, ('--dry-run', machine)))}.", flush=True)


def _work_and_machine(args: argparse.Namespace, job: Job) -> str:
    """Return the lengths, the machine and the limits on memory that all rows are for."""
    machine = job.machine.profile()
    limits = {"device": args.max_gpu_memory, "host": args.max_host_memory}
    used = " and ".join(f"{gib:g} GiB of {where} memory" for where, gib in limits.items() if gib is not None)
    parts = [
        f"Prompt {args.prompt_len}, {args.gen_len} new tokens",
        machine and f"on {machine.in_words()}",
        used and f"at most {used} used",
        machine and machine.caveat(),
    ]
    return f"{'; '.join(filter(None, parts))}."


def _remarks(
    args: argparse.Namespace, found: SearchResult, best: Sequence[Candidate], shown: int, unknown: int
) -> list[str]:
    """Return the lines below a table that has the first `shown` of `best`, and `unknown` configurations without a predicted speed."""
    hidden = len(best) - shown if best else len(found.unknown) - unknown
    lines = [f"{hidden} more configuration{'s fit' if hidden > 1 else ' fits'}: --all shows them"] if hidden else []
    if best:
        lines.append("*: no other has both a shorter step and more token/s")
        lines += [*notes(best[:shown]), *_ranked_after(best, args.goal)]
        lines += filter(None, (_faster_than_plainest(best, args.goal), None if args.num_gpus else _unused_gpus(best)))
    lines += filter(None, [checkpoint_refusal(args.model, args.dummy)])
    if found.too_large:
        lines += ["Does not fit:", *(f"  {line}" for line in what_does_not_fit(found.too_large))]
    if found.unknown and best:
        where = "" if unknown else "; --all lists them"
        lines.append(f"fit, but not predicted: {len(found.unknown)} more: {why_not_predicted(found.unknown)}{where}")
    return lines


def _ranked_after(best: Sequence[Candidate], goal: str) -> list[str]:
    """Return a line for each engine that would rank higher if its unmeasured overhead were nothing."""

    def is_better(each: Candidate, other: Candidate) -> bool:
        if goal == "latency":
            return each.best_step_s < other.best_step_s
        return each.best_tokens_per_s > other.best_tokens_per_s

    known = [each for each in best if not (each.lacks_overhead or each.failed)]
    demoted: dict[str, Candidate] = {}  # by engine
    for each in best:
        if each.lacks_overhead and goal != "memory" and any(is_better(each, other) for other in known):
            demoted.setdefault(each.config.engine, each)
    return [
        f"{engine} is ranked after the others, because its overhead is not in its bound: {in_short(each)}: {speed(each, goal)}"
        for engine, each in demoted.items()
    ]


def _faster_than_plainest(best: Sequence[Candidate], goal: str) -> str | None:
    """Return a line about what is clearly faster than the candidate with the fewest GPUs, most bits and smallest batch; None if nothing."""
    plainest = min(
        best, key=lambda each: (each.failed, each.world_size, -each.config.quant_bits, each.config.batch_size)
    )
    found = faster_than(plainest.plan, goal)
    return f"faster than {in_short(plainest)} ({speed(plainest, goal)}): {faster_in_words(found)}" if found else None


def _unused_gpus(candidates: Sequence[Candidate]) -> str | None:
    """Return a line about GPUs that a batch of 1 leaves unused; None where it leaves none."""
    gpus = max((each.plan.job.machine.gpus() for each in candidates), default=0)
    if gpus < 2 or all(each.config.batch_size > 1 for each in candidates):
        return None
    every = "both" if gpus == 2 else f"all {gpus}"
    return f"batch 1 runs on one of the {gpus} GPUs, because they divide the batch: --batch-size {gpus} uses {every}"


def rows_of(shown: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return a row for each of `shown`; those on the Pareto front of all `candidates` are marked."""
    front = {id(each) for each in pareto_front(candidates)}
    return [{"place": number} | row_of(each.plan, each, id(each) in front) for number, each in enumerate(shown, 1)]


def row_of(plan: Plan, candidate: Candidate | None = None, on_front: bool = False) -> dict[str, Any]:
    """Return the row of a configuration; predicted values are None without a `candidate`."""
    config, times = plan.job.config, candidate.times if candidate else None
    return {
        "engine": config.engine,
        "quant_bits": config.quant_bits,
        "gpus": plan.job.ranks.world_size if plan.job.on_gpu else 0,
        "weights": weights_in_words(plan),
        "keys_and_values": "host" if config.kv_offload or not plan.job.on_gpu else "device",
        "batch_size": config.batch_size,
        "device_bytes": plan.weights.device_peak_bytes if plan.job.on_gpu else None,
        "host_bytes": next(need.needed for need in plan.needs if need.place == HOST_MEMORY),
        "prefill_s": times and times.prefill.seconds,
        "step_s": times and times.step.seconds,
        "tokens_per_s": candidate and candidate.tokens_per_s,
        "tokens_per_s_range": times and times.tokens_per_s_range(config.batch_size),
        "prefill_range_s": times and times.prefill_range_s,
        "step_range_s": times and times.step_range_s,
        "at_most": times is not None and times.at_least,
        "total_s": candidate and candidate.total_s,
        "measured_tokens_per_s": candidate and candidate.measured_tokens_per_s,
        "bound_by": times and times.step.bound_by,
        "tried": "failed" if candidate and candidate.failed else None,
        "front": on_front,
    }


def in_json(rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return `rows` with the keys that only JSON has: command, reasons for bounds, and the token/s of a whole generation."""
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


def _to_json(
    args: argparse.Namespace, job: Job, found: SearchResult, best: Sequence[Candidate], first_line: str
) -> str:
    machine = job.machine.profile()
    names = ("model", "goal", "prompt_len", "gen_len", "max_gpu_memory", "max_host_memory")
    return json.dumps(
        {name: getattr(args, name) for name in names}
        | {
            "verdict": first_line,
            "machine": None if machine is None else machine.in_words(),
            "machine_source": None if machine is None else machine.source,
            "configurations": in_json(rows_of(best, best), best),
            "too_large": what_does_not_fit(found.too_large),
            "not_predicted": {
                "count": len(found.unknown),
                "because": why_not_predicted(found.unknown) or None,
                "configurations": [
                    {"place": number}
                    | row_of(plan)
                    | {"command": command_of(plan.job.config, plan.job.ranks.world_size)}
                    for number, plan in enumerate(found.unknown, len(best) + 1)
                ],
            },
            "checkpoint_refused": checkpoint_refusal(args.model, args.dummy),
        },
        indent=1,
    )


def table(rows: Sequence[dict[str, Any]], plans: Sequence[Plan], every_column: bool) -> str:
    """Return the rows of `plans` as a table of the terminal's width, else `PIPED_WIDTH` wide, or as wide as all columns with
    `every_column`."""
    terminal = sys.stdout.isatty()
    width = None if every_column and not terminal else shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    cells = [_cells(row, plan) for row, plan in zip(rows, plans)]
    columns = [
        column
        for column in COLUMNS
        if (every_column or column.name not in ONLY_WITH_ALL) and any(row[column.name] for row in cells)
    ]
    without_range = [column for column in columns if column.name != "range"]
    for shown, gap in ((columns, GAP), (columns, 1), (without_range, GAP), (without_range, 1)):
        plain = terminal_table(shown, texts_of(cells, shown), False, None, gap)
        if width is None or max(map(len, plain.splitlines())) <= width:
            break
    return terminal_table(shown, texts_of(cells, shown), terminal, width, gap)


def _cells(row: dict[str, Any], plan: Plan) -> dict[str, str | None]:
    """Return the texts of a row by column, bounds with ≤ or ≥; None leaves a cell empty."""
    most, least = ("≤", "≥") if row["at_most"] else ("", "")
    measured, terms = row["measured_tokens_per_s"], plan.weights.cost_terms
    cpu_share = max(terms.step_cpu.layer_share, terms.step_cpu.expert_share)

    def seconds(value: float | None) -> str:
        """Return the number alone, from `LONG_S` on with units."""
        return UNKNOWN if value is None else least + format_seconds(value).removesuffix(" s" if value < LONG_S else "")

    return {
        "place": f"{'*' if row['front'] else ''}{row['place']}",
        "configuration": _configuration(plan),
        "gpus": str(row["gpus"]) if plan.job.machine.gpus() > 1 else None,
        "batch_size": str(row["batch_size"]),
        "tokens_per_s": UNKNOWN if row["tokens_per_s"] is None else most + significant(row["tokens_per_s"]),
        "range": None if row["tokens_per_s_range"] is None else "-".join(map(significant, row["tokens_per_s_range"])),
        "measured": row["tried"] if measured is None else significant(measured),
        "step_s": seconds(row["step_s"]),
        "prefill_s": seconds(row["prefill_s"]),
        "total_s": seconds(row["total_s"]),
        "device": None if row["device_bytes"] is None else format_gib(row["device_bytes"]),
        "host": format_gib(row["host_bytes"]),
        "cores": UNKNOWN if terms.cpu_rate_unknown else f"{cpu_share:.0%}" if cpu_share else None,
        "bound_by": UNKNOWN if row["bound_by"] is None else BOUND_BY[row["bound_by"]],
    }


def _configuration(plan: Plan) -> str:
    """Return such as "stream: int4 85% host, KV device"."""
    config = plan.job.config
    kv_place = "host" if config.kv_offload or not plan.job.on_gpu else "device"
    return f"{config.engine}: {format_of_weights(plan)} {place_of_weights(plan)}, KV {kv_place}"


def draw(candidates: Sequence[Candidate], path: Path, title: str) -> None:
    """Draw latency against throughput as PNG, PDF or SVG, by the name of the file. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    kinds: dict[str, list[Candidate]] = {}
    for each in candidates:
        gpus = f", {each.world_size} GPUs" if each.world_size > 1 else ""
        kinds.setdefault(f"{each.config.engine}, {each.config.quant_bits} bits{gpus}", []).append(each)

    def points(group: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        return [1e3 * each.times.step.seconds for each in group], [each.tokens_per_s for each in group]

    for kind, group in kinds.items():
        axes.scatter(*points(group), label=kind, s=28)
    front = pareto_front(candidates)
    axes.plot(*points(front), color="black", linewidth=1, label="Pareto front")
    for each, *point in zip(front, *points(front)):
        batch = f"batch {each.config.batch_size}"
        axes.annotate(batch, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="ms a step (latency of a token)", ylabel="token/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with write_atomically(path) as part:
        figure.savefig(part, format=path.suffix.lstrip(".").lower() or "png")
    pyplot.close(figure)
