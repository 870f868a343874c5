"""Score a loaded model: the tasks of a run, checked before loading, evaluated after its timed loops, and printed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.checks import perplexity_window
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Job, LoadedModel
from zero_inference.errors import UsageError
from zero_inference.quality.data import find_task_file, load_items
from zero_inference.quality.sandbox import check_isolation
from zero_inference.quality.tasks import TASKS, QualitySettings
from zero_inference.records.schema import Quality
from zero_inference.records.scores import Tasks
from zero_inference.records.write import RunLog
from zero_inference.utils.files import write_atomically
from zero_inference.utils.progress import Progress, current_progress
from zero_inference.utils.ranks import Ranks


@dataclass
class Evaluation:
    """`scores`: task -> scores as in the record; `items`: one dict for each item of each task, for --quality-items."""

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)


def load_tasks(config: RunConfig) -> dict[str, list[dict]]:
    """Return task -> its items. Raises UsageError for wrong data, or where programs cannot be isolated; both before a model is loaded."""
    items = {
        task: load_items(task, path, config.quality_limit)
        for task, path in zip(config.quality, find_data_files(config))
    }
    if "humaneval" in items:
        check_isolation(config.allow_unsafe_code)
    return items


def find_data_files(config: RunConfig) -> list[Path]:
    """Return the file of each task. Raises UsageError as `find_task_file`."""
    return [find_task_file(task, config.quality_data) for task in config.quality]


def check_lengths(config: RunConfig, positions: int | None) -> None:
    """Raise UsageError where windows or programs are longer than the model's `positions` (None: no such limit)."""
    if positions is None:
        return
    if "perplexity" in config.quality:
        perplexity_window(config.perplexity_window, config.perplexity_stride, positions)
    if "humaneval" in config.quality and config.humaneval_tokens >= positions:
        raise UsageError(
            f"--humaneval-tokens {config.humaneval_tokens}: problem and program share the model's {positions} positions; "
            "use fewer."
        )


def score_run(
    job: Job, loaded: LoadedModel, tasks: dict[str, list[dict]], tokenizer, files: RunLog, progress: Progress
) -> Quality:
    """Evaluate `tasks` on the loaded model of a run and write --quality-items: one JSON object a line. All ranks call it."""
    config, ranks = job.config, job.ranks
    settings = QualitySettings(
        batch_size=config.quality_batch_size or max(1, config.batch_size // ranks.world_size),
        samples=config.humaneval_samples,
        temperature=config.humaneval_temperature,
        new_tokens=config.humaneval_tokens,
        ks=config.pass_at_k,
        window=config.perplexity_window,
        stride=config.perplexity_stride,
        seed=config.seed,
        allow_unsafe_code=config.allow_unsafe_code,
    )
    evaluation = evaluate(tasks, loaded.model, tokenizer, loaded.device, ranks, settings, progress)
    for task, scores in evaluation.scores.items():
        if scores["truncated"]:
            progress.say(
                f"warning: {task}: {scores['truncated']} sequences were longer than the model's context; "
                "their beginnings were cut off"
            )
    if config.quality_items and ranks.is_first:
        with files.noting("items", config.quality_items), write_atomically(config.quality_items) as file:
            file.write_text("".join(json.dumps(item) + "\n" for item in evaluation.items))
    return Quality(by_task=Tasks.model_validate(evaluation.scores))


def evaluate(
    tasks: dict[str, list[dict]],
    model,
    tokenizer,
    device: torch.device,
    ranks: Ranks,
    settings: QualitySettings,
    progress: Progress | None = None,
) -> Evaluation:
    """Score `model` on the checked items of each task. All ranks call it and get the same result.

    Raises:
        RunError: the model gives no scores, or programs cannot be run.
    """
    from zero_inference.quality.harness import EngineLM

    progress = progress or current_progress()
    lm = EngineLM(model, tokenizer, device, settings.batch_size)
    done = Evaluation()
    for task, items in tasks.items():
        start = time.perf_counter()
        lm.truncated = 0
        with progress.task("quality", ticking=True) as lm.under_way:
            scores, details = TASKS[task](task, items, lm, device, ranks, settings)
        scores |= {
            "batch_size": settings.batch_size,
            "truncated": ranks.total(lm.truncated),
            "seconds": time.perf_counter() - start,
        }
        done.scores[task] = scores
        done.items += [{"task": task, "item": number, **detail} for number, detail in enumerate(details)]
    return done


def format_scores(task: str, scores: dict) -> str:
    """Return one line, such as `mmlu: accuracy 25.0% +- 4.4% (25 of 100)`."""
    if task == "perplexity":
        return (
            f"perplexity: {scores['perplexity']:.3f}{_plus_minus(scores['stderr'], '.3f')} a token "
            f"({scores['tokens']} tokens, windows of {scores['window']}, stride {scores['stride']}"
            f"{_in_dtype(scores['perplexity_in_dtype'], '.3f')})"
        )
    if task == "humaneval":
        parts = [
            f"pass@{k} {value:.1%}{_plus_minus(scores['stderr'][k], '.1%')}" for k, value in scores["pass_at_k"].items()
        ]
        how = "greedy" if scores["n"] == 1 else f"{scores['n']} samples each at temperature {scores['temperature']:g}"
        return f"humaneval: {', '.join(parts)} ({scores['problems']} problems, {how})"
    line = f"{task}: accuracy {scores['accuracy']:.1%}{_plus_minus(scores['stderr'], '.1%')}"
    line += f" ({scores['correct']} of {scores['total']}{_in_dtype(scores['accuracy_in_dtype'], '.1%')})"
    if "acc_norm" in scores:
        line += f", acc_norm {scores['acc_norm']:.1%}{_plus_minus(scores['acc_norm_stderr'], '.1%')}"
        line += _in_dtype(scores["acc_norm_in_dtype"], ".1%")
    return line


def _in_dtype(value: float | None, format: str) -> str:
    return "" if value is None else f"; lm-eval's default {value:{format}}"


def _plus_minus(value: float | None, format: str) -> str:
    return "" if value is None else f" +- {value:{format}}"
