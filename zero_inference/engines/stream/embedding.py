"""The input embedding in page-locked host memory, of which a pass reads the rows of its tokens.

Its table is as large as the output head, and a decode step reads a row a token: 16 KiB of 1.96 GiB in Llama-3.1-70B. Device memory
holds layers instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zero_inference.engines.base import Job
from zero_inference.kernels.extension import load_extension
from zero_inference.models.operators import trace_reads
from zero_inference.models.skeleton import unique_parameter_names
from zero_inference.utils.host_memory import host_empty


class EmbeddingTable(NamedTuple):
    """The weight of a model's input embedding.

    Attributes:
        module: name of the embedding.
        nbytes: of the table.
        row_bytes: of a token.
    """

    module: str
    nbytes: int
    row_bytes: int

    @property
    def weight(self) -> str:
        """Name of the parameter."""
        return f"{self.module}.weight"


def table_for_host(job: Job) -> EmbeddingTable | None:
    """Return the table of the job's model if it may be in host memory; None where it has to be on the device."""
    if not device_reads_rows(job):
        return None
    return job.skeleton.once("embedding table", lambda: find_table(job.skeleton.model))


def device_reads_rows(job: Job) -> bool:
    """Return whether the device reads single rows of page-locked host memory."""
    alone = job.on_gpu and job.pin_weights and job.ranks.world_size == 1
    return alone and (not job.machine.is_here or load_extension())


def find_table(model: Any) -> EmbeddingTable | None:
    """Return the table of the input embedding of `model`, which is a skeleton; None if it is not one that only `nn.Embedding.forward`
    reads: tied to the head, scaled by a forward of its own, or read by other code."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a checkpoint's own code may not say which it is
        return None
    plain = isinstance(embedding, nn.Embedding) and type(embedding).forward is nn.Embedding.forward
    if not plain or "forward" in vars(embedding) or embedding.max_norm is not None:
        return None
    weight, reads = embedding.weight, trace_reads(model)
    names = unique_parameter_names(model).get(id(weight), [])
    if reads is None or len(names) != 1 or weight.dtype.itemsize not in (2, 4):
        return None
    module = names[0].rpartition(".")[0]
    if module not in reads.inside.get(names[0], ()):
        return None
    row_bytes = embedding.embedding_dim * weight.dtype.itemsize
    return EmbeddingTable(module, embedding.num_embeddings * row_bytes, row_bytes)


class HostEmbedding:
    """Computes the embedding `module` from its weight in host memory until it is closed.

    Args:
        values: of the weight.
        pinned: page-lock them, as a GPU needs it.
    """

    def __init__(self, module: nn.Module, values: torch.Tensor, pinned: bool):
        self.module, self.table = module, host_empty(values.shape, values.dtype, pinned)
        self.table.copy_(values)
        module.forward = self.rows

    def rows(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids `input`, [..., columns]; on a GPU an id beyond the table is a device-side assert, as in PyTorch."""
        if not input.is_cuda:
            return F.embedding(input, self.table)
        out = torch.empty(*input.shape, self.table.shape[1], dtype=self.table.dtype, device=input.device)
        torch.ops.zero_inference.embedding_rows(input.to(torch.int64).contiguous(), self.table, out)
        return out

    def close(self) -> None:
        """Let go of the memory."""
        self.module.__dict__.pop("forward", None)
        self.table = self.table.new_empty(0, 0)
