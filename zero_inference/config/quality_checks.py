"""What can be seen to be wrong with the options about scores before anything is loaded; raises as `checks` does."""

from __future__ import annotations

import importlib.util
import os

from zero_inference.config.choices import DEFAULTS, LONGEST_WINDOW, QUALITY_COMPANIONS, QUALITY_TASKS, Choices
from zero_inference.errors import UsageError
from zero_inference.utils.near import did_you_mean
from zero_inference.utils.replace import check_output_file


def check_quality(choices: Choices) -> None:
    for task in choices.quality:
        if task not in QUALITY_TASKS:
            near = did_you_mean(task, QUALITY_TASKS)
            known = f"choose from {', '.join(QUALITY_TASKS)}"
            raise UsageError(f"--quality {task}: no such task; {known}{'; ' + near if near else '.'}")
    if len(set(choices.quality)) < len(choices.quality):
        raise UsageError(f"--quality {','.join(choices.quality)}: a task is named twice; name each once.")
    for other, names in QUALITY_COMPANIONS.items():
        task = other.removeprefix("--quality").strip()
        for name in names:
            if getattr(choices, name) != DEFAULTS[name] and not (task in choices.quality if task else choices.quality):
                raise UsageError(
                    f"--{name.replace('_', '-')} belongs to {other}, which was not given: add that or drop --{name.replace('_', '-')}."
                )
    if not choices.quality:
        return
    if choices.dummy:
        raise UsageError(
            "--quality needs a tokenizer and trained weights, and --dummy has neither: keep one of the two."
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--quality works through lm-evaluation-harness, which is not installed: pip install 'lm-eval>=0.4.13'."
        )
    _check_quality_numbers(choices)
    _check_quality_paths(choices)


def _check_quality_numbers(choices: Choices) -> None:
    if not 0 < choices.humaneval_temperature < float("inf"):
        raise UsageError(
            f"--humaneval-temperature {choices.humaneval_temperature}: must be a number above 0; "
            "one sample (--humaneval-samples 1) is greedy."
        )
    if choices.humaneval_samples == 1 and choices.humaneval_temperature != Choices.humaneval_temperature:
        raise UsageError(
            "--humaneval-temperature: a single sample is greedy and has none; add --humaneval-samples or drop it."
        )
    for k in choices.pass_at_k:
        if not 1 <= k <= choices.humaneval_samples:
            raise UsageError(
                f"--pass-at-k {k}: k has to be 1 to the number of samples, which is {choices.humaneval_samples}; "
                f"lower k or use --humaneval-samples {max(k, 1)}."
            )
    if choices.perplexity_window is not None:
        perplexity_window(choices.perplexity_window, choices.perplexity_stride, None)
    if "humaneval" in choices.quality and not choices.allow_code_execution:
        raise UsageError(
            "--quality humaneval runs code that the model wrote: allow it with --allow-code-execution "
            "(it runs isolated, see the README), or leave humaneval out."
        )


def _check_quality_paths(choices: Choices) -> None:
    needing = [task for task in choices.quality if task != "humaneval"]
    if needing and choices.quality_data is None:
        raise UsageError(
            f"--quality {','.join(choices.quality)}: no data for {', '.join(needing)}; "
            "add --quality-data with a file or folder."
        )
    if choices.quality_data is not None:
        if not os.path.exists(choices.quality_data):
            raise UsageError(f"--quality-data {choices.quality_data}: no such file or folder.")
        if os.path.isfile(choices.quality_data) and len(choices.quality) > 1:
            raise UsageError(
                f"--quality-data {choices.quality_data} is one file and --quality names {len(choices.quality)} tasks; "
                "give a folder with a file named after each."
            )
    if choices.quality_items:
        check_output_file("--quality-items", choices.quality_items)


def perplexity_window(window: int | None, stride: int | None, positions: int | None) -> tuple[int, int]:
    """The window and the stride of perplexity in tokens, for a model of `positions`; None where there is no such limit.

    Raises:
        UsageError: the window is longer than the model's context, or the stride than the window.
    """
    window = window or min(LONGEST_WINDOW, positions or LONGEST_WINDOW)
    if positions is not None and window > positions:
        raise UsageError(f"--perplexity-window {window}: the model has {positions} positions; use at most that.")
    stride = stride or max(1, window // 2)
    if stride > window:
        raise UsageError(
            f"--perplexity-stride {stride}: longer than the window of {window} tokens, so text would be left out; "
            "use at most the window."
        )
    return window, stride
