"""`zero-inference micro matmul|elementwise|layer`: tables of rates beside the datasheet's and the best measured ones."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.config.options import NORM_KERNELS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.errors import RunError, UsageError
from zero_inference.utils.files import check_output_file, write_atomically
from zero_inference.utils.format import (
    FORMATS,
    PIPED_WIDTH,
    Column,
    decimals,
    format_percent,
    print_rows,
    shown_columns,
    three_digits,
)
from zero_inference.utils.progress import Progress, importing, use_progress

if TYPE_CHECKING:
    from zero_inference.micro.benchmarks import MachineRates

BENCHMARKS = {
    "matmul": "products of square matrices",
    "elementwise": "a * 1.2, which measures memory bandwidth",
    "layer": "transformer blocks and their parts",
}
EXAMPLES = {
    "matmul": "zero-inference micro matmul --sizes 512 2048 --dtype fp32 bf16",
    "elementwise": "zero-inference micro elementwise --plot elementwise.png",
    "layer": "zero-inference micro layer --blocks opt llama --seq 128 --batch 1",
}
KINDS = ("fp32", "tf32", "fp16", "bf16")
ALIASES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
# Elements go past the last-level cache: 50 MiB of L2 on an H200, 126 MB on a B200.
DEFAULTS: dict[str, dict[str, dict[str, Sequence[int]]]] = {
    "matmul": {"sizes": {"cuda": (128, 512, 2048, 8192), "cpu": (128, 512, 2048)}},
    "elementwise": {"sizes": {"cuda": [1 << p for p in range(14, 29, 2)], "cpu": [1 << p for p in range(14, 27, 2)]}},
    "layer": {"seq": {"cuda": (128, 512), "cpu": (128,)}, "batch": {"cuda": (4, 128), "cpu": (1,)}},
}
# Metavar and help of the options in DEFAULTS.
COUNTED = {
    ("matmul", "sizes"): ("N", "n of the n x n matrices"),
    ("elementwise", "sizes"): ("N", "elements of the vectors"),
    ("layer", "seq"): ("S", "tokens of a sequence"),
    ("layer", "batch"): ("B", "sequences"),
}
# `layer` has 136 figures by default (5 blocks x 2 lengths x 2 batches x 6, and 16 with norm kernels). blocked_autorange takes 0.3 s more
# than this on average, 1 s at most, so all end within 3 minutes on a GPU.
LAYER_MIN_RUN_TIME_S = 0.3
LONGEST_CALL_S = 3.0  # one product of 2048 in float16, which most CPUs emulate, took 100 s
MAX_COUNT = 1 << 40  # of an option; a size that does not fit memory becomes a row with an error

TIME_US = Column("time_s", "time (us)", lambda seconds: three_digits(1e6 * seconds))
OF_DATASHEET = Column("of_datasheet", "of datasheet", format_percent)
OF_MEASURED = Column("of_measured", "of measured", format_percent)
BEST = Column("best_tflops", "best TFLOP/s measured", three_digits)
SKIPPED, ERROR = (Column(name, name, dtype="string") for name in ("skipped", "error"))
COLUMNS = {
    "matmul": (
        Column("dtype", "type", dtype="string"),
        Column("n", "n", dtype="Int64"),
        TIME_US,
        Column("tflops", "TFLOP/s", three_digits),
        *(OF_DATASHEET, OF_MEASURED, BEST, SKIPPED, ERROR),
    ),
    "elementwise": (
        Column("n", "n", dtype="Int64"),
        TIME_US,
        Column("gflops", "GFLOP/s", three_digits),
        Column("gbps", "GB/s", three_digits),
        *(OF_DATASHEET, OF_MEASURED, ERROR),
    ),
    "layer": (
        Column("block", "block", dtype="string", whole=True),
        Column("dtype", "type", dtype="string"),
        Column("norms", "norms", dtype="string"),
        Column("seq", "seq", dtype="Int64"),
        Column("batch", "batch", dtype="Int64"),
        Column("forward_s", "fwd (ms)", lambda seconds: three_digits(1e3 * seconds)),
        Column("forward_tflops", "fwd TFLOP/s", three_digits),
        *(OF_DATASHEET, OF_MEASURED, BEST),
        Column("forward_backward_tflops", "fwd+bwd TFLOP/s", three_digits),
        Column("dense_tflops", "dense", three_digits),
        Column("dense_activation_tflops", "dense + act", three_digits),
        Column("feed_forward_tflops", "feed- forward", three_digits),
        Column("attention_tflops", "attn", three_digits),
        Column("attention_of_feed_forward", "attn / ffn", decimals(2)),
        Column("norm_modules_patched", "norms patched", dtype="Int64"),
        Column("norm_speedup", "norm gain", lambda ratio: f"{ratio:.3f}x"),
        Column("skippable", "causal half", format_percent),
        *(SKIPPED, ERROR),
    ),
}
# Columns that only csv and json have.
ONLY_EXACT = "best_tflops dense_tflops dense_activation_tflops norm_modules_patched skippable".split()
OF_BEST = "of measured: share of the best rate that this process has reached with the same type so far"
NOTES = {
    "matmul": f"a product is 2 n^3 operations; {OF_BEST}",
    "elementwise": "8 n bytes are moved; of measured: share of the rate of a copy inside the device's memory; above 100% the data "
    "came from a cache",
    "layer": "counted are the operations of the products (24 b s h^2 + 4 b h s^2 in a classical block), three times that for "
    f"forward + backward, and causal attention in full; {OF_BEST}",
}
# Columns of the plot: x, y, and those that name a line.
PLOTS = {
    "matmul": ("n", "tflops", ["dtype"]),
    "elementwise": ("n", "gbps", []),
    "layer": ("batch", "forward_tflops", ["block", "seq", "norms"]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `zero-inference micro`."""
    parser.epilog = examples(*EXAMPLES.values())
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{matmul,elementwise,layer}", parser_class=type(parser)
    )
    for name, purpose in BENCHMARKS.items():
        command = commands.add_parser(name, help=purpose, description=purpose, epilog=examples(EXAMPLES[name]))
        add = command.add_argument
        add("--device", choices=("cuda", "cpu"), help="what to measure (default: the GPU where there is one)")
        add(
            "--min-run-time",
            type=_seconds,
            default=LAYER_MIN_RUN_TIME_S if name == "layer" else 3.0,
            metavar="S",
            help="seconds for which each figure is measured (default: %(default)g)",
        )
        output = "of the output; csv and json have full precision (default: table)"
        add("--format", choices=FORMATS, default="table", help=output)
        add("--plot", metavar="FILE.png", type=Path, help="also draw the figures")
        add_verbose(command)
        if name != "elementwise":
            longest = "skip sizes of which a single call is expected to take longer, in seconds (default: %(default)g)"
            add("--longest-call", type=_seconds, default=LONGEST_CALL_S, metavar="S", help=longest)
        if name == "layer":
            blocks = (
                "bert-large, gpt2-medium, t5-large, opt, llama, or an OPT or Llama preset (default: these five, with opt-1.3b and "
                "llama-3.2-1b for the last two on a CPU)"
            )
            add("--blocks", nargs="+", metavar="NAME", help=blocks)
        for option, by_device in DEFAULTS[name].items():
            defaults = {device: " ".join(map(str, values)) for device, values in by_device.items()}
            default = f"default: {defaults['cuda']}, on a CPU {defaults['cpu']}"
            if name == "elementwise":
                default = "default: 2^14 to 2^28 by 4, on a CPU to 2^26"
            metavar, counted = COUNTED[name, option]
            add(f"--{option}", nargs="+", type=_count, metavar=metavar, help=f"{counted} ({default})")
        if name == "matmul":
            types = "types of the numbers (default: all that the device has)"
            add("--dtype", nargs="+", type=_kind, choices=KINDS, help=types)
        elif name == "layer":
            add("--dtype", type=_kind, choices=KINDS, help="type to compute in (default: fp16, on a CPU fp32)")
            norms = "add a row with this package's norm kernels for each OPT and Llama block (default: auto, where they are built)"
            add("--norm-kernels", choices=NORM_KERNELS, default="auto", help=norms)


