"""The keys of the record's `quality`: the scores of each task that was asked for, see docs/quality.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zero_inference.records.key import key

_BATCH_SIZE = ("sequences", "sequences in one forward of a rank")
_TRUNCATED = ("sequences", "that were longer than the model's context and lost their beginning")
_SECONDS = ("s", "time of the task")
_STDERR = ("share", "standard error of the mean over the items; null for a single one")
_ACCURACY = ("share", "items whose most likely choice is the right one")
_CORRECT = ("items", "whose most likely choice is the right one")
_TOTAL = ("items", "items that were scored")
_OUTCOMES = ("", "one digit an item, 1 or 0, in the order of the data")


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """Of a task with choices."""

    accuracy: float = key(*_ACCURACY)
    stderr: float | None = key(*_STDERR)
    correct: int = key(*_CORRECT)
    total: int = key(*_TOTAL)
    outcomes: str = key(*_OUTCOMES)
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
    acc_norm: float = key(
        "share", "items whose most likely choice is the right one, likelihoods divided by the length of the choice"
    )
    acc_norm_stderr: float | None = key(*_STDERR)
    outcomes_norm: str = key("", "`outcomes` by likelihoods divided by the length of the choice")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


@dataclass(frozen=True, slots=True)
class ProgramScores:
    """Of programs that were run against their tests."""

    pass_at_k: dict[int, float] = key("share", "by k: the chance that one of k programs passes, mean over the problems")
    stderr: dict[int, float | None] = key(
        "share", "by k: standard error of the mean over the problems; null for a single one"
    )
    n: int = key("programs", "written for each problem")
    k: list[int] = key("", "every k of `pass_at_k`")
    problems: int = key("problems", "that programs were written for")
    temperature: float | None = key("", "temperature of the sampling; null for one greedy program")
    new_tokens: int = key("token", "most tokens of a program")
    passed: list[int] = key("programs", "that passed, of each problem")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


@dataclass(frozen=True, slots=True)
class PerplexityScores:
    """Of text that was read."""

    perplexity: float = key("", "exp of `nll_per_token`; null where that is too large for a number")
    stderr: float | None = key("", "standard error of `perplexity`; null with a single window")
    nll_per_token: float = key("nat/token", "mean negative log-likelihood, all documents together")
    nll_stderr: float | None = key("nat/token", "standard error of `nll_per_token`; null with a single window")
    tokens: int = key("token", "tokens that were scored")
    windows: int = key("windows", "that the text was cut into")
    documents: int = key("documents", "that the text came from")
    window: int = key("token", "length of a window")
    stride: int = key("token", "new tokens in each window")
    batch_size: int = key(*_BATCH_SIZE)
    truncated: int = key(*_TRUNCATED)
    seconds: float = key(*_SECONDS)


TaskScores = ChoiceScores | NormedChoiceScores | ProgramScores | PerplexityScores


@dataclass(frozen=True, slots=True)
class Tasks:
    """Which task has which scores."""

    mmlu: ChoiceScores | None = key("", "likeliest of four choices", only_with="--quality mmlu", default=None)
    hellaswag: NormedChoiceScores | None = key(
        "", "likeliest of four endings", only_with="--quality hellaswag", default=None
    )
    humaneval: ProgramScores | None = key(
        "", "programs that pass their tests", only_with="--quality humaneval", default=None
    )
    perplexity: PerplexityScores | None = key(
        "", "how likely a text is to the model", only_with="--quality perplexity", default=None
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
