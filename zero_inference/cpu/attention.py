"""Attention of a few new tokens over keys and values in host memory (csrc/cpu/attention.h).

Keys and values are [blocks, batch, kv_heads, positions per block, head_dim] with any strides but contiguous rows: position p is in block
p // positions per block. Reading is fastest where the rows of one block and head are contiguous. Plain keys [batch, kv_heads, positions,
head_dim] are one block: `keys[None]`.
"""

from __future__ import annotations

import ctypes
import math
import os
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, fields, require_library
from zero_inference.cpu.pool import Call, CpuPool
from zero_inference.errors import RunError

MASKS = {torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}  # zero_inference::cpu::Mask


class _CachedRows(ctypes.Structure):
    _fields_ = fields(c_void_p, "data") + fields(c_int64, "block batch head position")


class _TokenRows(ctypes.Structure):
    _fields_ = fields(c_int64, "batch head token")


class AttentionArguments(ctypes.Structure):
    """`Attention` of csrc/cpu/attention.h, field by field."""

    _fields_ = [
        *fields(c_int64, "batch heads kv_heads tokens positions block_positions key_dim value_dim window"),
        *[("queries", c_void_p), ("query_strides", _TokenRows), *fields(_CachedRows, "keys values"), ("out", c_void_p)],
        *[("out_strides", _TokenRows), ("mask", c_void_p), ("mask_strides", _TokenRows)],
        *fields(c_void_p, "slopes sinks"),
        *fields(ctypes.c_float, "scale softcap"),
        *fields(ctypes.c_int32, "dtype mask_kind"),
    ]


@dataclass(frozen=True)
class LogitOptions:
    """A layer's treatment of logits; tensors are float32 [heads] on the CPU, made contiguous.

    Attributes:
        scale: of the products; None: 1 / sqrt(key_dim).
        softcap: logits become softcap * tanh(logit / softcap); 0: none.
        sinks: a logit per head that takes part in the softmax without a value.
        slopes: ALiBi's: slope * (position - own position) is added.
    """

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("sinks", "slopes"):
            if (tensor := getattr(self, name)) is not None:
                object.__setattr__(self, name, tensor.contiguous())

    def scale_for(self, key_dim: int) -> float:
        return 1 / math.sqrt(key_dim) if self.scale is None else self.scale


PLAIN_LOGITS = LogitOptions()


def _layer_arguments(keys: Tensor, values: Tensor, heads: int, logits: LogitOptions) -> AttentionArguments:
    """Return the arguments that all calls of a layer share: addresses of the tensors, which must outlive the result."""
    _, batch, kv_heads, block_positions, key_dim = keys.shape
    return AttentionArguments(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        block_positions=block_positions,
        key_dim=key_dim,
        value_dim=values.shape[4],
        keys=_CachedRows(keys.data_ptr(), *keys.stride()[:4]),
        values=_CachedRows(values.data_ptr(), *values.stride()[:4]),
        scale=logits.scale_for(key_dim),
        softcap=logits.softcap,
        slopes=None if logits.slopes is None else logits.slopes.data_ptr(),
        sinks=None if logits.sinks is None else logits.sinks.data_ptr(),
        dtype=DTYPES[keys.dtype],
    )


@torch.no_grad()
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    logits: LogitOptions = PLAIN_LOGITS,
    *,
    positions: int | None = None,
    mask: Tensor | None = None,
    window: int = 0,
    threads: int | None = None,
    instructions: str = "auto",
) -> Tensor:
    """Return softmax(cap(scale * query keys^T) + slopes * distance + mask) values, accumulated in float32.

    New token t is at position `positions - new + t` and sees positions up to its own.

    Args:
        query: float32, float16 or bfloat16 [batch, heads, new, key_dim], on the CPU.
        keys: [blocks, batch, kv_heads, positions per block, key_dim] of the same dtype; heads is a multiple of kv_heads.
        values: [blocks, batch, kv_heads, positions per block, value_dim].
        positions: filled positions, the new tokens included; None: all that the blocks hold.
        mask: bool (True is visible) or float (added), [batch or 1, heads or 1, new, positions or more].
        window: positions that a token sees, its own included; 0: all.
        threads: None: as many as CPUs that this process may use.
        instructions: one of `INSTRUCTIONS`; "auto" is the best supported.

    Returns:
        [batch, heads, new, value_dim], a view of [batch, new, heads, value_dim].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        RunError: not enough memory.
        RuntimeError: the library of csrc/cpu is not available.
    """
    if positions is None:
        positions = keys.shape[0] * keys.shape[3]
    _check(query, keys, values, logits, positions, mask)
    query, keys, values = _with_contiguous_rows(query), _with_contiguous_rows(keys), _with_contiguous_rows(values)
    batch, heads, new, _ = query.shape
    out = query.new_empty((batch, new, heads, values.shape[4])).transpose(1, 2)
    arguments = _layer_arguments(keys, values, heads, logits)
    arguments.tokens, arguments.positions, arguments.window = new, positions, window
    arguments.queries, arguments.query_strides = query.data_ptr(), _TokenRows(*query.stride()[:3])
    arguments.out, arguments.out_strides = out.data_ptr(), _TokenRows(*out.stride()[:3])
    if mask is not None:
        mask = _with_contiguous_rows(mask)
        strides = (stride if size > 1 else 0 for stride, size in zip(mask.stride()[:3], mask.shape[:3]))
        arguments.mask, arguments.mask_strides = mask.data_ptr(), _TokenRows(*strides)
        arguments.mask_kind = MASKS[mask.dtype]
    instruction_set = -1 if instructions == "auto" else INSTRUCTIONS.index(instructions)
    threads = threads or len(os.sched_getaffinity(0))
    if require_library().zero_inference_attention(ctypes.byref(arguments), instruction_set, threads):
        raise _no_memory()
    return out


