"""The options of `zero-inference micro`, and the sizes that are measured where none are asked for."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

from zero_inference.config.options import NORM_KERNELS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.errors import UsageError
from zero_inference.utils.replace import check_output_file
from zero_inference.utils.tables import FORMATS

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
MOST = 1 << 40  # elements; what memory there is for them, a row says


def add_arguments(parser: argparse.ArgumentParser, benchmarks: dict[str, str]) -> None:
    """The options of `zero-inference micro`; `benchmarks` are their names and what they measure."""
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
    """fp16 for float16 and half, and so on; anything else as it is."""
    name = text.lower().removeprefix("torch.")
    return {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(name, name)


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
