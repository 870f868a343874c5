"""The keys of the record's `quality`: the scores of each task that was asked for, see docs/quality.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zero_inference.records.field import key

_BATCH_SIZE = ("sequences", "sequences in one forward pass of a rank")
_TRUNCATED = ("sequences", "sequences longer than the model's context, whose beginning was cut off")
_SECONDS = ("s", "time the task took")
_STDERR = ("share", "standard error of the mean over the items; null for a single item")
_ACCURACY = ("share", "share of items where the likeliest choice is the right one")
_CORRECT = ("items", "number of items where the likeliest choice is the right one")
_TOTAL = ("items", "number of items scored")
_IN_DTYPE = "as lm-eval has it by default, with log-probabilities in the dtype of the logits; null where it is the same"
_OUTCOMES = ("", "one digit per item, 1 (right) or 0, in the order of the data")


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """Of a task with choices."""

    accuracy: float = key(*_ACCURACY)
    stderr: float | None = key(*_STDERR)
    correct: int = key(*_CORRECT)
    total: int = key(*_TOTAL)
    outcomes: str = key(*_OUTCOMES)
    accuracy_in_dtype: float | None = key("share", f"`accuracy` {_IN_DTYPE}")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


@dataclass(frozen=True, slots=True)
class NormedChoiceScores:
    """Of a task whose choices differ in length."""

    accuracy: float = key(*_ACCURACY)
    stderr: float | None = key(*_STDERR)
    correct: int = key(*_CORRECT)
    total: int = key(*_TOTAL)
    outcomes: str = key(*_OUTCOMES)
    accuracy_in_dtype: float | None = key("share", f"`accuracy` {_IN_DTYPE}")
    acc_norm: float = key(
        "share",
        "share of items where the likeliest choice is the right one, with log-likelihoods divided by the length of the choice",
    )
    acc_norm_stderr: float | None = key(*_STDERR)
    outcomes_norm: str = key("", "`outcomes` with log-likelihoods divided by the length of the choice")
    acc_norm_in_dtype: float | None = key("share", f"`acc_norm` {_IN_DTYPE}")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


@dataclass(frozen=True, slots=True)
class ProgramScores:
    """Of programs that were run against their tests."""

    pass_at_k: dict[int, float] = key(
        "share", "for each k: probability that at least one of k programs passes, averaged over the problems"
    )
    stderr: dict[int, float | None] = key(
        "share", "for each k: standard error of that average; null for a single problem"
    )
    n: int = key("programs", "programs written for each problem")
    k: list[int] = key("", "the values of k in `pass_at_k`")
    problems: int = key("problems", "number of problems")
    temperature: float | None = key("", "sampling temperature; null for one greedy program")
    new_tokens: int = key("token", "maximum tokens of a program")
    passed: list[int] = key("programs", "programs that passed, for each problem")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


@dataclass(frozen=True, slots=True)
class PerplexityScores:
    """Of text that was read."""

    perplexity: float = key("", "exp of `nll_per_token`; null if it is too large for a floating-point number")
    perplexity_in_dtype: float | None = key("", f"`perplexity` {_IN_DTYPE}")
    stderr: float | None = key("", "standard error of `perplexity`; null with a single window")
    nll_per_token: float = key("nat/token", "mean negative log-likelihood per token over all documents")
    nll_stderr: float | None = key("nat/token", "standard error of `nll_per_token`; null with a single window")
    tokens: int = key("token", "number of tokens scored")
    windows: int = key("windows", "number of windows the text was split into")
    documents: int = key("documents", "number of documents")
    window: int = key("token", "length of a window")
    stride: int = key("token", "tokens scored in each window after the first")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


TaskScores = ChoiceScores | NormedChoiceScores | ProgramScores | PerplexityScores


@dataclass(frozen=True, slots=True)
class Tasks:
    """Which task has which scores."""

    mmlu: ChoiceScores | None = key(
        "", "multiple choice: likeliest of four answers", only_with="--quality mmlu", default=None
    )
    hellaswag: NormedChoiceScores | None = key(
        "", "multiple choice: likeliest of four endings", only_with="--quality hellaswag", default=None
    )
    humaneval: ProgramScores | None = key(
        "", "generated programs that pass their tests", only_with="--quality humaneval", default=None
    )
    perplexity: PerplexityScores | None = key(
        "", "how well the model predicts a text", only_with="--quality perplexity", default=None
    )


_KINDS: dict[str, type[Any]] = {
    "mmlu": ChoiceScores,
    "hellaswag": NormedChoiceScores,
    "humaneval": ProgramScores,
    "perplexity": PerplexityScores,
}
assert list(_KINDS) == [task.name for task in fields(Tasks)]


def scores_of(task: str, scores: Mapping[str, Any]) -> TaskScores:
    """`scores` as the type that declares them.

    Raises:
        ValueError: a key more or less than are declared.
    """
    kind = _KINDS[task]
    declared = {each.name for each in fields(kind)}
    if odd := sorted(declared ^ scores.keys()):
        raise ValueError(f"quality.{task}: {', '.join(odd)}: declared and given keys differ in these")
    typed: TaskScores = kind(**scores)
    return typed
