"""`zero-inference plan`: which configurations of a model a machine can run, and how fast each is predicted to be."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from zero_inference.config.checks import batch_advice
from zero_inference.config.options import MAX_GIB
from zero_inference.config.run_config import RunConfig
from zero_inference.config.run_options import model_argument
from zero_inference.errors import UsageError
from zero_inference.utils import garbage
from zero_inference.utils.format import format_bytes
from zero_inference.utils.progress import Progress, current_progress, importing, use_progress

if TYPE_CHECKING:
    from zero_inference.engines.base import Job
    from zero_inference.hardware.machine import Machine
    from zero_inference.planning.search import SearchResult, SearchSpace


def main(args: argparse.Namespace) -> int:
    """Print the table and return 0. Raises UsageError where nothing fits, or nothing can be predicted."""
    args.model = model_argument(args)
    if args.machines:
        return _list_machines(args)
    if args.model is None:
        raise UsageError("name a model first: zero-inference plan MODEL, a hub name, a local folder or a preset.")
    from zero_inference.hardware.spec import resolve_profile

    resolve_profile(args.machine, args.assume)  # refuses unknown machines before torch is imported
    with garbage.postpone_collections(), use_progress(Progress(args.verbose > 0)):
        with importing("torch and transformers", args.verbose > 0):
            from zero_inference.planning.answer import print_answer
        job, found = search(args)
        garbage.resume_collections()
        print_answer(args, job, found, current_progress().say)
    return 0


def search(args: argparse.Namespace) -> tuple[Job, SearchResult]:
    """Plan what the options leave open. Raises UsageError: they are invalid, or the model cannot be planned."""
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
    from zero_inference.hardware.machine import resolve_machine
    from zero_inference.models.spec import resolve_for_plan
    from zero_inference.planning.plan import build_job, check_model
    from zero_inference.planning.search import find_candidates
    from zero_inference.utils.ranks import detect_ranks

    ranks = detect_ranks()
    if ranks.world_size > 1:
        raise UsageError("zero-inference plan runs in one process: start it without a launcher.")
    ranks = resolve_machine(args.machine, args.assume).ranks_there(ranks)
    spec = resolve_for_plan(config, ranks.device.type)  # before this machine is measured, which takes a minute
    check_model(config, spec)
    machine = _machine(args)
    job = build_job(config, spec, ranks, machine=machine)
    return job, find_candidates(job, _search_space(args, _world_sizes(args, machine)))


def _list_machines(args: argparse.Namespace) -> int:
    from zero_inference.hardware.spec import print_typical_machines

    if args.model is not None:
        raise UsageError(
            "--machines lists typical machines and plans nothing: drop the model, or name a machine with --machine."
        )
    print_typical_machines("json" if args.json else "table")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("max_gpu_memory", "max_host_memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= MAX_GIB:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be more than 0 GiB.")
    if args.verify and (args.machine or args.assume):
        raise UsageError(
            "--verify runs configurations on this machine, not on another one: drop it, or drop --machine and --assume."
        )
    if args.plot is not None:
        from zero_inference.utils.files import check_output_file

        if args.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise UsageError(f"--plot {args.plot}: the name must end in .png, .pdf or .svg.")
        check_output_file("--plot", str(args.plot))


def _machine(args: argparse.Namespace) -> Machine:
    from zero_inference.hardware.cache import measure_if_needed
    from zero_inference.hardware.machine import limit_memory, resolve_machine

    machine = resolve_machine(args.machine, args.assume)
    if machine.is_here:
        measure_if_needed(current_progress().say)
    if args.max_gpu_memory is not None and not machine.gpus():
        raise UsageError(
            f"--max-gpu-memory {args.max_gpu_memory:g}: the machine has no GPU; use --max-host-memory, or drop it."
        )
    description = None if machine.is_here else machine.profile()
    if description is not None:
        _check_part(
            "--max-host-memory", args.max_host_memory, description.host_memory_bytes, "host={:g}GiB", description.name
        )
        least = min((gpu.memory_bytes for gpu in description.gpus), default=0)
        _check_part(
            "--max-gpu-memory", args.max_gpu_memory, least, f"gpus={machine.gpus()}x{{:g}}GiB", description.name
        )
    device, host = (None if gib is None else int(gib * 2**30) for gib in (args.max_gpu_memory, args.max_host_memory))
    return machine if device is None and host is None else limit_memory(machine, device, host)


def _check_part(option: str, gib: float | None, there: int, instead: str, name: str) -> None:
    """Raises UsageError for a limit that is more than the machine has."""
    if gib is not None and gib * 2**30 > there:
        raise UsageError(
            f"{option} {gib:g}: {name} has only {format_bytes(there)}; for a machine with more use --assume {instead.format(gib)}."
        )


def _world_sizes(args: argparse.Namespace, machine: Machine) -> tuple[int, ...]:
    """Return the numbers of ranks to plan for; 1 for a machine without a GPU.

    Raises:
        UsageError: the machine has fewer GPUs, or no batch divides over them.
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


def _search_space(args: argparse.Namespace, world_sizes: tuple[int, ...]) -> SearchSpace:
    from zero_inference.planning.search import SearchSpace

    every = SearchSpace()
    return replace(
        every,
        engines=tuple(dict.fromkeys(args.engine or every.engines)),
        quant_bits=tuple(dict.fromkeys(args.quant_bits or every.quant_bits)),
        batch_sizes=tuple(dict.fromkeys(args.batch_size or every.batch_sizes)),
        kv_offload=every.kv_offload if args.kv_offload is None else (args.kv_offload == "on",),
        world_sizes=world_sizes,
    )