def _kind(text: str) -> str:
    name = text.lower().removeprefix("torch.")
    return ALIASES.get(name, name)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is " + ("less than 1" if value < 1 else f"more than {MAX_COUNT}"))
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0")
    return value


def main(args: argparse.Namespace) -> int:
    """Measure, print and draw; return 0. Each row also goes to stderr as soon as it is measured. Raises UsageError: what cannot be measured
    here. RunError: a row failed."""
    if args.plot is not None:
        if args.plot.suffix.lower() != ".png":
            raise UsageError(f"--plot {args.plot}: plots are PNG files; use a name that ends in .png.")
        check_output_file("--plot", args.plot)
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib, which is not installed: `pip install matplotlib`.")
    with importing("torch", args.verbose > 0):
        from zero_inference.micro import benchmarks
        from zero_inference.micro.benchmarks import MachineRates

    rates = MachineRates(args.device)
    for option, by_device in DEFAULTS[args.benchmark].items():
        if getattr(args, option) is None:
            setattr(args, option, by_device[rates.device.type])
    rows: list[dict[str, Any]] = []
    with use_progress(Progress(args.verbose > 0)) as progress:
        total, measuring = getattr(benchmarks, args.benchmark)(args, rates)
        with progress.task(f"micro {args.benchmark}", total, ticking=True) as task:
            task.at(f"row 1 of {total}")
            for row in measuring:
                rows.append(row)
                values = [
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                    if value is not None
                ]
                progress.say("  ".join(values[:8]))  # as many as fit a line
                if len(rows) < total:
                    task.at(f"row {len(rows) + 1} of {total}", len(rows))
    _print(args, rates, rows)
    if args.plot is not None:
        _plot(args, rates, rows)
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(rows)} rows were not measured ({failed[0]['error']}): ask for smaller sizes."
        )
    return 0


