"""The output of `--dry-run`: the verdict with the predicted speed, the memory needed, and the options that are not the defaults.

`--json` prints all of it as one object instead (`plan_in_json`). The exit code is 0 where the plan fits, 2 where not.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zero_inference.config.options import DEFAULTS
from zero_inference.engines.base import EnginePlan, Job
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import ProfiledMachine
from zero_inference.planning.changes import changes_that_fit, more_memory, one_of
from zero_inference.planning.explain import (
    NOT_MEASURED,
    experts_in_words,
    faster_in_words,
    first_token_in_words,
    left_out,
    seconds_in_words,
    times_in_words,
    why_unknown,
)
from zero_inference.planning.memory import HOST_MEMORY, PAGE_LOCKED, Need, log_sizes, shown
from zero_inference.planning.plan import Plan
from zero_inference.planning.roofline import planned_step_bound, rates_missing_for_bound
from zero_inference.planning.search import Faster
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils.format import format_bytes, format_seconds, significant
from zero_inference.utils.processes import run_command

NOT_SHOWN = ("dry_run", "json", "machine", "assume")  # in the row of options; the machine has a row of its own
Row = tuple[str, str]  # label and text


@dataclass(frozen=True)
class Verdict:
    """The verdict on a plan: whether it fits, and its predicted speed.

    Attributes:
        line: the verdict, the predicted speed or what would fit, in a line that begins with `word`.
        changes: alternatives of options to add so that it fits; empty if it fits or none helps.
        unpredicted: why no speed is predicted; None if one is, or if it does not fit.
    """

    fits: bool
    line: str
    changes: Sequence[str] = ()
    unpredicted: str | None = None

    @property
    def word(self) -> str:
        return DoesNotFit.FITS if self.fits else DoesNotFit.VERDICT


def verdict_of(job: Job, plan: Plan | DoesNotFit) -> Verdict:
    """Return the verdict on the plan of `job`, or on why there is none."""
    if not isinstance(plan, Plan) or not plan.fits:
        if isinstance(plan, Plan):
            shortfall = f"It needs {' and '.join(need.shortage() for need in shown(plan.needs) if not need.fits)}."
        else:
            shortfall = str(plan)
        changes = changes_that_fit(job)
        advice = (
            f"It would fit with {one_of(changes)}."
            if changes
            else f"No change of options makes it fit, nor do two together: use {more_memory(job)}."
        )
        return Verdict(False, f"{DoesNotFit.VERDICT} {shortfall} {advice}", changes)
    loading = [] if plan.load_s is None else [f"loading {seconds_in_words(plan.load_s, plan.load_range_s)}"]
    if plan.times is not None:
        predicted = ", ".join([times_in_words(plan.times, job.config.batch_size), *loading])
        return Verdict(True, f"{DoesNotFit.FITS} Predicted: {predicted}.")
    machine = plan.job.machine.profile()
    unpredicted = NOT_MEASURED if machine is None else why_unknown(plan.weights, machine)
    line = f"{DoesNotFit.FITS} No speed is predicted: {unpredicted}." + "".join(f" Predicted: {it}." for it in loading)
    return Verdict(True, line, unpredicted=unpredicted)


def print_plan(job: Job, plan: Plan | DoesNotFit, faster: Sequence[Faster] = ()) -> None:
    """Print the plan of `job`, or why there is none.

    Args:
        faster: options that are predicted to decode clearly faster.

    Raises:
        DoesNotFit: after the plan of a run that does not, for its exit code.
    """
    with contextlib.redirect_stdout(sys.stderr):  # libraries print while other options are planned
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
    if not isinstance(plan, Plan):
        return [*rows, ("weights", _plain_weights(job)), ("KV cache", _kv_cache(job))]
    rows += [*_needs_rows(plan), ("weights", _weights(plan)), ("KV cache", _kv_cache(job))]
    rows += zip(["decode", *[""] * 9], plan.weights.in_words())
    if not plan.fits:
        return rows
    times = plan.times
    lines = {
        "limit": limit_in_words(plan.weights, times.step.seconds if times else None),
        "experts": experts_in_words(plan.weights),
        "first token": first_token_in_words(plan.weights, times) if times else None,
        "bounds": f"times are lower bounds: {'; '.join(times.bounds_because)}" if times and times.at_least else None,
        "not counted": "; ".join(left_out(times)) if times else None,
    }
    return rows + [(label, line) for label, line in lines.items() if line]


def _machine_rows(job: Job) -> list[Row]:
    if not isinstance(job.machine, ProfiledMachine):
        saved = job.machine.profile()
        return [("machine", caveat)] if saved is not None and (caveat := saved.caveat()) else []
    rows = [("machine", job.machine.hardware_profile.in_words())]
    if caveat := job.machine.hardware_profile.caveat():
        rows.append(("", caveat))
    gpus, ranks = job.machine.gpus(), job.ranks.local_world_size
    if gpus > ranks:
        rows.append(("", f"planned for {ranks} of its {gpus} GPUs; for all: {run_command([], gpus)} ..."))
    return rows


def _needs_rows(plan: Plan) -> list[Row]:
    locked_bytes = sum(need.needed for need in plan.needs if need.place == PAGE_LOCKED)
    rows = []
    for need in shown(plan.needs):
        text = need.in_words() + ("" if need.fits else "  <- does not fit")
        if need.place == HOST_MEMORY and locked_bytes:
            text += f"; {format_bytes(locked_bytes)} of it page-locked"
        rows.append((need.place, f"{text} {need.which}".rstrip()))
    return rows


def _plain_weights(job: Job) -> str:
    return f"{format_bytes(job.sizes.parameter_bytes)} in {job.spec.dtype_name}"


def _weights(plan: Plan) -> str:
    config, size = plan.job.config, _plain_weights(plan.job)
    if config.quantized:
        head = ", output head in int8" if plan.weights.cost_terms.head_plain_bytes and config.quant_bits != 8 else ""
        size = f"{format_bytes(plan.weights.weight_bytes)} in int{config.quant_bits}{head} ({size})"
    return f"{size}; {plan.weights.describe_location()}"


def limit_in_words(plan: EnginePlan, predicted_step_s: float | None = None) -> str | None:
    """Return the token/s by the binding rate of a described machine alone; None if it equals the prediction, and for this machine, whose
    rates a run measures."""
    machine = plan.job.machine
    if not isinstance(machine, ProfiledMachine):
        return None
    if missing := rates_missing_for_bound(plan, machine.hardware_profile):
        return f"not known without the rate of {' and '.join(missing)}"
    found = planned_step_bound(plan, machine.hardware_profile)
    if found is None:
        return "not known, because the description of the machine has no rates"
    bound_by, step_s = found
    if bound_by == "device_memory" and not plan.job.on_gpu:
        bound_by = "host_memory"
    if predicted_step_s is not None and significant(step_s) == significant(predicted_step_s):
        return None
    rate = significant(plan.job.config.batch_size / step_s)
    most = "about" if plan.cost_terms.depends_on_routing else "at most"  # tokens may choose other experts
    counted = "; the host's cores are not counted" if plan.cost_terms.cpu_rate_unknown else ""
    return (
        f"{most} {rate} token/s ({format_seconds(step_s)} a step) by the rate of {RATE_WORDS[bound_by]} alone{counted}"
    )


def _kv_cache(job: Job) -> str:
    sizes, config = log_sizes(job), job.config
    place = "in host memory" if config.kv_offload or not job.on_gpu else "on the device"
    return (
        f"{format_bytes(sizes.cache_bytes)} {place}, for {config.batch_size} x {job.length} tokens; "
        f"hidden states {format_bytes(sizes.hidden_bytes)}"
    )


def _options(job: Job) -> str:
    config = job.config
    implied = ("cpu_offload",) if config.engine == "stream" else ()
    changed = {
        name: value
        for name, value in config.as_dict().items()
        if value != DEFAULTS[name] and name not in (*NOT_SHOWN, *implied)
    }
    texts = (f"{name}={_value(value)}{' GiB' * (name == 'gpu_memory')}" for name, value in changed.items())
    return f"different from the defaults: {', '.join(texts) or 'none'}"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(verdict: Verdict, rows: Sequence[Row], colour: bool, width: int | None) -> str:
    """Return the verdict in a line and the rows below it, wrapped to `width` columns if given (programs look for whole lines)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width or 100_000, force_terminal=colour, color_system="standard" if colour else None
    )
    first_line = Text(verdict.line)
    first_line.stylize("bold green" if verdict.fits else "bold red", 0, len(verdict.word))
    console.print(first_line)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(f"  {label}", "bold"), Text(text))
    console.print(grid)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def plan_in_json(job: Job, plan: Plan | DoesNotFit, verdict: Verdict, faster: Sequence[Faster] = ()) -> dict[str, Any]:
    """Return the JSON object of `--dry-run --json`. Bytes and seconds throughout; null is a value that is not known. Keys:

    fits                    whether all needs are met
    verdict                 the line that `--dry-run` prints first
    config                  every option as it is used, with `dtype`, `pin_memory`, `model_type` and `world_size` as resolved
    sizes                   `model_bytes`, `cache_bytes`, `hidden_bytes` as in the record; `weight_bytes` as the engine stores them
    needs                   by place of one node: `place` (device memory, host memory, page-locked memory, disk), `which`,
                            `needed_bytes`, `reserve_bytes` (to stay free besides), `available_bytes`, `fits`; null where the engine
                            makes no plan because of `refused`
    refused                 why the engine makes no plan; else null
    predicted               `prefill_s`, `decode_step_s`, `decode_throughput` (token/s), `bound_by`, `load_s`; `prefill_range_s`,
                            `decode_step_range_s`, `decode_throughput_range`, `load_range_s`: [low, high], within which 9 of 10 runs
                            of this kind were, null for bounds and without a GPU; `bounds_because`: why they are lower bounds, empty
                            where they are not; `left_out`: what they do not count; `unknown_because`: why there are none
    limit                   of a described machine: `decode_step_s` by its rates alone, `decode_throughput`, `bound_by`; else null
    moved_per_step          bytes of a decode step, over all ranks, by the record's names
    placement               where the weights are, and what a decode step does, in words
    changes_that_fit        options to add, each for itself, where it does not fit
    faster                  options that are predicted to decode clearly faster: `options`, `tokens_per_s`, `times` (of the token/s
                            without them), `at_most`
    machine                 `name`, `source` (measured, datasheet, assumed), `is_here`, `gpus` (`name`, `memory_bytes`),
                            `host_memory_bytes`; null where it is this one, and was not measured
    """
    made = plan if isinstance(plan, Plan) else None
    weights, machine = made.weights if made else None, job.machine.profile()
    return {
        "fits": verdict.fits,
        "verdict": verdict.line,
        "config": job.config.as_dict()
        | {
            "dtype": job.spec.dtype_name,
            "model_type": job.spec.config.model_type,
            "world_size": job.ranks.world_size,
            "pin_memory": weights.pinned if weights else job.pin_weights,
        },
        "sizes": asdict(log_sizes(job)) | {"weight_bytes": weights.weight_bytes if weights else None},
        "needs": [_need_in_json(need) for need in made.needs] if made else None,
        "refused": None if made else str(plan),
        "predicted": _predicted_in_json(made, verdict),
        "limit": _limit_in_json(made) if made else None,
        "moved_per_step": weights.moved_per_step().as_dict() if weights else None,
        "placement": [weights.describe_location(), *weights.in_words()] if weights else [],
        "changes_that_fit": list(verdict.changes),
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


def _need_in_json(need: Need) -> dict[str, Any]:
    return {
        "place": need.place,
        "which": need.which or None,
        "needed_bytes": need.needed,
        "reserve_bytes": need.reserve,
        "available_bytes": need.available,
        "fits": need.fits,
    }


def _predicted_in_json(plan: Plan | None, verdict: Verdict) -> dict[str, Any]:
    times = plan.times if plan else None
    batch_size = plan.job.config.batch_size if plan else 0
    return {
        "prefill_s": times and times.prefill.seconds,
        "decode_step_s": times and times.step.seconds,
        "decode_throughput": times and times.tokens_per_s(batch_size),
        "bound_by": times and times.step.bound_by,
        "load_s": plan and plan.load_s,
        "prefill_range_s": times and times.prefill_range_s,
        "decode_step_range_s": times and times.step_range_s,
        "decode_throughput_range": times and times.tokens_per_s_range(batch_size),
        "load_range_s": plan and plan.load_range_s,
        "bounds_because": list(times.bounds_because) if times else [],
        "left_out": left_out(times) if times else [],
        "unknown_because": verdict.unpredicted,
    }


def _limit_in_json(plan: Plan) -> dict[str, Any] | None:
    machine = plan.job.machine
    if not isinstance(machine, ProfiledMachine) or rates_missing_for_bound(plan.weights, machine.hardware_profile):
        return None
    if (found := planned_step_bound(plan.weights, machine.hardware_profile)) is None:
        return None
    bound_by, step_s = found
    return {"decode_step_s": step_s, "decode_throughput": plan.job.config.batch_size / step_s, "bound_by": bound_by}
