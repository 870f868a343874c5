"""`zero-inference micro matmul|elementwise|layer`: tables of figures, each beside the datasheet's rate and this machine's own."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zero_inference.config import NORM_KERNELS
from zero_inference.errors import RunError, UsageError
from zero_inference.report.tables import FORMATS, Column, RowPrinter
from zero_inference.runtime.replace import check_output_file, replacing

if TYPE_CHECKING:
    import torch

    from zero_inference.micro.blocks import Block
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
TRIED_COLUMNS = 4096  # hidden size of the norm kernels' trial
LONGEST_CALL_S = 3.0  # one product of 2048 in float16, which most CPUs emulate, took 100 s
NOT_MEASURED = Column("not_measured", "not measured", dtype="string")


@dataclass(frozen=True)
class Benchmark:
    """What one of the three adds to the common part; `rows` measures, yielding a row as soon as it is there."""

    module: str
    what: str
    rows: Callable[[argparse.Namespace, MachineRates, ModuleType], Iterable[dict[str, Any]]]
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference micro`."""
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{matmul,elementwise,layer}", parser_class=type(parser)
    )
    parsers = {name: commands.add_parser(name, help=benchmark.what) for name, benchmark in BENCHMARKS.items()}
    for name, each in parsers.items():
        seconds = LAYER_MIN_RUN_TIME_S if name == "layer" else 3.0
        each.add_argument("--device", choices=("cuda", "cpu"), help="(default: the GPU where there is one)")
        each.add_argument(
            "--min-run-time",
            type=_seconds,
            default=seconds,
            metavar="S",
            help="seconds a figure is measured for (default: %(default)g)",
        )
        each.add_argument(
            "--format", choices=FORMATS, default="table", help="(default: table; csv and json in full precision)"
        )
        each.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the figures too")
    for name in ("matmul", "layer"):
        parsers[name].add_argument(
            "--longest-call",
            type=_seconds,
            default=LONGEST_CALL_S,
            metavar="S",
            help="skip a size of which one call is expected to take longer (default: %(default)g)",
        )
    parsers["matmul"].add_argument("--sizes", nargs="+", type=_count, metavar="N", help=_default("n", MATMUL_SIZES))
    parsers["matmul"].add_argument("--dtype", nargs="+", choices=KINDS, help="(default: all that the device has)")
    parsers["elementwise"].add_argument(
        "--sizes", nargs="+", type=_count, metavar="N", help="elements (default: 2^14 to 2^28 by 4, on a CPU to 2^26)"
    )
    layer = parsers["layer"]
    layer.add_argument(
        "--blocks",
        nargs="+",
        metavar="NAME",
        help="bert-large, gpt2-medium, t5-large, opt, llama, or an OPT or Llama preset (default: these five, on a "
        "CPU opt-1.3b and llama-3.2-1b of the last two)",
    )
    layer.add_argument("--seq", nargs="+", type=_count, metavar="S", help=_default("tokens", LAYER_SEQS))
    layer.add_argument("--batch", nargs="+", type=_count, metavar="B", help=_default("sequences", LAYER_BATCHES))
    layer.add_argument("--dtype", choices=KINDS, help="(default: fp16, on a CPU fp32)")
    layer.add_argument(
        "--norm-kernels",
        choices=NORM_KERNELS,
        default="auto",
        help="a second row of each OPT and Llama block, with this package's norm kernels (default: auto, where "
        "there are any)",
    )


def main(args: argparse.Namespace) -> int:
    """Measures, prints and draws; 0. Raises UsageError for what cannot be measured here, RunError where a row was not.

    Rows are printed as they come, JSON at the end; where stdout does not show them, a line of each goes to stderr.
    """
    if args.plot is not None:
        _check_plot(args.plot)
    from zero_inference.micro.timing import MachineRates, choose_device, device_name

    benchmark = BENCHMARKS[args.benchmark]
    rates = MachineRates(choose_device(args.device))
    module = importlib.import_module(f"zero_inference.micro.{benchmark.module}")
    printer = RowPrinter(_columns(args, module, rates), args.format)
    rows = []
    for row in benchmark.rows(args, rates, module):
        rows.append(row)
        if args.format != "json":
            printer.add(row | {NOT_MEASURED.name: row.get("error") or row.get("skipped") or ""})
        if args.format == "json" or (sys.stderr.isatty() and not sys.stdout.isatty()):
            _progress(row)
    if args.format == "json":
        print(json.dumps(_context(args, rates, device_name(rates.device)) | {"rows": rows}, indent=2, allow_nan=False))
    if args.format in ("table", "md"):
        for line in _captions(rates, device_name(rates.device), benchmark.note):
            print(("\n" if args.format == "md" else "") + line)
    if args.plot is not None:
        _plot(args.plot, module, rows, rates, device_name(rates.device))
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(rows)} rows were not measured ({failed[0]['error']}): ask for smaller sizes."
        )
    return 0


def _matmul_rows(args, rates: MachineRates, module: ModuleType):
    kinds = args.dtype or _kinds(rates.device)
    _check_kinds(kinds, rates.device)
    return module.measure(
        rates, args.sizes or MATMUL_SIZES[rates.device.type], kinds, args.min_run_time, args.longest_call
    )