def _print(args: argparse.Namespace, rates: MachineRates, rows: list[dict[str, Any]]) -> None:
    card = rates.card
    if args.format == "json":
        import torch

        context = {
            "benchmark": args.benchmark,
            "device": rates.device.type,
            "device_name": rates.device_name,
            "torch": torch.__version__,
            "min_run_time_s": args.min_run_time,
            "card": card
            and {
                "name": card.name,
                "memory_gbps": {"value": card.memory.value, "source": card.memory.source},
                "tflops": {kind: {"value": rate.value, "source": rate.source} for kind, rate in card.tflops.items()},
            },
        }
        print(json.dumps(context | {"rows": rows}, indent=2, allow_nan=False))
        return
    columns: Sequence[Column] = COLUMNS[args.benchmark]
    if args.format != "csv":
        columns = [column for column in shown_columns(rows, columns) if column.name not in ONLY_EXACT]
    print_rows(rows, columns, args.format, piped_width=PIPED_WIDTH, gap=2)
    if args.format == "csv":
        return
    captions = [f"{rates.device_name}: {NOTES[args.benchmark]}"]
    if card:
        sources = dict.fromkeys([*(rate.source for rate in card.tflops.values()), card.memory.source])
        captions.append(f"datasheet: {card.name}, dense rates; {'; '.join(sources)}")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    for line in captions:
        print(f"\n{line}" if args.format == "md" else textwrap.fill(line, width, subsequent_indent="  "))


def _plot(args: argparse.Namespace, rates: MachineRates, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x, y, names = PLOTS[args.benchmark]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if y in row:
            lines.setdefault(" ".join(str(row[name]) for name in names), []).append((row[x], row[y]))
    for label, points in lines.items():
        axes.plot(*zip(*points), marker="o", label=label or None)
    headers = {column.name: column.header for column in COLUMNS[args.benchmark]}
    axes.set(xscale="log", yscale="log", xlabel=headers[x], ylabel=headers[y], title=rates.device_name)
    axes.grid(True, which="major", alpha=0.3)
    if any(lines):
        axes.legend(fontsize=8)
    with write_atomically(args.plot) as file:
        figure.savefig(file, dpi=150, format="png")
    pyplot.close(figure)
