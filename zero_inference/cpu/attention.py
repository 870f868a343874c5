"""Attention of a few new tokens over keys and values in host memory, by the host's cores (csrc/cpu/attention.h).

Keys and values are [blocks, batch, kv_heads, positions of a block, head_dim], with any strides but rows without gaps: position p lies
in block p // positions of a block. A core reads contiguous memory where the rows of a block and a head lie one behind the other.
`keys[None]` of plain keys [batch, kv_heads, positions, head_dim] is one block.
"""

from __future__ import annotations

import ctypes
import math
import os

import torch

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, require_library
from zero_inference.cpu.pool import Call, CpuPool
from zero_inference.errors import RunError

MASKS = {torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}  # zero_inference::cpu::Mask


class _KeptRows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("block", "batch", "head", "position")]


class _TokenRows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class AttentionArguments(ctypes.Structure):
    """`Attention` of csrc/cpu/attention.h, field by field."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "tokens", "positions", "block_positions")]
        + [(name, ctypes.c_int64) for name in ("key_dim", "value_dim", "window")]
        + [("queries", ctypes.c_void_p), ("query_strides", _TokenRows), ("keys", _KeptRows), ("values", _KeptRows)]
        + [("out", ctypes.c_void_p), ("out_strides", _TokenRows), ("mask", ctypes.c_void_p)]
        + [("mask_strides", _TokenRows), ("slopes", ctypes.c_void_p), ("sinks", ctypes.c_void_p)]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("dtype", ctypes.c_int32)]
        + [("mask_kind", ctypes.c_int32)]
    )


def describe_layer(
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionArguments:
    """What does not change from call to call: where keys and values lie, and what is done with the logits.

    The tensors have to outlive the description. Arguments as in `attention`.
    """
    _, batch, kv_heads, block_positions, key_dim = keys.shape
    described = AttentionArguments(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        block_positions=block_positions,
        key_dim=key_dim,
        value_dim=values.shape[4],
        window=window,
        scale=scale,
        softcap=softcap,
        dtype=DTYPES[keys.dtype],
    )
    for name, kept in (("keys", keys), ("values", values)):
        setattr(described, name, _KeptRows(kept.data_ptr(), *kept.stride()[:4]))
    for name, of_heads in (("slopes", slopes), ("sinks", sinks)):
        setattr(described, name, None if of_heads is None else of_heads.data_ptr())
    return described


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    positions: int | None = None,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    window: int = 0,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    threads: int | None = None,
    instructions: str | None = None,
) -> torch.Tensor:
    """softmax(cap(scale * query keys^T) + slopes * distance + mask) values, [batch, heads, new, value_dim], summed in float32.

    New token t is at position `positions - new + t` and sees positions up to its own.

    Args:
        query: float32, float16 or bfloat16 [batch, heads, new, key_dim], on the CPU.
        keys: [blocks, batch, kv_heads, positions of a block, key_dim] of the same dtype; heads is a multiple of kv_heads.
        values: [blocks, batch, kv_heads, positions of a block, value_dim].
        positions: how many there are, the new tokens' included; None: all that the blocks hold.
        scale: of the products; None: 1 / sqrt(key_dim).
        mask: bool (True is seen) or float (added), [batch or 1, heads or 1, new, positions or more].
        window: a token sees that many positions, its own included; 0: all.
        slopes: ALiBi's, float32 [heads]: slope * (position - own position) is added.
        softcap: logits become softcap * tanh(logit / softcap); 0: they stay.
        sinks: a logit a head that takes part in the softmax without a value, float32 [heads].
        threads: how many cores work; None: all that this process may use.
        instructions: one of `INSTRUCTIONS`, where "amx" is "avx512"; None: the best that the processor has.

    Raises:
        ValueError: shapes, dtypes or devices that do not belong together.
        RunError: memory is missing.
        RuntimeError: the library of csrc/cpu is not there.
    """
    if positions is None:
        positions = keys.shape[0] * keys.shape[3]
    _check(query, keys, values, positions, mask, slopes, sinks)
    return torch.ops.zero_inference.cpu_decode_attention(
        query,
        keys,
        values,
        positions,
        1 / math.sqrt(query.shape[3]) if scale is None else scale,
        mask,
        window,
        slopes,
        softcap,
        sinks,
        threads or len(os.sched_getaffinity(0)),
        -1 if instructions is None else INSTRUCTIONS.index(instructions),
    )


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: int,
    mask: torch.Tensor | None,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    shapes = f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    if query.dim() != 4 or keys.dim() != 5 or values.dim() != 5 or keys.shape[:4] != values.shape[:4]:
        raise ValueError(
            f"attention on the cores: {shapes}; [batch, heads, new, dim] and two of 5 dimensions are needed"
        )
    (batch, heads, new, key_dim), (blocks, kept_batch, kv_heads, of_block, kept_dim) = query.shape, keys.shape
    if batch != kept_batch or key_dim != kept_dim or heads % kv_heads or not new <= positions <= blocks * of_block:
        raise ValueError(f"attention on the cores: {shapes} and {positions} positions do not belong together")
    if query.dtype not in DTYPES or not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"attention on the cores: dtypes {query.dtype}, {keys.dtype}, {values.dtype} must be one float type"
        )
    given = [tensor for tensor in (query, keys, values, mask, slopes, sinks) if tensor is not None]
    if any(tensor.device.type != "cpu" for tensor in given):
        raise ValueError(
            f"attention on the cores: all tensors must be on the CPU, not {[str(t.device) for t in given]}"
        )
    if mask is not None and (
        mask.dtype not in MASKS
        or mask.dim() != 4
        or any(size not in (1, whole) for size, whole in zip(mask.shape, (batch, heads)))
        or mask.shape[2] != new
        or mask.shape[3] < positions
    ):
        raise ValueError(f"attention on the cores: a mask {tuple(mask.shape)} of {mask.dtype} for {shapes}")
    for name, of_heads in (("slopes", slopes), ("sinks", sinks)):
        if of_heads is not None and (of_heads.dtype != torch.float32 or of_heads.shape != (heads,)):
            raise ValueError(
                f"attention on the cores: {name} {tuple(of_heads.shape)} of {of_heads.dtype}, not float32 [{heads}]"
            )


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _empty_output(query: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[batch, heads, new, value_dim], a view of [batch, new, heads, value_dim], which is what models go on with."""
    batch, heads, new, _ = query.shape
    return query.new_empty((batch, new, heads, values.shape[4])).transpose(1, 2)


