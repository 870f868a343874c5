"""`zero-inference link`: measure the rooflines of this machine, and save its hardware profile.

One process measures all GPUs. Imports no torch before the arguments are checked.
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
    """Measure and print; returns 0. Raises UsageError: several ranks were started, or a folder does not exist."""
    from zero_inference.errors import UsageError
    from zero_inference.utils.files import check_output_file, machine_path, make_folder

    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise UsageError(
            f"zero-inference link measures all GPUs in one process, and {ranks[:40]} were started: start it without a launcher."
        )
    if args.disk is not None and not args.disk.is_dir():
        raise UsageError(f"--disk {args.disk}: there is no such folder.")
    if args.save == CACHE:
        args.save = machine_path()
        make_folder(args.save.parent)
    if args.save is not None:
        check_output_file("--save", str(args.save))
    with use_progress(Progress(args.verbose > 0)) as progress:
        if args.save is not None:
            progress.say(
                "measuring this machine: about a minute, and up to two more the first time, to compile kernels"
            )
        _measure(args)
    return 0


def _measure(args: argparse.Namespace) -> None:
    """Measure and print; with --save also measure and save the hardware profile."""
    with importing("torch", args.verbose > 0):
        from zero_inference.hardware.measure_profile import (
            make_report,
            measure_this_machine,
            print_report,
            visible_devices,
        )
    from zero_inference.errors import RunError
    from zero_inference.hardware.profile import write_profile

    say, profile = current_progress().say, None
    if args.save is None:
        report = make_report(visible_devices(), args.disk)
    else:
        report, profile = measure_this_machine(args.disk, say)
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
