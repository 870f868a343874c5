"""The output of `zero-inference plan` (a table of configurations) and of `--dry-run` (one plan in rows), as text and as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero_inference.config.run_config import non_default_options, shell_words
from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.planning import search
from zero_inference.planning.changes import Faster, advice_to_fit, changes_that_fit, faster_than, what_does_not_fit
from zero_inference.planning.cost import Times, seconds_in_words
from zero_inference.planning.make_plan import make_plan, without_draft
from zero_inference.planning.memory import HOST_MEMORY, log_sizes, without_page_locked
from zero_inference.planning.plan import Plan, draft_bytes
from zero_inference.planning.roofline import planned_step_bound
from zero_inference.planning.search import SearchResult, pareto_front
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import (
    Column,
    format_bytes,
    format_gib,
    format_seconds,
    print_rows,
    shown_columns,
    significant,
)

SHOWN, SHOWN_COMMANDS = 10, 3  # rows without --all, and commands below the table
COLUMNS = (
    Column("place", ""),
    Column("configuration", "engine, weights", dtype="string"),
    Column("gpus", "GPUs"),
    Column("batch_size", "batch"),
    Column("tokens_per_s", "token/s"),
    Column("range", "9 in 10\nwithin"),
    Column("measured", "measured\ntoken/s"),
    Column("step_s", "step"),
    Column("prefill_s", "first\ntoken"),
    Column("device", "device\n(GiB)"),
    Column("host", "host\n(GiB)"),
    Column("bound_by", "bound by", dtype="string"),
)


def print_answer(args: argparse.Namespace, found: SearchResult, say: Callable[[str], None]) -> None:
    """Print the table, or the JSON object, of what was found, and draw the picture if asked.
    Raises UsageError: nothing fits, or nothing is predicted though --plot or --verify needs predictions."""
    best, verdict = found.candidates, search.headline(found, args.goal)
    if not best and (not found.unknown or args.verify or args.plot):
        raise UsageError(verdict)
    if args.plot is not None:
        draw(best, args.plot, f"{args.model}, prompt {args.prompt_len}, {args.gen_len} new tokens: predicted")
        say(f"picture: {args.plot}")
    if args.json:
        print(json.dumps(_answer_in_json(args, found, verdict), indent=1))
    else:
        _print_table(args, found, verdict)


def _answer_in_json(args: argparse.Namespace, found: SearchResult, verdict: str) -> dict[str, Any]:
    machine, rows, fitting = found.job.machine.profile(), rows_of(found), len(found.candidates)
    names = ("model", "goal", "prompt_len", "gen_len", "max_gpu_memory", "max_host_memory")
    return {name: getattr(args, name) for name in names} | {
        "verdict": verdict,
        "machine": machine and machine.in_words(),
        "machine_source": machine and machine.source,
        "configurations": rows[:fitting],
        "too_large": [what_does_not_fit(plan) for plan in found.too_large],
        "not_predicted": {
            "count": len(found.unknown),
            "because": search.why_not_predicted(found.unknown) or None,
            "configurations": rows[fitting:],
        },
    }


def _print_table(args: argparse.Namespace, found: SearchResult, verdict: str) -> None:
    best, machine = found.candidates, found.job.machine.profile()
    rows, plans = rows_of(found), [*best, *found.unknown]
    shown = len(plans) if args.all else min(SHOWN, len(best) or len(plans))
    where = f", on {machine.in_words()}" if machine else ""
    print(f"{verdict}\nPrompt {args.prompt_len}, {args.gen_len} new tokens{where}\n")
    cells = [_cells(row, plan) for row, plan in zip(rows[:shown], plans)]
    print_rows(cells, shown_columns(cells, COLUMNS), "table", gap=2)
    remarks = [f"{len(plans) - shown} more fit: --all shows them"] if shown < len(plans) else []
    remarks += ["*: no other has both a shorter step and more token/s"] if best else []
    remarks += search.notes(found)
    print("\n".join([*remarks, *(f"does not fit: {what_does_not_fit(plan)}" for plan in found.too_large)]), end="\n\n")
    options = [f"--{name} {shlex.quote(value)}" for name in ("machine", "assume") if (value := getattr(args, name))]
    comment = f"  # {' '.join(options)}" if options else ""  # only a dry run takes these options
    for row, plan in [(row, plan) for row, plan in zip(rows, plans) if not plan.failed][:SHOWN_COMMANDS]:
        print(f"{row['place']}. {plan.describe(work=True)}:\n   {row['command']}{comment}")
        print("".join(f"   {label}: {text}\n" for label, text in plan.describe_gpus()), end="")
    print(f"For the details of one, add {' '.join(['--dry-run', *options])}.", flush=True)


def rows_of(found: SearchResult) -> list[dict[str, Any]]:
    """Return the rows of the JSON object: of the candidates, those on their Pareto front marked, and of plans without predictions."""
    front = set(map(id, pareto_front(found.candidates)))
    rows = [row_of(plan, plan.times) | {"front": id(plan) in front} for plan in (*found.candidates, *found.unknown)]
    return [{"place": number} | row for number, row in enumerate(rows, 1)]


def row_of(plan: Plan, times: Times | None) -> dict[str, Any]:
    """Return the row of a configuration, with its predicted `times`."""
    config = plan.job.config
    total_s = times and times.prefill.seconds + (config.gen_len - 1) * times.step.seconds
    return {
        "engine": config.engine,
        "quant_bits": plan.job.quant_bits,
        "gpus": plan.job.num_gpus if plan.job.on_gpu else 0,
        "weights": plan.short_placement,
        "keys_and_values": "host" if config.kv_offload or not plan.job.on_gpu else "device",
        "batch_size": config.batch_size,
        "device_bytes": plan.engine_plan.device_peak_bytes if plan.job.on_gpu else None,
        "host_bytes": next(need.needed_bytes for need in plan.needs if need.place == HOST_MEMORY),
        "prefill_s": times and times.prefill.seconds,
        "step_s": times and times.step.seconds,
        "tokens_per_s": times and times.tokens_per_s,
        "tokens_per_s_range": times and times.tokens_per_s_range,
        "prefill_range_s": times and times.prefill.range_s,
        "step_range_s": times and times.step.range_s,
        "at_most": times is not None and times.is_bound,
        "total_s": total_s,
        "total_tokens_per_s": total_s and config.batch_size * config.gen_len / total_s,
        "measured_tokens_per_s": plan.measured_tokens_per_s,
        "bound_by": times and times.step.bound_by,
        "bounds_because": times and list(times.bounds_because),
        "with_host": times and times.with_host,
        "without_cores": times and times.without_cores,
        "tried": "failed" if plan.failed else None,
        "command": search.command_of(config, plan.job.ranks.world_size),
    }


def _cells(row: dict[str, Any], plan: Plan) -> dict[str, str | None]:
    """Return the texts of a row by column, bounds with ≤ or ≥."""
    most, least = ("≤", "≥") if row["at_most"] else ("", "")
    known = row["tokens_per_s"] is not None
    measured, rates, device_bytes = row["measured_tokens_per_s"], row["tokens_per_s_range"], row["device_bytes"]
    return {
        "place": f"{'*' if row['front'] else ''}{row['place']}",
        "configuration": plan.describe(),
        "gpus": str(row["gpus"]) if plan.job.machine.gpus() > 1 else None,
        "batch_size": str(row["batch_size"]),
        "tokens_per_s": most + significant(row["tokens_per_s"]) if known else None,
        "range": rates and "-".join(map(significant, rates)),
        "measured": significant(measured) if measured else row["tried"],
        "step_s": least + format_seconds(row["step_s"]) if known else None,
        "prefill_s": least + format_seconds(row["prefill_s"]) if known else None,
        "device": None if device_bytes is None else format_gib(device_bytes),
        "host": format_gib(row["host_bytes"]),
        "bound_by": row["bound_by"] and RATE_WORDS[row["bound_by"]].removeprefix("the "),
    }


def draw(candidates: Sequence[Plan], path: Path, title: str) -> None:
    """Draw latency against throughput as PNG, PDF or SVG, by the name of the file. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))

    def points(group: Sequence[Plan]) -> tuple[list[float], list[float]]:
        return [1e3 * each.times.step.seconds for each in group], [each.tokens_per_s for each in group]

    def kind(each: Plan) -> str:
        return f"{each.job.config.engine}, {each.job.format_name}, {each.job.num_gpus} GPUs"

    for label in dict.fromkeys(map(kind, candidates)):
        axes.scatter(*points([each for each in candidates if kind(each) == label]), label=label, s=28)
    front = pareto_front(candidates)
    axes.plot(*points(front), color="black", linewidth=1, label="Pareto front")
    for each, *point in zip(front, *points(front)):
        axes.annotate(
            f"batch {each.job.config.batch_size}", point, xytext=(4, 4), textcoords="offset points", fontsize=8
        )
    axes.set(xscale="log", yscale="log", xlabel="ms a step (latency of a token)", ylabel="token/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with write_atomically(path) as part:
        figure.savefig(part, format=path.suffix.lstrip(".").lower())
    pyplot.close(figure)


def print_plan(job: Job, goal: str | None) -> None:
    """Plan `job` and print the plan, or why there is none, for `--dry-run`, with options that decode clearly faster by `goal`.
    Raises DoesNotFit: after the plan of a run that does not, for its exit code."""
    with contextlib.redirect_stdout(sys.stderr):  # libraries print while options are planned
        plan, refused = None, None
        try:
            plan = make_plan(job)
            plan.check()
        except DoesNotFit as error:
            plan, refused = None, str(error)
        fits = plan is not None and plan.fits
        # changes are compared by the token/s of single steps
        faster = faster_than(plan, goal) if fits and job.config.speculate is None else []
        alone = without_draft(plan) if fits and plan.speculation else None
        changes = [] if fits else changes_that_fit(job)
    if fits:
        unknown = f"No speed is predicted: {plan.why_not_predicted}"
        predicted = f"Predicted: {_prediction(plan)}" if plan.times else unknown
        load_s, range_s = plan.predicted.load_s, plan.predicted.load_range_s
        loading = "" if load_s is None else f", loading {seconds_in_words(load_s, range_s)}"
        verdict = f"{DoesNotFit.FITS} {predicted}{loading}."
    else:
        short = [need.shortage() for need in without_page_locked(plan.needs) if not need.fits] if plan else []
        reason = f"It needs {' and '.join(short)}." if plan else refused
        verdict = f"{DoesNotFit.VERDICT} {reason} It would fit with {advice_to_fit(job, changes)}."
    if job.config.json:
        print(json.dumps(_plan_in_json(job, plan, refused, verdict, changes, faster, alone), indent=1), flush=True)
    else:
        rows = [*_rows(job, plan), ("faster", ", ".join(each.in_words() for each in faster))]
        if alone is not None:
            rows.append(("without draft", alone.in_words()))
        print("\n".join([verdict, *(f"  {label:<15}{text}" for label, text in rows if text)]), flush=True)
    if not fits:
        raise DoesNotFit(f"--dry-run: {job.spec.name} does not fit as asked; the plan says where, and what would fit.")


def _prediction(plan: Plan) -> str:
    """Return the predicted times; with a draft whose acceptance is unknown those of a pass, not token/s."""
    times, tokens = plan.times, plan.job.step_tokens
    least = "at least " if times.is_bound else ""
    first = f"first token {least}{seconds_in_words(times.prefill.seconds, times.prefill.range_s)}"
    if plan.speculation is not None:
        return f"{plan.speculation.in_words()}; {first}"
    if plan.job.config.speculate is None:
        return times.in_words()
    verified = f"a pass of up to {tokens} tokens takes {least}{format_seconds(times.step.seconds)}, {first}"
    return f"{verified}; token/s depend on how many proposals are accepted"


def _rows(job: Job, plan: Plan | None) -> list[tuple[str, str]]:
    """Return label and text of the rows below the verdict; empty texts are not shown."""
    config, machine = job.config, job.machine.profile()
    rows = []
    if machine is not None:
        rows += [("machine", "" if job.machine.is_here else machine.in_words()), ("", machine.caveat() or "")]
    weights = f"{format_bytes(job.sizes.parameter_bytes)} in {job.spec.dtype_name}"
    if plan is not None:
        rows += [(need.place, need.in_words()) for need in without_page_locked(plan.needs)]
        if job.quantized:
            weights = f"{format_bytes(plan.engine_plan.weight_bytes)} in {job.format_name} ({weights})"
        weights += f"; {plan.engine_plan.describe_location()}"
    place = "in host memory" if config.kv_offload or not job.on_gpu else "on the device"
    cache = f"{format_bytes(log_sizes(job)['cache_bytes'])} {place}, for {config.batch_size} x {job.length} tokens"
    rows += [("weights", weights), ("", job.conversion or ""), ("KV cache", cache)]
    if plan is not None and plan.draft is not None:
        taken = format_bytes(draft_bytes(plan.draft, config))
        shared = plan.draft.engine_plan.shared_layers
        skipped = len(plan.draft.job.skipped)
        own = (
            f"{taken} of its own" + f", {shared} layers shared" * bool(shared) + f", {skipped} skipped" * bool(skipped)
        )
        rows.append(("draft", f"{plan.draft.describe()}, {own}, proposes up to {config.most_proposals} tokens"))
    if plan is not None:
        rows += plan.describe_gpus()
        rows += [("decode", line) for line in plan.engine_plan.in_words()] + [("experts", plan.unchosen_experts or "")]
        if limit := _limit(plan):
            about = "about" if plan.engine_plan.cost_terms.depends_on_routing else "at most"
            rate, bound = significant(config.batch_size / limit["decode_step_s"]), RATE_WORDS[limit["bound_by"]]
            what = "token/s" if config.speculate is None else "passes/s, each of several tokens,"
            rows.append(("limit", f"{about} {rate} {what} by the rate of {bound} alone"))
        if plan.fits and plan.times:
            gain_unknown = config.speculate is not None and plan.speculation is None
            left_out = [*plan.times.left_out, *["what --speculate gains"] * gain_unknown]
            rows += [("bounds", "; ".join(plan.times.bounds_because)), ("not counted", "; ".join(left_out))]
    return [*rows, ("options", shlex.join(shell_words(non_default_options(config))))]


def _limit(plan: Plan) -> dict[str, Any] | None:
    """Return the bound of a step by the rates of a described machine alone; None for this machine, whose rates a run measures."""
    machine = plan.job.machine.other
    if machine is None or not (found := planned_step_bound(plan.engine_plan, machine)):
        return None
    bound_by, step_s = found
    config = plan.job.config
    throughput = config.batch_size / step_s if config.speculate is None else None  # a pass gives several tokens
    return {"decode_step_s": step_s, "decode_throughput": throughput, "bound_by": bound_by}


def _plan_in_json(
    job: Job,
    plan: Plan | None,
    refused: str | None,
    verdict: str,
    changes: Sequence[str],
    faster: Sequence[Faster],
    alone: Times | None,
) -> dict[str, Any]:
    """Return the JSON object of `--dry-run --json`, in bytes and seconds; null is a value that is not known.

    sizes              as in the record; `weight_bytes` as the engine stores them
    needs              by place of one node; `reserve_bytes` have to stay free besides; null where the engine makes no plan: `refused`
    predicted          ranges are [low, high], within which 9 of 10 runs of this kind were, null for bounds and without a GPU;
                       `bounds_because`: why times are lower bounds; `left_out`: what they do not count
    limit              of a described machine, by its rates alone
    moved_per_step     bytes of a decode step, over all ranks, by the record's names
    gpus               where one process drives several: layers, peak bytes and bytes over the link in a decode step of each
    draft              of --speculate, if it is a model: bytes of its own weights and KV cache, layers that it shares and skips; for self
                       `predicted`: seconds of a pass and of its proposals, and tokens of a pass with the assumed acceptance
    changes_that_fit   options to add, each for itself, where it does not fit
    faster             options that are predicted to decode clearly faster; `times` of the token/s without them
    """
    weights, machine, times = plan and plan.engine_plan, job.machine.profile(), plan and plan.times
    fits = plan is not None and plan.fits
    resolved = {
        "dtype": job.spec.dtype_name,
        "model_type": job.spec.config.model_type,
        "world_size": job.ranks.world_size,
        "num_gpus": plan.job.num_gpus if plan and job.on_gpu else job.config.num_gpus,
        "pin_memory": weights.pinned if weights else job.pin_weights,
    }
    return {
        "fits": fits,
        "verdict": verdict,
        "config": job.config.as_dict() | resolved,
        "sizes": log_sizes(job) | {"weight_bytes": weights and weights.weight_bytes},
        "needs": plan and [asdict(need) | {"which": need.which or None, "fits": need.fits} for need in plan.needs],
        "refused": refused,
        "predicted": {
            "prefill_s": times and times.prefill.seconds,
            "decode_step_s": times and times.step.seconds,
            "decode_throughput": plan.tokens_per_s
            if times and (plan.speculation or not job.config.speculate)
            else None,
            "bound_by": times and times.step.bound_by,
            "load_s": plan and plan.predicted.load_s,
            "prefill_range_s": times and times.prefill.range_s,
            "decode_step_range_s": times and times.step.range_s,
            "decode_throughput_range": times and times.tokens_per_s_range,
            "load_range_s": plan and plan.predicted.load_range_s,
            "bounds_because": list(times.bounds_because) if times else [],
            "left_out": times.left_out if times else [],
            "unknown_because": plan.why_not_predicted if plan and fits else None,
        },
        "limit": plan and _limit(plan),
        "moved_per_step": weights and weights.moved_per_step().as_dict(),
        "gpus": plan and (plan.by_gpu or None),
        "draft": plan
        and plan.draft
        and {
            "placement": plan.draft.describe(),
            "bytes": draft_bytes(plan.draft, job.config),
            "shared_layers": plan.draft.engine_plan.shared_layers,
            "skipped_layers": len(plan.draft.job.skipped),
            "predicted": plan.speculation and asdict(plan.speculation),
            "decode_throughput_without": alone and alone.tokens_per_s,
        },
        "placement": [weights.describe_location(), *weights.in_words()] if weights else [],
        "changes_that_fit": list(changes),
        "faster": [asdict(each) for each in faster],
        "machine": machine
        and {
            "name": machine.name,
            "source": machine.source,
            "is_here": job.machine.is_here,
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in machine.gpus],
            "host_memory_bytes": machine.host_memory_bytes,
        },
    }