@torch.library.custom_op("zero_inference::cpu_decode_attention", mutates_args=(), device_types="cpu")
def _cpu_decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: int,
    scale: float,
    mask: torch.Tensor | None,
    window: int,
    slopes: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    threads: int,
    instructions: int,
) -> torch.Tensor:
    query, keys, values = _with_rows(query), _with_rows(keys), _with_rows(values)
    slopes, sinks = (None if of_heads is None else of_heads.contiguous() for of_heads in (slopes, sinks))
    out = _empty_output(query, values)
    described = describe_layer(keys, values, query.shape[1], scale, window, slopes, softcap, sinks)
    described.tokens, described.positions = query.shape[2], positions
    described.queries, described.query_strides = query.data_ptr(), _TokenRows(*query.stride()[:3])
    described.out, described.out_strides = out.data_ptr(), _TokenRows(*out.stride()[:3])
    if mask is not None:
        mask = _with_rows(mask)
        strides = (stride if size > 1 else 0 for stride, size in zip(mask.stride()[:3], mask.shape[:3]))
        described.mask, described.mask_strides = mask.data_ptr(), _TokenRows(*strides)
        described.mask_kind = MASKS[mask.dtype]
    library = require_library()
    if library.zero_inference_attention(ctypes.byref(described), ctypes.c_int32(instructions), ctypes.c_int64(threads)):
        raise RunError(f"attention on the cores: not enough host memory for the partial sums of {threads} threads")
    return out


