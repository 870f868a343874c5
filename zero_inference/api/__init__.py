"""Python instead of the shell: `run`, `plan` and `load`, which `zero_inference` itself exports. Importing this does not import torch."""

from __future__ import annotations

import functools
import html
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.api.process import free_memory, preserve_process_state
from zero_inference.config.option import hyphens
from zero_inference.config.options import DEFAULTS, OF_DRY_RUNS, OPTIONS
from zero_inference.config.parser import other_option
from zero_inference.config.run_config import make_config, shell_words
from zero_inference.errors import RunError, UsageError
from zero_inference.planning.command import arguments_from_keywords, search
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils import GB, interpreter, processes
from zero_inference.utils.format import closest

if TYPE_CHECKING:
    import pandas
    import torch

    from zero_inference.planning.plan import Plan

__all__ = ["PlannedRun", "Plans", "RunResult", "load", "plan", "run", "unload"]
# Keywords of each function, and what to do about those that it does not have.
RUN_KEYWORDS = tuple(name for name in OPTIONS if name != "model" and name not in OF_DRY_RUNS)
RUN_ELSEWHERE = {
    **dict.fromkeys(OF_DRY_RUNS, "zero_inference.plan() predicts, here or for another machine"),
    "auto": 'give "auto" as the value of engine, quant_bits or batch_size',
}
LOAD_KEYWORDS = tuple(name for name, option in OPTIONS.items() if option.of_load)
LOAD_ELSEWHERE = {
    **dict.fromkeys(set(OPTIONS) - set(LOAD_KEYWORDS) - {"model"}, "it is for zero_inference.run()"),
    **dict.fromkeys(("prompt_len", "gen_len"), "max_length is that of prompt and generated tokens together"),
}
PLAN_OTHERS = ("dtype", "dummy", "trust_remote_code", "verify")
PLAN_ELSEWHERE = {
    **dict.fromkeys(("json", "plot", "all"), "the result has frame(), and holds all configurations"),
    "machines": "`zero-inference plan --machines` lists the typical machines",
}
SHOWN = 10  # rows of `repr`, and its columns
SHOWN_COLUMNS = "engine bits batch gpus weights tokens_per_s step_s first_token_s device_gib host_gib bound_by".split()


def load(
    model: str | Path,
    *,
    engine: str = "stream",
    batch_size: int = 1,
    max_length: int | None = None,
    scoring: bool = True,
    **placement: Any,
) -> Any:
    """Return a transformers model whose weights an engine has placed: on the device, in host memory or on disk.

        model = load("meta-llama/Llama-3.1-70B-Instruct", quant_bits=4)
        inputs = model.tokenizer("The capital of France is", return_tensors="pt")
        print(model.tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
        model.unload()

    It is an instance of the model's own transformers class, for `generate`, calls, and tools such as lm-eval's
    `HFLM(pretrained=model, tokenizer=model.tokenizer)`. Inputs may be on any device. Weights cannot be moved, trained, changed or saved;
    PEFT's LoRA adapters work. `with load(...) as model:` unloads it at the end.

    Memory is planned for `batch_size` sequences of `max_length` tokens. A call of more raises UsageError, which says what to load with;
    more sequences are fine while they are shorter, so that there are no more tokens (without `kv_offload`).

    Args:
        model: hub name, local folder, or a built-in preset or model.
        engine: "stream", "deepspeed" (one process), "accelerate" (with `cpu_offload` or `disk_offload`), "resident" (all on the device),
            or "auto" (what is predicted to be fastest here).
        max_length: tokens of a sequence, prompt and generated ones; by default 2048, or the model's context if that is shorter.
        scoring: set device memory aside for the logits of all tokens, which scoring needs; False leaves it to weights.
        **placement: options of run_model.py: `quant_bits`, `gpu_memory`, `num_gpus`, `kv_offload`, `cpu_offload`, `disk_offload`,
            `offload_dir`, `cpu_compute`, `dtype`, `dummy`, `verbose`, ...

    Returns:
        the model, with four attributes more: `tokenizer` (it pads on the left, for batches; None where the checkpoint has none),
        `placement` (what is where, a list of sentences), `max_length` (tokens), and `unload()`.

    Raises:
        TypeError: there is no such keyword; the message has the nearest one.
        UsageError: it cannot work; nothing was loaded. RunError: loading failed.
    """
    _check_keywords("load", placement, LOAD_KEYWORDS, LOAD_ELSEWHERE)
    config = make_config({"model": model, "engine": engine, "batch_size": batch_size, **placement})
    with interpreter.postpone_collections():
        from zero_inference.api.placed_model import load_model

        return load_model(config, max_length, scoring)


def unload(model: Any) -> None:
    """Free all that a model of `load` holds: memory, threads, files. Calls of it raise UsageError from then on. Safe to call twice."""
    model.unload()


