"""The three benchmarks: products of square matrices, `a * 1.2`, and transformer blocks with their parts. Each yields rows as they are
measured."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.errors import UsageError, is_out_of_memory
from zero_inference.micro.blocks import CPU_BLOCKS, DEFAULT_BLOCKS, SHORT, Block, block_config, build_block
from zero_inference.micro.timing import DTYPES, MachineRates, kinds_of, median_s, once_s, precision, predict_s
from zero_inference.models.spec import max_positions
from zero_inference.norms.choice import apply_norm_kernels, check_norm_kernels_option, prepare_norm_kernels
from zero_inference.norms.patch import family_refusal
from zero_inference.utils.format import decimals, format_percent, four_digits
from zero_inference.utils.progress import current_progress
from zero_inference.utils.tables import Column

Row = dict[str, Any]
# The backward pass has two products, for inputs and weights, per product of the forward pass.
FORWARD_AND_BACKWARD = 3
FLOAT_BYTES = 4
OF_BEST = "of measured: share of the best rate that this process has reached with the same type so far"
OF_RATES = (
    Column("of_datasheet", "of datasheet", format_percent),
    Column("of_measured", "of measured", format_percent),
)
NOT_MEASURED = (Column("skipped", "skipped", dtype="string"), Column("error", "error", dtype="string"))


@dataclass(frozen=True)
class Benchmark:
    """What a command line measures and how it is shown.

    Attributes:
        rows: yields `total` rows, or fewer.
        only_exact: columns that csv and json have, and tables for people do not.
        note: below the table.
        line: returns a row's line of the plot; `x` its position there, `y` the column.
        limits: returns horizontal lines by label, after all is measured.
    """

    total: int
    rows: Iterator[Row]
    columns: Sequence[Column]
    note: str
    line: Callable[[Row], str]
    x: Callable[[Row], int]
    y: str
    labels: tuple[str, str]
    limits: Callable[[], Mapping[str, float | None]]
    only_exact: frozenset[str] = frozenset(("skipped", "error"))


def measure_row(row: Row, measure: Callable[[], Row]) -> Row:
    """Return `row` with the values of `measure`, or with an `error` if memory was not sufficient."""
    try:
        return row | measure()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return row | {"error": "out of memory"}


def skip_reason(seconds: float, longest_call_s: float, what: str) -> str | None:
    if seconds <= longest_call_s:
        return None
    return f"{what} is expected to take {seconds:.1f} s, longer than --longest-call {longest_call_s:g}"


def check_kinds(kinds: Sequence[str], device: torch.device) -> None:
    for kind in kinds:
        if kind not in kinds_of(device):
            name = "GPU" if device.type == "cuda" else "CPU"
            raise UsageError(f"--dtype {kind}: this {name} does not support it; use {', '.join(kinds_of(device))}.")


# matmul


def matmul(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    kinds = args.dtype or kinds_of(rates.device)
    check_kinds(kinds, rates.device)
    return Benchmark(
        total=len(kinds) * len(args.sizes),
        rows=matmul_rows(rates, args.sizes, kinds, args.min_run_time, args.longest_call),
        columns=(
            Column("dtype", "type", dtype="string"),
            Column("n", "n", dtype="Int64"),
            Column("time_s", "time (us)", lambda seconds: four_digits(1e6 * seconds)),
            Column("tflops", "TFLOP/s", four_digits),
            *OF_RATES,
            Column("best_tflops", "best TFLOP/s measured", four_digits),
            *NOT_MEASURED,
        ),
        note=f"a product is 2 n^3 operations; {OF_BEST}",
        line=lambda row: row["dtype"],
        x=lambda row: row["n"],
        y="tflops",
        labels=("n", "TFLOP/s"),
        limits=lambda: {f"{kind}, datasheet": rates.datasheet_tflops(kind) for kind in kinds},
    )


def matmul_rows(
    rates: MachineRates, sizes: Sequence[int], kinds: Sequence[str], min_run_time: float, longest_call_s: float
) -> Iterator[Row]:
    """Yield a row of [n, n] x [n, n] for every kind and size: `2 n^3 / t`, and its share of the datasheet's rate and of the best one."""
    for kind, n in itertools.product(kinds, sizes):
        measure = functools.partial(_measure_matmul, rates, n, kind, min_run_time, longest_call_s)
        yield measure_row({"dtype": kind, "n": n}, measure)