def _check(
    query: Tensor, keys: Tensor, values: Tensor, logits: LogitOptions, positions: int, mask: Tensor | None
) -> None:
    given = {"query": query, "keys": keys, "values": values, "mask": mask, **vars(logits)}
    tensors = {name: tensor for name, tensor in given.items() if torch.is_tensor(tensor)}
    batch, heads, new, dim = query.shape if query.dim() == 4 else (-1, -1, -1, -1)
    cached = keys.shape  # [blocks, batch, kv_heads, positions per block, key_dim]
    per_head = [each for each in (logits.sinks, logits.slopes) if each is not None]
    fits = (
        len(cached) == values.dim() == 5
        and cached[:4] == values.shape[:4]
        and (batch, dim) == (cached[1], cached[4])
        and heads % cached[2] == 0
        and new <= positions <= cached[0] * cached[3]
        and query.dtype in DTYPES
        and query.dtype == keys.dtype == values.dtype
        and all(tensor.device.type == "cpu" for tensor in tensors.values())
        and all(each.dtype == torch.float32 and each.shape == (heads,) for each in per_head)
    )
    if mask is not None:
        sizes = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] == new
        fits &= sizes and mask.shape[3] >= positions and mask.dtype in MASKS
    if not fits:
        found = ", ".join(f"{name} {each.dtype} {list(each.shape)} {each.device}" for name, each in tensors.items())
        raise ValueError(f"CPU attention over {positions} positions: these do not match: {found}")


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    logits: LogitOptions = PLAIN_LOGITS,
    *,
    positions: int | None = None,
    mask: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Return the result of `attention` in float64, by plain PyTorch; arguments as there."""
    batch, heads, new, key_dim = query.shape
    if positions is None:
        positions = keys.shape[0] * keys.shape[3]
    flat = (cached.double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :positions] for cached in (keys, values))
    # [batch, heads, positions, dim]
    all_keys, all_values = (cached.repeat_interleave(heads // keys.shape[2], 1) for cached in flat)
    scores = logits.scale_for(key_dim) * query.double() @ all_keys.transpose(2, 3)  # [batch, heads, new, positions]
    if logits.softcap:
        scores = logits.softcap * torch.tanh(scores / logits.softcap)
    distance = torch.arange(positions) - torch.arange(positions - new, positions)[:, None]  # [new, positions]
    if logits.slopes is not None:
        scores = scores + logits.slopes.double()[:, None, None] * distance
    visible = (distance <= 0) & (distance > -window if window else True)
    if mask is not None:
        mask = mask[..., :positions]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    scores = scores.masked_fill(~visible, -torch.inf)
    if logits.sinks is not None:
        scores = torch.cat([scores, logits.sinks.double()[:, None, None].expand(batch, heads, new, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :positions]
    if mask is not None:
        weights = weights.nan_to_num(0.0)  # it may hide all positions of a token
    return weights @ all_values


# A decoder layer's attention as a task of the pool (csrc/cpu/attention.cpp), which also stores the new keys and values; without masks.


def add_attention(pool: CpuPool, keys: Tensor, values: Tensor, heads: int, logits: LogitOptions) -> int:
    """Add a layer's attention to the pool, which keeps the tensors alive; return the number of its task.

    Raises:
        RunError: not enough memory to attend to all positions for one token.
    """
    layer = _layer_arguments(keys, values, heads, logits)
    pool.references += [each for each in (keys, values, logits.sinks, logits.slopes) if each is not None]
    task = pool.library.zero_inference_cpu_pool_add_attention(
        pool.handle, ctypes.byref(layer), INSTRUCTIONS.index(pool.instructions)
    )
    _reserve(pool, task, 1, keys.shape[0] * keys.shape[3])
    return task


def _reserve(pool: CpuPool, task: int, new: int, positions: int) -> None:
    call = Call(task, new, None, None, (new, positions, 0, 0))
    if pool.library.zero_inference_cpu_pool_reserve(pool.handle, ctypes.byref(call)):
        raise _no_memory()


def run_attention(pool: CpuPool, task: int, packed: Tensor, out: Tensor, new: int, positions: int, window: int) -> None:
    """Store the new keys and values and write attention to `out`, synchronously. Raises RunError without memory.

    Args:
        packed: queries, new keys and new values, [batch, heads, new, dim] each, one after the other.
        out: [batch, new, heads, value_dim], contiguous.
        new: new tokens; positions: all, with the new ones; window: as of `attention`.
    """
    call = Call(task, new, packed.data_ptr(), out.data_ptr(), (new, positions, window, 0))
    if pool.library.zero_inference_cpu_pool_run(pool.handle, ctypes.byref(call)):
        raise _no_memory()


def submit_attention(
    pool: CpuPool, task: int, source: int, target: int, new: int, positions: int, window: int, number: int, device: int
) -> None:
    """Queue a call of `run_attention`. Raises RunError without memory.

    Args:
        source, target: addresses in host memory of `packed` and `out`.
        number, device: as of `CpuPool.submit`.
    """
    if new > 1:  # `add_attention` reserved memory for one token
        _reserve(pool, task, new, positions)
    pool.submit_call(Call(task, new, source, target, (new, positions, window, 0)), number, device)


def _no_memory() -> RunError:
    return RunError("not enough host memory for CPU attention: use --cpu-compute off.")
