"""`zero-inference micro matmul|elementwise|layer`: tables of rates beside the datasheet's and the best measured ones."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zero_inference.config.options import NORM_KERNELS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.errors import RunError, UsageError
from zero_inference.utils.files import check_output_file, write_atomically
from zero_inference.utils.progress import Progress, importing, use_progress
from zero_inference.utils.tables import FORMATS, PIPED_WIDTH, Column, RowPrinter

if TYPE_CHECKING:
    import torch

    from zero_inference.micro.timing import MachineRates


KINDS = ("fp32", "tf32", "fp16", "bf16")
MATMUL_SIZES = {"cuda": (128, 512, 2048, 8192), "cpu": (128, 512, 2048)}
# Past the last-level cache: 50 MiB of L2 on an H200, 126 MB on a B200.
ELEMENTWISE_SIZES = {"cuda": tuple(1 << p for p in range(14, 29, 2)), "cpu": tuple(1 << p for p in range(14, 27, 2))}
# The default of `layer` ends within 3 minutes on a GPU. There are 5 blocks x 2 lengths x 2 batches x 6 figures, and for the two
# blocks whose norms have kernels 2 x 2 x 2 x 2 more: 136 figures. blocked_autorange takes min_run_time, and beside it up to 1 s,
# 0.3 s on average, to find a block that is 10,000 times as long as a look at the clock (some us, as it waits for the device) and
# to end its last one: 136 x (0.3 + 0.3) s = 82 s, and 177 s at worst; compiling the norm kernels, once on a machine, is not in it.
# On a CPU it is 30 figures of about a second.
LAYER_MIN_RUN_TIME_S = 0.3
LAYER_BATCHES = {"cuda": (4, 128), "cpu": (1,)}
LAYER_SEQS = {"cuda": (128, 512), "cpu": (128,)}
LONGEST_CALL_S = 3.0  # one product of 2048 in float16, which most CPUs emulate, took 100 s
EXAMPLES = {
    "matmul": ("zero-inference micro matmul --sizes 512 2048 --dtype fp32 bf16",),
    "elementwise": ("zero-inference micro elementwise --plot elementwise.png",),
    "layer": ("zero-inference micro layer --blocks opt llama --seq 128 --batch 1",),
}
MAX_COUNT = 1 << 40  # elements; a row reports if memory is not sufficient


def add_options(parser: argparse.ArgumentParser, benchmarks: dict[str, str]) -> None:
    """Add the options of `zero-inference micro`; `benchmarks` has their names and descriptions."""
    parser.epilog = examples(*(example for of_one in EXAMPLES.values() for example in of_one))
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{matmul,elementwise,layer}", parser_class=type(parser)
    )
    parsers = {name: commands.add_parser(name, help=what, description=what) for name, what in benchmarks.items()}
    for name, each in parsers.items():
        each.epilog = examples(*EXAMPLES[name])
        seconds = LAYER_MIN_RUN_TIME_S if name == "layer" else 3.0
        each.add_argument(
            "--device", choices=("cuda", "cpu"), help="what to measure (default: the GPU where there is one)"
        )
        each.add_argument(
            "--min-run-time",
            type=_seconds,
            default=seconds,
            metavar="S",
            help="seconds for which each figure is measured (default: %(default)g)",
        )
        each.add_argument(
            "--format",
            choices=FORMATS,
            default="table",
            help="of the output; csv and json have full precision (default: table)",
        )
        each.add_argument("--plot", metavar="FILE.png", type=Path, help="also draw the figures")
        add_verbose(each)
    for name in ("matmul", "layer"):
        parsers[name].add_argument(
            "--longest-call",
            type=_seconds,
            default=LONGEST_CALL_S,
            metavar="S",
            help="skip sizes of which a single call is expected to take longer, in seconds (default: %(default)g)",
        )
    parsers["matmul"].add_argument(
        "--sizes", nargs="+", type=_count, metavar="N", help=_default("n of the n x n matrices", MATMUL_SIZES)
    )
    parsers["matmul"].add_argument(
        "--dtype", nargs="+", type=_kind, choices=KINDS, help="types of the numbers (default: all that the device has)"
    )
    parsers["elementwise"].add_argument(
        "--sizes",
        nargs="+",
        type=_count,
        metavar="N",
        help="elements of the vectors (default: 2^14 to 2^28 by 4, on a CPU to 2^26)",
    )
    _add_layer_arguments(parsers["layer"])


def _add_layer_arguments(layer: argparse.ArgumentParser) -> None:
    layer.add_argument(
        "--blocks",
        nargs="+",
        metavar="NAME",
        help="bert-large, gpt2-medium, t5-large, opt, llama, or an OPT or Llama preset (default: these five, with opt-1.3b and "
        "llama-3.2-1b for the last two on a CPU)",
    )
    layer.add_argument("--seq", nargs="+", type=_count, metavar="S", help=_default("tokens of a sequence", LAYER_SEQS))
    layer.add_argument("--batch", nargs="+", type=_count, metavar="B", help=_default("sequences", LAYER_BATCHES))
    layer.add_argument("--dtype", type=_kind, choices=KINDS, help="type to compute in (default: fp16, on a CPU fp32)")
    layer.add_argument(
        "--norm-kernels",
        choices=NORM_KERNELS,
        default="auto",
        help="add a row with this package's norm kernels for each OPT and Llama block (default: auto, where they are built)",
    )


def check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: plots are PNG files; use a name that ends in .png.")
    check_output_file("--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: `pip install matplotlib`.")


def _default(what: str, sizes: dict[str, tuple[int, ...]]) -> str:
    texts = {device: " ".join(map(str, values)) for device, values in sizes.items()}
    return f"{what} (default: {texts['cuda']}, on a CPU {texts['cpu']})"


def _kind(text: str) -> str:
    """Return fp16 for float16 and half, and so on; anything else unchanged."""
    name = text.lower().removeprefix("torch.")
    return {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(name, name)


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


NOT_MEASURED = Column("not_measured", "not measured", dtype="string")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `zero-inference micro`.

    Attributes:
        rows: returns the maximum number of rows, and an iterator that yields each row as soon as it is measured.
    """

    module: str
    what: str
    rows: Callable[[argparse.Namespace, MachineRates, ModuleType], tuple[int, Iterable[dict[str, Any]]]]
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `zero-inference micro`."""
    add_options(parser, {name: benchmark.what for name, benchmark in BENCHMARKS.items()})


def main(args: argparse.Namespace) -> int:
    """Measure, print and draw; return 0. Raises UsageError for what cannot be measured here, RunError if a row failed.

    Rows are printed as they are measured, JSON at the end; if stdout does not show them, a line of each goes to stderr.
    """
    if args.plot is not None:
        check_plot(args.plot)
    with importing("torch", args.verbose > 0):
        from zero_inference.micro.timing import MachineRates, choose_device, device_name

        benchmark = BENCHMARKS[args.benchmark]
        rates = MachineRates(choose_device(args.device))
        module = importlib.import_module(f"zero_inference.micro.{benchmark.module}")
        device = device_name(rates.device)
    hidden: list[str] = []
    columns = _columns(args, module, rates)
    if args.format == "table":
        columns, hidden = _hide_columns(columns, getattr(module, "LEAST_SHOWN", ()), _width())
    with use_progress(Progress(args.verbose > 0)) as progress:
        rows = _measure_and_print(args, columns, benchmark, rates, module, progress)
    if args.format == "json":
        print(json.dumps(_context(args, rates, device) | {"rows": rows}, indent=2, allow_nan=False))
    if args.format in ("table", "md"):
        lines = _captions(rates, device, benchmark.note)
        if hidden:
            lines.append(f"not shown for want of width, but in --format csv: {', '.join(hidden)}")
        for line in lines:
            wrapped = textwrap.fill(line, _width(), subsequent_indent="  ") if args.format == "table" else line
            print(("\n" if args.format == "md" else "") + wrapped)
    if args.plot is not None:
        _plot(args.plot, module, rows, rates, device)
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(rows)} rows were not measured ({failed[0]['error']}): ask for smaller sizes."
        )
    return 0


def _measure_and_print(
    args: argparse.Namespace,
    columns: Sequence[Column],
    benchmark: Benchmark,
    rates: MachineRates,
    module: ModuleType,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return all rows, each printed as soon as it is measured."""
    printer = RowPrinter(columns, args.format, gap=1 if hasattr(module, "LEAST_SHOWN") else 2)
    also_to_stderr = args.format == "json" or (sys.stderr.isatty() and not sys.stdout.isatty())
    total, measuring = benchmark.rows(args, rates, module)
    rows: list[dict[str, Any]] = []
    with progress.task(f"micro {args.benchmark}", total, ticking=True) as task:
        task.at(f"row 1 of {total}")
        for row in measuring:
            rows.append(row)
            if args.format != "json":
                with progress.paused():
                    printer.add(row | {NOT_MEASURED.name: row.get("error") or row.get("skipped") or ""})
            if also_to_stderr:
                progress.say(_in_words(row))
            if len(rows) < total:
                task.at(f"row {len(rows) + 1} of {total}", len(rows))
    return rows


