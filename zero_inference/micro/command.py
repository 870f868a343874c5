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
from zero_inference.utils.progress import Progress, importing, use_progress
from zero_inference.utils.tables import FORMATS, PIPED_WIDTH, print_rows, shown_columns

if TYPE_CHECKING:
    from zero_inference.micro.benchmarks import Benchmark
    from zero_inference.micro.timing import MachineRates

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
# The default of `layer` ends within 3 minutes on a GPU: 136 figures (5 blocks x 2 lengths x 2 batches x 6, and 16 with norm kernels), each
# of which takes this and up to 1 s, 0.3 s on average, that blocked_autorange adds.
LAYER_MIN_RUN_TIME_S = 0.3
LONGEST_CALL_S = 3.0  # one product of 2048 in float16, which most CPUs emulate, took 100 s
MAX_COUNT = 1 << 40  # elements; a row reports if memory is not sufficient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `zero-inference micro`."""
    parser.epilog = examples(*EXAMPLES.values())
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{matmul,elementwise,layer}", parser_class=type(parser)
    )
    for name, what in BENCHMARKS.items():
        command = commands.add_parser(name, help=what, description=what)
        command.epilog = examples(EXAMPLES[name])
        add = command.add_argument
        add("--device", choices=("cuda", "cpu"), help="what to measure (default: the GPU where there is one)")
        add(
            "--min-run-time",
            type=_seconds,
            default=LAYER_MIN_RUN_TIME_S if name == "layer" else 3.0,
            metavar="S",
            help="seconds for which each figure is measured (default: %(default)g)",
        )
        add(
            "--format",
            choices=FORMATS,
            default="table",
            help="of the output; csv and json have full precision (default: table)",
        )
        add("--plot", metavar="FILE.png", type=Path, help="also draw the figures")
        add_verbose(command)
        if name != "elementwise":
            add(
                "--longest-call",
                type=_seconds,
                default=LONGEST_CALL_S,
                metavar="S",
                help="skip sizes of which a single call is expected to take longer, in seconds (default: %(default)g)",
            )
        if name == "layer":
            _add_layer_arguments(command)
            continue
        what = _default("n of the n x n matrices", "matmul", "sizes")
        if name == "elementwise":
            what = "elements of the vectors (default: 2^14 to 2^28 by 4, on a CPU to 2^26)"
        add("--sizes", nargs="+", type=_count, metavar="N", help=what)
        if name == "matmul":
            what = "types of the numbers (default: all that the device has)"
            add("--dtype", nargs="+", type=_kind, choices=KINDS, help=what)


def _add_layer_arguments(layer: argparse.ArgumentParser) -> None:
    layer.add_argument(
        "--blocks",
        nargs="+",
        metavar="NAME",
        help="bert-large, gpt2-medium, t5-large, opt, llama, or an OPT or Llama preset (default: these five, with opt-1.3b and "
        "llama-3.2-1b for the last two on a CPU)",
    )
    tokens, sequences = _default("tokens of a sequence", "layer", "seq"), _default("sequences", "layer", "batch")
    layer.add_argument("--seq", nargs="+", type=_count, metavar="S", help=tokens)
    layer.add_argument("--batch", nargs="+", type=_count, metavar="B", help=sequences)
    layer.add_argument("--dtype", type=_kind, choices=KINDS, help="type to compute in (default: fp16, on a CPU fp32)")
    layer.add_argument(
        "--norm-kernels",
        choices=NORM_KERNELS,
        default="auto",
        help="add a row with this package's norm kernels for each OPT and Llama block (default: auto, where they are built)",
    )


