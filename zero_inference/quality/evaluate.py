"""Scores of a loaded model: each rank evaluates its share of the items, the results are joined on all."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.config import RunConfig
from zero_inference.errors import RunError, UsageError
from zero_inference.quality.data import data_file, load_items
from zero_inference.quality.in_step import in_step
from zero_inference.quality.pass_at_k import pass_at_k
from zero_inference.quality.sandbox import IsolationError, Limits, Outcome, check_isolation, run_program
from zero_inference.runtime.distributed import Ranks
from zero_inference.runtime.replace import replacing

DEFAULT_KS = (1, 10, 100)
LONGEST_WINDOW = 1024
LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True)
class QualitySettings:
    """How the tasks are done.

    Attributes:
        batch_size: sequences in one forward of a rank.
        samples: programs for each humaneval problem; one is greedy, more are drawn at `temperature`.
        new_tokens: the most tokens of a program.
        ks: the k of pass@k, none larger than `samples`; () takes those of 1, 10 and 100 that are allowed.
        window, stride: of perplexity, in tokens; None takes the model's context length (at most 1024) and half the window.
        limits: of each program.
    """

    batch_size: int = 1
    samples: int = 1
    temperature: float = 0.8
    new_tokens: int = 512
    ks: tuple[int, ...] = ()
    window: int | None = None
    stride: int | None = None
    seed: int = 0
    limits: Limits = Limits()

    def resolved_ks(self) -> tuple[int, ...]:
        return self.ks or tuple(k for k in DEFAULT_KS if k <= self.samples)

    def check_ks(self) -> None:
        """Raises ValueError for a k that `samples` do not allow."""
        for k in self.resolved_ks():
            pass_at_k(self.samples, 0, k)


@dataclass
class Evaluation:
    """Scores by task, as they go into the record, and for each item of each task one dict with what decided."""

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)


def prepare(config: RunConfig) -> dict[str, list[dict]]:
    """Everything about quality that can fail before a model is loaded: the items of each task, and a place to run code.

    Raises:
        UsageError: see the message.
    """
    items = {
        task: load_items(task, path, config.quality_limit) for task, path in zip(config.quality, data_files(config))
    }
    if "humaneval" in items:
        check_isolation()
    return items


def data_files(config: RunConfig) -> list[Path]:
    """Where the items of each task of `config` are read from. Raises UsageError as `data_file`."""
    return [data_file(task, config.quality_data) for task in config.quality]


def check_lengths(config: RunConfig, positions: int | None) -> None:
    """Raises UsageError where windows or programs are longer than the model's `positions` (None: no such limit)."""
    if positions is None:
        return
    if "perplexity" in config.quality:
        window = config.perplexity_window or min(LONGEST_WINDOW, positions)
        if window > positions:
            raise UsageError(f"--perplexity-window {window}: the model has {positions} positions; use at most that.")
        if config.perplexity_stride and config.perplexity_stride > window:
            raise UsageError(
                f"--perplexity-stride {config.perplexity_stride}: longer than the window of {window} tokens; "
                "use at most that."
            )
    if "humaneval" in config.quality and config.humaneval_tokens >= positions:
        raise UsageError(
            f"--humaneval-tokens {config.humaneval_tokens}: the model has {positions} positions for problem and "
            "program; use fewer."
        )


