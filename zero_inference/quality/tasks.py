"""The tasks: each scores a rank's share of the items, and what all ranks found becomes its entry in the record.

A task returns its scores, and for each item one dict with what decided.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import comb

import torch

from zero_inference.config.checks import perplexity_window
from zero_inference.errors import RunError, UsageError
from zero_inference.quality.sandbox import IsolationError, Limits, Outcome, run_program
from zero_inference.utils.ranks import Ranks


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) for one problem, computed in whole numbers.

    Source: Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1.

    Args:
        n: samples drawn.
        c: samples that passed, 0 to n.
        k: samples of which one has to pass, 1 to n.

    Raises:
        ValueError: c or k out of its range.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} samples passed of n = {n}: it has to be 0 to n")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} with n = {n} samples: k has to be 1 to n; draw more samples")
    return 1.0 - comb(n - c, k) / comb(n, k)


DEFAULT_KS = (1, 10, 100)


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


@contextmanager
def ranks_in_step(model, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Within it ranks call `model` as often as each likes; it ends when all are done.

    Leaving by an exception does not wait for the others.
    """
    if ranks.world_size == 1:
        yield
        return
    word = model.register_forward_pre_hook(lambda module, args: _anybody_works(ranks, True), prepend=True)
    try:
        yield
    finally:
        word.remove()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    while _anybody_works(ranks, False):
        with torch.no_grad():
            model(token, use_cache=False)


def _anybody_works(ranks: Ranks, here: bool) -> bool | None:
    anybody = ranks.maximum([float(here)])[0] > 0
    return None if here else anybody  # what a pre-hook returns would replace the inputs


def share_of(items: list, ranks: Ranks) -> list:
    """Every n-th item for each of n ranks: neighbours, which often take equally long, are spread over them."""
    return items[ranks.rank :: ranks.world_size]


def gather_items(mine: list, ranks: Ranks) -> list:
    """What all ranks made of their `share_of` the items, one result an item, in the order of the items; on every rank."""
    shares = ranks.gather_objects(mine)
    results = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        results[rank :: ranks.world_size] = share
    return results


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

    with ranks_in_step(lm.model, device, ranks):
        mine = score_choices(lm, task, share_of(items, ranks))
    scored = gather_items(mine, ranks)
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
    from zero_inference.quality.harness import score_windows, split_windows

    try:
        window, stride = perplexity_window(settings.window, settings.stride, lm.max_length)
    except UsageError as error:  # the model is loaded by now
        raise RunError(str(error)) from None
    windows = split_windows(lm, [item["text"] for item in items], window, stride)
    with ranks_in_step(lm.model, device, ranks):
        mine = score_windows(lm, share_of(windows, ranks))
    values, own = map(list, zip(*gather_items(mine, ranks)))
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
    with ranks_in_step(lm.model, device, ranks):
        completions = complete_programs(
            lm,
            [item["prompt"] for item in share for _ in range(n)],
            settings.new_tokens,
            settings.temperature if n > 1 else None,
            settings.seed + ranks.rank,
        )
    programs = [
        build_program(item, completion)
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
    by_item = gather_items(mine, ranks)
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


def build_program(item: dict, completion: str) -> str:
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
