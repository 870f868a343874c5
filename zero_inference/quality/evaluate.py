"""Score a loaded model: the tasks of a run, checked before loading, evaluated after its timed loops, and printed.

Tokenizing, prompts, windows and generation are lm-evaluation-harness's; log-likelihoods are summed here, because it has them either in
float32 or in the dtype of the logits, and in steps over all ranks. lm_eval is imported where it is used: it takes seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, NamedTuple

import numpy as np
import torch

from zero_inference.config.checks import perplexity_window
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Job, LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.quality.data import load_items
from zero_inference.quality.sandbox import Limits, Outcome, check_isolation, isolation_problem, run_programs
from zero_inference.records.schema import Quality, Tasks
from zero_inference.records.write import RunLog
from zero_inference.utils.files import write_atomically
from zero_inference.utils.patching import Patches
from zero_inference.utils.progress import Progress, Task, current_progress
from zero_inference.utils.ranks import Ranks

DEFAULT_KS = (1, 10, 100)
STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # the function is complete; from lm-eval's task humaneval (Codex)
TOP_P = 0.95  # for several samples, as in the Codex paper


@dataclass(frozen=True)
class QualitySettings:
    """Settings of all tasks."""

    batch_size: int = 1  # sequences in one forward pass of a rank
    samples: int = 1  # programs for each humaneval problem; one is greedy, several are drawn at `temperature`
    temperature: float = 0.8
    new_tokens: int = 512  # most tokens of a program
    ks: tuple[int, ...] = ()  # of pass@k, none larger than `samples`; () takes those of 1, 10 and 100 that are allowed
    window: int | None = None  # of perplexity, in tokens; None takes the model's context length, at most 1024
    stride: int | None = None  # None takes half the window
    seed: int = 0
    limits: Limits = Limits()  # of each program
    allow_unsafe_code: bool = False  # run programs with `limits` alone where they cannot be isolated

    def resolved_ks(self) -> tuple[int, ...]:
        return self.ks or tuple(k for k in DEFAULT_KS if k <= self.samples)


def mean_and_stderr(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error from the sample's spread (n - 1), as lm-eval's; None for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return sum(values) / len(values), error


class Request(NamedTuple):
    """Token ids to score, after those of the context."""

    context: Sequence[int]  # at least one
    scored: Sequence[int]


@dataclass
class Scoring:
    """Model, ranks and settings of a task's evaluation."""

    lm: Any  # lm-eval's HFLM over the loaded model, from `make_lm`
    task: str
    ranks: Ranks
    settings: QualitySettings
    progress: Progress
    progress_task: Task
    truncated: int = 0  # sequences so far that were longer than the model's context

    def over_ranks(self, items: list, score: Callable[[list], list], calls_model: bool = True) -> list:
        """Return a result for each item, on every rank. Each of n ranks scores every n-th item, as neighbours often take equally long.

        Ranks that share a model's layers may need different numbers of forward passes: each announces its own, and a rank that has
        finished runs the model on one token until all have. Leaving by an exception does not wait for the others.
        """
        ranks, model = self.ranks, self.lm.model
        if ranks.world_size == 1:
            return score(items)

        def any_rank_works(this_rank: bool) -> bool:
            return ranks.maximum([float(this_rank)])[0] > 0

        def announce(module, args) -> None:
            any_rank_works(True)

        with Patches() as patches:
            if calls_model:
                patches.add_hooks(model.register_forward_pre_hook(announce, prepend=True))
            mine = score(items[ranks.rank :: ranks.world_size])
        token = torch.zeros(1, 1, dtype=torch.long, device=self.lm.device)
        while calls_model and any_rank_works(False):
            with torch.no_grad():
                model(token, use_cache=False)
        results: list = [None] * len(items)
        for rank, share in enumerate(ranks.gather_objects(mine)):
            results[rank :: ranks.world_size] = share
        return results

    def log_likelihoods(self, requests: Sequence[Request]) -> list[tuple[float, float]]:
        """Return the summed log-likelihood (nat) of each request's scored tokens, twice: with log-probabilities in float32; and in the
        logits' dtype as by lm-eval's default, where bfloat16 has three digits.

        As in lm-eval, requests that differ in their last token share a forward pass, and the longest come first.

        Raises:
            RunError: an answer is longer than the model's context, or a log-likelihood is not finite.
        """
        lm, task = self.lm, self.task
        by_input: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            if len(request.scored) > lm.max_length:
                raise RunError(
                    f"{task}: an answer has {len(request.scored)} tokens, but the model's context is only {lm.max_length}; "
                    "remove it from the data."
                )
            tokens = (*request.context, *request.scored[:-1])
            self.truncated += len(tokens) > lm.max_length
            by_input[tokens[-lm.max_length :]].append(number)
        inputs = sorted(by_input, key=lambda tokens: (-len(tokens), tokens))
        found: dict[int, tuple[float, float]] = {}
        self.progress_task.total = len(requests)
        for at in range(0, len(inputs), lm.batch_size):
            self.progress_task.at(f"{task} {len(found)} of {len(requests)} requests", len(found))
            batch = inputs[at : at + lm.batch_size]
            ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
            for row, tokens in zip(ids, batch):
                row[: len(tokens)] = torch.tensor(tokens)  # padding on the right changes nothing before it
            for tokens, logits in zip(batch, lm._model_call(ids.to(lm.device))):  # logits [T, vocabulary]
                for number in by_input[tokens]:
                    scored = torch.tensor(requests[number].scored, device=logits.device)[:, None]
                    answer = logits[len(tokens) - len(scored) : len(tokens)]
                    in_float32, in_dtype = (
                        float(answer.log_softmax(-1, dtype=dtype).gather(1, scored).sum())
                        for dtype in (torch.float32, logits.dtype)
                    )
                    if not math.isfinite(in_float32):
                        raise RunError(
                            f"{task}: a log-likelihood is {in_float32}, not finite; try another --dtype or quantization."
                        )
                    found[number] = in_float32, in_dtype
        return [found[number] for number in range(len(requests))]


