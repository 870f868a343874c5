"""Attention of a few new tokens over keys and values in host memory (csrc/cpu/attention.h).

Keys and values are [blocks, batch, kv_heads, positions per block, head_dim] with any strides but contiguous rows: position p is in block
p // positions per block. Reading is fastest where the rows of one block and head are contiguous. Plain keys [batch, kv_heads, positions,
head_dim] are one block: `keys[None]`.
"""

from __future__ import annotations

import ctypes
import math
import os

import torch
from torch import Tensor

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, require_library
from zero_inference.cpu.pool import Call, CpuPool
from zero_inference.errors import RunError

MASKS = {torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}  # zero_inference::cpu::Mask


class _CachedRows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("block", "batch", "head", "position")]


class _TokenRows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class AttentionArguments(ctypes.Structure):
    """`Attention` of csrc/cpu/attention.h, field by field."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "tokens", "positions", "block_positions")]
        + [(name, ctypes.c_int64) for name in ("key_dim", "value_dim", "window")]
        + [("queries", ctypes.c_void_p), ("query_strides", _TokenRows), ("keys", _CachedRows), ("values", _CachedRows)]
        + [("out", ctypes.c_void_p), ("out_strides", _TokenRows), ("mask", ctypes.c_void_p)]
        + [("mask_strides", _TokenRows), ("slopes", ctypes.c_void_p), ("sinks", ctypes.c_void_p)]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("dtype", ctypes.c_int32)]
        + [("mask_kind", ctypes.c_int32)]
    )


def _layer_arguments(
    keys: Tensor,
    values: Tensor,
    heads: int,
    scale: float,
    window: int,
    slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
) -> AttentionArguments:
    """Return the arguments that all calls of a layer share, without queries, output, mask and the number of positions.

    They hold addresses of the tensors, which must outlive the result; shapes as of `attention`.
    """
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
        window=window,
        scale=scale,
        softcap=softcap,
        slopes=None if slopes is None else slopes.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        dtype=DTYPES[keys.dtype],
    )


@torch.no_grad()
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    positions: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    window: int = 0,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    threads: int | None = None,
    instructions: str | None = None,
) -> Tensor:
    """Return softmax(cap(scale * query keys^T) + slopes * distance + mask) values, accumulated in float32.

    New token t is at position `positions - new + t` and sees positions up to its own.

    Args:
        query: float32, float16 or bfloat16 [batch, heads, new, key_dim], on the CPU.
        keys: [blocks, batch, kv_heads, positions per block, key_dim] of the same dtype; heads is a multiple of kv_heads.
        values: [blocks, batch, kv_heads, positions per block, value_dim].
        positions: filled positions, the new tokens included; None: all that the blocks hold.
        scale: of the products; None: 1 / sqrt(key_dim).
        mask: bool (True is visible) or float (added), [batch or 1, heads or 1, new, positions or more].
        window: positions that a token sees, its own included; 0: all.
        slopes: ALiBi's, float32 [heads]: slope * (position - own position) is added.
        softcap: logits become softcap * tanh(logit / softcap); 0: none.
        sinks: a logit per head that takes part in the softmax without a value, float32 [heads].
        threads: None: as many as CPUs that this process may use.
        instructions: one of `INSTRUCTIONS`, where "amx" is "avx512"; None: the best supported.

    Returns:
        [batch, heads, new, value_dim], a view of [batch, new, heads, value_dim].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        RunError: not enough memory.
        RuntimeError: the library of csrc/cpu is not available.
    """
    if positions is None:
        positions = keys.shape[0] * keys.shape[3]
    _check(query, keys, values, positions, mask, slopes, sinks)
    query, keys, values = _with_contiguous_rows(query), _with_contiguous_rows(keys), _with_contiguous_rows(values)
    slopes, sinks = (None if per_head is None else per_head.contiguous() for per_head in (slopes, sinks))
    batch, heads, new, key_dim = query.shape
    out = query.new_empty((batch, new, heads, values.shape[4])).transpose(1, 2)
    scale = 1 / math.sqrt(key_dim) if scale is None else scale
    arguments = _layer_arguments(keys, values, heads, scale, window, slopes, softcap, sinks)
    arguments.tokens, arguments.positions = new, positions
    arguments.queries, arguments.query_strides = query.data_ptr(), _TokenRows(*query.stride()[:3])
    arguments.out, arguments.out_strides = out.data_ptr(), _TokenRows(*out.stride()[:3])
    if mask is not None:
        mask = _with_contiguous_rows(mask)
        strides = (stride if size > 1 else 0 for stride, size in zip(mask.stride()[:3], mask.shape[:3]))
        arguments.mask, arguments.mask_strides = mask.data_ptr(), _TokenRows(*strides)
        arguments.mask_kind = MASKS[mask.dtype]
    kind = -1 if instructions is None else INSTRUCTIONS.index(instructions)
    threads = threads or len(os.sched_getaffinity(0))
    if require_library().zero_inference_attention(ctypes.byref(arguments), kind, threads):
        raise RunError(f"CPU attention: not enough host memory for the partial sums of {threads} threads")
    return out


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: int,
    mask: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    shapes = f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    if query.dim() != 4 or keys.dim() != 5 or values.dim() != 5 or keys.shape[:4] != values.shape[:4]:
        raise ValueError(
            f"CPU attention needs [batch, heads, new, dim] and keys and values of 5 dimensions, not {shapes}"
        )
    (batch, heads, new, key_dim), (blocks, key_batch, kv_heads, block_positions, dim) = query.shape, keys.shape
    fits = batch == key_batch and key_dim == dim and heads % kv_heads == 0
    if not fits or not new <= positions <= blocks * block_positions:
        raise ValueError(f"CPU attention: {shapes} and {positions} positions do not match")
    if query.dtype not in DTYPES or not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"CPU attention needs one float dtype, not {query.dtype}, {keys.dtype}, {values.dtype}")
    given = [tensor for tensor in (query, keys, values, mask, slopes, sinks) if tensor is not None]
    if any(tensor.device.type != "cpu" for tensor in given):
        raise ValueError(f"CPU attention needs tensors on the CPU, not on {[str(t.device) for t in given]}")
    if mask is not None and (
        mask.dtype not in MASKS
        or mask.dim() != 4
        or any(size not in (1, whole) for size, whole in zip(mask.shape, (batch, heads)))
        or mask.shape[2] != new
        or mask.shape[3] < positions
    ):
        raise ValueError(f"CPU attention: a mask {tuple(mask.shape)} of {mask.dtype} for {shapes}")
    for name, per_head in (("slopes", slopes), ("sinks", sinks)):
        if per_head is not None and (per_head.dtype != torch.float32 or per_head.shape != (heads,)):
            raise ValueError(
                f"CPU attention: {name} {tuple(per_head.shape)} of {per_head.dtype}, not float32 [{heads}]"
            )


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    positions: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    window: int = 0,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the result of `attention`, [batch, heads, new, value_dim] in `dtype`, by plain PyTorch: the reference of tests.

    Args:
        query: [batch, heads, new, key_dim].
        keys, values: [blocks, batch, kv_heads, positions per block, dim].
        others: as of `attention`.
    """
    batch, heads, new, _ = query.shape
    flat = (cached.to(dtype).permute(1, 2, 0, 3, 4).flatten(2, 3) for cached in (keys, values))
    if positions is None:
        positions = keys.shape[0] * keys.shape[3]
    # [batch, heads, positions, dim]
    all_keys, all_values = (cached[:, :, :positions].repeat_interleave(heads // keys.shape[2], 1) for cached in flat)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    logits = scale * query.to(dtype) @ all_keys.transpose(2, 3)  # [batch, heads, new, positions]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(positions) - torch.arange(positions - new, positions)[:, None]  # [new, positions]
    if slopes is not None:
        logits = logits + slopes.to(dtype)[:, None, None] * distance
    visible = (distance <= 0) & (distance > -window if window else True)
    if mask is not None:
        mask = mask[..., :positions]
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(dtype)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(dtype)[:, None, None].expand(batch, heads, new, 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :positions]
    return (
        weights if mask is None else weights.nan_to_num(0.0)
    ) @ all_values  # a mask may hide all positions of a token


# A decoder layer's attention as a task of the pool (csrc/cpu/attention_task.cpp), which also stores the new keys and values; without masks.


def add_attention(
    pool: CpuPool,
    keys: Tensor,
    values: Tensor,
    heads: int,
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> int:
    """Add a layer's attention to the pool, which keeps the tensors alive; return the number of its task. Arguments as of `attention`.

    Raises:
        RunError: not enough memory to attend to all positions for one token.
    """
    slopes, sinks = (None if per_head is None else per_head.contiguous() for per_head in (slopes, sinks))
    layer = _layer_arguments(keys, values, heads, scale, 0, slopes, softcap, sinks)
    pool.references += [tensor for tensor in (keys, values, slopes, sinks) if tensor is not None]
    task = pool.library.zero_inference_cpu_pool_add_attention(
        pool.handle, ctypes.byref(layer), INSTRUCTIONS.index(pool.instructions)
    )
    _reserve_attention(pool, task, 1, keys.shape[0] * keys.shape[3])
    return task


def _reserve_attention(pool: CpuPool, task: int, new: int, positions: int) -> None:
    call = Call(task, new, None, None, (new, positions, 0, 0))
    if pool.library.zero_inference_cpu_pool_reserve(pool.handle, ctypes.byref(call)):
        raise _no_memory()


def run_attention(pool: CpuPool, task: int, packed: Tensor, out: Tensor, new: int, positions: int, window: int) -> None:
    """Store the new keys and values and write attention to `out`, synchronously.

    Args:
        packed: queries, new keys and new values, [batch, heads, new, dim] each, one after the other.
        out: [batch, new, heads, value_dim], contiguous.
        new: new tokens; positions: including them; window: as of `attention`.

    Raises:
        RunError: not enough memory.
    """
    call = Call(task, new, packed.data_ptr(), out.data_ptr(), (new, positions, window, 0))
    if pool.library.zero_inference_cpu_pool_run(pool.handle, ctypes.byref(call)):
        raise _no_memory()


def submit_attention(
    pool: CpuPool, task: int, source: int, target: int, new: int, positions: int, window: int, number: int
) -> None:
    """Queue a call of `run_attention` that starts when the hand-off's input flag reaches `number`.

    Args:
        source, target: addresses in host memory of `packed` and `out`.

    Raises:
        RunError: not enough memory.
    """
    if new > 1:  # `add_attention` reserved memory for one token
        _reserve_attention(pool, task, new, positions)
    call = Call(task, new, source, target, (new, positions, window, 0))
    pool.library.zero_inference_cpu_pool_submit(pool.handle, ctypes.byref(call), number)


def _no_memory() -> RunError:
    return RunError("not enough host memory for CPU attention: use --cpu-compute off.")
