"""Random weights for runs that need no checkpoint: seeded by name, so that order, rank and engine do not matter."""

from __future__ import annotations

import hashlib

import torch

WEIGHT_STD = 0.02  # the init of GPT-2, OPT and Llama; keeps 16-bit activations finite through every preset


def fill_dummy(tensor: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    """Fill `tensor` in place where it lies and return it.

    Matrices are N(0, 0.02^2), norm weights 1 + N(0, 0.02^2), biases N(0, 0.02^2). The values depend on `seed`, `name`,
    shape, dtype and the kind of device alone.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    tensor.normal_(0.0, WEIGHT_STD, generator=generator)
    if tensor.dim() == 1 and not name.endswith("bias"):
        tensor.add_(1.0)
    return tensor
