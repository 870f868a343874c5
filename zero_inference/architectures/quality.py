"""Quality of one model that is already there, over the same code as `run_model.py --quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zero_inference.config.options import QUALITY_TASKS
from zero_inference.errors import UsageError
from zero_inference.quality.data import check_items, load_items, rows_of
from zero_inference.quality.evaluate import QualitySettings, evaluate
from zero_inference.quality.sandbox import check_isolation
from zero_inference.utils.ranks import Ranks


class QualityBenchmark:
    """Scores a causal language model on tasks.

    Args:
        model: a transformers model, ready to be called; it is not changed.
        tokenizer: its tokenizer.
        device: where inputs go; None takes that of the model's parameters.
        allow_code_execution: humaneval runs what the model wrote, in `zero_inference.quality.sandbox`.
        settings: fields of `QualitySettings`: batch_size, samples, temperature, ks, window, stride, seed, limits.

    Raises:
        UsageError: no tokenizer.
        ValueError: a k of pass@k that is larger than the number of samples.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        device: torch.device | str | None = None,
        allow_code_execution: bool = False,
        **settings,
    ):
        if tokenizer is None:
            raise UsageError("quality is measured on text, and no tokenizer was given: pass the model's.")
        self.model, self.tokenizer = model, tokenizer
        self.device = torch.device(device) if device is not None else _device_of(model)
        self.allow_code_execution = allow_code_execution
        self.settings = QualitySettings(**settings)
        self.settings.check_ks()

    def evaluate_task(self, task: str, dataset: Any) -> dict[str, Any]:
        """Score the model on `dataset`, whose fields `zero_inference.quality.data` lists.

        Args:
            dataset: dicts in any iterable, a datasets.Dataset, a DataFrame, or the path of a file or folder.

        Returns:
            For mmlu and hellaswag `accuracy`, `stderr` (None for one item), `correct`, `total`, and hellaswag's `acc_norm`; for
            humaneval `pass_at_k` ({k: value}), `n` samples a problem and `k`, the list of them; for perplexity `perplexity`,
            `stderr`, `tokens`, `window` and `stride`. More keys beside them.

        Raises:
            ValueError: unknown task.
            UsageError: data that is empty or wrong, code that may not or cannot be run.
            RunError: the model gives no scores.
        """
        if task not in QUALITY_TASKS:
            raise ValueError(f"unknown task {task!r}; there are {', '.join(QUALITY_TASKS)}")
        if isinstance(dataset, (str, Path)):
            items = load_items(task, dataset)
        else:
            items = check_items(task, rows_of(dataset))
        if task == "humaneval":
            if not self.allow_code_execution:
                raise UsageError("humaneval runs code that the model wrote: allow it with allow_code_execution=True.")
            check_isolation()
        alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=self.device)
        return evaluate({task: items}, self.model, self.tokenizer, self.device, alone, self.settings).scores[task]


def _device_of(model) -> torch.device:
    """Of the first parameter that is anywhere; one that accelerate offloads is on the meta device between forwards."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
