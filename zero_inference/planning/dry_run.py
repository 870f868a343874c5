"""What `--dry-run` prints: the verdict with the predicted speed first, then what is needed where, last the options that are not the
defaults. `--json` prints all of it as one object instead (`plan_json`)."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zero_inference.config.options import DEFAULTS
from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import ProfiledMachine
from zero_inference.planning.explain import (
    Faster,
    Verdict,
    experts_in_words,
    faster_in_words,
    first_token_in_words,
    limit_in_words,
    rates_missing_for_bound,
    step_bound,
    verdict_of,
)
from zero_inference.planning.memory import HOST_MEMORY, PAGE_LOCKED, Need, log_sizes, shown
from zero_inference.planning.plan import Plan
from zero_inference.utils.format import format_bytes
from zero_inference.utils.processes import run_command

NOT_SHOWN = ("dry_run", "json", "machine", "assume")  # of what is not a default: the machine has a line of its own
Row = tuple[str, str]  # a label and what stands beside it


def print_plan(job: Job, plan: Plan | DoesNotFit, faster: Sequence[Faster] = ()) -> None:
    """The plan on stdout.

    Args:
        plan: of `job`, or why there is none.
        faster: options that are predicted to decode clearly faster.

    Raises:
        DoesNotFit: after the plan of a run that does not, for its exit code.
    """
    with contextlib.redirect_stdout(sys.stderr):  # other options are planned, and libraries print there
        verdict = verdict_of(job, plan)
    if job.config.json:
        print(json.dumps(plan_in_json(job, plan, verdict, faster), indent=1), flush=True)
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        rows = [*_rows(job, plan), ("options", _options(job))]
        rows += [("faster", faster_in_words(faster))] if faster else []
        print(_text(verdict, rows, terminal, width), end="", flush=True)
    if not verdict.fits:
        raise DoesNotFit(f"--dry-run: {job.spec.name} does not fit as asked; the plan says where, and what would fit.")


def _rows(job: Job, plan: Plan | DoesNotFit) -> list[Row]:
    rows = _machine_rows(job)
    if isinstance(plan, Plan):
        rows += _needs_rows(plan.needs)
    rows += [("weights", _weights(job, plan)), ("KV cache", _kv_cache(job))]
    if isinstance(plan, Plan):
        rows += zip(["decode", *[""] * 9], plan.weights.in_words())
    return rows + (_limit_rows(plan) if isinstance(plan, Plan) and plan.fits else [])


def _limit_rows(plan: Plan) -> list[Row]:
    """What is to be known about the predicted times."""
    rows, times = [], plan.times
    if line := limit_in_words(plan.weights, times.step.seconds if times else None):
        rows.append(("limit", line))
    if line := experts_in_words(plan.weights):
        rows.append(("experts", line))
    if times and (line := first_token_in_words(plan.weights, times)):
        rows.append(("first token", line))
    if times and times.at_least:
        rows.append(("bounds", f"times are lower bounds: {'; '.join(times.bounds_because)}"))
    if times and (left_out := times.left_out()):
        rows.append(("not counted", "; ".join(left_out)))
    return rows


def _machine_rows(job: Job) -> list[Row]:
    if not isinstance(job.machine, ProfiledMachine):
        kept = job.machine.profile()
        return [("machine", caveat)] if kept is not None and (caveat := kept.caveat()) else []
    rows = [("machine", job.machine.hardware_profile.in_words())]
    if caveat := job.machine.hardware_profile.caveat():
        rows.append(("", caveat))
    gpus, ranks = job.machine.gpus(), job.ranks.local_world_size
    if gpus > ranks:
        rows.append(("", f"planned for {ranks} of its {gpus} GPUs; for all: {run_command([], gpus)} ..."))
    return rows


def _needs_rows(needs: Sequence[Need]) -> list[Row]:
    """A line a place."""
    locked = next((need for need in needs if need.place == PAGE_LOCKED), None)
    rows = []
    for need in shown(needs):
        said = need.in_words() + ("" if need.fits else "  <- does not fit")
        if need.place == HOST_MEMORY and locked is not None and locked.needed:
            said += f"; {format_bytes(locked.needed)} of it page-locked"
        rows.append((need.place, f"{said} {need.which}".rstrip()))
    return rows


def _weights(job: Job, plan: Plan | DoesNotFit) -> str:
    plain = f"{format_bytes(job.sizes.parameter_bytes)} in {job.spec.dtype_name}"
    if not isinstance(plan, Plan):
        return plain
    config, stored = job.config, plan.weights.weight_bytes
    head = ", output head in int8" if plan.weights.cost_terms.head_plain_bytes and config.quant_bits != 8 else ""
    size = f"{format_bytes(stored)} in int{config.quant_bits}{head} ({plain})" if config.quantized else plain
    return f"{size}; {plan.weights.places_in_words()}"


def _kv_cache(job: Job) -> str:
    sizes, config = log_sizes(job), job.config
    place = "in host memory" if config.kv_offload or not job.on_gpu else "on the device"
    return (
        f"{format_bytes(sizes.cache_bytes)} {place}, for {config.batch_size} x {job.length} tokens; "
        f"hidden states {format_bytes(sizes.hidden_bytes)}"
    )


def _options(job: Job) -> str:
    """What was asked for, where that differs from the defaults."""
    config = job.config
    implied = ("cpu_offload",) if config.engine == "stream" else ()
    changed = {
        name: value
        for name, value in config.as_dict().items()
        if value != DEFAULTS[name] and name not in (*NOT_SHOWN, *implied)
    }
    said = ", ".join(f"{name}={_value(value)}{' GiB' * (name == 'gpu_memory')}" for name, value in changed.items())
    return f"different from the defaults: {said or 'none'}"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(verdict: Verdict, rows: Sequence[Row], colour: bool, width: int | None) -> str:
    """The verdict in a line and the rows below it, wrapped beside their labels on a terminal of `width` columns. Nothing is wrapped
    without one: programs look for whole lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width or 100_000, force_terminal=colour, color_system="standard" if colour else None
    )
    said = Text(verdict.said)
    said.stylize("bold green" if verdict.fits else "bold red", 0, len(verdict.word))
    console.print(said)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(f"  {label}", "bold"), Text(text))
    console.print(grid)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def plan_in_json(job: Job, plan: Plan | DoesNotFit, verdict: Verdict, faster: Sequence[Faster] = ()) -> dict[str, Any]:
    """See above."""
    found = plan if isinstance(plan, Plan) else None
    return {
        "fits": verdict.fits,
        "verdict": verdict.said,
        "config": resolved(job, found.weights.pinned if found else job.pin_weights),
        "sizes": asdict(log_sizes(job)) | {"weight_bytes": found.weights.weight_bytes if found else None},
        "needs": None if found is None else [_need(need) for need in found.needs],
        "refused": None if found else str(plan),
        "predicted": _predicted(found, verdict),
        "limit": None if found is None else _limit(found),
        "moved_per_step": None if found is None else found.weights.moved_per_step().as_dict(),
        "placement": [] if found is None else [found.weights.places_in_words(), *found.weights.in_words()],
        "changes_that_fit": verdict.changes,
        "faster": [asdict(each) for each in faster],
        "machine": _machine(job),
    }


