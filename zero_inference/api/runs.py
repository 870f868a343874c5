"""`run`: run_model.py from Python, with a result instead of printed lines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.api.loading import check_keywords
from zero_inference.api.process import free_memory, preserve_process_state
from zero_inference.config.options import OF_DRY_RUNS, OPTIONS
from zero_inference.config.run_config import make_config, shell_words
from zero_inference.errors import RunError, UsageError
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils import GB, garbage, processes

if TYPE_CHECKING:
    import torch

KEYWORDS = tuple(name for name in OPTIONS if name != "model" and name not in OF_DRY_RUNS)
ELSEWHERE = {
    **dict.fromkeys(OF_DRY_RUNS, "zero_inference.plan() predicts, here or for another machine"),
    "auto": 'give "auto" as the value of engine, quant_bits or batch_size',
}


@dataclass(eq=False)
class RunResult:
    """A measured generation.

    Attributes:
        text: what was generated, one string a sequence; None where the model has no tokenizer.
        output_ids: the generated ids, int64 [batch, gen_len], in host memory, of the last measured loop.
        record: all that was measured, as it is written to the record file (`zero-inference report --fields` describes each key).
        log_file, record_file: where the run was logged; None with `log=False`.
    """

    text: list[str] | None
    output_ids: torch.Tensor = field(repr=False)
    record: dict[str, Any] = field(repr=False)
    log_file: Path | None = None
    record_file: Path | None = None

    def __post_init__(self) -> None:
        record = self.record
        steps, gpu_bytes = record["gen_len"] - 1, record["peak_gpu_bytes"]
        # seconds, medians over loops
        self.load_s: float = record["load_s"]
        self.prefill_s: float = record["prefill_latency_s"]  # to the first token
        self.decode_s: float = record["decode_latency_s"]  # from the first token to the last
        self.total_s: float = record["total_latency_s"]
        self.step_s: float | None = self.decode_s / steps if steps else None  # a decode step; None with a single token
        # decoding, all sequences; None with a single token
        self.tokens_per_s: float | None = record["decode_throughput"]
        # peak of the loops; None without a GPU
        self.gpu_gib: float | None = None if gpu_bytes is None else gpu_bytes / GB
        self.host_gib: float = record["peak_host_bytes"] / GB  # peak of this process, the caller's data included
        self.bound_by: str | None = record["limit"]["bound_by"]  # the bound of a decode step, such as "link"
        self.fraction_of_limit: float | None = record["limit"]["fraction_of_limit"]  # that decode steps reached, 0 to 1
        self.quality: dict[str, Any] | None = record["quality"]  # scores by task; None without `quality=`

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


def run(model: str | Path, *, log: bool = True, **options: Any) -> RunResult:
    """Generate from `model` and measure it, as `run_model.py --model MODEL ...` does, with the same loops, log and record.

        result = run("smollm2-135m", engine="stream", quant_bits=4, prompt_len=64, gen_len=16)
        print(result.tokens_per_s, result.text[0])

    Progress and warnings go to stderr (`verbose=0` is quiet); results are returned and not printed. It may be called again and again in
    one process. Errors name the options of the command; a keyword is an option's name with underscores.

    Args:
        model: hub name, local folder, or a built-in preset or model.
        log: append to the log and the record in `log_dir` (default `logs`); False writes no file.
        **options: any option of run_model.py, by its name with underscores: `engine` ("deepspeed" where it is left out), `batch_size`,
            `prompt_len`, `gen_len` in tokens, `quant_bits` (16, 8, 4), `cpu_offload`, `disk_offload`, `kv_offload`, `gpu_memory` in GiB,
            `loops`, `warmup`, `dtype`, `dummy`, `quality`, ... (`zero-inference run --help` lists them with their defaults). None is the
            default. `prompts` may be a list of strings, which `batch_size` follows where it is not given.

    Raises:
        TypeError: there is no such keyword; the message has the nearest one.
        UsageError: it cannot work; nothing was loaded or written.
        RunError: it failed on the way; with `log`, a record with status 'failed' was written.
    """
    check_keywords("run", options, KEYWORDS, ELSEWHERE)

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
        with garbage.postpone_collections():
            from zero_inference import runner
            from zero_inference.report.results import texts_of_ids

            with preserve_process_state(config.verbose):
                try:
                    finished = runner.run(config, ["zero_inference.run", *shell_words(given)], publish=publish)
                    assert finished is not None, "a dry run has no result"
                    files, ids, tokenizer = finished.files, finished.output_ids, finished.tokenizer
                    text = None if tokenizer is None else texts_of_ids(ids, tokenizer, finished.ends)
                    return RunResult(text, ids, files.as_written(), *((files.log, files.record) if log else ()))
                finally:
                    free_memory()
