"""`zero-inference micro matmul|elementwise|layer`: tables of figures, each beside the datasheet's rate and this machine's own."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zero_inference.errors import RunError, UsageError
from zero_inference.micro import arguments
from zero_inference.micro.arguments import ELEMENTWISE_SIZES, LAYER_BATCHES, LAYER_SEQS, MATMUL_SIZES, check_plot
from zero_inference.micro.norms import norm_patch
from zero_inference.utils.progress import Progress, importing, reporting
from zero_inference.utils.replace import replacing
from zero_inference.utils.tables import PIPED_WIDTH, Column, RowPrinter

if TYPE_CHECKING:
    import torch

    from zero_inference.micro.timing import MachineRates

NOT_MEASURED = Column("not_measured", "not measured", dtype="string")


@dataclass(frozen=True)
class Benchmark:
    """What one of the three adds to the common part.

    Attributes:
        rows: how many rows there will be at most, and the rows, each yielded as soon as it is measured.
    """

    module: str
    what: str
    rows: Callable[[argparse.Namespace, MachineRates, ModuleType], tuple[int, Iterable[dict[str, Any]]]]
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference micro`."""
    arguments.add_arguments(parser, {name: benchmark.what for name, benchmark in BENCHMARKS.items()})


def main(args: argparse.Namespace) -> int:
    """Measures, prints and draws; 0. Raises UsageError for what cannot be measured here, RunError where a row was not.

    Rows are printed as they come, JSON at the end; where stdout does not show them, a line of each goes to stderr.
    """
    if args.plot is not None:
        check_plot(args.plot)
    with importing("torch", args.verbose > 0):
        from zero_inference.micro.timing import MachineRates, choose_device, device_name

        benchmark = BENCHMARKS[args.benchmark]
        rates = MachineRates(choose_device(args.device))
        module = importlib.import_module(f"zero_inference.micro.{benchmark.module}")
    with reporting(Progress(args.verbose > 0)) as progress:
        rows = _measured(args, benchmark, rates, module, progress)
    if args.format == "json":
        print(json.dumps(_context(args, rates, device_name(rates.device)) | {"rows": rows}, indent=2, allow_nan=False))
    if args.format in ("table", "md"):
        lines = _captions(rates, device_name(rates.device), benchmark.note)
        if args.format == "table" and (hidden := _fitting(_columns(args, module, rates), _least(module), _width())[1]):
            lines.append(f"not shown for want of width, but in --format csv: {', '.join(hidden)}")
        for line in lines:
            wrapped = textwrap.fill(line, _width(), subsequent_indent="  ") if args.format == "table" else line
            print(("\n" if args.format == "md" else "") + wrapped)
    if args.plot is not None:
        _plot(args.plot, module, rows, rates, device_name(rates.device))
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(rows)} rows were not measured ({failed[0]['error']}): ask for smaller sizes."
        )
    return 0


def _measured(
    args: argparse.Namespace, benchmark: Benchmark, rates: MachineRates, module: ModuleType, progress: Progress
) -> list[dict[str, Any]]:
    """All rows, each printed when it is there."""
    columns = _columns(args, module, rates)
    printer = RowPrinter(
        _fitting(columns, _least(module), _width())[0] if args.format == "table" else columns,
        args.format,
        gap=1 if _least(module) else 2,
    )
    told = args.format == "json" or (sys.stderr.isatty() and not sys.stdout.isatty())
    total, measuring = benchmark.rows(args, rates, module)
    rows: list[dict[str, Any]] = []
    with progress.task(f"micro {args.benchmark}", total, ticking=True) as task:
        task.at(f"row 1 of {total}")
        for row in measuring:
            rows.append(row)
            if args.format != "json":
                with progress.paused():
                    printer.add(row | {NOT_MEASURED.name: row.get("error") or row.get("skipped") or ""})
            if told:
                progress.say(_in_words(row))
            if len(rows) < total:
                task.at(f"row {len(rows) + 1} of {total}", len(rows))
    return rows


def _matmul_rows(args, rates: MachineRates, module: ModuleType):
    kinds = args.dtype or _kinds(rates.device)
    _check_kinds(kinds, rates.device)
    sizes = args.sizes or MATMUL_SIZES[rates.device.type]
    return len(kinds) * len(sizes), module.measure(rates, sizes, kinds, args.min_run_time, args.longest_call)


def _elementwise_rows(args, rates: MachineRates, module: ModuleType):
    sizes = args.sizes or ELEMENTWISE_SIZES[rates.device.type]
    return len(sizes), module.measure(rates, sizes, args.min_run_time)


def _layer_rows(args, rates: MachineRates, module: ModuleType):
    from zero_inference.micro.blocks import CPU_BLOCKS, DEFAULT_BLOCKS, SHORT, block_config
    from zero_inference.micro.timing import DTYPES
    from zero_inference.models.spec import max_positions
    from zero_inference.norms.patch import why_not_family

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
    patch = norm_patch(
        args.norm_kernels, rates.device, DTYPES[kind], [config.model_type for config in configs.values()]
    )
    known = 0 if patch is None else sum(why_not_family(each.model_type) is None for each in configs.values())
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


def _kinds(device: torch.device) -> tuple[str, ...]:
    from zero_inference.micro.timing import kinds_of

    return kinds_of(device)


def _check_kinds(kinds: Iterable[str], device: torch.device) -> None:
    for kind in kinds:
        if kind not in _kinds(device):
            raise UsageError(
                f"--dtype {kind}: this {'GPU' if device.type == 'cuda' else 'CPU'} does not support it; "
                f"use {', '.join(_kinds(device))}."
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
    """All of the module's for programs; for people those that this machine and the options can fill, known before any row is."""
    if args.format in ("csv", "json"):
        return list(module.COLUMNS)
    left_out = {"error", "skipped"}
    if rates.card is None:
        left_out.add("of_datasheet")
    if getattr(args, "norm_kernels", "off") == "off" or (args.norm_kernels == "auto" and rates.device.type != "cuda"):
        left_out |= {"norms", "norm_modules_patched", "norm_speedup"}
    return [*(column for column in module.COLUMNS if column.name not in left_out), NOT_MEASURED]


def _fitting(columns: list[Column], least_shown: Sequence[str], width: int) -> tuple[list[Column], list[str]]:
    """Return the columns of a table at most `width` wide, as far as leaving out `least_shown` makes it so, and the headers left out."""
    shown, hidden = columns, []
    for name in least_shown:
        if RowPrinter(shown, "table", gap=1).width > width:
            hidden += [column.header for column in shown if column.name == name]
            shown = [column for column in shown if column.name != name]
    return shown, hidden


def _least(module: ModuleType) -> Sequence[str]:
    return getattr(module, "LEAST_SHOWN", ())


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
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")
    pyplot.close(figure)
