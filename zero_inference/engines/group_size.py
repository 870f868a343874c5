"""Which matrices are too narrow for groups, and what is said where groups do not fit a wider one."""

from __future__ import annotations

from zero_inference.errors import UsageError
from zero_inference.utils.suggestions import nearest_divisor

LEAST_COLUMNS = (
    32  # a matrix with fewer keeps its dtype: it is no large projection (a low rank, the kernel of a convolution)
)


def group_size_refusal(asked: int, name: str, shape: tuple[int, ...], packs: int = 1) -> UsageError:
    """What to say where groups of `asked` do not fit the last dimension of weight `name`, of which `packs` elements share a word."""
    last = shape[-1]
    fitting = nearest_divisor(asked, last, (256, 128, 64, 32, 16, 8), packs)
    change = (
        f"use --quant-group-size {fitting} or another divisor"
        if fitting
        else "no group size fits this model, drop --quant-bits"
    )
    return UsageError(
        f"--quant-group-size {asked}: does not divide {name} of shape {list(shape)} along its last dimension; {change}."
    )
