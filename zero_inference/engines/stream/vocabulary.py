"""The two matrices of the size of the vocabulary: the input embedding in host memory, and the output head in 8 bits.

In Llama-3.1-70B each takes 1.96 GiB in 16 bits, as much as four of its layers in 4 bits. A decode step reads 16 KiB of the embedding, a row
a token, and all of the head. Their device memory holds layers instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zero_inference.cpu import products as cpu_products
from zero_inference.cpu.library import load_library
from zero_inference.cpu.products import quantize
from zero_inference.engines.base import Job
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.formats import QuantizedWeight
from zero_inference.kernels.products import FUSED_ROWS, can_fuse, quantized_linear
from zero_inference.kernels.quantization import GroupQuantization, dequantize
from zero_inference.models.empty_model import parameter_names
from zero_inference.models.tracing import trace_reads
from zero_inference.utils.patching import Patches

HEAD_BITS = 8
HEAD_ROWS_MULTIPLE = 256  # so that parts of a head begin at addresses from which kernels read vectors
HEAD_CHUNK_BYTES = 64 << 20  # of a head in 16 bits, quantized at a time


class EmbeddingTable(NamedTuple):
    """The weight of a model's input embedding, and the name of its module."""

    module: str
    nbytes: int
    row_bytes: int  # of one token

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"


def find_host_embedding(job: Job) -> EmbeddingTable | None:
    """Return the input embedding if it may be in host memory: `find_table`, on a device that reads its rows there."""
    if not device_reads_rows(job):
        return None
    return job.empty_model.cached("embedding table", lambda: find_table(job.empty_model.model))


def device_reads_rows(job: Job) -> bool:
    """Return whether the device can read single rows of a table in page-locked host memory."""
    return job.on_gpu and job.pin_weights and (not job.machine.is_here or load_extension())


def find_table(model: Any) -> EmbeddingTable | None:
    """Return the input embedding of an empty `model`; None if it is tied to the head, scaled by its own forward, or read by other code."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a checkpoint's own code may not say which it is
        return None
    name = _name_of_weight(model, embedding, nn.Embedding)
    if name is None or embedding.max_norm is not None or embedding.weight.dtype.itemsize not in (2, 4):
        return None
    row_bytes = embedding.embedding_dim * embedding.weight.dtype.itemsize
    return EmbeddingTable(name.rpartition(".")[0], embedding.num_embeddings * row_bytes, row_bytes)


def _name_of_weight(model: Any, module: nn.Module | None, kind: type[nn.Module]) -> str | None:
    """Return the name of the weight of `module`; None unless only the forward of `kind` reads it."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward or "forward" in vars(module):
        return None
    names, reads = parameter_names(model).get(id(module.weight), []), trace_reads(model)
    if reads is None or len(names) != 1 or names[0].rpartition(".")[0] not in reads.callers_of.get(names[0], ()):
        return None
    return names[0]


class HostEmbedding:
    """Computes the embedding `module` from its weight `table` [vocabulary, columns] in host memory until it is closed."""

    def __init__(self, module: nn.Module, table: torch.Tensor):
        self.patches, self.table = Patches(), table
        self.patches.set_attr(module, "forward", self.rows)

    def rows(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids `input`, [..., columns]; on a GPU an id beyond the table is a device-side assert, as in PyTorch."""
        if not input.is_cuda:
            return F.embedding(input, self.table)
        out = torch.empty(*input.shape, self.table.shape[1], dtype=self.table.dtype, device=input.device)
        torch.ops.zero_inference.embedding_rows(input.to(torch.int64).contiguous(), self.table, out)
        return out

    def close(self) -> None:
        self.patches.close()
        self.table = self.table.new_empty(0, 0)


class HeadWeight(NamedTuple):
    """The weight of an output head, the name of its parameter, and how it is stored."""

    name: str
    shape: tuple[int, int]
    scheme: GroupQuantization

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.scheme.dtype.itemsize  # in the model's dtype, as `plain_bytes`

    @property
    def plain_bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    @property
    def stored_bytes(self) -> int:
        return self.scheme.stored_bytes(math.prod(self.shape), self.scheme.dtype)

    def packed(self, values: torch.Tensor, device: torch.device) -> QuantizedWeight:
        """Return `values` quantized on `device`, where `HEAD_CHUNK_BYTES` of rows are quantized at a time."""
        form, step = self.scheme.weight_format(self.scheme.dtype), max(1, HEAD_CHUNK_BYTES // self.row_bytes)
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in form.tensors(self.shape).items()
        }
        for first in range(0, len(values), step):
            rows = values[first : first + step].to(device)
            for part, new in zip(tensors.values(), quantize(rows, self.scheme)):
                part[first : first + step] = new.view(len(rows), -1)
        return QuantizedWeight(form, **tensors)


def find_head(model: Any, dtype: torch.dtype, group_sizes: Sequence[int]) -> HeadWeight | None:
    """Return the output head of the empty `model`, with the first of `group_sizes` that divides its rows.

    None if no size does, the weight is not of `dtype`, or other code than the head's `nn.Linear.forward` reads it, as a tied one.
    """
    head = model.get_output_embeddings()
    name = _name_of_weight(model, head, nn.Linear)
    if name is None:
        return None
    schemes = (GroupQuantization(HEAD_BITS, size, dtype) for size in group_sizes)
    scheme = next((scheme for scheme in schemes if scheme.can_quantize(head.weight)), None)
    return None if scheme is None else HeadWeight(name, tuple(head.weight.shape), scheme)


class QuantizedHead:
    """Computes the output head `module` from the result of `HeadWeight.packed` until it is closed.

    Args:
        workspace: uint8, at least a row in the model's dtype; nothing else uses it during the head's call.
    """

    def __init__(self, module: nn.Module, weight: HeadWeight, packed: QuantizedWeight, workspace: torch.Tensor):
        self.module, self.weight, self.packed, self.patches = module, weight, packed, Patches()
        count = workspace.numel() // weight.row_bytes
        count = min(weight.shape[0], count // HEAD_ROWS_MULTIPLE * HEAD_ROWS_MULTIPLE or count)
        with torch.inference_mode(False):  # a view of inference mode could not be used outside it
            self.rows = workspace[: count * weight.row_bytes].view(weight.scheme.dtype).view(count, -1)
        self.patches.set_attr(module, "forward", self.logits)

    def logits(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits [..., rows] of `input` [..., columns]: few tokens multiply codes, more multiply chunks of dequantized rows."""
        (count, columns), packed, bias = self.weight.shape, self.packed, self.module.bias
        x = input.reshape(-1, columns)
        if len(x) <= FUSED_ROWS:
            if can_fuse(x, packed, bias):
                return quantized_linear(input, packed, count, bias)
            if not x.is_cuda and load_library() is not None:
                return cpu_products.linear_groups(input, packed, count, bias)
        out = x.new_empty(len(x), count)
        for first in range(0, count, len(self.rows)):
            rows = self.rows[: count - first]
            last = first + len(rows)
            chunk = {name: tensor[first:last] for name, tensor in packed.tensors.items()}
            dequantize(QuantizedWeight(packed.format, **chunk), rows)
            if bias is None:
                torch.mm(x, rows.mT, out=out[:, first:last])
            else:
                torch.addmm(bias[first:last], x, rows.mT, out=out[:, first:last])
        return out.view(*input.shape[:-1], count)

    def close(self) -> None:
        self.patches.close()
        empty = self.rows.new_empty(0, 0)
        self.packed, self.rows = QuantizedWeight(self.packed.format, empty), empty
