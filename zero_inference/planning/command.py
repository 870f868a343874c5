"""`zero-inference plan`: its options, for the shell and for `zero_inference.plan`, their checks, and the search that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.config.checks import batch_advice
from zero_inference.config.option import ALL, SIZE_HELP, Option
from zero_inference.config.options import MAX_GIB, MULTI_GPU_ENGINES, OPTIONS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.config.run_config import RunConfig, add_model, model_argument
from zero_inference.errors import UsageError
from zero_inference.utils import GB, interpreter
from zero_inference.utils.files import check_output_file
from zero_inference.utils.format import format_bytes
from zero_inference.utils.progress import Progress, current_progress, importing, use_progress

if TYPE_CHECKING:
    from zero_inference.hardware.machine import Machine
    from zero_inference.planning.search import SearchResult

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
HELP = {  # where it is not that of the same option of a run
    "dummy": "random weights of the model's shape, as for run_model.py",
    "dtype": "type to compute in",
    "prompt_len": "tokens of each prompt",
    "batch_size": "sequences over all GPUs, one or several numbers",
    "quant_bits": "bits of a stored weight, one or several",
    "engine": "engines to consider, one or several",
    "kv_offload": "KV cache in host memory",
    "goal": "what to rank by: token/s of decoding, seconds of a decode step, or device and host memory",
    "verify": "run the N best for a few steps each, on this machine, and rank them by what was measured",
    "num_gpus": "GPUs to use, one or several numbers",
    "max_gpu_memory": f"use no more device memory than this; {SIZE_HELP}",
    "max_host_memory": "use no more host memory than this",
    "machine": "plan for another machine: a file that `zero-inference link --save FILE` wrote there, or a typical machine, with several "
    "GPUs as in 2xrtx4090",
    "assume": "plan for a machine described here, or for that of --machine with other figures, such as host=256GiB; see "
    "run_model.py --help",
}


def _option(name: str, group: str, **changes: Any) -> Option:
    """Return the option of a run with other attributes, or a new one."""
    declared = OPTIONS.get(name) or Option(name, None, "")
    return replace(declared, group=group, help=HELP.get(name, declared.help), **changes)


def _searched(name: str, group: str, if_left_out: str, **changes: Any) -> Option:
    """Return an option whose values are all tried where it is left out."""
    return _option(name, group, default=None, default_help=if_left_out, until_planned=None, **changes)


PLAN_OPTIONS = {
    option.name: option
    for option in (
        _option("dummy", _WORK),
        _option("dtype", _WORK),
        _option("trust_remote_code", _WORK),
        _option("prompt_len", _WORK, default_help=None, least=1),
        _option("gen_len", _WORK),
        _searched("batch_size", _WORK, "1 to 64"),
        _searched("quant_bits", _SEARCH, "16, 8 and 4; stored too if the checkpoint is quantized"),
        _searched("engine", _SEARCH, "all"),
        _searched("kv_offload", _SEARCH, "both are tried", kind="word", choices=("on", "off")),
        _option("goal", _SEARCH, default="throughput", default_help=None),
        _option("verify", _SEARCH, default=0, kind="int", least=0),
        _searched("num_gpus", _MACHINE, "1, 2, 4 and so on, and all"),
        _searched("max_gpu_memory", _MACHINE, "all that is free", kind="size", metavar="SIZE"),
        _searched("max_host_memory", _MACHINE, "all that is free", kind="size", metavar="SIZE"),
        _option("machine", _MACHINE),
        _option("assume", _MACHINE),
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
    output.add_argument("--all", action="store_true", help="show more than the best 10")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_verbose(output)
    output.add_argument("--plot", metavar="FILE", type=Path, help="draw latency against throughput (png, pdf or svg)")
    text = "list the typical machines with the figures of their datasheets, and plan nothing"
    groups[_MACHINE].add_argument("--machines", action="store_true", help=text)


def arguments_from_keywords(given: Mapping[str, Any]) -> argparse.Namespace:
    """Return the namespace of the command's options for keywords of `zero_inference.plan`; None is the default. Raises UsageError."""
    found: dict[str, Any] = {name: option.default for name, option in PLAN_OPTIONS.items()}
    for name, value in given.items():
        if value is None:
            continue
        option = PLAN_OPTIONS.get(name) or OPTIONS[name]
        several = isinstance(value, (list, tuple, range, set))
        if name in SEVERAL:
            found[name] = [option.read(each) for each in (value if several else [value])]
        else:
            found[name] = option.read(value)
    return argparse.Namespace(**found, plot=None)


def main(args: argparse.Namespace) -> int:
    """Print the table and return 0. Raises UsageError where nothing fits, or nothing can be predicted."""
    from zero_inference.hardware.spec import print_typical_machines, resolve_profile

    args.model = model_argument(args)
    if args.machines:
        if args.model is not None:
            raise UsageError("--machines plans nothing: drop the model, or name a machine with --machine.")
        print_typical_machines("json" if args.json else "table")
        return 0
    if args.model is None:
        raise UsageError("name a model first: zero-inference plan MODEL, a hub name, a local folder or a preset.")
    resolve_profile(args.machine, args.assume)  # refuses unknown machines before torch is imported
    with interpreter.postpone_collections(), use_progress(Progress(args.verbose > 0)):
        with importing("torch and transformers", args.verbose > 0):
            from zero_inference.planning.output import print_answer
        say = current_progress().say
        found = search(args, say)
        interpreter.resume_collections()
        print_answer(args, found, say)
    return 0