def make_lm(model, tokenizer, device: torch.device, batch_size: int) -> Any:
    """Return lm-eval's HFLM over a loaded model, on the engine's device; its weights stay untouched.

    HFLM would take the device of the first parameter, which is meta under accelerate, and tie weights again, which puts plain parameters
    where an engine manages its own.
    """
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with Patches() as patches:
        patches.set_attr(model, "tie_weights", lambda *arguments, **named: None)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    lm._device = device
    return lm


def evaluate_choices(items: list[dict], on: Scoring) -> tuple[dict, list[dict]]:
    """Return the scores of mmlu or hellaswag, and details of each item. The choice with the highest log-likelihood counts; for acc_norm
    log-likelihoods are divided by the lengths of the choices in characters."""
    docs = read_choices(on.task, items)
    choices = len(docs[0].choices)

    def score(mine: list[ChoiceDoc]) -> list[np.ndarray]:
        pairs = [on.lm._encode_pair(doc.query, f" {choice}") for doc in mine for choice in doc.choices]
        return list(np.array(on.log_likelihoods([Request(*pair) for pair in pairs])).reshape(len(mine), choices, 2))

    values = np.array(on.over_ranks(docs, score))  # [items, choices, 2]: in float32, and in the dtype of the logits
    lengths = np.array([[[len(choice)] for choice in doc.choices] for doc in docs])
    gold = np.array([[doc.gold] for doc in docs])
    right, right_norm = values.argmax(1) == gold, (values / lengths).argmax(1) == gold  # [items, 2]
    names = ("accuracy", "stderr", "outcomes", "accuracy_in_dtype")
    scores = dict(zip(names, _accuracy(right))) | {"correct": int(right[:, 0].sum()), "total": len(items)}
    details = [
        {"log_likelihoods": each[:, 0].tolist(), "correct": bool(correct)} for each, correct in zip(values, right[:, 0])
    ]
    if on.task == "hellaswag":
        names = ("acc_norm", "acc_norm_stderr", "outcomes_norm", "acc_norm_in_dtype")
        scores |= dict(zip(names, _accuracy(right_norm)))
        details = [detail | {"correct_norm": bool(correct)} for detail, correct in zip(details, right_norm[:, 0])]
    return scores, details


