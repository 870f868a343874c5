"""`plan`: the configurations of `zero-inference plan` as rows to print, sort, put in a data frame and run."""

from __future__ import annotations

import functools
import html
import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.api.loading import PLACEMENT, check_keywords
from zero_inference.api.process import preserve_process_state
from zero_inference.config.options import DEFAULTS, OF_DRY_RUNS
from zero_inference.planning.command import arguments_from_keywords, search
from zero_inference.utils import GB, garbage

if TYPE_CHECKING:
    import pandas

    from zero_inference.planning.plan import Plan
    from zero_inference.planning.search import Candidate

SHOWN = 10  # rows
OTHERS = ("dtype", "dummy", "trust_remote_code", "verify")
ELSEWHERE = {
    **dict.fromkeys(("json", "plot", "all"), "the result has frame(), and holds all configurations"),
    "machines": "`zero-inference plan --machines` lists the typical machines",
}
# Columns of `repr` and a notebook.
SHOWN_COLUMNS = "engine bits batch gpus weights tokens_per_s step_s first_token_s device_gib host_gib bound_by".split()


@dataclass(frozen=True)
class PlannedRun:
    """A configuration and its predictions. Times and rates are None if it does not fit or they are unknown."""

    engine: str
    bits: int  # of a stored weight
    batch: int  # sequences, over all GPUs
    gpus: int  # 0 on a CPU
    weights: str  # their placement, such as "60% host (CPU 30%)"
    kv_offload: bool
    tokens_per_s: float | None  # of decoding, all sequences together; measured if `verify` ran it
    step_s: float | None
    first_token_s: float | None
    total_s: float | None  # of the whole generation
    tokens_per_s_range: tuple[float, float] | None  # of 9 in 10 such runs; None for a bound, and on a CPU
    first_token_range_s: tuple[float, float] | None
    device_gib: float | None  # peak of a GPU; None on a CPU
    host_gib: float
    bound_by: str | None  # such as "link"
    fits: bool
    why_not: str | None  # what is missing and what would fit
    command: str
    options: dict[str, Any] = field(repr=False)  # run(**best.options), with one GPU or none

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

        columns = [each.name for each in fields(PlannedRun) if each.name != "options"]
        return pandas.DataFrame([asdict(row) for row in self.rows], columns=columns)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        frame = self.frame()
        table = frame[frame["fits"].astype(bool)][SHOWN_COLUMNS].head(SHOWN).dropna(axis=1, how="all")
        lines = [self.verdict, f"predicted for {self.machine}" if self.machine else None]
        if not table.empty:
            lines.append(table.to_string(index=False, na_rep="", float_format="{:.3g}".format))
        hidden = sum(row.fits for row in self.rows) - len(table)
        lines += [f"{hidden} more that fit" if hidden else None]
        lines += [*(f"does not fit: {row.why_not}" for row in self.rows if not row.fits), *self.notes]
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


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
    given = {name: value for name, value in locals().items() if name != "options"}
    check_keywords("plan", options, (*OTHERS, *inspect.signature(plan).parameters), ELSEWHERE)
    args = arguments_from_keywords(given | options)
    with garbage.postpone_collections(), preserve_process_state(verbose=1):
        job, found, best = search(args, functools.partial(print, file=sys.stderr, flush=True))

        from zero_inference.planning.changes import what_does_not_fit
        from zero_inference.planning.search import headline, notes

        rows = [_planned_run(each.plan, each) for each in best if not each.failed]
        rows += [_planned_run(each) for each in found.unknown]
        rows += [_planned_run(each, why_not=what_does_not_fit(each)) for each in found.too_large]
        profile, remarks = job.machine.profile(), notes(job, found, best)
        where = profile.in_words() if profile else None
        return Plans(rows, headline(found, best, args.goal, args.model), where, remarks)


def _planned_run(plan: Plan, candidate: Candidate | None = None, why_not: str | None = None) -> PlannedRun:
    """Return the row of a plan; predictions are None without a `candidate`, and it fits unless there is a reason `why_not`."""
    from zero_inference.planning.output import row_of

    config, row = plan.job.config, row_of(plan, candidate)
    same = ("engine", "gpus", "weights", "total_s", "bound_by", "command")
    # the stream engine implies cpu_offload
    left_out = (*OF_DRY_RUNS, "auto", "goal", *(["cpu_offload"] if config.engine == "stream" else []))
    return PlannedRun(
        **{name: row[name] for name in same},
        bits=config.quant_bits,
        batch=config.batch_size,
        kv_offload=config.kv_offload,
        tokens_per_s=candidate.best_tokens_per_s if candidate else None,
        step_s=candidate.best_step_s if candidate else None,
        first_token_s=row["prefill_s"],
        tokens_per_s_range=row["tokens_per_s_range"] if row["measured_tokens_per_s"] is None else None,
        first_token_range_s=row["prefill_range_s"],
        device_gib=None if row["device_bytes"] is None else row["device_bytes"] / GB,
        host_gib=row["host_bytes"] / GB,
        fits=why_not is None,
        why_not=why_not,
        options={
            name: value
            for name, value in config.as_dict().items()
            if name in ("model", "engine") or (value != DEFAULTS[name] and name not in left_out)
        },
    )
