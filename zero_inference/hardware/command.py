"""`zero-inference link`: measure the rooflines of this machine, and save its hardware profile.

Under a launcher every rank measures its own GPU at the same time. Imports no torch before the arguments are checked.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from zero_inference.config.parser import add_verbose, examples
from zero_inference.utils.progress import Progress, current_progress, importing, use_progress

CACHE = Path()  # --save without a name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples("zero-inference link --save", "zero-inference link --disk /tmp --save box.json")
    parser.add_argument(
        "--disk",
        metavar="DIR",
        type=Path,
        help="also measure reading from the disk of this folder; writes a file of 1 GiB there and removes it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=Path,
        nargs="?",
        const=CACHE,
        help="keep what was measured. With FILE, for plans of this machine elsewhere (--machine FILE); without, for plans and runs on this "
        "machine, until a version or a GPU changes. Takes a minute, and up to two more the first time, to compile kernels",
    )
    add_verbose(parser)
    # only what --save measures of the engines
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # set by the deepspeed launcher


def main(args: argparse.Namespace) -> int:
    """Measure and print; returns 0. Raises UsageError: a folder or a GPU does not exist."""
    from zero_inference.errors import UsageError
    from zero_inference.utils.files import check_output_file, machine_path, make_folder

    if args.disk is not None and not args.disk.is_dir():
        raise UsageError(f"--disk {args.disk}: there is no such folder.")
    if args.save == CACHE:
        args.save = machine_path()
        make_folder(args.save.parent)
    if args.save is not None:
        check_output_file("--save", str(args.save))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError("--save measures in one process: start it without a launcher.")
    quiet = args.verbose == 0 or os.environ.get("RANK", "0") != "0"
    with use_progress(Progress(not quiet)) as progress:
        if args.save is not None:
            progress.say(
                "measuring this machine: about a minute, and up to two more the first time, to compile kernels"
            )
        _measure(args)
    return 0


def _measure(args: argparse.Namespace) -> None:
    """Measure and print; with --save also measure and save the hardware profile."""
    with importing("torch", args.verbose > 0):
        import torch

        from zero_inference.hardware.measure_profile import make_report, measure_this_machine, print_report
    from zero_inference.errors import RunError, UsageError
    from zero_inference.hardware.profile import write_profile
    from zero_inference.utils.ranks import detect_ranks, start_process_group, stop_process_group
    from zero_inference.utils.watch import PeerWatch, lost_connection

    ranks = detect_ranks(args.local_rank)
    if ranks.device.type == "cuda" and ranks.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"{ranks.local_world_size} ranks were started on a node with {torch.cuda.device_count()} visible GPUs; "
            "start one rank per GPU."
        )
    say = current_progress().say
    profile = None
    watch = PeerWatch(ranks, lambda reason: reason)  # the end of a rank ends the others
    watch.start()
    failed = True
    try:
        if ranks.world_size > 1:
            start_process_group(ranks)
        elif ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        if args.save is None:
            report = make_report(ranks, args.disk)
        else:
            report, profile = measure_this_machine(ranks, args.disk, say)
        failed = False
    except RuntimeError as error:
        if lost := lost_connection(error, ranks):
            raise RunError(f"{lost}.") from error
        raise
    finally:
        watch.stop(failed)
        if not failed or ranks.world_size == 1:  # after a failure this could wait for a rank that has ended
            stop_process_group()
    if not ranks.is_first:
        return
    if args.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print_report(report)
    if profile is None:
        return
    try:
        write_profile(profile, args.save)
    except OSError as error:
        raise RunError(f"--save {args.save}: {error.strerror}; the rates above were not saved.") from error
    say(f"machine: {args.save}")
    if caveat := profile.caveat():
        say(f"warning: {caveat}")
