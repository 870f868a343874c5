"""Attention by the CPU backend against the same in float64."""

from __future__ import annotations

import math

import pytest
import torch

from zero_inference.cpu.attention import (
    PLAIN_LOGITS,
    LogitOptions,
    add_attention,
    attention,
    attention_reference,
    run_attention,
)
from zero_inference.cpu.library import INSTRUCTIONS, best_instructions
from zero_inference.cpu.pool import CpuPool

SETS = INSTRUCTIONS[: INSTRUCTIONS.index(best_instructions()) + 1]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of the largest output: roundings of it


def draw(batch, heads, kv_heads, new, positions, dim, value_dim=None, dtype=torch.float32, block=64, size=1.0):
    """query, keys, values as `attention` takes them; positions after the last are NaN, so that reading them shows."""
    generator = torch.Generator().manual_seed(positions * 1009 + heads * 31 + dim)
    blocks = math.ceil(positions / block)

    def cached(of_dim):
        rows = torch.randn((blocks, batch, kv_heads, block, of_dim), generator=generator)
        rows[-1, :, :, positions - (blocks - 1) * block :] = torch.nan
        return rows.to(dtype)

    query = torch.randn((batch, heads, new, dim), generator=generator) * size
    return query.to(dtype), cached(dim), cached(value_dim or dim)


def assert_right(
    query, keys, values, instructions="auto", threads=1, largest_logit=0.0, logits=PLAIN_LOGITS, **options
):
    found = attention(query, keys, values, logits, instructions=instructions, threads=threads, **options)
    flat = (cached.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : options["positions"]] for cached in (keys, values))
    right = attention_reference(query, *(cached[None] for cached in flat), logits, **options)
    assert found.shape == right.shape and found.dtype == query.dtype
    error = (found.double() - right).abs().max() / right.abs().max()
    bound = TOLERANCE[query.dtype] + 2 * largest_logit * 2**-24  # a logit's rounding is a weight's relative error
    assert error <= bound, f"off by {error:.2e} of the largest output"


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("new", [1, 3])
def test_groups_of_queries_in_every_dtype_with_every_instruction_set(heads, kv_heads, new, dtype, instructions):
    tensors = draw(2, heads, kv_heads, new, 133, 64, dtype=dtype)
    assert_right(*tensors, instructions, positions=133)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "dim, value_dim", [(64, 64), (72, 40), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (5, 3)]
)
def test_widths_of_heads(dim, value_dim, dtype, instructions):
    assert_right(*draw(1, 6, 2, 1, 67, dim, value_dim, dtype), instructions, positions=67)


SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 2.0]), torch.tensor([0.5, -3.0, 4.0, 90.0])
BIASES = {
    "window": dict(window=20),
    "window longer than the context": dict(window=1000),
    "softcap": dict(logits=LogitOptions(softcap=3.0)),
    "alibi": dict(logits=LogitOptions(slopes=SLOPES)),
    "sinks": dict(logits=LogitOptions(sinks=SINKS)),
    "scale": dict(logits=LogitOptions(scale=0.3)),
    "all at once": dict(window=90, logits=LogitOptions(0.3, 5.0, SINKS / 20, SLOPES / 20)),
}


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("new", [1, 3])
def test_what_is_done_with_logits(name, new, instructions):
    assert_right(*draw(2, 4, 2, new, 150, 64, size=2.0), instructions, positions=150, **BIASES[name])


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (3, 4), (1, 4)])
def test_masks(shape, dtype, instructions):
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand((*shape, 2, 110), generator=generator) > 0.4
    seen[..., :66] &= torch.rand((*shape, 2, 1), generator=generator) > 0.5  # a first piece that some see nothing of
    seen[..., 104] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float16).min)
    mask = seen if dtype == torch.bool else added.to(dtype)
    assert_right(*draw(3, 4, 2, 2, 107, 32, dtype=torch.float32), instructions, positions=107, mask=mask)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_logits_over_many_positions(dtype, instructions):
    query, keys, values = draw(1, 4, 2, 1, 2000, 64, dtype=dtype, size=40.0)
    assert_right(query, keys, values, instructions, positions=2000, largest_logit=200.0)
    grows = (torch.arange(2048) / 100).reshape(32, 1, 1, 64, 1)  # the largest logit comes last, and rises all the time
    keys = (grows * torch.ones((32, 1, 2, 64, 64))).to(dtype)
    assert_right(query.abs(), keys, values, instructions, positions=2000, largest_logit=6000.0)
    assert_right(-query.abs(), keys, values, instructions, positions=2000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block", [64, 61, 7])
@pytest.mark.parametrize("options", [{}, dict(window=700), dict(logits=LogitOptions(sinks=SINKS))])
def test_parts_of_a_long_context_are_merged(options, block, dtype):
    tensors = draw(1, 4, 1, 2, 1501, 64, dtype=dtype, block=block)  # 8 threads share the positions of the one key head
    assert_right(*tensors, threads=8, positions=1501, **options)
    mask = torch.ones((1, 1, 2, 1501), dtype=torch.bool)
    mask[..., :900] = False  # whole parts that are not seen
    assert_right(*tensors, threads=8, positions=1501, mask=mask, **options)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_memory_that_is_not_aligned_and_other_layouts(dtype, instructions):
    query, keys, values = draw(3, 4, 2, 1, 70, 40, dtype=dtype, block=70)
    shifted = []
    for tensor in (query, keys, values):
        memory = torch.empty(tensor.numel() + 1, dtype=dtype)
        shifted.append(memory[1:].view(tensor.shape).copy_(tensor))
        assert shifted[-1].data_ptr() % 64 != 0
    assert_right(*shifted, instructions, positions=70)
    position_major = (cached.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4) for cached in (keys, values))
    assert_right(query, *position_major, instructions, positions=70)
    every_other = (torch.stack([cached, cached], -1).flatten(-2)[..., ::2] for cached in (keys, values))
    assert_right(query.transpose(1, 2).contiguous().transpose(1, 2), *every_other, instructions, positions=70)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("batch, heads, kv_heads", [(1, 4, 1), (3, 4, 4)])
