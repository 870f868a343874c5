"""`zero-inference plan`: which configurations of a model a machine can run, and how fast each is predicted to be."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zero_inference.config import DTYPES, ENGINES, GOALS, QUANT_BITS, RunConfig
from zero_inference.config.checks import batch_advice
from zero_inference.config.choices import MOST_GIB
from zero_inference.errors import UsageError
from zero_inference.runtime import garbage
from zero_inference.runtime.progress import Progress, add_verbose, current, importing, reporting

if TYPE_CHECKING:
    from zero_inference.engines.base import Job
    from zero_inference.machine.machine import Machine
    from zero_inference.search.candidates import Found, Free

SHOWN = 10
# By goal what comes first.
FIRST = {"throughput": "most token/s of decoding", "latency": "shortest decode step", "memory": "least memory"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference plan`; what is left out is free, but for the lengths."""
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="hub name, local folder or preset; always needed")
    parser.add_argument("--dummy", action="store_true", help="random weights of its shape, as for run_model.py")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="(default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the checkpoint's own code run")
    parser.add_argument("--prompt-len", type=int, metavar="P", default=512, help="(default: %(default)s)")
    parser.add_argument("--gen-len", type=int, metavar="G", default=32, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, metavar="B", nargs="+", help="one or several (default: 1 to 64)")
    parser.add_argument("--quant-bits", type=int, choices=QUANT_BITS, nargs="+", help="(default: 16, 8 and 4)")
    parser.add_argument("--engine", choices=ENGINES, nargs="+", help="(default: all)")
    parser.add_argument("--kv-offload", choices=("on", "off"), help="keys and values in host memory (default: both)")
    parser.add_argument(
        "--goal",
        choices=GOALS,
        default="throughput",
        help="what to rank by: token/s of decoding, seconds of a decode step, or device and host memory (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        type=int,
        metavar="N",
        default=0,
        help="run the N best for some steps each, on this machine, and rank them by what they do",
    )
    parser.add_argument("--all", action="store_true", help=f"show more than the best {SHOWN}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw latency against throughput (png, pdf or svg)")
    _add_machine_arguments(parser)
    add_verbose(parser)


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-gpus",
        type=int,
        metavar="N",
        nargs="+",
        help="GPUs to use, one or several numbers, where they divide the batch (default: 1, 2, 4 and so on, and all)",
    )
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="use no more of the device (default: what is free)"
    )
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="use no more of the host (default: what is free)"
    )
    parser.add_argument(
        "--machine",
        metavar="FILE_OR_NAME",
        help="another machine: a file of `zero-inference link --save FILE` measured there, or a typical one by its name, with "
        "several GPUs as in 2xrtx4090",
    )
    parser.add_argument(
        "--machines",
        action="store_true",
        help="instead of a plan: the typical machines, from datasheets, with their figures",
    )
    parser.add_argument(
        "--assume",
        metavar="gpus=1x24GiB,host=128GiB,...",
        help="a machine that is not there, or what is different about that of --machine, such as host=256GiB; see run_model.py --help",
    )


def main(args: argparse.Namespace) -> int:
    """Prints the table; 0. Raises UsageError where nothing fits, or nothing can be predicted."""
    if args.machines:
        return _list_machines(args)
    if args.model is None:
        raise UsageError("--model: say for which model, a hub name, a local folder or a preset.")
    config = RunConfig(
        model=args.model,
        dummy=args.dummy,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        prompt_len=args.prompt_len,
        gen_len=args.gen_len,
        engine="stream",
        machine=args.machine,
        assume=args.assume,
        dry_run=True,
    ).validate()
    _check(args)
    with garbage.postponed(), reporting(Progress(args.verbose > 0)):
        with importing("torch and transformers", args.verbose > 0):
            from zero_inference.planning import plan  # noqa: F401
        job, found = _search(args, config)
        garbage.look_from_here()
        _tell(args, job, found)
    return 0


def _search(args: argparse.Namespace, config: RunConfig) -> tuple[Job, Found]:
    from zero_inference.models.spec import resolve_model
    from zero_inference.planning.checks import check_model
    from zero_inference.planning.plan import describe_job
    from zero_inference.runtime.distributed import detect_ranks
    from zero_inference.search.candidates import find_candidates

    machine, ranks = _machine(args), detect_ranks()
    if ranks.world_size > 1:
        raise UsageError("zero-inference plan answers for one process: start it without a launcher.")
    ranks = machine.ranks_there(ranks)
    spec = resolve_model(config, ranks.device.type)
    check_model(config, spec)
    job = describe_job(config, spec, ranks, machine=machine)
    return job, find_candidates(job, _free(args, _world_sizes(args, machine)))


def _list_machines(args: argparse.Namespace) -> int:
    from zero_inference.machine.typical import print_typical

    if args.model is not None:
        raise UsageError(
            "--machines lists typical machines and plans nothing: drop --model, or name one with --machine."
        )
    print_typical("json" if args.json else "table")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("gpu_memory", "host_memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= MOST_GIB:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be more than 0 GiB.")
    if args.verify < 0:
        raise UsageError(f"--verify {args.verify}: must be 0 or more configurations.")
    if args.verify and (args.machine or args.assume):
        raise UsageError(
            "--verify runs configurations, which another machine cannot be asked to: drop it, or --machine and --assume."
        )
    for size in args.batch_size or ():
        if not 1 <= size < 2**31:
            raise UsageError(f"--batch-size {size}: must be at least 1.")
    if args.plot is not None:
        from zero_inference.runtime.replace import check_output_file

        if args.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise UsageError(f"--plot {args.plot}: end its name in .png, .pdf or .svg.")
        check_output_file("--plot", str(args.plot))


