"""The table and the line of sizes that a run prints: medians over its loops, their range, and what the plan had predicted."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from zero_inference.records.schema import EngineFacts, Measured, Request
from zero_inference.report.short import model_in_short, weights_in_short
from zero_inference.utils.format import GIB, LEAST_OF_UNIT, format_bytes, one_line, three_digits
from zero_inference.utils.tables import Column, terminal_table, texts_of

WIDEST = 100  # columns, of what a run prints


def line_width() -> int:
    """Columns to print in: those of the terminal, at most `WIDEST`."""
    return min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST


def run_in_words(request: Request) -> str:
    """What ran, on one line: model, engine, weights, batch and lengths."""
    weights = weights_in_short(request.quant_bits, request.dtype)
    ranks = [f"{request.world_size} ranks"] * (request.world_size > 1)
    lengths = [f"batch {request.batch_size}", f"prompt {request.prompt_len}", f"{request.gen_len} generated"]
    return ", ".join([model_in_short(request.model), request.engine, weights or "", *ranks, *lengths])


def times_table(measured: Measured, colour: bool = False, width: int | None = None) -> str:
    """Time to first token, decode and total as a table that ends in a newline."""
    rows = _rows(measured)
    loops = len(measured.loops)
    columns = [
        Column("phase", f"median of {loops} loops" if loops > 1 else "1 loop", dtype="string", whole=True),
        Column("median_s", "seconds", three_digits),
        *[Column("range_s", "min to max", one_line, whole=True)] * (loops > 1),
        Column("throughput", "token/s", three_digits),
        *[Column("predicted_s", "predicted (s)", one_line, whole=True)] * any(row["predicted_s"] for row in rows),
    ]
    return terminal_table(columns, texts_of(rows, columns), colour, width)


def _rows(measured: Measured) -> list[dict[str, Any]]:
    plan, steps = measured.predicted, len(measured.loops[-1].step_s)
    prefill = _Expected() if plan is None else _Expected(plan.prefill_s, plan.prefill_range_s)
    decode = _Expected() if plan is None else _Expected(plan.decode_s, plan.decode_range_s)
    phases = (
        ("time to first token (prefill)", "prefill", prefill),
        (f"decode ({steps} step{'s' * (steps != 1)})", "decode", decode),
        ("total", "total", prefill.and_then(decode)),
    )
    return [
        {
            "phase": name,
            "median_s": getattr(measured, f"{phase}_latency_s"),
            "range_s": _range([getattr(loop, f"{phase}_s") for loop in measured.loops]),
            "throughput": getattr(measured, f"{phase}_throughput"),
            "predicted_s": expected.in_words(),
        }
        for name, phase, expected in phases
        if phase != "decode" or steps
    ]


class _Expected(NamedTuple):
    """A predicted time and its range; None where these are not known."""

    seconds: float | None = None
    within_s: Sequence[float] | None = None

    def and_then(self, other: _Expected) -> _Expected:
        """Return both, one after the other."""
        if self.seconds is None or other.seconds is None:
            return _Expected()
        known = self.within_s is not None and other.within_s is not None
        within_s = [sum(each) for each in zip(self.within_s, other.within_s)] if known else None
        return _Expected(self.seconds + other.seconds, within_s)

    def in_words(self) -> str | None:
        """Return such as "0.220 (0.187 to 0.242)"."""
        if self.seconds is None:
            return None
        within = "" if self.within_s is None else f" ({' to '.join(map(three_digits, self.within_s))})"
        return f"{three_digits(self.seconds)}{within}"


def _range(times_s: Sequence[float]) -> str:
    return f"{three_digits(min(times_s))} to {three_digits(max(times_s))}"


def sizes_in_words(request: Request, measured: Measured, engine: EngineFacts) -> str:
    """Return the sizes of the run on one line: in GiB, or each in its own unit where one of them is small."""
    share, bits = engine.quantized_fraction, f"int{request.quant_bits}"
    if request.quant_bits != 8 and engine.stream is not None and engine.stream.head_bits:
        bits += f" and int{engine.stream.head_bits}"
    parts = [
        ("model", measured.model_bytes, " at 16 bits"),
        ("stored", measured.weight_bytes, "" if share is None else f" ({share:.1%} {bits})"),
        ("KV cache", measured.cache_bytes, ""),
        ("peak GPU", measured.peak_gpu_bytes, ""),
        ("peak host", measured.peak_host_bytes, ""),
    ]
    known = [(name, size, more) for name, size, more in parts if size is not None]
    if any(0 < size < LEAST_OF_UNIT * GIB for _, size, _ in known):
        return ", ".join(f"{name} {format_bytes(size)}{more}" for name, size, more in known)
    return f"GiB: {', '.join(f'{name} {three_digits(size / GIB)}{more}' for name, size, more in known)}"