@_cpu_decode_attention.register_fake
def _(query, keys, values, *args):  # type: ignore[no-untyped-def]
    return _empty_output(query, values)


def attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    positions: int | None = None,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    window: int = 0,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """What `attention` computes, in plain PyTorch in `dtype`; the arguments are the same."""
    batch, heads, new, _ = query.shape
    flat = (kept.to(dtype).permute(1, 2, 0, 3, 4).flatten(2, 3) for kept in (keys, values))
    if positions is None:
        positions = keys.shape[0] * keys.shape[3]
    all_keys, all_values = (kept[:, :, :positions].repeat_interleave(heads // keys.shape[2], 1) for kept in flat)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    logits = scale * query.to(dtype) @ all_keys.transpose(2, 3)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(positions) - torch.arange(positions - new, positions)[:, None]
    if slopes is not None:
        logits = logits + slopes.to(dtype)[:, None, None] * distance
    seen = (distance <= 0) & (distance > -window if window else True)
    if mask is not None:
        mask = mask[..., :positions]
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(dtype)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(dtype)[:, None, None].expand(batch, heads, new, 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :positions]
    return weights.nan_to_num(0.0) @ all_values if mask is not None else weights @ all_values


class AttentionTasks:
    """Attention of layers by the threads of `cores`, which also store the new keys and values. There are no masks."""

    def __init__(self, cores: CpuPool):
        self.cores = cores
        add = cores.library.zero_inference_cores_add_attention
        add.restype, add.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
        scale: float,
        softcap: float = 0.0,
        slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> int:
        """The number of a new task, for keys and values as `attention` takes them; they are kept as long as the threads are there.

        Raises:
            RunError: no memory is left for what the threads need to attend to all positions for one token.
        """
        slopes, sinks = (None if of_heads is None else of_heads.contiguous() for of_heads in (slopes, sinks))
        layer = describe_layer(keys, values, heads, scale, 0, slopes, softcap, sinks)
        self.cores.kept += [tensor for tensor in (keys, values, slopes, sinks) if tensor is not None]
        task = self.cores.library.zero_inference_cores_add_attention(
            self.cores.handle, ctypes.byref(layer), INSTRUCTIONS.index(self.cores.instructions)
        )
        self._reserve(task, 1, keys.shape[0] * keys.shape[3])
        return task

    def _reserve(self, task: int, new: int, positions: int) -> None:
        call = Call(task, new, None, None, (new, positions, 0, 0))
        if self.cores.library.zero_inference_cores_reserve(self.cores.handle, ctypes.byref(call)):
            raise _no_memory()

    def run(self, task: int, packed: torch.Tensor, out: torch.Tensor, new: int, positions: int, window: int) -> None:
        """At once.

        Args:
            packed: queries, new keys and new values, [batch, heads, new, dim] each, one behind the other.
            out: [batch, new, heads, value_dim], contiguous.
            new: tokens; positions: with them; window: as for `attention`.

        Raises:
            RunError: memory is missing.
        """
        call = Call(task, new, packed.data_ptr(), out.data_ptr(), (new, positions, window, 0))
        if self.cores.library.zero_inference_cores_run(self.cores.handle, ctypes.byref(call)):
            raise _no_memory()

    def submit(self, task: int, source: int, target: int, new: int, positions: int, window: int, number: int) -> None:
        """For the moment when the flag of the input has `number`; `source` and `target` are addresses in host memory.

        Raises:
            RunError: memory is missing.
        """
        if new > 1:  # for one there is memory
            self._reserve(task, new, positions)
        call = Call(task, new, source, target, (new, positions, window, 0))
        self.cores.library.zero_inference_cores_submit(self.cores.handle, ctypes.byref(call), number)


def _no_memory() -> RunError:
    return RunError("no host memory is left for attention on the cores: use --cpu-compute off.")
