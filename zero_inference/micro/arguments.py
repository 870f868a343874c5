"""The options of `zero-inference micro`, and the sizes that are measured where none are asked for."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

from zero_inference.config import NORM_KERNELS
from zero_inference.errors import UsageError
from zero_inference.runtime.progress import add_verbose
from zero_inference.runtime.replace import check_output_file
from zero_inference.runtime.tables import FORMATS

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
MOST = 1 << 40  # elements; what memory there is for them, a row says


def add_arguments(parser: argparse.ArgumentParser, benchmarks: dict[str, str]) -> None:
    """The options of `zero-inference micro`; `benchmarks` are their names and what they measure."""
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{matmul,elementwise,layer}", parser_class=type(parser)
    )
    parsers = {name: commands.add_parser(name, help=what) for name, what in benchmarks.items()}
    for name, each in parsers.items():
        seconds = LAYER_MIN_RUN_TIME_S if name == "layer" else 3.0
        each.add_argument("--device", choices=("cuda", "cpu"), help="(default: the GPU where there is one)")
        each.add_argument(
            "--min-run-time",
            type=_seconds,
            default=seconds,
            metavar="S",
            help="measure each figure for S seconds (default: %(default)g)",
        )
        each.add_argument(
            "--format", choices=FORMATS, default="table", help="(default: table; csv and json have all digits)"
        )
        each.add_argument("--plot", metavar="FILE.png", type=Path, help="also draw the figures")
        add_verbose(each)
    for name in ("matmul", "layer"):
        parsers[name].add_argument(
            "--longest-call",
            type=_seconds,
            default=LONGEST_CALL_S,
            metavar="S",
            help="skip sizes where one call is expected to take more than S seconds (default: %(default)g)",
        )
    parsers["matmul"].add_argument("--sizes", nargs="+", type=_count, metavar="N", help=_default("n", MATMUL_SIZES))
    parsers["matmul"].add_argument("--dtype", nargs="+", choices=KINDS, help="(default: all that the device supports)")
    parsers["elementwise"].add_argument(
        "--sizes",
        nargs="+",
        type=_count,
        metavar="N",
        help="elements of a vector (default: 2^14 to 2^28 in steps of 4x, on a CPU to 2^26)",
    )
    layer = parsers["layer"]
    layer.add_argument(
        "--blocks",
        nargs="+",
        metavar="NAME",
        help="bert-large, gpt2-medium, t5-large, opt, llama, or an OPT or Llama preset (default: the five named here; on a "
        "CPU opt-1.3b and llama-3.2-1b)",
    )
    layer.add_argument("--seq", nargs="+", type=_count, metavar="S", help=_default("tokens", LAYER_SEQS))
    layer.add_argument("--batch", nargs="+", type=_count, metavar="B", help=_default("sequences", LAYER_BATCHES))
    layer.add_argument("--dtype", choices=KINDS, help="(default: fp16, on a CPU fp32)")
    layer.add_argument(
        "--norm-kernels",
        choices=NORM_KERNELS,
        default="auto",
        help="measure each OPT and Llama block a second time, with this package's norm kernels (default: auto, which does "
        "so where they can run)",
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