def _measure_matmul(rates: MachineRates, n: int, kind: str, min_run_time: float, longest_call_s: float) -> Row:
    smaller = [64 << power for power in range(24) if 64 << power < n]
    with precision(kind):
        expected_s = predict_s(
            lambda size: once_s(rates.device, product(rates.device, size, kind)),
            lambda size: 2 * size**3,
            [*smaller, n],
        )
        if reason := skip_reason(expected_s, longest_call_s, "one product"):
            return {"skipped": reason}
        seconds = median_s(product(rates.device, n, kind), min_run_time)
    tflops, datasheet = 2 * n**3 / seconds / 1e12, rates.datasheet_tflops(kind)
    best = rates.best_tflops(kind, seen=tflops)
    return {
        "time_s": seconds,
        "tflops": tflops,
        "of_datasheet": tflops / datasheet if datasheet else None,
        "of_measured": tflops / best,
        "best_tflops": best,
    }


def product(device: torch.device, n: int, kind: str) -> Callable[[], object]:
    """Return a product of random values: zeros are multiplied faster."""
    left, right = (torch.randn(n, n, device=device).to(DTYPES[kind]) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


# elementwise


def elementwise(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    return Benchmark(
        total=len(args.sizes),
        rows=elementwise_rows(rates, args.sizes, args.min_run_time),
        columns=(
            Column("n", "n", dtype="Int64"),
            Column("time_s", "time (us)", lambda seconds: four_digits(1e6 * seconds)),
            Column("gflops", "GFLOP/s", four_digits),
            Column("gbps", "GB/s", four_digits),
            *OF_RATES,
            NOT_MEASURED[1],
        ),
        note="8 n bytes are moved; of measured: share of the rate of a copy inside the device's memory; above 100% the data "
        "came from a cache",
        line=lambda row: "a * 1.2",
        x=lambda row: row["n"],
        y="gbps",
        labels=("n (float32)", "GB/s"),
        limits=lambda: {
            "copy, measured": rates.copy_gb_per_s,
            "datasheet": rates.card.memory.value if rates.card else None,
        },
    )


def elementwise_rows(rates: MachineRates, sizes: Sequence[int], min_run_time: float) -> Iterator[Row]:
    """Yield a row per size of a float32 vector: `n / t` FLOP/s and `8 n / t` bytes/s, and their share of the memory bandwidth."""

    def measure(n: int) -> Row:
        a = torch.randn(n, device=rates.device)
        out = torch.empty_like(a)  # a new one would cost a CPU mostly page faults
        seconds = median_s(lambda: torch.mul(a, 1.2, out=out), min_run_time)
        gb_per_s = 2 * FLOAT_BYTES * n / seconds / 1e9
        return {
            "time_s": seconds,
            "gflops": n / seconds / 1e9,
            "gbps": gb_per_s,
            "of_datasheet": gb_per_s / rates.card.memory.value if rates.card else None,
            "of_measured": gb_per_s / rates.copy_gb_per_s,
        }

    for n in sizes:
        yield measure_row({"n": n}, functools.partial(measure, n))


# layer

PARTS = ("dense", "dense_activation", "feed_forward", "attention")
FIRST_TOKENS = 16
TRIED_COLUMNS = 4096  # hidden size of the norm kernels' trial


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
    patch = make_norm_patch(args.norm_kernels, rates.device, DTYPES[kind], families)
    second_rows = sum(family_refusal(each) is None for each in families) if patch else 0
    return Benchmark(
        total=(len(names) + second_rows) * len(args.seq) * len(args.batch),
        rows=layer_rows(rates, names, args.seq, args.batch, kind, args.min_run_time, args.longest_call, patch),
        columns=(
            Column("block", "block", dtype="string", whole=True),
            Column("dtype", "type", dtype="string"),
            Column("norms", "norms", dtype="string"),
            Column("seq", "seq", dtype="Int64"),
            Column("batch", "batch", dtype="Int64"),
            Column("forward_s", "fwd (ms)", lambda seconds: four_digits(1e3 * seconds)),
            Column("forward_tflops", "fwd TFLOP/s", four_digits),
            *OF_RATES,
            Column("best_tflops", "best TFLOP/s measured", four_digits),
            Column("forward_backward_tflops", "fwd+bwd TFLOP/s", four_digits),
            Column("dense_tflops", "dense", four_digits),
            Column("dense_activation_tflops", "dense + act", four_digits),
            Column("feed_forward_tflops", "feed- forward", four_digits),
            Column("attention_tflops", "attn", four_digits),
            Column("attention_of_feed_forward", "attn / ffn", decimals(2)),
            Column("norm_modules_patched", "norms patched", dtype="Int64"),
            Column("norm_speedup", "norm gain", lambda ratio: f"{ratio:.3f}x"),
            Column("skippable", "causal half", format_percent),
            *NOT_MEASURED,
        ),
        only_exact=frozenset(
            "dtype best_tflops dense_tflops dense_activation_tflops norm_modules_patched skippable skipped error".split()
        ),
        note="counted are the operations of the products (24 b s h^2 + 4 b h s^2 in a classical block), three times that for "
        f"forward + backward, and causal attention in full; {OF_BEST}",
        line=lambda row: f"{row['block']}, seq {row['seq']}, {row['norms']} norms",
        x=lambda row: row["batch"] * row["seq"],
        y="forward_tflops",
        labels=("tokens (batch x seq)", "forward TFLOP/s"),
        limits=lambda: {"best rate measured": rates.best_tflops(kind)},
    )


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

    If `patch_norms` replaces norms of a block, second rows have the whole block with this package's norm kernels (its parts have no
    norms), the number of replaced norms and the speedup of the forward.
    """
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
                    parts = () if patched else PARTS
                    measure = functools.partial(
                        _measure_block, rates, block, seq, batch, kind, min_run_time, longest_call_s, parts
                    )
                    row = measure_row(row, measure)
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
    return FORWARD_AND_BACKWARD * predict_s(forward_once, lambda size: block.shape.forward(*size), sizes)


def _measure_block(
    rates: MachineRates,
    block: Block,
    seq: int,
    batch: int,
    kind: str,
    min_run_time: float,
    longest_call_s: float,
    parts: Sequence[str],
) -> Row:
    expected_s = predict_step_s(rates.device, block, seq, batch, kind)
    if reason := skip_reason(expected_s, longest_call_s, "forward + backward"):
        return {"skipped": reason}
    x = torch.randn(batch, seq, block.shape.hidden, device=rates.device, dtype=DTYPES[kind])
    shape = block.shape
    work = {
        "layer": shape.forward(batch, seq),
        "dense": shape.dense(batch, seq),
        "dense_activation": shape.dense(batch, seq),
        "feed_forward": shape.feed_forward(batch, seq),
        "attention": shape.attention(batch, seq),
    }
    with torch.no_grad():
        spent_s = {part: median_s(functools.partial(block.parts[part], x), min_run_time) for part in ("layer", *parts)}
    tflops = {part: work[part] / seconds / 1e12 for part, seconds in spent_s.items()}
    step_s = median_s(forward_and_backward(block, x), min_run_time)
    step_tflops = FORWARD_AND_BACKWARD * work["layer"] / step_s / 1e12
    datasheet, best = rates.datasheet_tflops(kind), rates.best_tflops(kind, seen=max(step_tflops, *tflops.values()))
    return {
        "forward_s": spent_s["layer"],
        "forward_tflops": tflops["layer"],
        "of_datasheet": tflops["layer"] / datasheet if datasheet else None,
        "of_measured": tflops["layer"] / best,
        "best_tflops": best,
        "forward_backward_s": step_s,
        "forward_backward_tflops": step_tflops,
        **{f"{part}_s": spent_s[part] for part in parts},
        **{f"{part}_tflops": tflops[part] for part in parts},
        "attention_of_feed_forward": tflops["attention"] / tflops["feed_forward"] if parts else None,
        "skippable": shape.skippable(batch, seq),
    }


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


def make_norm_patch(
    norm_kernels: str, device: torch.device, dtype: torch.dtype, families: Sequence[str]
) -> Callable[[Block], int] | None:
    """Return a function that installs our norm kernels in a block and returns the number of norms; None without kernels.

    Raises:
        UsageError: `cuda`, and no block's norms have kernels, or the kernels are unavailable or fail on this device.
    """
    if norm_kernels == "off" or (norm_kernels == "auto" and device.type != "cuda"):
        return None
    known = [family for family in families if family_refusal(family) is None]
    check_norm_kernels_option(norm_kernels, (known or families)[0])
    say = current_progress().say
    unusable = prepare_norm_kernels(norm_kernels, known[0], device, dtype, TRIED_COLUMNS, say) if known else None

    def patch(block: Block) -> int:
        reason = family_refusal(block.family) or unusable
        asked = "auto" if reason else norm_kernels  # a family without kernels is no error beside one that has them
        facts = apply_norm_kernels(asked, reason, block.module, lambda line: say(f"{block.name}: {line}"), block.family)
        return facts["norm_modules_patched"]

    return patch