@dataclass(eq=False)
class RunResult:
    """A measured generation.

    Attributes:
        text: what was generated, one string a sequence; None where the model has no tokenizer.
        output_ids: the generated ids, int64 [batch, gen_len], in host memory, of the last measured loop.
        record: all that was measured, as it is written to the record file (`zero-inference report --fields` describes each key).
        log_file, record_file: where the run was logged; None with `log=False`.
        load_s, prefill_s, decode_s, total_s: medians over loops; `prefill_s` is to the first token, `decode_s` from there to the last.
        step_s, tokens_per_s: of a decode step, and of decoding all sequences; None with a single token.
        gpu_gib, host_gib: peaks, None without a GPU; host memory of this process, the caller's data included.
        bound_by, fraction_of_limit: the bound of a decode step, such as "link", and the share of it that was reached, 0 to 1.
        quality: scores by task; None without `quality=`.
    """

    text: list[str] | None
    output_ids: torch.Tensor = field(repr=False)
    record: dict[str, Any] = field(repr=False)
    log_file: Path | None = None
    record_file: Path | None = None

    def __post_init__(self) -> None:
        record = self.record
        steps, gpu_bytes = record["gen_len"] - 1, record["peak_gpu_bytes"]
        self.load_s: float = record["load_s"]
        self.prefill_s: float = record["prefill_latency_s"]
        self.decode_s: float = record["decode_latency_s"]
        self.total_s: float = record["total_latency_s"]
        self.step_s: float | None = self.decode_s / steps if steps else None
        self.tokens_per_s: float | None = record["decode_throughput"]
        self.gpu_gib: float | None = None if gpu_bytes is None else gpu_bytes / GB
        self.host_gib: float = record["peak_host_bytes"] / GB
        self.bound_by: str | None = record["limit"]["bound_by"]
        self.fraction_of_limit: float | None = record["limit"]["fraction_of_limit"]
        self.quality: dict[str, Any] | None = record["quality"]

    def __repr__(self) -> str:
        record, gpu, bound, fraction = self.record, self.gpu_gib, self.bound_by, self.fraction_of_limit
        if bound == "device_memory" and gpu is None:
            bound = "host_memory"  # the device is the CPU
        head = (
            f"RunResult: {record['model']}, engine {record['engine']}, {record['quant_bits']} bits, {record['dtype']}, "
            f"batch {record['batch_size']}, prompt {record['prompt_len']}, {record['gen_len']} new tokens"
        )
        parts = [
            f"first token {self.prefill_s:.3g} s",
            f"decode {self.tokens_per_s:.3g} token/s" if self.tokens_per_s else "",
            f"{fraction:.0%} of the limit of {RATE_WORDS[bound]}" if bound and fraction else "",
            f"host memory {self.host_gib:.3g} GiB" + (f", GPU {gpu:.3g} GiB" if gpu else ""),
        ]
        text = " ".join(self.text[0].split()) if self.text else ""
        parts = [head, ", ".join(filter(None, parts)), f"text {text[:100]}{'...' * (len(text) > 100)}" if text else ""]
        return "\n  ".join(filter(None, parts))


