"""lm-evaluation-harness on a model that an engine has loaded: log-likelihoods of choices and of windows of text, and completions.

Each function takes one rank's share of the items and returns one result for each.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import lm_eval.api.task as lm_eval_task
import lm_eval.models.huggingface as lm_eval_models
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from lm_eval.tasks.hellaswag.utils import process_docs as hellaswag_docs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero_inference.errors import RunError
from zero_inference.utils.progress import Progress, Task

STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # the function is complete; from lm-eval's task humaneval (Codex)
TOP_P = 0.95  # for several samples, as in the Codex paper


class EngineLM(HFLM):
    """HFLM over a loaded model, with the engine's device and our progress; its weights stay untouched.

    HFLM would take the device of the first parameter, which is meta under accelerate, and tie weights again, which puts plain parameters
    where an engine manages its own. Log-probabilities are float32; HFLM's default is the dtype of the logits: bfloat16 has three digits.

    Attributes:
        in_own_dtype: the last log-likelihoods with log-probabilities in the dtype of the logits; None if that is float32.
        replayed: log-likelihoods to return instead of running the model, or None.
    """

    def __init__(self, model, tokenizer, device: torch.device, batch_size: int):
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        with _tie_weights_disabled(model):
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
        self._device = device
        self.in_own_dtype: list[float] | None = None
        self.replayed: list[float] | None = None
        self.label, self.truncated = "", 0
        self.under_way = Task(Progress(enabled=False), "quality", None, None)

    def loglikelihood(self, requests, disable_tqdm: bool = True):
        return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(self, requests, disable_tqdm: bool = True):
        with self._counted():
            return super().generate_until(requests)

    def _model_call(self, inps, *args, **kwargs):
        self._logits, self._row = super()._model_call(inps, *args, **kwargs), 0  # [B, T, vocabulary]
        return self._logits

    def _select_cont_toks(self, logits, contlen=None, inplen=None):
        row, self._row = self._logits[self._row], self._row + 1
        self.own_logits = super()._select_cont_toks(row, contlen, inplen)  # [answer, vocabulary]
        return super()._select_cont_toks(logits, contlen, inplen)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = True, override_bs=None):
        if self.replayed is not None:
            return [(value, False) for value in self.replayed]
        for _, _, continuation in requests:
            if len(continuation) > self.max_length:
                raise RunError(
                    f"{self.label}: an answer has {len(continuation)} tokens, but the model's context is only "
                    f"{self.max_length}; remove it from the data."
                )
        self.truncated += sum(
            len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests
        )
        with self._counted(), self._in_both_dtypes():
            return super()._loglikelihood_tokens(requests, override_bs=override_bs)

    @contextmanager
    def _in_both_dtypes(self) -> Iterator[None]:
        """Replace HFLM's Collator, which gets each answer, by one that also scores it in the dtype of the logits."""
        collator, self.in_own_dtype = lm_eval_models.Collator, None
        lm_eval_models.Collator = partial(_InOwnDtype, self)
        try:
            yield
        finally:
            lm_eval_models.Collator = collator
            self._logits = self.own_logits = None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Replace HFLM's progress bar of requests by ours."""
        bars = lm_eval_models.tqdm
        lm_eval_models.tqdm = lambda *rows, total=None, **settings: _Requests(self, total)
        try:
            yield
        finally:
            lm_eval_models.tqdm = bars