def settings_of(config: RunConfig, ranks: Ranks) -> QualitySettings:
    return QualitySettings(
        batch_size=config.quality_batch_size or max(1, config.batch_size // ranks.world_size),
        samples=config.humaneval_samples,
        temperature=config.humaneval_temperature,
        new_tokens=config.humaneval_tokens,
        ks=config.pass_at_k,
        window=config.perplexity_window,
        stride=config.perplexity_stride,
        seed=config.seed,
    )


def evaluate(
    tasks: dict[str, list[dict]],
    model,
    tokenizer,
    device: torch.device,
    ranks: Ranks,
    settings: QualitySettings,
    progress: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Score `model`, which stays as it is, on the checked items of each task. Every rank calls this and gets the same.

    Raises:
        RunError: the model gives no scores, or programs cannot be run.
    """
    from zero_inference.quality.harness import LoadedLM

    lm = LoadedLM(model, tokenizer, device, settings.batch_size, progress)
    done = Evaluation()
    for task, items in tasks.items():
        start = time.perf_counter()
        lm.truncated = lm.forwards = 0
        scores, details = _TASKS[task](task, items, lm, device, ranks, settings)
        scores |= {
            "batch_size": settings.batch_size,
            "truncated": ranks.total(lm.truncated),
            "seconds": time.perf_counter() - start,
        }
        done.scores[task] = scores
        done.items += [{"task": task, "item": number, **detail} for number, detail in enumerate(details)]
    return done


def write_items(path: str | Path, items: list[dict]) -> None:
    """One JSON object a line: task, item (its position in the data, from 0) and what decided."""
    with replacing(path) as file:
        file.write_text("".join(json.dumps(item) + "\n" for item in items))


def in_words(task: str, scores: dict) -> str:
    """One line for people."""
    if task == "perplexity":
        return (
            f"perplexity: {scores['perplexity']:.3f}{_plus_minus(scores['stderr'], '.3f')} a token "
            f"({scores['tokens']} tokens, windows of {scores['window']}, stride {scores['stride']})"
        )
    if task == "humaneval":
        parts = [
            f"pass@{k} {value:.1%}{_plus_minus(scores['stderr'][k], '.1%')}" for k, value in scores["pass_at_k"].items()
        ]
        how = "greedy" if scores["n"] == 1 else f"{scores['n']} samples each at temperature {scores['temperature']:g}"
        return f"humaneval: {', '.join(parts)} ({scores['problems']} problems, {how})"
    line = f"{task}: accuracy {scores['accuracy']:.1%}{_plus_minus(scores['stderr'], '.1%')}"
    line += f" ({scores['correct']} of {scores['total']})"
    if "acc_norm" in scores:
        line += f", acc_norm {scores['acc_norm']:.1%}{_plus_minus(scores['acc_norm_stderr'], '.1%')}"
    return line


def _plus_minus(value: float | None, format: str) -> str:
    return "" if value is None else f" +- {value:{format}}"


def mean_and_stderr(values: list[float]) -> tuple[float, float | None]:
    """The mean, and its standard error from the sample's spread (n - 1), as lm-eval's; None for a single value."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _choices(
    task: str, items: list[dict], lm, device, ranks: Ranks, settings: QualitySettings
) -> tuple[dict, list[dict]]:
    from zero_inference.quality.harness import score_choices

    with in_step(lm.model, device, ranks):
        mine = score_choices(lm, task, items[ranks.rank :: ranks.world_size])
    scored = _joined(mine, ranks)
    accuracy, stderr = mean_and_stderr([float(one.correct) for one in scored])
    scores = {
        "accuracy": accuracy,
        "stderr": stderr,
        "correct": sum(one.correct for one in scored),
        "total": len(scored),
        "outcomes": "".join(str(int(one.correct)) for one in scored),
    }
    if task == "hellaswag":
        norm, norm_stderr = mean_and_stderr([float(one.correct_norm) for one in scored])
        scores |= {
            "acc_norm": norm,
            "acc_norm_stderr": norm_stderr,
            "outcomes_norm": "".join(str(int(one.correct_norm)) for one in scored),
        }
    details = [
        {"log_likelihoods": one.log_likelihoods, "correct": one.correct}
        | ({"correct_norm": one.correct_norm} if task == "hellaswag" else {})
        for one in scored
    ]
    return scores, details


def _perplexity(
    task: str, items: list[dict], lm, device, ranks: Ranks, settings: QualitySettings
) -> tuple[dict, list[dict]]:
    """exp of the mean negative log-likelihood of a token, all documents together.

    The error treats windows as independent and their token counts as part of the chance (a ratio estimate), and goes through
    exp by its slope; None with a single window.
    """
    from zero_inference.quality.harness import score_windows, windows_of

    window = settings.window or min(LONGEST_WINDOW, lm.max_length)
    if window > lm.max_length:
        raise RunError(
            f"--perplexity-window {window}: the model's context is {lm.max_length} tokens; use at most that."
        )
    stride = settings.stride or max(1, window // 2)
    if stride > window:
        raise RunError(f"--perplexity-stride {stride}: longer than the window of {window} tokens; use at most that.")
    windows = windows_of(lm, [item["text"] for item in items], window, stride)
    with in_step(lm.model, device, ranks):
        mine = score_windows(lm, windows[ranks.rank :: ranks.world_size])
    values = _joined(mine, ranks)
    counts = [len(one.scored) for one in windows]
    tokens, m = sum(counts), len(windows)
    nll = -sum(values) / tokens
    spread = sum((-value - nll * count) ** 2 for value, count in zip(values, counts))
    nll_stderr = math.sqrt(spread * m / (m - 1)) / tokens if m > 1 else None
    perplexity = math.exp(nll) if nll < LARGEST_EXPONENT else math.inf  # null in the record, which has nll_per_token
    scores = {
        "perplexity": perplexity,
        "stderr": perplexity * nll_stderr if nll_stderr is not None else None,
        "nll_per_token": nll,
        "nll_stderr": nll_stderr,
        "tokens": tokens,
        "windows": m,
        "documents": len(items),
        "window": window,
        "stride": stride,
    }
    details = [
        {"document": one.document, "log_likelihood": value, "tokens": count}
        for one, value, count in zip(windows, values, counts)
    ]
    return scores, details


def _humaneval(
    task: str, items: list[dict], lm, device, ranks: Ranks, settings: QualitySettings
) -> tuple[dict, list[dict]]:
    from zero_inference.quality.harness import complete_programs

    share = items[ranks.rank :: ranks.world_size]
    n = settings.samples
    with in_step(lm.model, device, ranks):
        completions = complete_programs(
            lm,
            [item["prompt"] for item in share for _ in range(n)],
            settings.new_tokens,
            settings.temperature if n > 1 else None,
            settings.seed + ranks.rank,
        )
    lm.progress(f"humaneval, running {len(completions)} programs")
    programs = [
        program_of(item, completion)
        for item, completion in zip((item for item in share for _ in range(n)), completions)
    ]
    outcomes = run_programs(programs, settings.limits, max(1, (os.cpu_count() or 1) // ranks.local_world_size))
    mine = [list(zip(completions[at : at + n], outcomes[at : at + n])) for at in range(0, len(programs), n)]
    joined = _joined(mine, ranks)
    passed = [sum(outcome.passed for _, outcome in samples) for samples in joined]
    scores = pass_scores(passed, n, settings.resolved_ks())
    scores |= {
        "problems": len(items),
        "temperature": settings.temperature if n > 1 else None,
        "new_tokens": settings.new_tokens,
        "passed": passed,
    }
    details = [
        {"passed": right, "samples": [{"completion": text, "verdict": outcome.reason} for text, outcome in samples]}
        for right, samples in zip(passed, joined)
    ]
    return scores, details


def pass_scores(passed: list[int], n: int, ks: tuple[int, ...]) -> dict:
    """pass@k over problems: the estimate of each, then the mean, with the standard error of that mean.

    Raises:
        ValueError: a k larger than n.
    """
    by_k = {k: mean_and_stderr([pass_at_k(n, c, k) for c in passed]) for k in ks}
    return {
        "pass_at_k": {k: mean for k, (mean, _) in by_k.items()},
        "stderr": {k: error for k, (_, error) in by_k.items()},
        "n": n,
        "k": list(ks),
    }


def program_of(item: dict, completion: str) -> str:
    """The problem's beginning, what the model wrote, and the test of it."""
    return f"{item['prompt']}{completion}\n{item['test']}\ncheck({item['entry_point']})\n"


def run_programs(programs: list[str], limits: Limits, workers: int) -> list[Outcome]:
    """How each program ended, in their order, without what it printed: thousands of outputs are not kept.

    Raises:
        RunError: the system stopped giving the isolation.
    """

    def ended(program: str) -> Outcome:
        return replace(run_program(program, limits), output="")

    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(ended, programs))
        except IsolationError as error:
            raise RunError(f"humaneval: a program could not be shut in ({error}), so none is run any more.") from error


def _joined(mine: list, ranks: Ranks) -> list:
    """The shares of all ranks in the order of the items."""
    shares = ranks.gather_objects(mine)
    joined = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        joined[rank :: ranks.world_size] = share
    return joined


_TASKS = {"mmlu": _choices, "hellaswag": _choices, "humaneval": _humaneval, "perplexity": _perplexity}
