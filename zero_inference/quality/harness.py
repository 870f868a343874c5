"""lm-evaluation-harness on a model that an engine has loaded: its tokenizing, documents, windows and generation.

Each function takes one rank's share of the items and returns one result for each.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.hellaswag.utils import preprocess
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero_inference.errors import RunError
from zero_inference.utils.patching import Patches
from zero_inference.utils.progress import Task

STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # the function is complete; from lm-eval's task humaneval (Codex)
TOP_P = 0.95  # for several samples, as in the Codex paper


class EngineLM(HFLM):
    """HFLM over a loaded model, on the engine's device; its weights stay untouched.

    HFLM would take the device of the first parameter, which is meta under accelerate, and tie weights again, which puts plain parameters
    where an engine manages its own.

    Attributes:
        truncated: sequences so far that were longer than the model's context.
    """

    def __init__(self, model, tokenizer, device: torch.device, batch_size: int):
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        with Patches() as patches:
            patches.set_attr(model, "tie_weights", lambda *arguments, **named: None)
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self._device = device
        self.truncated = 0


@dataclass(frozen=True)
class Request:
    """Tokens whose log-likelihood is wanted, and those before them, of which there is at least one."""

    context: Sequence[int]
    scored: Sequence[int]
    document: int = 0  # number of the text


def score_requests(lm: EngineLM, task: str, requests: Sequence[Request], progress: Task) -> list[tuple[float, float]]:
    """Return the summed log-likelihood (nat) of each request's scored tokens: with log-probabilities in float32, and as lm-eval has it by
    default, in the dtype of the logits: bfloat16 has three digits.

    As in lm-eval, requests that differ in their last token share a forward pass, and the longest come first.

    Raises:
        RunError: an answer is longer than the model's context, or a log-likelihood is not finite.
    """
    by_input: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        if len(request.scored) > lm.max_length:
            raise RunError(
                f"{task}: an answer has {len(request.scored)} tokens, but the model's context is only {lm.max_length}; "
                "remove it from the data."
            )
        tokens = (*request.context, *request.scored[:-1])
        lm.truncated += len(tokens) > lm.max_length
        by_input[tokens[-lm.max_length :]].append(number)
    inputs = sorted(by_input, key=lambda tokens: (-len(tokens), tokens))
    found: dict[int, tuple[float, float]] = {}
    progress.total = len(requests)
    for at in range(0, len(inputs), lm.batch_size):
        progress.at(f"{task} {len(found)} of {len(requests)} requests", len(found))
        batch = inputs[at : at + lm.batch_size]
        ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
        for row, tokens in zip(ids, batch):
            row[: len(tokens)] = torch.tensor(tokens)  # padding on the right changes nothing before it
        for tokens, logits in zip(batch, lm._model_call(ids.to(lm.device))):  # logits [T, vocabulary]
            for number in by_input[tokens]:
                scored = torch.tensor(requests[number].scored, device=logits.device)[:, None]
                answer = logits[len(tokens) - len(scored) : len(tokens)]
                exact, own = (
                    float(answer.log_softmax(-1, dtype=dtype).gather(1, scored).sum())
                    for dtype in (torch.float32, logits.dtype)
                )
                if not math.isfinite(exact):
                    raise RunError(
                        f"{task}: a log-likelihood is {exact}, which is not finite; try another --dtype or quantization."
                    )
                found[number] = exact, own
    return [found[number] for number in range(len(requests))]


def build_choice_docs(task: str, items: list[dict]) -> list[dict]:
    """Return lm-eval's documents: `query`, `choices`, and `gold`, the index of the right choice."""
    if task == "mmlu":
        return [{"query": item["prompt"], "choices": item["choices"], "gold": item["answer"]} for item in items]
    docs = [{"query": item["ctx"], "choices": item["endings"], "gold": item["label"]} for item in items]
    if all({"activity_label", "ctx_a", "ctx_b"} <= item.keys() for item in items):  # as lm-eval's task
        for doc, item in zip(docs, items):
            doc["query"] = preprocess(f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}")
            doc["choices"] = [preprocess(ending) for ending in item["endings"]]
    return docs


def choice_requests(lm: EngineLM, docs: list[dict]) -> list[Request]:
    """Return the requests of each choice of each document, tokenized by lm-eval's rules."""
    return [Request(*lm._encode_pair(doc["query"], f" {choice}")) for doc in docs for choice in doc["choices"]]


def window_requests(lm: EngineLM, texts: list[str], window: int, stride: int) -> list[Request]:
    """Split texts so that every token is scored in exactly one window, the first one after the beginning-of-text token.

    Args:
        window: most tokens of a forward pass.
        stride: tokens that each window after the first scores, each with a context of window - stride + 1 or more.
    """
    requests = []
    for number, text in enumerate(texts):
        tokens, context_len = lm.tok_encode(text), window - stride + 1
        for pair in get_rolling_token_windows(tokens, lm.prefix_token_id, max_seq_len=window, context_len=context_len):
            context, scored = make_disjoint_window(pair)
            requests.append(Request(context, scored, number))
    return requests


def complete_programs(
    lm: EngineLM, prompts: list[str], new_tokens: int, temperature: float | None, seed: int, progress: Task
) -> list[str]:
    """Return a completion of each prompt, cut where the function ends; greedy if `temperature` is None.

    Raises:
        RunError: a prompt and `new_tokens` exceed the model's context.
    """
    lengths = [len(lm.tok_encode(prompt)) for prompt in prompts]
    if max(lengths, default=0) + new_tokens > lm.max_length:
        raise RunError(
            f"humaneval: a prompt of {max(lengths)} tokens and {new_tokens} new ones do not fit the model's context of "
            f"{lm.max_length} tokens; lower --humaneval-tokens."
        )
    settings = {"until": STOP, "max_gen_toks": new_tokens, "do_sample": temperature is not None}
    if temperature is not None:
        settings |= {"temperature": temperature, "top_p": TOP_P, "top_k": 0}
        torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda number: (-lengths[number], prompts[number]))  # as HFLM sorts
    completions = [""] * len(prompts)
    progress.total = len(prompts)
    for at in range(0, len(order), lm.batch_size):
        progress.at(f"humaneval {at} of {len(order)} requests", at)
        batch = order[at : at + lm.batch_size]
        requests = [
            Instance(request_type="generate_until", doc={}, arguments=(prompts[number], settings), idx=number)
            for number in batch
        ]
        for number, text in zip(batch, lm.generate_until(requests, disable_tqdm=True)):
            completions[number] = text
    return completions
