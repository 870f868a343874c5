"""The options of `zero-inference plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zero_inference.config import values
from zero_inference.config.options import ENGINES, GOALS, QUANT_BITS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.config.run_options import DTYPE, add_model

SHOWN = 10
BITS = ",".join(map(str, QUANT_BITS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference plan`; what is left out is free, but for the lengths."""
    parser.usage = "%(prog)s MODEL [options]"
    model = parser.add_argument_group(
        "model and work", examples("zero-inference plan facebook/opt-66b --batch-size 1 8")
    )
    add_model(model)
    model.add_argument("--dummy", action="store_true", help="random weights of the model's shape, as for run_model.py")
    model.add_argument(
        "--dtype", type=values.dtype, metavar=DTYPE, default="auto", help="type to compute in (default: %(default)s)"
    )
    model.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    model.add_argument(
        "--prompt-len", type=int, metavar="P", default=512, help="tokens of each prompt (default: %(default)s)"
    )
    model.add_argument("--gen-len", type=int, metavar="G", default=32, help="tokens to generate (default: %(default)s)")
    model.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        nargs="+",
        help="sequences over all GPUs, one or several numbers (default: 1 to 64)",
    )
    _add_search_arguments(parser)
    output = parser.add_argument_group(
        "output", examples("zero-inference plan facebook/opt-66b --all --plot front.png")
    )
    output.add_argument("--all", action="store_true", help=f"show more than the best {SHOWN}")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_verbose(output)
    output.add_argument("--plot", metavar="FILE", type=Path, help="draw latency against throughput (png, pdf or svg)")
    _add_machine_arguments(
        parser.add_argument_group(
            "machine",
            examples(
                "zero-inference plan facebook/opt-66b --machine rtx4090 --max-gpu-memory 16GiB",
                "zero-inference plan facebook/opt-66b --assume gpus=1x24GiB,host=128GiB,link=25GB/s,memory=1000GB/s",
            ),
        )
    )


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group(
        "configurations", examples("zero-inference plan facebook/opt-66b --engine stream --quant-bits 4 --goal latency")
    )
    search.add_argument(
        "--quant-bits",
        type=values.bits,
        metavar=f"{{{BITS}}}",
        nargs="+",
        help="bits of a stored weight, one or several (default: 16, 8 and 4)",
    )
    search.add_argument(
        "--engine", choices=ENGINES, nargs="+", help="engines to consider, one or several (default: all)"
    )
    search.add_argument("--kv-offload", choices=("on", "off"), help="KV cache in host memory (default: both are tried)")
    search.add_argument(
        "--goal",
        choices=GOALS,
        default="throughput",
        help="what to rank by: token/s of decoding, seconds of a decode step, or device and host memory (default: %(default)s)",
    )
    search.add_argument(
        "--verify",
        type=int,
        metavar="N",
        default=0,
        help="run the N best for a few steps each, on this machine, and rank them by what was measured (default: 0)",
    )


def _add_machine_arguments(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument(
        "--num-gpus",
        type=int,
        metavar="N",
        nargs="+",
        help="GPUs to use, one or several numbers that divide the batch (default: 1, 2, 4 and so on, and all)",
    )
    for place, what in (("gpu", "device memory"), ("host", "host memory")):
        limit: dict[str, Any] = {"type": values.size, "metavar": values.SIZE}
        note = f"; {values.SIZES}" if place == "gpu" else ""
        machine.add_argument(
            f"--max-{place}-memory", help=f"use no more {what} than this{note} (default: all that is free)", **limit
        )
        # what they were called before run_model.py had a --gpu-memory that means another thing
        machine.add_argument(f"--{place}-memory", dest=f"max_{place}_memory", help=argparse.SUPPRESS, **limit)
    machine.add_argument(
        "--machine",
        metavar="FILE_OR_NAME",
        help="plan for another machine: a file that `zero-inference link --save FILE` wrote there, or a typical machine, with several "
        "GPUs as in 2xrtx4090",
    )
    machine.add_argument(
        "--machines",
        action="store_true",
        help="list the typical machines with the figures of their datasheets, and plan nothing",
    )
    machine.add_argument(
        "--assume",
        metavar="gpus=1x24GiB,host=128GiB,...",
        help="plan for a machine described here, or for that of --machine with other figures, such as host=256GiB; see run_model.py --help",
    )
