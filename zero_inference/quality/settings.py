"""How quality tasks are done, whatever the model."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.quality.pass_at_k import pass_at_k
from zero_inference.quality.sandbox import Limits

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