@interpreter.reserve_stack
def search(args: argparse.Namespace, say: Callable[[str], None]) -> SearchResult:
    """Plan what the options leave open; return what was found, the best candidates first.
    Raises UsageError: the options are invalid, or the model cannot be planned."""
    of_run = ("model", "dummy", "dtype", "trust_remote_code", "prompt_len", "gen_len", "machine", "assume")
    config = RunConfig(**{name: getattr(args, name) for name in of_run}, engine="stream", dry_run=True).validate()
    if args.verify and (args.machine or args.assume):
        raise UsageError("--verify runs configurations on this machine: drop it, or drop --machine and --assume.")
    if args.plot is not None:
        if args.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise UsageError(f"--plot {args.plot}: the name must end in .png, .pdf or .svg.")
        check_output_file("--plot", str(args.plot))
    from zero_inference.hardware.machine import resolve_machine
    from zero_inference.models.spec import resolve_for_plan
    from zero_inference.planning.plan import build_job, check_model
    from zero_inference.planning.search import find_candidates, measure_if_unknown, ranked, verify
    from zero_inference.utils.ranks import detect_ranks

    ranks, machine = detect_ranks(), resolve_machine(args.machine, args.assume)
    if ranks.world_size > 1:
        raise UsageError("zero-inference plan runs in one process: start it without a launcher.")
    ranks = machine.ranks_there(ranks)
    spec = resolve_for_plan(config, ranks.device.type)  # before this machine is measured, which takes a minute
    check_model(config, spec)
    gpus, limited = _numbers_of_gpus(args, machine.gpus()), _limit_memory(args, machine)
    measure_if_unknown(machine, say)
    asked = {"engines": args.engine, "quant_bits": args.quant_bits, "batch_sizes": args.batch_size}
    asked |= {"kv_offload": args.kv_offload and [args.kv_offload == "on"]}
    given: dict[str, Any] = {name: tuple(dict.fromkeys(choices)) for name, choices in asked.items() if choices}
    found = find_candidates(build_job(config, spec, ranks, machine=limited), gpus=gpus, **given)
    found.candidates = ranked(found.candidates, args.goal)
    if args.verify and found.candidates:
        found.candidates = verify(found.candidates, args.verify, args.goal, say)
    return found


def _limit_memory(args: argparse.Namespace, machine: Machine) -> Machine:
    """Return `machine` with the limits of memory. Raises UsageError for more than a described machine has."""
    limits = {"gpu": args.max_gpu_memory, "host": args.max_host_memory}
    profile, gpus = machine.other, machine.gpus()
    for place, gib in limits.items():
        if gib is None:
            continue
        option = f"--max-{place}-memory {gib:g}"
        if not 0 < gib <= MAX_GIB:
            raise UsageError(f"{option}: must be more than 0 GiB, and at most {MAX_GIB} GiB.")
        if place == "gpu" and not gpus:
            raise UsageError(f"{option}: the machine has no GPU; use --max-host-memory, or drop it.")
        if profile is not None:
            there = profile.host_memory_bytes if place == "host" else min(gpu.memory_bytes for gpu in profile.gpus)
            larger = f"gpus={gpus}x{gib:g}GiB" if place == "gpu" else f"host={gib:g}GiB"
            if gib * GB > there:
                has = f"{profile.name} has only {format_bytes(there)}"
                raise UsageError(f"{option}: {has}; for a machine with more use --assume {larger}.")
    device_bytes, host_bytes = (None if gib is None else int(gib * GB) for gib in limits.values())
    return replace(machine, device_limit_bytes=device_bytes, host_limit_bytes=host_bytes)


def _numbers_of_gpus(args: argparse.Namespace, gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs to plan for: --num-gpus, or 1, 2, 4 and so on, and all; 1 for a machine without a GPU.
    Raises UsageError: the machine has fewer GPUs, or no batch divides over the ranks of the engines."""
    asked = [max(1, gpus) if number == ALL else number for number in args.num_gpus or ()]
    for number in asked:
        if not 1 <= number <= max(1, gpus):
            raise UsageError(f"--num-gpus {number}: the machine has {gpus} GPUs; use at most that, or drop it.")
    numbers = asked or [*(1 << power for power in range(gpus.bit_length())), max(1, gpus)]
    divided = args.engine and not set(MULTI_GPU_ENGINES).intersection(args.engine)
    if args.batch_size and divided and all(size % number for size in args.batch_size for number in numbers):
        raise UsageError(f"{batch_advice(args.batch_size[0], min(numbers), f'--num-gpus {min(numbers)}')}.")
    return tuple(sorted(set(numbers)))
