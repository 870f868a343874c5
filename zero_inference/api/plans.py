"""`plan`: the configurations of `zero-inference plan` as rows to print, sort, put in a data frame and run."""

from __future__ import annotations

import argparse
import functools
import html
import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.api.keywords import check_keywords
from zero_inference.api.loading import PLACEMENT
from zero_inference.api.process import preserve_process_state
from zero_inference.config.options import DEFAULTS, OF_DRY_RUNS
from zero_inference.planning import command
from zero_inference.planning.arguments import arguments_from_keywords
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils import GB, garbage
from zero_inference.utils.format import LONG_S, format_duration, significant

if TYPE_CHECKING:
    import pandas

    from zero_inference.engines.base import Job
    from zero_inference.planning.plan import Plan
    from zero_inference.planning.search import Candidate, SearchResult

SHOWN = 10  # rows
OTHERS = ("dtype", "dummy", "trust_remote_code", "verify")
ELSEWHERE = {
    **dict.fromkeys(("json", "plot", "all"), "the result has frame(), and holds all configurations"),
    "machines": "`zero-inference plan --machines` lists the typical machines",
}
SHOWN_COLUMNS = {  # of `repr` and a notebook, by attribute
    "engine": "engine",
    "bits": "bits",
    "batch": "batch",
    "weights": "weights in",
    "tokens_per_s": "token/s",
    "tokens_per_s_range": "9 in 10 within",
    "step_s": "step (s)",
    "first_token_s": "first token (s)",
    "device_gib": "GPU (GiB)",
    "host_gib": "host (GiB)",
    "bound_by": "bound by",
}


@dataclass(frozen=True)
class PlannedRun:
    """A configuration and its predictions. Times and rates are None if it does not fit or they are unknown.

    Attributes:
        engine: "stream", "deepspeed", "accelerate" or "resident".
        bits: of a stored weight, 16, 8 or 4.
        batch: sequences, over all GPUs.
        gpus: 0 on a CPU.
        weights: their placement in words, such as "60% host (cores 30%)".
        kv_offload: whether the KV cache is in host memory.
        tokens_per_s: of decoding, all sequences together; measured if `verify` ran it.
        tokens_per_s_range, first_token_range_s: (low, high) of 9 in 10 such runs; None for a bound, and on a CPU.
        step_s, first_token_s, total_s: seconds of a decode step, of the prefill, and of the whole generation.
        device_gib: peak memory of a GPU in GiB; None on a CPU.
        host_gib: host memory in GiB.
        bound_by: the bound of a decode step, such as "link".
        fits: whether the machine has the memory.
        why_not: what is missing and what would fit; None if it fits.
        command: the shell command that runs it.
        options: the keywords that run it, `run(**best.options)`, with one GPU or none.
    """

    engine: str
    bits: int
    batch: int
    gpus: int
    weights: str
    kv_offload: bool
    tokens_per_s: float | None
    step_s: float | None
    first_token_s: float | None
    total_s: float | None
    tokens_per_s_range: tuple[float, float] | None
    first_token_range_s: tuple[float, float] | None
    device_gib: float | None
    host_gib: float
    bound_by: str | None
    fits: bool
    why_not: str | None
    command: str
    options: dict[str, Any] = field(repr=False)

    @property
    def placement(self) -> dict[str, Any]:
        """The keywords of `load`: `load(**best.placement)`."""
        return {name: value for name, value in self.options.items() if name in PLACEMENT or name == "model"}