def _matmul_rows(args, rates: MachineRates, module: ModuleType):
    from zero_inference.micro.timing import kinds_of

    kinds = args.dtype or kinds_of(rates.device)
    _check_kinds(kinds, rates.device)
    sizes = args.sizes or MATMUL_SIZES[rates.device.type]
    return len(kinds) * len(sizes), module.measure(rates, sizes, kinds, args.min_run_time, args.longest_call)


def _elementwise_rows(args, rates: MachineRates, module: ModuleType):
    sizes = args.sizes or ELEMENTWISE_SIZES[rates.device.type]
    return len(sizes), module.measure(rates, sizes, args.min_run_time)


def _layer_rows(args, rates: MachineRates, module: ModuleType):
    from zero_inference.micro.blocks import CPU_BLOCKS, DEFAULT_BLOCKS, SHORT, block_config
    from zero_inference.micro.layer import make_norm_patch
    from zero_inference.micro.timing import DTYPES
    from zero_inference.models.spec import max_positions
    from zero_inference.norms.patch import family_refusal

    kind, device = args.dtype or ("fp16" if rates.device.type == "cuda" else "fp32"), rates.device.type
    _check_kinds([kind], rates.device)
    default = DEFAULT_BLOCKS if device == "cuda" else CPU_BLOCKS
    blocks = [SHORT.get(name, name) for name in args.blocks or default]
    seqs, batches = args.seq or LAYER_SEQS[device], args.batch or LAYER_BATCHES[device]
    configs = {name: block_config(name) for name in blocks}
    for name, config in configs.items():
        positions = max_positions(config)
        if positions and max(seqs) > positions:
            raise UsageError(f"--seq {max(seqs)}: {name} has {positions} positions; shorten it.")
    patch = make_norm_patch(
        args.norm_kernels, rates.device, DTYPES[kind], [config.model_type for config in configs.values()]
    )
    known = 0 if patch is None else sum(family_refusal(each.model_type) is None for each in configs.values())
    total = (len(blocks) + known) * len(seqs) * len(batches)  # blocks with norm kernels have a second row
    return total, module.measure(rates, blocks, seqs, batches, kind, args.min_run_time, args.longest_call, patch)


