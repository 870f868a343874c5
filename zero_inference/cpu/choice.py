"""The experts that tokens chose, as the CPU takes them, and the device's part of the weighted sum."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_inference.cpu.matrix import DTYPES
from zero_inference.utils.extension import load_extension


class Choice(NamedTuple):
    """What each row of an input chose of a task with experts (csrc/cpu/experts.h).

    Attributes:
        experts: their numbers, int64 [rows, k]; ~e for one that the device has and ~(e + experts) for one that it
            fetches, which the CPU counts and does not read.
        weights: of them, [rows, k] in float32, float16 or bfloat16.
    """

    experts: torch.Tensor
    weights: torch.Tensor

    def extra(self, experts: int, weights: int) -> tuple[int, ...]:
        """For a call that finds both at these addresses."""
        return self.experts.shape[-1], experts, weights, DTYPES[self.weights.dtype]


class WeightedRows(NamedTuple):
    """The weighted sum of what a token's experts computed, before it is added up.

    Attributes:
        weights: [tokens, k]; contiguous.
        rows: [tokens * k, width], zeros for an expert that is not among these; contiguous.
        more: the same of other experts, or None.
    """

    weights: torch.Tensor
    rows: torch.Tensor
    more: torch.Tensor | None = None

    @property
    def has_kernel(self) -> bool:
        """Return whether the kernel of csrc/crossing computes the sum."""
        return self.rows.is_cuda and {self.rows.dtype, self.weights.dtype} <= DTYPES.keys() and load_extension()

    def total(self) -> torch.Tensor:
        """Return the sum of each token [tokens, width], added in float32 in the order of the choices."""
        return torch.ops.zero_inference.weighted_rows(*self) if self.has_kernel else self._by_pytorch()

    def added_to(self, out: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token and `out` [tokens, width], rounded once to out's dtype; with PyTorch alone."""
        return self._by_pytorch().add_(out).to(out.dtype)

    def _by_pytorch(self) -> torch.Tensor:
        """In float32."""
        tokens, k = self.weights.shape
        weights = self.weights.float().unsqueeze(-1)
        sums = [(rows.view(tokens, k, -1) * weights).sum(1) for rows in (self.rows, self.more) if rows is not None]
        return sums[0] if len(sums) == 1 else sums[0].add_(sums[1])
