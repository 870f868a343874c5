"""The options of `zero-inference plan`, for the shell and for `zero_inference.plan`. Those of a run are declared with it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_inference.config import values
from zero_inference.config.option import Option
from zero_inference.config.options import GOALS, OPTIONS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.config.run_options import add_model

SHOWN = 10
SEVERAL = ("batch_size", "quant_bits", "engine", "num_gpus")  # options that take one value or a list
GROUPS = {
    "model and work": ("zero-inference plan facebook/opt-66b --batch-size 1 8",),
    "configurations": ("zero-inference plan facebook/opt-66b --engine stream --quant-bits 4 --goal latency",),
    "output": ("zero-inference plan facebook/opt-66b --all --plot front.png",),
    "machine": (
        "zero-inference plan facebook/opt-66b --machine rtx4090 --max-gpu-memory 16GiB",
        "zero-inference plan facebook/opt-66b --assume gpus=1x24GiB,host=128GiB,link=25GB/s,memory=1000GB/s",
    ),
}
_WORK, _SEARCH, _OUTPUT, _MACHINE = GROUPS
_free = {"default": None, "until_planned": None}


def _memory_option(place: str, what: str, note: str = "") -> Option:
    return Option(
        f"max_{place}_memory",
        None,
        f"use no more {what} than this{note}",
        _MACHINE,
        values.size,
        "SIZE",
        default_help="all that is free",
    )


PLAN_OPTIONS = {
    each.name: each
    for each in (
        replace(OPTIONS["dummy"], group=_WORK, help="random weights of the model's shape, as for run_model.py"),
        replace(OPTIONS["dtype"], group=_WORK, help="type to compute in"),
        replace(OPTIONS["trust_remote_code"], group=_WORK),
        replace(OPTIONS["prompt_len"], group=_WORK, help="tokens of each prompt", default_help=None, least=1),
        replace(OPTIONS["gen_len"], group=_WORK),
        replace(
            OPTIONS["batch_size"],
            group=_WORK,
            help="sequences over all GPUs, one or several numbers",
            default_help="1 to 64",
            **_free,
        ),
        replace(
            OPTIONS["quant_bits"],
            group=_SEARCH,
            help="bits of a stored weight, one or several",
            default_help="16, 8 and 4",
            **_free,
        ),
        replace(
            OPTIONS["engine"],
            group=_SEARCH,
            help="engines to consider, one or several",
            default_help="all",
            **_free,
        ),
        Option(
            "kv_offload",
            None,
            "KV cache in host memory",
            _SEARCH,
            values.on_off,
            choices=("on", "off"),
            default_help="both are tried",
        ),
        Option(
            "goal",
            "throughput",
            "what to rank by: token/s of decoding, seconds of a decode step, or device and host memory",
            _SEARCH,
            choices=GOALS,
        ),
        Option(
            "verify",
            0,
            "run the N best for a few steps each, on this machine, and rank them by what was measured",
            _SEARCH,
            values.whole_number,
            "N",
            least=0,
        ),
        Option(
            "num_gpus",
            None,
            "GPUs to use, one or several numbers that divide the batch",
            _MACHINE,
            values.whole_number,
            "N",
            default_help="1, 2, 4 and so on, and all",
        ),
        _memory_option("gpu", "device memory", f"; {values.SIZE_HELP}"),
        _memory_option("host", "host memory"),
        replace(
            OPTIONS["machine"],
            group=_MACHINE,
            help="plan for another machine: a file that `zero-inference link --save FILE` wrote there, or a typical machine, with several "
            "GPUs as in 2xrtx4090",
        ),
        replace(
            OPTIONS["assume"],
            group=_MACHINE,
            help="plan for a machine described here, or for that of --machine with other figures, such as host=256GiB; see "
            "run_model.py --help",
        ),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; what is left out is searched, except for the lengths."""
    parser.usage = "%(prog)s MODEL [options]"
    groups = {title: parser.add_argument_group(title, examples(*lines)) for title, lines in GROUPS.items()}
    add_model(groups[_WORK], replace(OPTIONS["model"], default=None))
    for name, option in PLAN_OPTIONS.items():
        nargs: dict[str, Any] = {"nargs": "+"} if name in SEVERAL else {}
        option.add_to(groups[option.group], default=option.default, **nargs)
    output = groups[_OUTPUT]
    output.add_argument("--all", action="store_true", help=f"show more than the best {SHOWN}")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_verbose(output)
    output.add_argument("--plot", metavar="FILE", type=Path, help="draw latency against throughput (png, pdf or svg)")
    groups[_MACHINE].add_argument(
        "--machines",
        action="store_true",
        help="list the typical machines with the figures of their datasheets, and plan nothing",
    )
    for place in ("gpu", "host"):  # their names before run_model.py had another --gpu-memory
        limit = PLAN_OPTIONS[f"max_{place}_memory"]
        groups[_MACHINE].add_argument(f"--{place}-memory", dest=limit.name, type=limit.read, help=argparse.SUPPRESS)


def arguments_from_keywords(given: Mapping[str, Any]) -> argparse.Namespace:
    """Return the same namespace for keywords of `zero_inference.plan`; None is the default. Raises UsageError."""
    found: dict[str, Any] = {name: option.default for name, option in PLAN_OPTIONS.items()}
    for name, value in given.items():
        if value is None:
            continue
        option = PLAN_OPTIONS.get(name) or OPTIONS[name]
        if name in SEVERAL:
            several = value if isinstance(value, (list, tuple, range, set)) else [value]
            found[name] = [option.read(each) for each in several]
        else:
            found[name] = option.read(value)
    return argparse.Namespace(**found, plot=None)
