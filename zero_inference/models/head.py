"""The product that gives the logits, kept from a slow way of PyTorch's."""

from __future__ import annotations

from typing import Any

import torch


def multiply_rows_at_once(model: Any) -> None:
    """Have the head of `model` called with rows that lie one behind the other.

    A prefill multiplies the last position alone, a slice of the hidden states. Where no gradient is asked for, PyTorch makes a product
    of batches of such a slice, even of one row, and copies the transposed head for it on a CPU: a prefill of 64 tokens of Llama-3.2-1B
    took 3.8 s instead of 0.5 (2 cores, bfloat16; benchmarks/results/cpu/prefill_head.txt).
    """
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Module):
        head.register_forward_pre_hook(_in_rows)


def _in_rows(head: torch.nn.Module, args: tuple) -> tuple | None:
    if not args or not torch.is_tensor(args[0]):
        return None
    hidden, expected = args[0], 1
    for size, stride in zip(reversed(hidden.shape), reversed(hidden.stride())):
        if stride != expected:
            return hidden.clone(memory_format=torch.contiguous_format), *args[1:]
        expected *= size
    return None