def resolved(job: Job, pinned: bool) -> dict[str, Any]:
    """Every option as it is used."""
    return job.config.as_dict() | {
        "dtype": job.spec.dtype_name,
        "model_type": job.spec.config.model_type,
        "world_size": job.ranks.world_size,
        "pin_memory": pinned,
    }


def _need(need: Need) -> dict[str, Any]:
    return {
        "place": need.place,
        "which": need.which or None,
        "needed_bytes": need.needed,
        "reserve_bytes": need.reserve,
        "available_bytes": need.available,
        "fits": need.fits,
    }


def _predicted(plan: Plan | None, verdict: Verdict) -> dict[str, Any]:
    times = plan.times if plan else None
    return {
        "prefill_s": times.prefill.seconds if times else None,
        "decode_step_s": times.step.seconds if times else None,
        "decode_throughput": times.tokens_per_s(plan.job.config.batch_size) if plan and times else None,
        "bound_by": times.step.bound_by if times else None,
        "load_s": plan.load_s if plan else None,
        "prefill_range_s": times.prefill_range_s if times else None,
        "decode_step_range_s": times.step_range_s if times else None,
        "decode_throughput_range": times.tokens_per_s_range(plan.job.config.batch_size) if plan and times else None,
        "load_range_s": plan.load_range_s if plan else None,
        "bounds_because": list(times.bounds_because) if times else [],
        "left_out": times.left_out() if times else [],
        "unknown_because": verdict.unpredicted,
    }


def _limit(plan: Plan) -> dict[str, Any] | None:
    machine = plan.job.machine
    if not isinstance(machine, ProfiledMachine) or rates_missing_for_bound(plan.weights, machine.hardware_profile):
        return None
    if (found := step_bound(plan.weights, machine.hardware_profile)) is None:
        return None
    bound_by, step_s = found
    return {"decode_step_s": step_s, "decode_throughput": plan.job.config.batch_size / step_s, "bound_by": bound_by}


def _machine(job: Job) -> dict[str, Any] | None:
    found = job.machine.profile()
    if found is None:
        return None
    gpus = [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in found.gpus]
    return {
        "name": found.name,
        "source": found.source,
        "is_here": job.machine.is_here,
        "gpus": gpus,
        "host_memory_bytes": found.host_memory_bytes,
    }
