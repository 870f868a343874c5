"""The output head in 8 bits on the device, in runs whose layers are quantized.

In 16 bits that of Llama-3.1-70B takes 1.96 GiB, as much as four of its layers in 4 bits, and each decode step reads all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_inference.cpu import products as cores
from zero_inference.cpu.library import load_library
from zero_inference.cpu.products import quantize
from zero_inference.kernels.groups import GroupQuantization, dequantize
from zero_inference.kernels.products import FUSED_ROWS, can_fuse, linear_groups
from zero_inference.models.operators import trace_reads
from zero_inference.models.skeleton import unique_parameter_names

BITS = 8
EVEN_ROWS = 256  # so that the parts of a head begin where kernels read vectors
QUANTIZED_BYTES = 64 << 20  # of a head in 16 bits, at a time


class HeadWeight(NamedTuple):
    """The weight of an output head, and how it is stored.

    Attributes:
        name: of the parameter.
        shape: rows and columns.
    """

    name: str
    shape: tuple[int, int]
    scheme: GroupQuantization

    @property
    def module(self) -> str:
        """Name of the head."""
        return self.name.rpartition(".")[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the model's dtype."""
        return self.shape[1] * self.scheme.dtype.itemsize

    @property
    def plain_bytes(self) -> int:
        """Bytes of the weight in the model's dtype."""
        return self.shape[0] * self.row_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes, scales and minima."""
        numel = math.prod(self.shape)
        return self.scheme.packed_bytes(numel) + 2 * numel // self.scheme.group_size * self.scheme.dtype.itemsize

    def packed(self, values: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return codes, scales and minima of `values` on `device`, which takes a few rows at a time."""
        numel, step = values.numel(), max(1, QUANTIZED_BYTES // self.row_bytes)
        codes = torch.empty(self.scheme.packed_bytes(numel), dtype=torch.uint8, device=device)
        scales, minima = (
            torch.empty(numel // self.scheme.group_size, dtype=self.scheme.dtype, device=device) for _ in range(2)
        )
        parts = codes, scales, minima
        for first in range(0, len(values), step):
            rows = values[first : first + step].to(device)
            for part, new in zip(parts, quantize(rows, self.scheme)):
                part.view(len(values), -1)[first : first + step] = new.view(len(rows), -1)
        return parts


def find_head(model: Any, dtype: torch.dtype, group_sizes: Sequence[int]) -> HeadWeight | None:
    """Return the weight of the output head of `model`, which is a skeleton, for the first of `group_sizes` that divides its rows; None if
    none does, if the weight is not of `dtype`, or if it is not one that only the head's `nn.Linear.forward` reads, such as a tied one."""
    head = model.get_output_embeddings()
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    reads = trace_reads(model) if plain else None
    if reads is None:
        return None
    names = unique_parameter_names(model).get(id(head.weight), [])
    if len(names) != 1 or names[0].rpartition(".")[0] not in reads.inside.get(names[0], ()):
        return None
    schemes = (GroupQuantization(BITS, size, dtype) for size in group_sizes)
    scheme = next((scheme for scheme in schemes if scheme.can_quantize(head.weight)), None)
    return None if scheme is None else HeadWeight(names[0], tuple(head.weight.shape), scheme)


class QuantizedHead:
    """Computes the output head `module` from its codes until it is closed.

    Args:
        packed: of `HeadWeight.packed`.
        workspace: uint8, of at least a row in the model's dtype: nothing else uses it while the head is called.
    """

    def __init__(
        self, module: nn.Module, weight: HeadWeight, packed: tuple[torch.Tensor, ...], workspace: torch.Tensor
    ):
        self.module, self.weight, self.packed = module, weight, packed
        count = workspace.numel() // weight.row_bytes
        count = min(weight.shape[0], count // EVEN_ROWS * EVEN_ROWS or count)
        with torch.inference_mode(False):  # a view of inference mode could not be used outside it
            self.rows = workspace[: count * weight.row_bytes].view(weight.scheme.dtype).view(count, -1)
        module.forward = self.logits

    def logits(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the head computes: for few tokens by a product with the codes, else with a part of the rows after the other."""
        (count, columns), size, bias = self.weight.shape, self.weight.scheme.group_size, self.module.bias
        codes, scales, minima = self.packed
        x = input.reshape(-1, columns)
        if len(x) <= FUSED_ROWS:
            if can_fuse(x, codes, scales, minima, BITS, size, bias):
                return linear_groups(input, codes, scales, minima, BITS, size, count, bias)
            if not x.is_cuda and load_library() is not None:
                return cores.linear_groups(input, codes, scales, minima, BITS, size, count, bias)
        out = x.new_empty(len(x), count)
        for first in range(0, count, len(self.rows)):
            rows = self.rows[: count - first]
            last = first + len(rows)
            codes, scales, minima = (part.view(count, -1)[first:last].flatten() for part in self.packed)
            dequantize(codes, scales, minima, BITS, size, rows)
            if bias is None:
                torch.mm(x, rows.mT, out=out[:, first:last])
            else:
                torch.addmm(bias[first:last], x, rows.mT, out=out[:, first:last])
        return out.view(*input.shape[:-1], count)

    def close(self) -> None:
        """Let go of the memory; the head cannot compute any more."""
        self.module.__dict__.pop("forward", None)
        self.packed, self.rows = (), self.rows.new_empty(0, 0)
