"""Products of square matrices, `a * 1.2`, and transformer blocks with their parts. Each benchmark yields rows as they are measured."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zero_inference.errors import UsageError, is_out_of_memory
from zero_inference.micro.blocks import CPU_BLOCKS, DEFAULT_BLOCKS, SHORT, Block, block_config, build_block
from zero_inference.micro.timing import DTYPES, MachineRates, kinds_of, median_s, once_s, precision, predict_s
from zero_inference.models.spec import max_positions
from zero_inference.norms.patch import (
    apply_norm_kernels,
    check_norm_kernels_option,
    family_refusal,
    prepare_norm_kernels,
)
from zero_inference.utils.progress import current_progress

Row = dict[str, Any]
Benchmark = tuple[int, Iterator[Row]]  # the number of rows, and the rows
# The backward pass has two products, for inputs and weights, per product of the forward pass.
FORWARD_AND_BACKWARD = 3


def measure_row(row: Row, measure: Callable[..., Row], *args: Any) -> Row:
    """Return `row` with the values of `measure(*args)`, or with an `error` if memory was not sufficient."""
    try:
        return row | measure(*args)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return row | {"error": "out of memory"}


def skip(seconds: float, longest_call_s: float, what: str) -> Row | None:
    """Return the value of a row that is skipped, as one call is expected to take longer than the user allows."""
    if seconds <= longest_call_s:
        return None
    return {"skipped": f"{what} is expected to take {seconds:.1f} s, longer than --longest-call {longest_call_s:g}"}


def check_kinds(kinds: Sequence[str], device: torch.device) -> None:
    for kind in kinds:
        if kind not in kinds_of(device):
            name = "GPU" if device.type == "cuda" else "CPU"
            raise UsageError(f"--dtype {kind}: this {name} does not support it; use {', '.join(kinds_of(device))}.")


def matmul(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    kinds = args.dtype or kinds_of(rates.device)
    check_kinds(kinds, rates.device)
    return len(kinds) * len(args.sizes), matmul_rows(rates, args.sizes, kinds, args.min_run_time, args.longest_call)


def matmul_rows(
    rates: MachineRates, sizes: Sequence[int], kinds: Sequence[str], min_run_time: float, longest_call_s: float
) -> Iterator[Row]:
    """Yield a row of [n, n] x [n, n] for every kind and size: `2 n^3 / t`, and its share of the datasheet's rate and of the best one."""

    def product(size: int, kind: str) -> Callable[[], object]:
        # random values: zeros are multiplied faster
        left, right = (torch.randn(size, size, device=rates.device).to(DTYPES[kind]) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    def measure(n: int, kind: str) -> Row:
        doubled = [*itertools.takewhile(lambda size: size < n, (64 << power for power in itertools.count())), n]
        with precision(kind):
            expected_s = predict_s(
                lambda size: once_s(rates.device, product(size, kind)), lambda size: 2 * size**3, doubled
            )
            if skipped := skip(expected_s, longest_call_s, "one product"):
                return skipped
            seconds = median_s(product(n, kind), min_run_time)
        tflops, datasheet = 2 * n**3 / seconds / 1e12, rates.datasheet_tflops(kind)
        best = rates.best_tflops(kind, seen=tflops)
        return {
            "time_s": seconds,
            "tflops": tflops,
            "of_datasheet": tflops / datasheet if datasheet else None,
            "of_measured": tflops / best,
            "best_tflops": best,
        }

    for kind, n in itertools.product(kinds, sizes):
        yield measure_row({"dtype": kind, "n": n}, measure, n, kind)


def elementwise(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    return len(args.sizes), elementwise_rows(rates, args.sizes, args.min_run_time)


def elementwise_rows(rates: MachineRates, sizes: Sequence[int], min_run_time: float) -> Iterator[Row]:
    """Yield a row per size of a float32 vector: `n / t` FLOP/s and `8 n / t` bytes/s, and their share of the memory bandwidth."""

    def measure(n: int) -> Row:
        a = torch.randn(n, device=rates.device)
        out = torch.empty_like(a)  # a new one would cost a CPU mostly page faults
        seconds = median_s(lambda: torch.mul(a, 1.2, out=out), min_run_time)
        gb_per_s = 8 * n / seconds / 1e9
        return {
            "time_s": seconds,
            "gflops": n / seconds / 1e9,
            "gbps": gb_per_s,
            "of_datasheet": gb_per_s / rates.card.memory.value if rates.card else None,
            "of_measured": gb_per_s / rates.copy_gb_per_s,
        }

    for n in sizes:
        yield measure_row({"n": n}, measure, n)


PARTS = ("dense", "dense_activation", "feed_forward", "attention")
FIRST_TOKENS = 16


def layer(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    on_gpu = rates.device.type == "cuda"
    kind = args.dtype or ("fp16" if on_gpu else "fp32")
    check_kinds([kind], rates.device)
    names = [SHORT.get(name, name) for name in args.blocks or (DEFAULT_BLOCKS if on_gpu else CPU_BLOCKS)]
    families = []
    for name in names:
        config = block_config(name)
        families.append(config.model_type)
        positions = max_positions(config)
        if positions and max(args.seq) > positions:
            raise UsageError(f"--seq {max(args.seq)}: {name} has {positions} positions; shorten it.")
    patch = make_norm_patch(args.norm_kernels, rates.device, families)
    blocks = len(names) + (sum(family_refusal(each) is None for each in families) if patch else 0)
    rows = layer_rows(rates, names, args.seq, args.batch, kind, args.min_run_time, args.longest_call, patch)
    return blocks * len(args.seq) * len(args.batch), rows


def layer_rows(
    rates: MachineRates,
    names: Sequence[str],
    seqs: Sequence[int],
    batches: Sequence[int],
    kind: str,
    min_run_time: float,
    longest_call_s: float,
    patch_norms: Callable[[Block], int] | None = None,
    build: Callable[..., Block] = build_block,
) -> Iterator[Row]:
    """Yield a row per block, length and batch, in TFLOP/s (1e12) by the formulas of `BlockShape`.

    If `patch_norms` replaces norms of a block, the rows are repeated with this package's norm kernels: times of the whole block, the
    number of replaced norms and the speedup of the forward. Parts such as attention contain no norms, so they are not timed again.
    """

    def measure(block: Block, seq: int, batch: int, parts: Sequence[str]) -> Row:
        expected_s = predict_step_s(rates.device, block, seq, batch, kind)
        if skipped := skip(expected_s, longest_call_s, "forward + backward"):
            return skipped
        x = torch.randn(batch, seq, block.shape.hidden, device=rates.device, dtype=DTYPES[kind])
        seconds, tflops = {}, {}
        with torch.no_grad():
            for part in ("layer", *parts):
                seconds[part] = median_s(functools.partial(block.parts[part], x), min_run_time)
                tflops[part] = block.shape.operations(part, batch, seq) / seconds[part] / 1e12
        step_s = median_s(forward_and_backward(block, x), min_run_time)
        step_tflops = FORWARD_AND_BACKWARD * block.shape.operations("layer", batch, seq) / step_s / 1e12
        datasheet = rates.datasheet_tflops(kind)
        best = rates.best_tflops(kind, seen=max(step_tflops, *tflops.values()))
        return {
            "forward_s": seconds["layer"],
            "forward_tflops": tflops["layer"],
            "of_datasheet": tflops["layer"] / datasheet if datasheet else None,
            "of_measured": tflops["layer"] / best,
            "best_tflops": best,
            "forward_backward_s": step_s,
            "forward_backward_tflops": step_tflops,
            **{f"{part}_s": seconds[part] for part in parts},
            **{f"{part}_tflops": tflops[part] for part in parts},
            "attention_of_feed_forward": tflops["attention"] / tflops["feed_forward"] if parts else None,
            "skippable": block.shape.skippable(batch, seq),
        }

    for name in names:
        with precision(kind):
            block = build(name, rates.device, DTYPES[kind])
            plain_s: dict[tuple[int, int], float | None] = {}
            for norms in ("torch", "cuda"):
                patched = patch_norms(block) if norms == "cuda" and patch_norms else 0
                if norms == "cuda" and not patched:
                    continue
                for seq, batch in itertools.product(seqs, batches):
                    row: Row = {"block": block.name, "dtype": kind, "norms": norms, "seq": seq, "batch": batch}
                    row = measure_row(row, measure, block, seq, batch, () if patched else PARTS)
                    if patched:
                        row["norm_modules_patched"] = patched
                        if (before_s := plain_s[seq, batch]) and "forward_s" in row:
                            row["norm_speedup"] = before_s / row["forward_s"]
                    else:
                        plain_s[seq, batch] = row.get("forward_s")
                    yield row
                    if rates.device.type == "cuda":
                        torch.cuda.empty_cache()
        del block


def predict_step_s(device: torch.device, block: Block, seq: int, batch: int, kind: str) -> float:
    """Predict the seconds of one forward and backward of the block from forwards of fewer tokens."""

    def forward_once(size: tuple[int, int]) -> float:
        x = torch.randn(*size, block.shape.hidden, device=device, dtype=DTYPES[kind])
        with torch.no_grad():
            return once_s(device, lambda: block.parts["layer"](x))

    doubled = [(1 << power, seq) for power in range((batch - 1).bit_length())]
    sizes = [(1, min(FIRST_TOKENS, seq)), *doubled, (batch, seq)]
    return FORWARD_AND_BACKWARD * predict_s(forward_once, lambda size: block.shape.operations("layer", *size), sizes)


def forward_and_backward(block: Block, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs the block's forward on `x` [batch, seq, hidden] and computes all gradients."""
    x = x.detach().requires_grad_(True)
    wanted = [x, *block.module.parameters()]
    gradient = torch.randn_like(x)

    def step():
        for each in wanted:
            each.grad = None  # so that the backward pass sets it and does not add to it
        block.parts["layer"](x).backward(gradient)

    return step


def make_norm_patch(norm_kernels: str, device: torch.device, families: Sequence[str]) -> Callable[[Block], int] | None:
    """Return a function that installs our norm kernels in a block and returns the number of norms; None without kernels.

    Raises:
        UsageError: `cuda`, and no block's norms have kernels, or the kernels are unavailable.
    """
    if norm_kernels == "off" or (norm_kernels == "auto" and device.type != "cuda"):
        return None
    known = [family for family in families if family_refusal(family) is None]
    check_norm_kernels_option(norm_kernels, (known or families)[0])
    say = current_progress().say
    unusable = prepare_norm_kernels(norm_kernels, known[0], device, say) if known else None

    def patch(block: Block) -> int:
        reason = family_refusal(block.family) or unusable
        asked = "auto" if reason else norm_kernels  # a family without kernels is no error beside one that has them
        facts = apply_norm_kernels(asked, reason, block.module, lambda line: say(f"{block.name}: {line}"), block.family)
        return facts["norm_modules_patched"]

    return patch