class ChoiceDoc(NamedTuple):
    query: str
    choices: list[str]
    gold: int  # index of the right choice


def read_choices(task: str, items: list[dict]) -> list[ChoiceDoc]:
    """Return the query and choices of each item, built as in lm-eval's tasks."""
    from lm_eval.tasks.hellaswag.utils import preprocess

    if task == "mmlu":
        return [ChoiceDoc(item["prompt"], item["choices"], item["answer"]) for item in items]
    if not all({"activity_label", "ctx_a", "ctx_b"} <= item.keys() for item in items):
        return [ChoiceDoc(item["ctx"], item["endings"], item["label"]) for item in items]
    return [
        ChoiceDoc(
            preprocess(f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"),
            [preprocess(ending) for ending in item["endings"]],
            item["label"],
        )
        for item in items
    ]


def _accuracy(right: np.ndarray) -> tuple[float, float | None, str, float | None]:
    """Return mean, standard error and outcomes ("0110...") in float32; and the mean in the logits' dtype if an outcome differs there."""
    in_float32, in_dtype = right.astype(int).T
    mean_in_dtype = float(in_dtype.mean()) if (in_dtype != in_float32).any() else None
    return *mean_and_stderr(in_float32.tolist()), "".join(map(str, in_float32)), mean_in_dtype


def evaluate_perplexity(items: list[dict], on: Scoring) -> tuple[dict, list[dict]]:
    """Return exp of the mean negative log-likelihood of a token, all documents together, and details of each item.

    Every token is scored once: the first window begins with the beginning-of-text token, later ones score `stride` tokens each. The
    standard error is that of a ratio estimate over independent windows, times the slope of exp; None with a single window.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    try:
        window, stride = perplexity_window(on.settings.window, on.settings.stride, on.lm.max_length)
    except UsageError as error:  # the model is loaded by now
        raise RunError(str(error)) from None
    documents: list[int] = []
    windows: list[Request] = []
    for number, item in enumerate(items):
        tokens, context = on.lm.tok_encode(item["text"]), window - stride + 1
        pairs = get_rolling_token_windows(tokens, on.lm.prefix_token_id, max_seq_len=window, context_len=context)
        windows += [Request(*make_disjoint_window(pair)) for pair in pairs]
        documents += [number] * (len(windows) - len(documents))
    values, in_dtype = np.array(on.over_ranks(windows, on.log_likelihoods)).T
    counts = np.array([len(one.scored) for one in windows])
    total, m = int(counts.sum()), len(windows)
    nll = -float(values.sum()) / total
    spread = float(((-values - nll * counts) ** 2).sum())
    nll_stderr = math.sqrt(spread * m / (m - 1)) / total if m > 1 else None
    perplexity = _perplexity(nll)
    scores = {
        "perplexity": perplexity,
        "perplexity_in_dtype": _perplexity(-float(in_dtype.sum()) / total) if (in_dtype != values).any() else None,
        "stderr": perplexity * nll_stderr if nll_stderr is not None else None,
        "nll_per_token": nll,
        "nll_stderr": nll_stderr,
        "tokens": total,
        "windows": m,
        "documents": len(items),
        "window": window,
        "stride": stride,
    }
    details = [
        {"document": document, "log_likelihood": value, "tokens": count}
        for document, value, count in zip(documents, values.tolist(), counts.tolist())
    ]
    return scores, details


def _perplexity(nll: float) -> float:
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf  # null in the record, which has nll_per_token


def evaluate_humaneval(items: list[dict], on: Scoring) -> tuple[dict, list[dict]]:
    settings, ranks, n = on.settings, on.ranks, on.settings.samples
    temperature = settings.temperature if n > 1 else None

    def run(programs: list[str]) -> list[Outcome]:
        workers = max(1, (os.cpu_count() or 1) // ranks.local_world_size)
        with on.progress.task("quality", len(programs)) as progress_task:
            return run_programs(programs, settings.limits, workers, progress_task, settings.allow_unsafe_code)

    samples = [item for item in items for _ in range(n)]
    completions = on.over_ranks(
        [item["prompt"] for item in samples], lambda prompts: complete_programs(prompts, temperature, on)
    )
    if ranks.is_first and (problem := isolation_problem()):
        on.progress.say(f"warning: humaneval: programs run with resource limits alone ({problem})")
    outcomes = on.over_ranks(list(map(build_program, samples, completions)), run, calls_model=False)
    details: list[dict[str, Any]] = []
    for at in range(0, len(samples), n):
        verdicts = outcomes[at : at + n]
        written = [{"completion": text, "verdict": outcome.reason} for text, outcome in zip(completions[at:], verdicts)]
        details.append({"passed": sum(outcome.passed for outcome in verdicts), "samples": written})
    passed = [detail["passed"] for detail in details]
    scores = pass_scores(passed, n, settings.resolved_ks())
    scores |= {"problems": len(items), "temperature": temperature, "new_tokens": settings.new_tokens, "passed": passed}
    return scores, details


def complete_programs(prompts: list[str], temperature: float | None, on: Scoring) -> list[str]:
    """Return a completion of each prompt, cut where the function ends; greedy if `temperature` is None.

    Raises:
        RunError: a prompt and its new tokens exceed the model's context.
    """
    from lm_eval.api.instance import Instance

    lm, new_tokens = on.lm, on.settings.new_tokens
    lengths = [len(lm.tok_encode(prompt)) for prompt in prompts]
    if max(lengths, default=0) + new_tokens > lm.max_length:
        raise RunError(
            f"humaneval: a prompt of {max(lengths)} tokens and {new_tokens} new ones do not fit the model's context of "
            f"{lm.max_length} tokens; lower --humaneval-tokens."
        )
    sampling: dict[str, Any] = {"until": STOP, "max_gen_toks": new_tokens, "do_sample": temperature is not None}
    if temperature is not None:
        sampling |= {"temperature": temperature, "top_p": TOP_P, "top_k": 0}
        torch.manual_seed(on.settings.seed + on.ranks.rank)
    order = sorted(range(len(prompts)), key=lambda number: (-lengths[number], prompts[number]))  # as HFLM sorts
    completions = [""] * len(prompts)
    on.progress_task.total = len(prompts)
    for at in range(0, len(order), lm.batch_size):
        on.progress_task.at(f"humaneval {at} of {len(order)} requests", at)
        batch = order[at : at + lm.batch_size]
        requests = [Instance("generate_until", {}, (prompts[number], sampling), number) for number in batch]
        for number, text in zip(batch, lm.generate_until(requests, disable_tqdm=True)):
            completions[number] = text
    return completions


def build_program(item: dict, completion: str) -> str:
    return f"{item['prompt']}{completion}\n{item['test']}\ncheck({item['entry_point']})\n"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one problem, of whose `n` samples `c` passed: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1. Raises ValueError for c or k out of its range.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} samples passed of n = {n}: it has to be 0 to n")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} with n = {n} samples: k has to be 1 to n; draw more samples")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_scores(passed: list[int], n: int, ks: tuple[int, ...]) -> dict:
    """Return pass@k averaged over problems, with the standard error of that mean. Raises ValueError for a k larger than n."""
    by_k = {k: mean_and_stderr([pass_at_k(n, c, k) for c in passed]) for k in ks}
    return {
        "pass_at_k": {k: mean for k, (mean, _) in by_k.items()},
        "stderr": {k: error for k, (_, error) in by_k.items()},
        "n": n,
        "k": list(ks),
    }


TASKS = {
    "mmlu": evaluate_choices,
    "hellaswag": evaluate_choices,
    "humaneval": evaluate_humaneval,
    "perplexity": evaluate_perplexity,
}


def load_tasks(config: RunConfig, positions: int | None) -> dict[str, list[dict]]:
    """Return task -> its items, before a model is loaded.

    Raises:
        UsageError: wrong data, programs cannot be isolated, or windows or programs longer than the model's `positions` (None: no limit).
    """
    items = {task: load_items(task, config.quality_data, config.quality_limit) for task in config.quality}
    if "humaneval" in items:
        check_isolation(config.allow_unsafe_code)
    if positions is not None and "perplexity" in items:
        perplexity_window(config.perplexity_window, config.perplexity_stride, positions)
    if positions is not None and "humaneval" in items and config.humaneval_tokens >= positions:
        raise UsageError(
            f"--humaneval-tokens {config.humaneval_tokens}: problem and program share the model's {positions} positions; "
            "use fewer."
        )
    return items


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
    by_task, items = evaluate(tasks, loaded.model, tokenizer, loaded.device, ranks, settings, progress)
    for task, scores in by_task.items():
        if scores["truncated"]:
            progress.say(
                f"warning: {task}: {scores['truncated']} sequences were longer than the model's context; "
                "their beginnings were cut off"
            )
    if config.quality_items and ranks.is_first:
        with files.noting("items", config.quality_items), write_atomically(config.quality_items) as file:
            file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return Quality(by_task=Tasks.model_validate(by_task))


def evaluate(
    tasks: dict[str, list[dict]],
    model,
    tokenizer,
    device: torch.device,
    ranks: Ranks,
    settings: QualitySettings,
    progress: Progress | None = None,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Score `model` on the checked items of each task. All ranks call it and get the same result.

    Returns:
        task -> scores as in the record, and one dict for each item of each task, for --quality-items.

    Raises:
        RunError: the model gives no scores, or programs cannot be run.
    """
    progress = progress or current_progress()
    lm = make_lm(model, tokenizer, device, settings.batch_size)
    scores: dict[str, dict[str, Any]] = {}
    written: list[dict[str, Any]] = []
    for task, items in tasks.items():
        start = time.perf_counter()
        with progress.task("quality", ticking=True) as progress_task:
            on = Scoring(lm, task, ranks, settings, progress, progress_task)
            scores[task], details = TASKS[task](items, on)
        scores[task] |= {
            "batch_size": settings.batch_size,
            "truncated": ranks.total(on.truncated),
            "seconds": time.perf_counter() - start,
        }
        written += [{"task": task, "item": number, **detail} for number, detail in enumerate(details)]
    return scores, written


def format_scores(task: str, scores: dict) -> str:
    """Return one line, such as `mmlu: accuracy 25.0% +- 4.4% (25 of 100)`."""

    def figure(name: str, format: str, error: str = "stderr") -> str:
        text, in_dtype = f"{scores[name]:{format}}{_plus_minus(scores[error], format)}", scores[f"{name}_in_dtype"]
        return text if in_dtype is None else f"{text} (lm-eval's default {in_dtype:{format}})"

    if task == "perplexity":
        how = f"{scores['tokens']} tokens, windows of {scores['window']}, stride {scores['stride']}"
        return f"perplexity: {figure('perplexity', '.3f')} a token ({how})"
    if task == "humaneval":
        parts = [
            f"pass@{k} {value:.1%}{_plus_minus(scores['stderr'][k], '.1%')}" for k, value in scores["pass_at_k"].items()
        ]
        how = "greedy" if scores["n"] == 1 else f"{scores['n']} samples each at temperature {scores['temperature']:g}"
        return f"humaneval: {', '.join(parts)} ({scores['problems']} problems, {how})"
    line = f"{task}: accuracy {figure('accuracy', '.1%')} ({scores['correct']} of {scores['total']})"
    return line + (f", acc_norm {figure('acc_norm', '.1%', 'acc_norm_stderr')}" if "acc_norm" in scores else "")


def _plus_minus(error: float | None, format: str) -> str:
    return "" if error is None else f" +- {error:{format}}"