def _default(what: str, benchmark: str, option: str) -> str:
    texts = {device: " ".join(map(str, values)) for device, values in DEFAULTS[benchmark][option].items()}
    return f"{what} (default: {texts['cuda']}, on a CPU {texts['cpu']})"


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
    """Measure, print and draw; return 0. Each row also goes to stderr as soon as it is measured.

    Raises:
        UsageError: what cannot be measured here.
        RunError: a row failed.
    """
    if args.plot is not None:
        _check_plot(args.plot)
    with importing("torch", args.verbose > 0):
        from zero_inference.micro import benchmarks
        from zero_inference.micro.timing import MachineRates

    rates = MachineRates(args.device)
    for option, by_device in DEFAULTS[args.benchmark].items():
        if getattr(args, option) is None:
            setattr(args, option, by_device[rates.device.type])
    with use_progress(Progress(args.verbose > 0)) as progress:
        benchmark: Benchmark = getattr(benchmarks, args.benchmark)(args, rates)
        rows: list[dict[str, Any]] = []
        with progress.task(f"micro {args.benchmark}", benchmark.total, ticking=True) as task:
            task.at(f"row 1 of {benchmark.total}")
            for row in benchmark.rows:
                rows.append(row)
                progress.say(_in_words(row))
                task.at(f"row {len(rows) + 1} of {benchmark.total}", len(rows))
    _print(args, benchmark, rates, rows)
    if args.plot is not None:
        _plot(args.plot, benchmark, rates, rows)
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(rows)} rows were not measured ({failed[0]['error']}): ask for smaller sizes."
        )
    return 0


def _in_words(row: dict[str, Any]) -> str:
    texts = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if value is not None
    )
    return "  ".join(list(texts)[:8])


def _check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: plots are PNG files; use a name that ends in .png.")
    check_output_file("--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: `pip install matplotlib`.")


def _print(args: argparse.Namespace, benchmark: Benchmark, rates: MachineRates, rows: list[dict[str, Any]]) -> None:
    card = rates.card
    if args.format == "json":
        import torch

        sheet = card and {
            "name": card.name,
            "memory_gbps": {"value": card.memory.value, "source": card.memory.source},
            "tflops": {kind: {"value": rate.value, "source": rate.source} for kind, rate in card.tflops.items()},
        }
        context = {
            "benchmark": args.benchmark,
            "device": rates.device.type,
            "device_name": rates.device_name,
            "torch": torch.__version__,
            "min_run_time_s": args.min_run_time,
            "card": sheet,
        }
        print(json.dumps(context | {"rows": rows}, indent=2, allow_nan=False))
        return
    if args.format == "csv":
        print_rows(rows, benchmark.columns, "csv")
        return
    columns = [column for column in shown_columns(rows, benchmark.columns) if column.name not in benchmark.only_exact]
    print_rows(rows, columns, args.format, piped_width=PIPED_WIDTH, gap=2)
    captions = [f"{rates.device_name}: {benchmark.note}"]
    if card:
        sources = dict.fromkeys([*(rate.source for rate in card.tflops.values()), card.memory.source])
        captions.append(f"datasheet: {card.name}, dense rates; {'; '.join(sources)}")
    elif rates.device.type == "cuda":
        captions.append("datasheet: zero_inference/hardware/cards.json has no card of this name")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    for line in captions:
        print(f"\n{line}" if args.format == "md" else textwrap.fill(line, width, subsequent_indent="  "))


def _plot(path: Path, benchmark: Benchmark, rates: MachineRates, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label in dict.fromkeys(map(benchmark.line, rows)):
        points = [
            (benchmark.x(row), row[benchmark.y]) for row in rows if benchmark.line(row) == label and benchmark.y in row
        ]
        if points:
            axes.plot(*zip(*points), marker="o", label=label)
    for label, rate in benchmark.limits().items():
        if rate:
            axes.axhline(rate, color="grey", linestyle="--", linewidth=1)
            axes.annotate(label, (0.01, rate), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    x_label, y_label = benchmark.labels
    axes.set(xscale="log", xlabel=x_label, ylabel=y_label, title=rates.device_name)
    axes.grid(True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    with write_atomically(path) as file:
        figure.savefig(file, dpi=150, format="png")
    pyplot.close(figure)
