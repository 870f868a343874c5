"""The tasks: each scores a rank's share of the items, and what all ranks found becomes its entry in the record.

A task returns its scores, and for each item one dict with what decided.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from zero_inference.config.checks import perplexity_window
from zero_inference.errors import RunError, UsageError
from zero_inference.quality.in_step import in_step
from zero_inference.quality.pass_at_k import pass_at_k
from zero_inference.quality.sandbox import IsolationError, Limits, Outcome, run_program
from zero_inference.quality.settings import QualitySettings
from zero_inference.quality.shares import joined, share_of
from zero_inference.utils.ranks import Ranks

LARGEST_EXPONENT = math.log(sys.float_info.max)


def mean_and_stderr(values: list[float]) -> tuple[float, float | None]:
    """The mean, and its standard error from the sample's spread (n - 1), as lm-eval's; None for a single value."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def evaluate_choices(
    task: str, items: list[dict], lm, device, ranks: Ranks, settings: QualitySettings
) -> tuple[dict, list[dict]]:
    from zero_inference.quality.harness import score_choices

    with in_step(lm.model, device, ranks):
        mine = score_choices(lm, task, share_of(items, ranks))
    scored = joined(mine, ranks)
    accuracy, stderr = mean_and_stderr([float(one.correct) for one in scored])
    scores = {
        "accuracy": accuracy,
        "stderr": stderr,
        "correct": sum(one.correct for one in scored),
        "total": len(scored),
        "outcomes": "".join(str(int(one.correct)) for one in scored),
        "accuracy_in_dtype": _in_dtype(scored, "correct"),
    }
    if task == "hellaswag":
        norm, norm_stderr = mean_and_stderr([float(one.correct_norm) for one in scored])
        scores |= {
            "acc_norm": norm,
            "acc_norm_stderr": norm_stderr,
            "outcomes_norm": "".join(str(int(one.correct_norm)) for one in scored),
            "acc_norm_in_dtype": _in_dtype(scored, "correct_norm"),
        }
    details = [
        {"log_likelihoods": one.log_likelihoods, "correct": one.correct}
        | ({"correct_norm": one.correct_norm} if task == "hellaswag" else {})
        for one in scored
    ]
    return scores, details


def _in_dtype(scored: list, outcome: str) -> float | None:
    """Return the mean of `outcome` with log-probabilities in the dtype of the logits; None where no item differs."""
    mine, own = (
        [float(getattr(one, outcome)) for one in each] for each in (scored, [one.in_own_dtype or one for one in scored])
    )
    return sum(own) / len(own) if own != mine else None


def _perplexity(nll: float) -> float:
    return math.exp(nll) if nll < LARGEST_EXPONENT else math.inf  # null in the record, which has nll_per_token


def evaluate_perplexity(
    task: str, items: list[dict], lm, device, ranks: Ranks, settings: QualitySettings
) -> tuple[dict, list[dict]]:
    """exp of the mean negative log-likelihood of a token, all documents together.

    The error treats windows as independent and their token counts as part of the chance (a ratio estimate), and goes through
    exp by its slope; None with a single window.
    """
    from zero_inference.quality.harness import score_windows, windows_of

    try:
        window, stride = perplexity_window(settings.window, settings.stride, lm.max_length)
    except UsageError as error:  # the model is loaded by now
        raise RunError(str(error)) from None
    windows = windows_of(lm, [item["text"] for item in items], window, stride)
    with in_step(lm.model, device, ranks):
        mine = score_windows(lm, share_of(windows, ranks))
    values, own = map(list, zip(*joined(mine, ranks)))
    counts = [len(one.scored) for one in windows]
    tokens, m = sum(counts), len(windows)
    nll = -sum(values) / tokens
    spread = sum((-value - nll * count) ** 2 for value, count in zip(values, counts))
    nll_stderr = math.sqrt(spread * m / (m - 1)) / tokens if m > 1 else None
    perplexity = _perplexity(nll)
    scores = {
        "perplexity": perplexity,
        "perplexity_in_dtype": _perplexity(-sum(own) / tokens) if own != values else None,
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


def evaluate_humaneval(
    task: str, items: list[dict], lm, device, ranks: Ranks, settings: QualitySettings
) -> tuple[dict, list[dict]]:
    from zero_inference.quality.harness import complete_programs

    share = share_of(items, ranks)
    n = settings.samples
    with in_step(lm.model, device, ranks):
        completions = complete_programs(
            lm,
            [item["prompt"] for item in share for _ in range(n)],
            settings.new_tokens,
            settings.temperature if n > 1 else None,
            settings.seed + ranks.rank,
        )
    programs = [
        program_of(item, completion)
        for item, completion in zip((item for item in share for _ in range(n)), completions)
    ]
    workers = max(1, (os.cpu_count() or 1) // ranks.local_world_size)
    with lm.under_way.progress.task("quality", len(programs)) as running:
        outcomes = run_programs(
            programs,
            settings.limits,
            workers,
            lambda done: running.at(f"humaneval {done} of {len(programs)} programs run", done),
        )
    mine = [list(zip(completions[at : at + n], outcomes[at : at + n])) for at in range(0, len(programs), n)]
    by_item = joined(mine, ranks)
    passed = [sum(outcome.passed for _, outcome in samples) for samples in by_item]
    scores = pass_scores(passed, n, settings.resolved_ks())
    scores |= {
        "problems": len(items),
        "temperature": settings.temperature if n > 1 else None,
        "new_tokens": settings.new_tokens,
        "passed": passed,
    }
    details = [
        {"passed": right, "samples": [{"completion": text, "verdict": outcome.reason} for text, outcome in samples]}
        for right, samples in zip(passed, by_item)
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


def run_programs(
    programs: list[str], limits: Limits, workers: int, progress: Callable[[int], None] = lambda done: None
) -> list[Outcome]:
    """How each program ended, in their order, without what it printed: thousands of outputs are not kept.

    `progress` gets the number of those that have ended.

    Raises:
        RunError: the system stopped giving the isolation.
    """

    def ended(program: str) -> Outcome:
        return replace(run_program(program, limits), output="")

    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for outcome in pool.map(ended, programs):
                outcomes.append(outcome)
                progress(len(outcomes))
        except IsolationError as error:
            raise RunError(
                f"humaneval: a program could not be isolated ({error}), so no more programs are run."
            ) from error
    return outcomes


TASKS = {
    "mmlu": evaluate_choices,
    "hellaswag": evaluate_choices,
    "humaneval": evaluate_humaneval,
    "perplexity": evaluate_perplexity,
}