def run(model: str | Path, *, log: bool = True, **options: Any) -> RunResult | None:
    """Generate from `model` and measure it, as `run_model.py --model MODEL ...` does, with the same loops, log and record.

        result = run("smollm2-135m", engine="stream", quant_bits=4, prompt_len=64, gen_len=16)
        print(result.tokens_per_s, result.text[0])

    Progress and warnings go to stderr (`verbose=0` is quiet); results are returned and not printed. It may be called again and again in
    one process. Errors name the options of the command; a keyword is an option's name with underscores.

    Args:
        model: hub name, local folder, or a built-in preset or model.
        log: append to the log and the record in `log_dir` (default `logs`); False writes no file.
        **options: any option of run_model.py, by its name with underscores: `engine` ("deepspeed" where it is left out), `batch_size`,
            `prompt_len`, `gen_len` in tokens, `quant_bits` (16, 8, 4, "stored"), `cpu_offload`, `disk_offload`, `kv_offload`,
            `gpu_memory` in GiB, `num_gpus`, `loops`, `warmup`, `dtype`, `dummy`, `quality`, ... (`zero-inference run --help` lists them
            with their defaults).
            None is the default. `prompts` may be a list of strings, which `batch_size` follows where it is not given.

    Returns:
        the results. None on the other ranks of a launcher where the first one drives all GPUs (`engine="stream"`).

    Raises:
        TypeError: there is no such keyword; the message has the nearest one.
        UsageError: it cannot work; nothing was loaded or written.
        RunError: it failed on the way; with `log`, a record with status 'failed' was written.
    """
    _check_keywords("run", options, RUN_KEYWORDS, RUN_ELSEWHERE)

    def publish(files: Any, output_ids: Any, tokenizer: Any, before: Callable[[], None], **_shown: Any) -> None:
        before()
        if log:
            with processes.defer_signals():
                files.write()
            if files.unwritten:
                raise RunError("; ".join(files.unwritten) + ".")

    with tempfile.TemporaryDirectory(prefix="zero-inference-") as folder:
        if not log:
            if options.get("log_file") is not None or options.get("log_dir") is not None:
                raise TypeError(
                    "log_file= or log_dir= says where to log, and log=False not to log: drop one of the two"
                )
            options["log_file"] = Path(folder, "run.log")
        if isinstance(prompts := options.get("prompts"), (list, tuple)):
            for number, prompt in enumerate(prompts, 1):
                if not isinstance(prompt, str) or "\n" in prompt or not prompt.strip():
                    raise UsageError(
                        f"prompts: number {number} is not one line of text; join its lines, or leave it out."
                    )
            options["batch_size"] = options.get("batch_size") or max(1, len(prompts))
            options["prompts"] = Path(folder, "prompts.txt")
            options["prompts"].write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
        given = {name: value for name, value in {"model": model, **options}.items() if value is not None}
        config = make_config(given)
        with interpreter.postpone_collections():
            from zero_inference import runner
            from zero_inference.report.results import texts_of_ids

            with preserve_process_state(config.verbose):
                try:
                    finished = runner.run(config, ["zero_inference.run", *shell_words(given)], publish=publish)
                    if finished is None:
                        return None
                    files, ids, tokenizer = finished.files, finished.output_ids, finished.tokenizer
                    text = None if tokenizer is None else texts_of_ids(ids, tokenizer, finished.ends)
                    return RunResult(text, ids, files.as_written(), *((files.log, files.record_path) if log else ()))
                finally:
                    free_memory()


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
    tokens_per_s_range: tuple[float, float] | None  # of 9 in 10 such runs; None for a bound, and unless on one GPU
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
        return {name: value for name, value in self.options.items() if name in LOAD_KEYWORDS or name == "model"}


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
    quant_bits: int | str | Sequence[int | str] | None = None,
    engine: str | Sequence[str] | None = None,
    kv_offload: bool | None = None,
    prompt_len: int = 512,
    gen_len: int = 32,
    max_gpu_memory: Any = None,
    max_host_memory: Any = None,
    num_gpus: int | str | Sequence[int] | None = None,
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
        batch_size, quant_bits, engine: one value or a list to choose from; None tries all (batch 1 to 64; 16, 8, 4 bits,
            and "stored" for a quantized checkpoint).
        prompt_len, gen_len: tokens.
        max_gpu_memory, max_host_memory: GiB, no more of which is used.
        num_gpus: how many to use, or "all"; None tries 1, 2, 4 and so on.
        **options: `dtype`, `dummy`, `trust_remote_code`, and `verify` (run so many of the best for a few steps, on this machine).

    Raises:
        TypeError: there is no such keyword.
        UsageError: the model or the machine cannot be used. A model that fits nowhere is no error: `best` is None then.
    """
    given = {name: value for name, value in locals().items() if name != "options"}
    _check_keywords("plan", options, (*PLAN_OTHERS, *inspect.signature(plan).parameters), PLAN_ELSEWHERE)
    args = arguments_from_keywords(given | options)
    with interpreter.postpone_collections(), preserve_process_state(verbose=1):
        found = search(args, functools.partial(print, file=sys.stderr, flush=True))

        from zero_inference.planning.changes import what_does_not_fit
        from zero_inference.planning.search import headline, notes

        rows = [_planned_run(each) for each in (*found.candidates, *found.unknown) if not each.failed]
        rows += [_planned_run(each, why_not=what_does_not_fit(each)) for each in found.too_large]
        profile = found.job.machine.profile()
        return Plans(rows, headline(found, args.goal), profile.in_words() if profile else None, notes(found))


def _planned_run(plan: Plan, why_not: str | None = None) -> PlannedRun:
    """Return the row of a plan, without predictions if there is a reason `why_not` to fit."""
    from zero_inference.planning.output import row_of

    config, row = plan.job.config, row_of(plan, None if why_not else plan.times)
    known, measured = row["step_s"] is not None, row["measured_tokens_per_s"] is not None
    # the stream engine implies cpu_offload
    left_out = (*OF_DRY_RUNS, "auto", "goal", *(["cpu_offload"] if config.engine == "stream" else []))
    return PlannedRun(
        **{name: row[name] for name in ("engine", "gpus", "weights", "total_s", "bound_by", "command")},
        bits=plan.job.quant_bits,
        batch=config.batch_size,
        kv_offload=config.kv_offload,
        tokens_per_s=plan.best_tokens_per_s if known else None,
        step_s=plan.best_step_s if known else None,
        first_token_s=row["prefill_s"],
        tokens_per_s_range=None if measured else row["tokens_per_s_range"],
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


def _check_keywords(function: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that `function` does not have, with advice from `elsewhere` or the nearest that it has."""
    for name in given:
        if name in known:
            continue
        if name in elsewhere:
            raise TypeError(f"{function}() has no keyword {name!r}: {elsewhere[name]}")
        advice = other_option(hyphens(name), "", {f"--{hyphens(each)}" for each in known})  # another tool's name for it
        meant = re.match("use --([a-z-]+)", advice or "")
        near = [meant[1].replace("-", "_")] if meant else closest(name, known)
        hint = f"did you mean {', '.join(near)}?" if near else f"help(zero_inference.{function}) lists them."
        raise TypeError(f"{function}() got an unexpected keyword {name!r}; {hint}")
