"""One transformer block and its parts: the share of the matrix rate that a whole layer reaches, and where the rest goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero_inference.micro.blocks import FORWARD_AND_BACKWARD, Block, build_block
from zero_inference.micro.timing import (
    DTYPES,
    MachineRates,
    measure_row,
    median_s,
    once_s,
    precision,
    predicted_s,
    too_long,
)
from zero_inference.utils.format import decimals, format_percent, four_digits
from zero_inference.utils.progress import current_progress
from zero_inference.utils.tables import Column

if TYPE_CHECKING:
    import torch

    from zero_inference.micro.blocks import Block


PatchNorms = Callable[[Block], int]

COLUMNS = (
    Column("block", "block", dtype="string", width=12),
    Column("dtype", "type", dtype="string", width=4),
    Column("norms", "norms", dtype="string", width=5),
    Column("seq", "seq", dtype="Int64", width=4),
    Column("batch", "batch", dtype="Int64", width=3),
    Column("forward_s", "fwd (ms)", lambda seconds: four_digits(1e3 * seconds), width=6),
    Column("forward_tflops", "fwd TFLOP/s", four_digits),
    Column("of_datasheet", "of datasheet", format_percent),
    Column("of_measured", "of measured", format_percent),
    Column("best_tflops", "best TFLOP/s measured", four_digits),
    Column("forward_backward_tflops", "fwd+bwd TFLOP/s", four_digits),
    Column("dense_tflops", "dense", four_digits),
    Column("dense_activation_tflops", "dense + act", four_digits),
    Column("feed_forward_tflops", "feed- forward", four_digits),
    Column("attention_tflops", "attn", four_digits),
    Column("attention_of_feed_forward", "attn / ffn", decimals(2), width=5),
    Column("norm_modules_patched", "norms patched", dtype="Int64"),
    Column("norm_speedup", "norm gain", lambda ratio: f"{ratio:.3f}x", width=6),
    Column("skippable", "causal half", format_percent, width=6),
    Column("skipped", "skipped", dtype="string"),
    Column("error", "error", dtype="string"),
)
# Left out of a table that is too wide, the first ones first.
LEAST_SHOWN = (
    "best_tflops", "dtype", "norm_modules_patched", "skippable", "dense_activation_tflops", "dense_tflops", "of_measured"
)  # fmt: skip
PARTS = ("dense", "dense_activation", "feed_forward", "attention")
FIRST_TOKENS = 16


def measure(
    rates: MachineRates,
    blocks: Sequence[str],
    seqs: Sequence[int],
    batches: Sequence[int],
    kind: str,
    min_run_time: float,
    longest_call_s: float,
    patch_norms: PatchNorms | None = None,
    build: Callable[..., Block] = build_block,
) -> Iterator[dict[str, Any]]:
    """Yield a row per block, length and batch, in TFLOP/s (1e12) by the formulas of `BlockShape`.

    A row has forward and forward + backward (counted three times; without the optimizer's step), its parts, and the ratio of the
    attention's rate to the feed-forward's. `skippable` is the share of the forward count that a causal kernel need not do. If
    `patch_norms` replaces norms, a second row has the whole block with this package's norm kernels (its parts have no norms), the number
    of replaced norms and the speedup of the forward. A size is `skipped`, with the reason, if one forward + backward is expected to take
    longer than `longest_call_s`; without enough memory the row has an `error`.

    Args:
        kind: a key of `DTYPES`.
        patch_norms: installs the kernels in a block and returns the number of replaced norms.
        build: takes name, device and dtype.
    """
    for name in blocks:
        with precision(kind):
            block = build(name, rates.device, DTYPES[kind])
            before: dict[tuple[int, int], float | None] = {}
            for row in _rows(rates, block, seqs, batches, kind, min_run_time, longest_call_s, PARTS):
                before[row["seq"], row["batch"]] = row.get("forward_s")
                yield row
            patched = patch_norms(block) if patch_norms is not None else 0
            if patched:
                for row in _rows(rates, block, seqs, batches, kind, min_run_time, longest_call_s, ()):
                    plain_s = before[row["seq"], row["batch"]]
                    if plain_s and "forward_s" in row:
                        row["norm_speedup"] = plain_s / row["forward_s"]
                    yield row | {"norms": "cuda", "norm_modules_patched": patched}
        del block


def _rows(rates, block: Block, seqs, batches, kind, min_run_time, longest_call_s, parts) -> Iterator[dict[str, Any]]:
    def measure_one(seq: int, batch: int) -> dict[str, Any]:
        seconds = predicted_step_s(rates.device, block, seq, batch, kind)
        reason = too_long(seconds, longest_call_s, "forward + backward")
        return {"skipped": reason} if reason else _measure_one(rates, block, seq, batch, kind, min_run_time, parts)

    for seq in seqs:
        for batch in batches:
            row = {"block": block.name, "dtype": kind, "norms": "torch", "seq": seq, "batch": batch}
            yield measure_row(row, lambda: measure_one(seq, batch))
            if rates.device.type == "cuda":
                torch.cuda.empty_cache()


def predicted_step_s(device: torch.device, block: Block, seq: int, batch: int, kind: str) -> float:
    """Predict the seconds of one forward and backward of the block from forwards of fewer tokens."""

    def forward_once(size: tuple[int, int]) -> float:
        x = torch.randn(*size, block.shape.hidden, device=device, dtype=DTYPES[kind])
        with torch.no_grad():
            return once_s(device, lambda: block.parts["layer"](x))

    sizes = [
        (1, min(FIRST_TOKENS, seq)),
        *((1 << power, seq) for power in range((batch - 1).bit_length())),
        (batch, seq),
    ]
    return FORWARD_AND_BACKWARD * predicted_s(forward_once, lambda size: block.shape.forward(*size), sizes)


def _measure_one(
    rates: MachineRates, block: Block, seq: int, batch: int, kind: str, min_run_time: float, parts: Sequence[str]
) -> dict[str, Any]:
    x = torch.randn(batch, seq, block.shape.hidden, device=rates.device, dtype=DTYPES[kind])
    shape = block.shape
    work = {
        "layer": shape.forward(batch, seq),
        "dense": shape.dense(batch, seq),
        "dense_activation": shape.dense(batch, seq),
        "feed_forward": shape.feed_forward(batch, seq),
        "attention": shape.attention(batch, seq),
    }
    work = {part: work[part] for part in ("layer", *parts)}
    spent = {}
    with torch.no_grad():
        for part in work:
            spent[part] = median_s(functools.partial(block.parts[part], x), min_run_time)
    tflops = {part: work[part] / spent[part] / 1e12 for part in work}
    step_s = median_s(forward_and_backward(block, x), min_run_time)
    step_tflops = FORWARD_AND_BACKWARD * work["layer"] / step_s / 1e12
    datasheet, best = rates.datasheet_tflops(kind), rates.best_tflops(kind, seen=max(step_tflops, *tflops.values()))
    return {
        "forward_s": spent["layer"],
        "forward_tflops": tflops["layer"],
        "of_datasheet": tflops["layer"] / datasheet if datasheet else None,
        "of_measured": tflops["layer"] / best,
        "best_tflops": best,
        "forward_backward_s": step_s,
        "forward_backward_tflops": step_tflops,
        **{f"{part}_s": spent[part] for part in parts},
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


def draw(axes, rows: Sequence[dict[str, Any]], rates: MachineRates) -> None:
    """Draw forward TFLOP/s against the tokens of a batch, a line per block, length and choice of norms."""
    for key in dict.fromkeys((row["block"], row["seq"], row["norms"]) for row in rows):
        points = [
            (row["batch"] * row["seq"], row["forward_tflops"])
            for row in rows
            if (row["block"], row["seq"], row["norms"]) == key and "forward_tflops" in row
        ]
        if points:
            block, seq, norms = key
            axes.plot(
                *zip(*points),
                marker="o",
                linestyle="-" if norms == "torch" else "--",
                label=f"{block}, seq {seq}" + ("" if norms == "torch" else ", norm kernels"),
            )
    axes.set(xscale="log", xlabel="tokens (batch x seq)", ylabel="forward TFLOP/s", title="one block")
    if rows:
        axes.axhline(rates.best_tflops(rows[0]["dtype"]), color="grey", linestyle=":", label="best rate measured")


TRIED_COLUMNS = 4096  # hidden size of the norm kernels' trial


def make_norm_patch(
    norm_kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    families: Sequence[str],
    prepare: Callable[..., str | None] | None = None,
) -> Callable[[Block], int] | None:
    """Return a function that installs our norm kernels in a block and reports on stderr how many norms it replaced, or why none; None
    without kernels.

    With `auto` the kernels are compiled and tried when the first block needs them, after its row without them.

    Args:
        norm_kernels: the value of --norm-kernels.
        families: transformers' model_type of each block.
        prepare: replaces `norms.choice.prepare_norm_kernels` in tests without a GPU.

    Raises:
        UsageError: `cuda`, and no block's norms have kernels, or the kernels are unavailable or fail on this device.
    """
    from zero_inference.norms.choice import apply_norm_kernels, check_norm_kernels_option, prepare_norm_kernels
    from zero_inference.norms.patch import family_refusal

    if norm_kernels == "off" or (norm_kernels == "auto" and device.type != "cuda"):
        return None

    @functools.cache
    def reason_unavailable(family: str) -> str | None:
        """Compile and try the kernels for `family`; return why they cannot be used, None if they can."""
        if reason := family_refusal(family):
            return reason
        return (prepare or prepare_norm_kernels)(
            norm_kernels, family, device, dtype, TRIED_COLUMNS, current_progress().say
        )

    if norm_kernels == "cuda":
        known = [family for family in families if family_refusal(family) is None]
        check_norm_kernels_option(norm_kernels, (known or families)[0])
        reason_unavailable(known[0])

    def patch(block: Block) -> int:
        reason = reason_unavailable(block.family)
        option = "auto" if reason else norm_kernels  # a family without kernels is no error beside one that has them
        facts = apply_norm_kernels(option, reason, block.module, lambda line: None, block.family)
        count = facts["norm_modules_patched"]
        outcome = f"transformers' implementation: {facts['norm_kernels_unused_because']}"
        if count:
            outcome = "this package's kernels"
        current_progress().say(f"{block.name}: {f'{count} ' if count else ''}norms use {outcome}")
        return count

    return patch
