"""What the rows of an input chose, as the cores take it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_inference.cores.matrix import DTYPES


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