class Plans(Sequence[PlannedRun]):
    """Configurations of a model, the best first, those that do not fit last.

    Attributes:
        verdict: whether the model runs, how fast, and with what; one sentence.
        machine: description of the machine; None if it was not measured.
        notes: what the predictions leave out, one sentence each.
    """

    def __init__(self, rows: Sequence[PlannedRun], verdict: str, machine: str | None, notes: Sequence[str]):
        self.rows, self.verdict, self.machine, self.notes = list(rows), verdict, machine, list(notes)

    @property
    def best(self) -> PlannedRun | None:
        """The first row that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    def frame(self) -> pandas.DataFrame:
        """Return all rows, with a column for each attribute except `options`."""
        import pandas

        rows = [{name: value for name, value in asdict(row).items() if name != "options"} for row in self.rows]
        return pandas.DataFrame(rows, columns=[name for name in PlannedRun.__dataclass_fields__ if name != "options"])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Plans(self.rows[index], self.verdict, self.machine, self.notes)
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def _shown_cells(self) -> list[dict[str, str]]:
        """Return a dictionary of header -> text for each of the first `SHOWN` rows that fit, without columns that are None in all."""
        fitting = [row for row in self.rows if row.fits][:SHOWN]
        names = [name for name in SHOWN_COLUMNS if any(getattr(row, name) is not None for row in fitting)]
        return [{SHOWN_COLUMNS[name]: _cell(name, getattr(row, name)) for name in names} for row in fitting]

    def _remarks(self) -> list[str]:
        """Return the lines below the table: rows that fit and are not shown, rows that do not fit, and notes."""
        hidden = sum(row.fits for row in self.rows) - SHOWN
        more = [f"{hidden} more that fit"] if hidden > 0 else []
        return [*more, *(f"does not fit: {row.why_not}" for row in self.rows if not row.fits), *self.notes]

    def __repr__(self) -> str:
        lines = [self.verdict, *([f"predicted for {self.machine}"] if self.machine else [])]
        if rows := self._shown_cells():
            widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
            lines.append("  ".join(f"{name:<{width}}" for name, width in widths.items()).rstrip())
            lines += ["  ".join(f"{row[name]:<{width}}" for name, width in widths.items()).rstrip() for row in rows]
        return "\n".join([*lines, *self._remarks()])

    def _repr_html_(self) -> str:
        rows = self._shown_cells()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ()))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(words)}</td>" for words in row.values()) + "</tr>" for row in rows
        )
        lines = [f"<b>{html.escape(self.verdict)}</b>"]
        lines += [html.escape(f"predicted for {self.machine}")] if self.machine else []
        below = "".join(f"<br>{html.escape(line)}" for line in self._remarks())
        return f"<p>{'<br>'.join(lines)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{below[4:]}</p>"


def plan(
    model: str | Path,
    *,
    machine: str | Path | None = None,
    assume: Any = None,
    goal: str = "throughput",
    batch_size: int | Sequence[int] | None = None,
    quant_bits: int | Sequence[int] | None = None,
    engine: str | Sequence[str] | None = None,
    kv_offload: bool | None = None,
    prompt_len: int = 512,
    gen_len: int = 32,
    max_gpu_memory: Any = None,
    max_host_memory: Any = None,
    num_gpus: int | Sequence[int] | None = None,
    **options: Any,
) -> Plans:
    """Return the configurations of `model` that a machine can run, with predicted speeds. No weight is read or fetched.

        found = plan("llama-3.1-70b", machine="rtx4090", assume="host=128GiB")
        print(found.verdict, found.best.command)

    Without `machine` and `assume` it is about this machine, whose rates are measured the first time, which takes a minute or two.

    Args:
        model: hub name, local folder, or a built-in preset.
        machine: a typical machine ("rtx4090", "2xrtx4090"), or a file of `zero-inference link --save FILE`.
        assume: a machine that is not there, or what is different about `machine`: "gpus=1x24GiB,host=128GiB", or a dict of the same.
        goal: what comes first: "throughput", "latency" or "memory".
        batch_size, quant_bits, engine: one value or a list to choose from; None tries all (batch 1 to 64; 16, 8, 4 bits).
        prompt_len, gen_len: tokens.
        max_gpu_memory, max_host_memory: GiB, no more of which is used.
        num_gpus: how many to use; None tries 1, 2, 4 and so on.
        **options: `dtype`, `dummy`, `trust_remote_code`, and `verify` (run so many of the best for a few steps, on this machine).

    Raises:
        TypeError: there is no such keyword.
        UsageError: the model or the machine cannot be used. A model that fits nowhere is no error: `best` is None then.
    """
    check_keywords("plan", options, (*OTHERS, *inspect.signature(plan).parameters), ELSEWHERE)
    given = {
        "machine": machine, "assume": assume, "goal": goal, "batch_size": batch_size, "quant_bits": quant_bits, "engine": engine,
        "kv_offload": kv_offload, "prompt_len": prompt_len, "gen_len": gen_len, "max_gpu_memory": max_gpu_memory,
        "max_host_memory": max_host_memory, "num_gpus": num_gpus,
    }  # fmt: skip
    args = arguments_from_keywords({"model": model, **given, **options})
    with garbage.postpone_collections(), preserve_process_state(verbose=1):
        job, found = command.search(args)
        return _plans_of(args, job, found)


def _plans_of(args: argparse.Namespace, job: Job, found: SearchResult) -> Plans:
    from zero_inference.models.spec import checkpoint_refusal
    from zero_inference.planning.explain import headline, notes, what_does_not_fit, why_none, why_not_predicted
    from zero_inference.planning.search import ranked, verify

    best = ranked(found.candidates, args.goal)
    if args.verify and best:
        best = verify(best, args.verify, args.goal, functools.partial(print, file=sys.stderr, flush=True))
    rows = [_planned_run(each.plan, each) for each in best if not each.failed]
    rows += [_planned_run(each) for each in found.unknown]
    rows += [_planned_run(each, why_not=what_does_not_fit([each])[0]) for each in found.too_large]
    remarks = notes(best)
    if found.unknown:
        remarks.append(f"speed not known of {len(found.unknown)} that fit: {why_not_predicted(found.unknown)}")
    machine = job.machine.profile()
    remarks += filter(None, [machine.caveat() if machine else None, checkpoint_refusal(args.model, args.dummy)])
    verdict = headline(best, args.goal) if found.candidates else why_none(found, args.model)
    return Plans(rows, verdict, machine.in_words() if machine else None, remarks)


def _planned_run(plan: Plan, candidate: Candidate | None = None, why_not: str | None = None) -> PlannedRun:
    """Return the row of a plan; predictions are None without a `candidate`, and it fits unless there is a reason `why_not`."""
    from zero_inference.planning.answer import row_of
    from zero_inference.planning.search import command_of

    config, row = plan.job.config, row_of(plan, candidate)
    measured, device_bytes = row["measured_tokens_per_s"] is not None, row["device_bytes"]
    options = {
        name: value
        for name, value in config.as_dict().items()
        if value != DEFAULTS[name] and name not in (*OF_DRY_RUNS, "auto", "goal")
    }
    if config.engine == "stream":
        options.pop("cpu_offload", None)  # it is implied
    return PlannedRun(
        engine=config.engine,
        bits=config.quant_bits,
        batch=config.batch_size,
        gpus=row["gpus"],
        weights=row["weights"],
        kv_offload=config.kv_offload,
        tokens_per_s=candidate.best_tokens_per_s if candidate else None,
        step_s=candidate.best_step_s if candidate else None,
        first_token_s=row["prefill_s"],
        total_s=row["total_s"],
        tokens_per_s_range=None if measured else row["tokens_per_s_range"],
        first_token_range_s=row["prefill_range_s"],
        device_gib=None if device_bytes is None else device_bytes / GB,
        host_gib=row["host_bytes"] / GB,
        bound_by=row["bound_by"],
        fits=why_not is None,
        why_not=why_not,
        command=command_of(config, plan.job.ranks.world_size),
        options={"model": config.model, "engine": config.engine, **options},
    )


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "tokens_per_s_range":
        return " to ".join(map(significant, value))
    if name == "bound_by":
        return RATE_WORDS.get(value, str(value))
    if name in ("device_gib", "host_gib"):
        return f"{value:.1f}"
    if name in ("step_s", "first_token_s") and value >= LONG_S:
        return format_duration(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
