"""Weights on a CPU to int8 and int4 groups, by csrc/cpu/quantize.cpp."""

from __future__ import annotations

import torch

from zero_inference.cpu.library import load_library
from zero_inference.cpu.matrix import DTYPES, INSTRUCTIONS
from zero_inference.kernels import groups
from zero_inference.kernels.groups import GroupQuantization


@torch.no_grad()
def quantize(
    weight: torch.Tensor, scheme: GroupQuantization, divides: bool = False, instructions: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `groups.quantize` returns, on a CPU with the compiled library; without a compiler, or on another device, call that.

    Args:
        instructions: one of `INSTRUCTIONS`; None: the best that the processor has.

    Raises:
        ValueError: see there.
        MemoryError: memory is missing.
    """
    library = load_library() if weight.device.type == "cpu" else None
    if library is None:
        return groups.quantize(weight, scheme, divides)
    rows, codes, scale, minimum = groups.empty_groups(weight, scheme)
    result = library.zero_inference_quantize(
        rows.data_ptr(),
        DTYPES[weight.dtype],
        *rows.shape,
        scheme.bits,
        divides,
        *(part.data_ptr() for part in (codes, scale, minimum)),
        torch.get_num_threads(),
        -1 if instructions is None else INSTRUCTIONS.index(instructions),
    )
    if result == -2:
        raise ValueError(f"this processor does not have {instructions}")
    if result < 0:
        raise MemoryError("quantizing a weight: memory is missing")
    groups.refuse_range(result == 1, weight.dtype)
    return codes, scale, minimum