def _machine(args: argparse.Namespace) -> Machine:
    from zero_inference.machine.choose import machine_of
    from zero_inference.machine.kept import measure_and_keep
    from zero_inference.machine.limited import LimitedMachine

    machine = machine_of(args.machine, args.assume)
    if machine.is_here and machine.described() is None:
        measure_and_keep(current().say)
    if args.gpu_memory is not None and not machine.gpus():
        raise UsageError(f"--gpu-memory {args.gpu_memory:g}: the machine has no GPU; use --host-memory, or drop it.")
    description = None if machine.is_here else machine.described()
    if description is not None:
        _check_part("--host-memory", args.host_memory, description.host_memory_bytes, "host={:g}GiB", description.name)
        least = min((gpu.memory_bytes for gpu in description.gpus), default=0)
        _check_part("--gpu-memory", args.gpu_memory, least, f"gpus={machine.gpus()}x{{:g}}GiB", description.name)
    device, host = (None if gib is None else int(gib * 2**30) for gib in (args.gpu_memory, args.host_memory))
    return machine if device is None and host is None else LimitedMachine(machine, device, host)


def _check_part(option: str, gib: float | None, there: int, instead: str, name: str) -> None:
    """Raises UsageError where a part of the memory is asked for that is larger than all of it."""
    if gib is not None and gib * 2**30 > there:
        raise UsageError(
            f"{option} {gib:g}: {name} has {there / 2**30:.1f} GiB, of which this is to be a part; for a machine with more use "
            f"--assume {instead.format(gib)}."
        )


def _world_sizes(args: argparse.Namespace, machine: Machine) -> tuple[int, ...]:
    """Numbers of GPUs to plan for; 1 for a machine without, whose device is the CPU.

    Raises:
        UsageError: there are fewer, or no batch divides over them.
    """
    gpus = machine.gpus()
    for number in args.num_gpus or ():
        if not 1 <= number <= gpus:
            there = f"{gpus} GPU{'s' * (gpus > 1)}: use 1 to {gpus}" if gpus else "no GPU: drop it"
            raise UsageError(f"--num-gpus {number}: the machine has {there}.")
    sizes = args.num_gpus or [*(1 << power for power in range(gpus.bit_length())), max(1, gpus)]
    if args.batch_size and all(size % number for size in args.batch_size for number in sizes):
        raise UsageError(f"{batch_advice(args.batch_size[0], min(sizes), f'--num-gpus {min(sizes)}')}.")
    return tuple(sorted(set(sizes)))


def _free(args: argparse.Namespace, world_sizes: tuple[int, ...]) -> Free:
    from zero_inference.search.candidates import Free

    free = Free()
    return replace(
        free,
        engines=tuple(dict.fromkeys(args.engine or free.engines)),
        quant_bits=tuple(dict.fromkeys(args.quant_bits or free.quant_bits)),
        batch_sizes=tuple(dict.fromkeys(args.batch_size or free.batch_sizes)),
        kv_offload=free.kv_offload if args.kv_offload is None else (args.kv_offload == "on",),
        world_sizes=world_sizes,
    )


def _tell(args: argparse.Namespace, job: Job, found: Found) -> None:
    from zero_inference.runtime.tables import print_rows
    from zero_inference.search.ranking import ranked
    from zero_inference.search.table import (
        COLUMNS,
        draw,
        in_json,
        rows_of,
        what_does_not_fit,
        what_is_not_known,
        why_none,
        why_not_predicted,
    )

    description = job.machine.described()
    if not found.candidates:
        raise UsageError(why_none(found, args.model))
    best = ranked(found.candidates, args.goal)
    if args.verify:
        from zero_inference.search.verify import verified

        best = verified(best, args.verify, args.goal, current().say)
    shown = best if args.all or args.json else best[:SHOWN]
    rows = rows_of(shown, best)
    if args.plot is not None:
        draw(best, args.plot, f"{args.model}, prompt {args.prompt_len}, {args.gen_len} new tokens: predicted")
        current().say(f"picture: {args.plot}")
    too_large = what_does_not_fit(found.too_large)
    if args.json:
        names = ("model", "goal", "prompt_len", "gen_len", "gpu_memory", "host_memory")
        answer = {name: getattr(args, name) for name in names} | {
            "machine": None if description is None else description.in_words(),
            "machine_source": None if description is None else description.source,
            "configurations": in_json(rows, shown),
            "too_large": too_large,
            "not_predicted": {"count": len(found.unknown), "because": why_not_predicted(found.unknown) or None},
        }
        print(json.dumps(answer, indent=1))
        return
    if description is not None:
        print(f"predicted for {description.in_words()}{_limits(args)}")
        if caveat := description.caveat():
            print(caveat)
    print(
        f"prompt {args.prompt_len}, {args.gen_len} new tokens; {FIRST[args.goal]} first; "
        "*: no other has both a shorter step and more token/s"
    )
    hidden = () if job.machine.gpus() > 1 else ("gpus",)
    columns = [each for each in COLUMNS if each.name not in hidden and any(row[each.name] is not None for row in rows)]
    print_rows(rows, columns, "table")
    if len(best) > len(shown):
        print(f"{len(best) - len(shown)} more with --all")
    for line in what_is_not_known(shown):
        print(line)
    for line in too_large:
        print(f"does not fit: {line}")
    if found.unknown:
        print(f"not predicted: {len(found.unknown)} more that fit: {why_not_predicted(found.unknown)}")
    for place, each in enumerate([each for each in shown if not each.failed][:3], 1):
        print(f"{place}: {each.command()}")


def _limits(args: argparse.Namespace) -> str:
    parts = {"device": args.gpu_memory, "host": args.host_memory}
    words = " and ".join(f"{gib:g} GiB of {where} memory" for where, gib in parts.items() if gib is not None)
    return f"; at most {words} used" if words else ""