class _InOwnDtype(Collator):
    """Computes each answer again with the log-softmax in the dtype of the logits."""

    def __init__(self, lm: EngineLM, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lm = lm
        self.answers: list[float] = []

    def get_cache(self, req_str, cxt_toks, cont_toks, logits):
        own = self.lm.own_logits
        values = None if own.dtype == torch.float32 else own.log_softmax(-1)  # [answer, vocabulary]
        for request, tokens, each in super().get_cache(req_str, cxt_toks, cont_toks, logits):
            if values is not None:
                chosen = torch.tensor(tokens, device=values.device)[:, None]
                self.answers.append(float(values.gather(1, chosen).sum()))
            yield request, tokens, each

    def get_original(self, newarr):
        self.lm.in_own_dtype = super().get_original(self.answers) if self.answers else None
        return super().get_original(newarr)


class _Requests:
    """Stands in for one of HFLM's progress bars."""

    def __init__(self, lm: EngineLM, total: int):
        self.lm, self.total, self.done = lm, total, 0
        self.update(0)

    def update(self, count: int = 1) -> None:
        self.done += count
        self.lm.under_way.total = self.total
        self.lm.under_way.at(f"{self.lm.label} {self.done} of {self.total} requests", self.done)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Choice:
    """One question: the summed log-likelihood (nat) of each choice, and whether the right one has the highest.

    `correct_norm` is lm-eval's acc_norm: log-likelihoods divided by the choices' lengths in characters. `in_own_dtype` has the results with
    log-probabilities in the dtype of the logits; None if that is float32.
    """

    log_likelihoods: list[float]
    correct: bool
    correct_norm: bool
    in_own_dtype: Choice | None = None


def score_choices(lm: EngineLM, task: str, items: list[dict]) -> list[Choice]:
    """Return the score of each item. Raises RunError for a log-likelihood that is not finite."""
    if not items:
        return []
    lm.label = task
    with TemporaryDirectory(prefix="zero-inference-") as folder, _no_bars():
        choice_task = build_choice_task(task, items, Path(folder))
        scored = _run_choice_task(task, lm, choice_task)
        for number, one in enumerate(scored):
            if not all(map(math.isfinite, one.log_likelihoods)):
                raise RunError(
                    f"{task}: the model's log-likelihoods of item {number} are {one.log_likelihoods}, some of them not finite; "
                    "try another --dtype or quantization."
                )
        if lm.in_own_dtype is None:
            return scored
        lm.replayed = lm.in_own_dtype
        try:
            in_own_dtype = _run_choice_task(task, lm, choice_task)
        finally:
            lm.replayed = None
    return [replace(one, in_own_dtype=other) for one, other in zip(scored, in_own_dtype)]


def _run_choice_task(task: str, lm: EngineLM, choice_task) -> list[Choice]:
    samples = evaluator.evaluate(lm, {task: choice_task}, bootstrap_iters=0, log_samples=True)["samples"][task]
    scored = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        values = [float(answer[0]) for answer in sample["filtered_resps"]]
        scored.append(Choice(values, bool(sample["acc"]), bool(sample["acc_norm"])))
    return scored


def build_choice_task(task: str, items: list[dict], folder: Path):
    """Return lm-eval's zero-shot task over `items`, which it reads from a file in `folder`."""
    docs = build_choice_docs(task, items)
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    text = datasets.Value("string")  # texts that all look like dates would be parsed
    features = datasets.Features({"query": text, "choices": datasets.List(text), "gold": datasets.Value("int64")})
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return lm_eval_task.ConfigurableTask(
        config={
            "task": task,
            "dataset_path": "json",
            "test_split": "test",
            "output_type": "multiple_choice",
            "num_fewshot": 0,
            "dataset_kwargs": {
                "data_files": {"test": str(path)},
                "cache_dir": str(folder / "cache"),
                "features": features,
            },
            "doc_to_text": "query",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "target_delimiter": " ",
            "metric_list": metrics,
        }
    )


def build_choice_docs(task: str, items: list[dict]) -> list[dict]:
    """Return lm-eval's documents: `query`, `choices`, and `gold`, the index of the right choice."""
    if task == "mmlu":
        return [{"query": item["prompt"], "choices": item["choices"], "gold": item["answer"]} for item in items]
    if all({"activity_label", "ctx_a", "ctx_b"} <= item.keys() for item in items):
        docs = hellaswag_docs(datasets.Dataset.from_list(items))
        return [{name: doc[name] for name in ("query", "choices", "gold")} for doc in docs]
    return [{"query": item["ctx"], "choices": item["endings"], "gold": item["label"]} for item in items]


@dataclass(frozen=True)
class Window:
    """Tokens of a document: `scored` are predicted, with `context` before them."""

    document: int
    context: list[int]
    scored: list[int]


def split_windows(lm: EngineLM, texts: list[str], window: int, stride: int) -> list[Window]:
    """Split texts so that every token is scored in exactly one window, the first one after the beginning-of-text token.

    Args:
        window: most tokens of a forward pass.
        stride: tokens that each window after the first scores, each with a context of window - stride + 1 or more.
    """
    windows = []
    for number, text in enumerate(texts):
        tokens = lm.tok_encode(text)
        pairs = get_rolling_token_windows(
            tokens, lm.prefix_token_id, max_seq_len=window, context_len=window - stride + 1
        )
        windows += [Window(number, *make_disjoint_window(pair)) for pair in pairs]
    return windows


def score_windows(lm: EngineLM, windows: list[Window]) -> list[tuple[float, float]]:
    """Return for each window the summed log-likelihood (nat) of its scored tokens, with float32 log-probabilities and in the dtype of the
    logits. Raises RunError if one is not finite."""
    if not windows:
        return []
    lm.label = "perplexity"
    values = [
        value for value, _ in lm._loglikelihood_tokens([(None, window.context, window.scored) for window in windows])
    ]
    if not all(math.isfinite(value) for value in values):
        raise RunError("perplexity: the model's log-likelihoods are not finite; try another --dtype or quantization.")
    return list(zip(values, lm.in_own_dtype or values))


def complete_programs(
    lm: EngineLM, prompts: list[str], new_tokens: int, temperature: float | None, seed: int
) -> list[str]:
    """Return a completion of each prompt, cut where the function ends; greedy if `temperature` is None.

    Raises:
        RunError: a prompt and `new_tokens` exceed the model's context.
    """
    if not prompts:
        return []
    longest = max(len(lm.tok_encode(prompt)) for prompt in prompts)
    if longest + new_tokens > lm.max_length:
        raise RunError(
            f"humaneval: a prompt of {longest} tokens and {new_tokens} new ones do not fit the model's context of "
            f"{lm.max_length} tokens; lower --humaneval-tokens."
        )
    lm.label = "humaneval"
    settings = {"until": STOP, "max_gen_toks": new_tokens, "do_sample": temperature is not None}
    if temperature is not None:
        settings |= {"temperature": temperature, "top_p": TOP_P, "top_k": 0}
        torch.manual_seed(seed)
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(prompt, settings), idx=number)
        for number, prompt in enumerate(prompts)
    ]
    return lm.generate_until(requests)


@contextmanager
def _tie_weights_disabled(model) -> Iterator[None]:
    model.tie_weights = lambda *arguments, **named: None
    try:
        yield
    finally:
        del model.tie_weights


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of lm-eval and datasets, which would break our progress line."""
    bars, drawn = lm_eval_task.tqdm, datasets.are_progress_bars_disabled()
    lm_eval_task.tqdm = lambda rows, **settings: rows
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        lm_eval_task.tqdm = bars
        if not drawn:
            datasets.enable_progress_bars()