def test_tasks_of_the_cores_store_new_rows_and_attend(batch, heads, kv_heads, dtype):
    _, keys, values = draw(batch, heads, kv_heads, 1, 700, 40, 24, dtype)
    pool = CpuPool([-1] * 3, spin_us=100)
    try:
        slopes, sinks = torch.rand((heads, 2)).unbind(1)  # not contiguous
        logits = LogitOptions(0.2, 20.0, sinks, slopes)
        task = add_attention(pool, keys, values, heads, logits)
        for start, new, window in ((0, 3, 0), (3, 1, 0), (690, 1, 0), (691, 5, 0), (696, 1, 100), (697, 3, 650)):
            packed = torch.randn(batch * new * (heads * 40 + kv_heads * 64)).to(dtype)
            sizes = [batch * new * width for width in (heads * 40, kv_heads * 40, kv_heads * 24)]
            query, *newest = packed.split(sizes)
            out = torch.empty((batch, new, heads, 24), dtype=dtype)
            run_attention(pool, task, packed, out, new, start + new, window)
            for cached, part in zip((keys, values), newest):
                rows = part.view(batch, kv_heads, new, -1)
                for position in range(start, start + new):
                    assert torch.equal(cached[position // 64, :, :, position % 64], rows[:, :, position - start])
            flat = (cached.permute(1, 2, 0, 3, 4).flatten(2, 3)[None, :, :, : start + new] for cached in (keys, values))
            right = attention_reference(query.view(batch, heads, new, 40), *flat, logits, window=window)
            error = (out.transpose(1, 2).double() - right).abs().max() / right.abs().max()
            assert error <= TOLERANCE[dtype] + 2 * 20 * 2**-24  # a logit, capped at 20, is rounded too
    finally:
        pool.close()


@pytest.mark.parametrize("instructions", SETS)
def test_nan_is_not_swallowed(instructions):
    query, keys, values = draw(1, 2, 2, 1, 100, 16)
    keys[0, 0, 1, 30] = torch.nan
    for options in ({}, dict(logits=LogitOptions(softcap=5.0)), dict(window=90)):
        found = attention(query, keys, values, positions=100, instructions=instructions, **options)
        assert found[0, 0].isfinite().all() and found[0, 1].isnan().all()


def test_what_does_not_belong_together_is_refused():
    query, keys, values = draw(2, 4, 2, 1, 10, 16)
    for tensors, options in (
        ((query[:, :3], keys, values), {}),
        ((query[:1], keys, values), {}),
        ((query[0], keys, values), {}),
        ((query, keys[0], values), {}),
        ((query.half(), keys, values), {}),
        ((query.double(), keys.double(), values.double()), {}),
        ((query, keys, values), dict(positions=65)),
        ((query, keys, values), dict(mask=torch.ones((2, 1, 1, 9), dtype=torch.bool), positions=10)),
        ((query, keys, values), dict(mask=torch.ones((2, 1, 1, 10), dtype=torch.int32), positions=10)),
        ((query, keys, values), dict(logits=LogitOptions(slopes=torch.ones(3)))),
        ((query, keys, values), dict(logits=LogitOptions(sinks=torch.ones(4, dtype=torch.float64)))),
    ):
        with pytest.raises(ValueError, match="CPU attention"):
            attention(*tensors, **options)