OF_BEST = (
    "of measured: share of the best rate that this process has reached with the same type so far, in these rows or in "
    "a few products measured before them"
)
BENCHMARKS = {
    "matmul": Benchmark(
        "matmul", "products of square matrices", _matmul_rows, f"a product is 2 n^3 operations; {OF_BEST}"
    ),
    "elementwise": Benchmark(
        "elementwise",
        "a * 1.2, which measures memory bandwidth",
        _elementwise_rows,
        "8 n bytes are moved; of measured: share of the rate of a copy inside the device's memory; above 100% the data came "
        "from a cache",
    ),
    "layer": Benchmark(
        "layer",
        "transformer blocks and their parts",
        _layer_rows,
        "counted are the operations of the products (24 b s h^2 + 4 b h s^2 in a classical block), three times that for "
        f"forward + backward, and causal attention in full (causal half: what a causal kernel may skip); {OF_BEST}",
    ),
}


def _check_kinds(kinds: Iterable[str], device: torch.device) -> None:
    from zero_inference.micro.timing import kinds_of

    for kind in kinds:
        if kind not in kinds_of(device):
            raise UsageError(
                f"--dtype {kind}: this {'GPU' if device.type == 'cuda' else 'CPU'} does not support it; "
                f"use {', '.join(kinds_of(device))}."
            )


def _context(args, rates: MachineRates, name: str) -> dict[str, Any]:
    import torch

    card = rates.card
    return {
        "benchmark": args.benchmark,
        "device": rates.device.type,
        "device_name": name,
        "torch": torch.__version__,
        "min_run_time_s": args.min_run_time,
        "card": card
        and {
            "name": card.name,
            "memory_gbps": {"value": card.memory.value, "source": card.memory.source},
            "tflops": {kind: {"value": rate.value, "source": rate.source} for kind, rate in card.tflops.items()},
        },
    }


def _captions(rates: MachineRates, name: str, note: str) -> list[str]:
    if rates.card:
        sources = dict.fromkeys([*(rate.source for rate in rates.card.tflops.values()), rates.card.memory.source])
        datasheet = f"datasheet: {rates.card.name}, dense rates; {'; '.join(sources)}"
    else:
        datasheet = "datasheet: zero_inference/hardware/cards.json has no card of this name"
    return [f"{name}: {note}", *([datasheet] if rates.device.type == "cuda" else [])]


def _columns(args, module: ModuleType, rates: MachineRates) -> list[Column]:
    """Return all of the module's columns for csv and json; else those that this machine and the options can fill."""
    if args.format in ("csv", "json"):
        return list(module.COLUMNS)
    left_out = {"error", "skipped"}
    if rates.card is None:
        left_out.add("of_datasheet")
    if getattr(args, "norm_kernels", "off") == "off" or (args.norm_kernels == "auto" and rates.device.type != "cuda"):
        left_out |= {"norms", "norm_modules_patched", "norm_speedup"}
    return [*(column for column in module.COLUMNS if column.name not in left_out), NOT_MEASURED]


def _hide_columns(columns: list[Column], hide_first: Sequence[str], width: int) -> tuple[list[Column], list[str]]:
    """Return (columns shown, headers hidden): columns named in `hide_first` are hidden in this order until a table of the rest is at most
    `width` characters wide."""
    shown, hidden = columns, []
    for name in hide_first:
        if RowPrinter(shown, "table", gap=1).width > width:
            hidden += [column.header for column in shown if column.name == name]
            shown = [column for column in shown if column.name != name]
    return shown, hidden


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def _in_words(row: dict[str, Any]) -> str:
    texts = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if value is not None
    ]
    return "  ".join(texts[:8])


def _plot(path: Path, module: ModuleType, rows: list[dict[str, Any]], rates: MachineRates, name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    module.draw(axes, rows, rates)
    axes.set_title(f"{axes.get_title()}\n{name}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    with write_atomically(path) as file:
        figure.savefig(file, dpi=150, format="png")
    pyplot.close(figure)