def _elementwise_rows(args, rates: MachineRates, module: ModuleType):
    return module.measure(rates, args.sizes or ELEMENTWISE_SIZES[rates.device.type], args.min_run_time)


def _layer_rows(args, rates: MachineRates, module: ModuleType):
    from zero_inference.micro.blocks import CPU_BLOCKS, DEFAULT_BLOCKS, SHORT, block_config
    from zero_inference.micro.timing import DTYPES

    kind, device = args.dtype or ("fp16" if rates.device.type == "cuda" else "fp32"), rates.device.type
    _check_kinds([kind], rates.device)
    default = DEFAULT_BLOCKS if device == "cuda" else CPU_BLOCKS
    blocks = [SHORT.get(name, name) for name in args.blocks or default]
    seqs, batches = args.seq or LAYER_SEQS[device], args.batch or LAYER_BATCHES[device]
    configs = {name: block_config(name) for name in blocks}
    for name, config in configs.items():
        positions = getattr(config, "max_position_embeddings", None)
        if positions and max(seqs) > positions:
            raise UsageError(f"--seq {max(seqs)}: {name} has {positions} positions; shorten it.")
    patch = norm_patch(
        args.norm_kernels, rates.device, DTYPES[kind], [config.model_type for config in configs.values()]
    )
    return module.measure(rates, blocks, seqs, batches, kind, args.min_run_time, args.longest_call, patch)


def norm_patch(
    asked: str, device: torch.device, dtype: torch.dtype, families: Sequence[str]
) -> Callable[[Block], int] | None:
    """What puts our norm kernels into a block and says on stderr how many norms it replaced, or why none; None to try nowhere.

    With `auto` the kernels are compiled and tried when the first block needs them, after its row without them.

    Args:
        asked: --norm-kernels.
        families: transformers' model_type of each block.

    Raises:
        UsageError: `cuda` was asked for, and no block's norms have kernels, or the kernels are not there or fail on this device.
    """
    from zero_inference.norms.choice import apply_norm_kernels, prepare_norm_kernels, refuse_norm_kernels
    from zero_inference.norms.patch import why_not_family

    if asked == "off" or (asked == "auto" and device.type != "cuda"):
        return None

    @functools.cache
    def why_not(family: str) -> str | None:
        if reason := why_not_family(family):
            return reason
        return prepare_norm_kernels(asked, family, device, dtype, TRIED_COLUMNS, _say)

    if asked == "cuda":
        known = [family for family in families if why_not_family(family) is None]
        refuse_norm_kernels(asked, (known or families)[0])
        why_not(known[0])

    def patch(block: Block) -> int:
        reason = why_not(block.family)
        facts = apply_norm_kernels("auto" if reason else asked, reason, block.module, lambda line: None, block.family)
        count = facts["norm_modules_patched"]
        _say(
            f"{block.name}: "
            + (
                f"our kernels in {count} norms"
                if count
                else f"norms run as transformers has them: {facts['norm_kernels_unused_because']}"
            )
        )
        return count

    return patch


MOST = 1 << 40  # elements; what memory there is for them, a row says
OF_BEST = (
    "of measured: of the best rate of the type seen so far in this process, by a few products of other sizes at first "
    "and by the rows, their own included"
)
BENCHMARKS = {
    "matmul": Benchmark(
        "matmul", "products of square matrices", _matmul_rows, f"2 n^3 operations a product; {OF_BEST}"
    ),
    "elementwise": Benchmark(
        "elementwise",
        "a * 1.2: the memory's rate",
        _elementwise_rows,
        "8 n bytes; of measured: of a copy inside the device's memory; above 100% a cache served",
    ),
    "layer": Benchmark(
        "layer",
        "transformer blocks and their parts",
        _layer_rows,
        "operations of the products (24 b s h^2 + 4 b h s^2 in a classical block), forward + backward counted 3x, "
        f"causal attention in full (causal half: what a causal kernel may skip); {OF_BEST}",
    ),
}


def _kinds(device: torch.device) -> tuple[str, ...]:
    from zero_inference.micro.timing import kinds_of

    return kinds_of(device)


def _check_kinds(kinds: Iterable[str], device: torch.device) -> None:
    for kind in kinds:
        if kind not in _kinds(device):
            raise UsageError(
                f"--dtype {kind}: this {'GPU' if device.type == 'cuda' else 'CPU'} does not have it; "
                f"there are {', '.join(_kinds(device))}."
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
        datasheet = "datasheet: no card of this name in zero_inference/micro/cards.json"
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


def _progress(row: dict[str, Any]) -> None:
    texts = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if value is not None
    ]
    _say("  ".join(texts[:8]))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: only PNG is drawn; end the name in .png.")
    check_output_file("--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed; `pip install matplotlib`.")


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


def _default(what: str, sizes: dict[str, tuple[int, ...]]) -> str:
    texts = {device: " ".join(map(str, values)) for device, values in sizes.items()}
    return f"{what} (default: {texts['cuda']}, on a CPU {texts['cpu']})"


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is " + ("less than 1" if value < 1 else f"more than {MOST}"))
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0")
    return value
