"""The keys of the record's `quality`: the scores of each task that was asked for, see docs/quality.md."""

from __future__ import annotations

from zero_inference.records.field import Part, key

_IN_DTYPE = "as lm-eval has it by default, with log-probabilities in the dtype of the logits; null where it is the same"
_STDERR = ("share", "standard error of the mean over the items; null for a single item")


class _Accuracy(Part):
    accuracy: float = key("share", "share of items where the likeliest choice is the right one")
    stderr: float | None = key(*_STDERR)
    correct: int = key("items", "number of items where the likeliest choice is the right one")
    total: int = key("items", "number of items scored")
    outcomes: str = key("", "one digit per item, 1 (right) or 0, in the order of the data")
    accuracy_in_dtype: float | None = key("share", f"`accuracy` {_IN_DTYPE}")


class _NormedAccuracy(Part):
    acc_norm: float = key(
        "share",
        "share of items where the likeliest choice is the right one, with log-likelihoods divided by the length of the choice",
    )
    acc_norm_stderr: float | None = key(*_STDERR)
    outcomes_norm: str = key("", "`outcomes` with log-likelihoods divided by the length of the choice")
    acc_norm_in_dtype: float | None = key("share", f"`acc_norm` {_IN_DTYPE}")


class _Programs(Part):
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


class _Perplexity(Part):
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


class _Pass(Part):
    batch_size: int = key("sequences", "sequences in one forward pass of a rank")
    truncated: int = key("sequences", "sequences longer than the model's context, whose beginning was cut off")
    seconds: float = key("s", "time the task took")


# The keys of the last base class come first.
class ChoiceScores(_Pass, _Accuracy):
    """Scores of a task with choices."""


class NormedChoiceScores(_Pass, _NormedAccuracy, _Accuracy):
    """Scores of a task whose choices differ in length."""


class ProgramScores(_Pass, _Programs):
    """Scores of programs that were run against their tests."""


class PerplexityScores(_Pass, _Perplexity):
    """Perplexity of a text."""


class Tasks(Part):
    """Scores by task."""

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
