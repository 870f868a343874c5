"""`zero-inference link`: what this machine can do, measured, and what about it costs speed.

Under a launcher every rank measures its own GPU at the same time, and the first one prints the sum. Which rates there are is in
`rooflines`, what is told of them in `report`; this file loads no torch before it has looked at the arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from zero_inference.config.parser import add_verbose, examples
from zero_inference.utils.progress import Progress, current_progress, importing, use_progress

if TYPE_CHECKING:
    from zero_inference.hardware.overhead_process import OverheadProcess
    from zero_inference.hardware.profile import HardwareProfile


HERE = Path()  # --save without a name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference link`."""
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
        const=HERE,
        help="keep what was measured. With FILE, for plans of this machine elsewhere (--machine FILE); without, for plans and runs on this "
        "machine, until a version or a GPU changes. Takes a minute, and up to two more the first time, to compile kernels",
    )
    add_verbose(parser)
    parser.add_argument(
        "--engines", action="store_true", help=argparse.SUPPRESS
    )  # only what --save measures of the engines
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # set by the deepspeed launcher


def main(args: argparse.Namespace) -> int:
    """Measures and prints; 0. Raises UsageError for a folder or a GPU that is not there."""
    from zero_inference.errors import UsageError
    from zero_inference.hardware.overhead_process import OverheadProcess
    from zero_inference.utils.files import check_output_file

    if args.disk is not None and not args.disk.is_dir():
        raise UsageError(f"--disk {args.disk}: there is no such folder.")
    if args.save == HERE:
        from zero_inference.hardware.cache import profile_cache_path
        from zero_inference.utils.files import make_folder

        args.save = profile_cache_path()
        make_folder(args.save.parent)
    if args.save is not None:
        check_output_file("--save", str(args.save))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError("--save measures in one process: start it without a launcher.")
    quiet = args.verbose == 0 or os.environ.get("RANK", "0") != "0"
    with contextlib.ExitStack() as stack:
        engines = None
        stack.enter_context(use_progress(Progress(not quiet)))
        if args.save is not None:
            current_progress().say(
                "measuring this machine: about a minute, and up to two more the first time, to compile kernels"
            )
            # it loads libraries while this process does
            engines = stack.enter_context(contextlib.closing(OverheadProcess()))
        return _measure(args, engines)


def _measure(args: argparse.Namespace, engines: OverheadProcess | None) -> int:
    """`engines` is there where a description is to be saved."""
    with importing("torch", args.verbose > 0):
        import torch

        from zero_inference.hardware.measure_profile import measure_this_machine
        from zero_inference.hardware.rooflines import as_json, make_report, print_report
    from zero_inference.errors import RunError, UsageError
    from zero_inference.utils.ranks import detect_ranks, start_process_group, stop_process_group
    from zero_inference.utils.watch import PeerWatch, lost_connection

    ranks = detect_ranks(args.local_rank)
    if ranks.device.type == "cuda" and ranks.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"{ranks.local_world_size} ranks were started on a node with {torch.cuda.device_count()} visible GPUs; "
            "start one rank per GPU."
        )
    watch = PeerWatch(ranks, lambda reason: reason)  # a rank that is lost ends the others
    watch.start()
    failed = True
    try:
        if ranks.world_size > 1:
            start_process_group(ranks)
        elif ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        report, description = (
            (make_report(ranks, args.disk), None)
            if engines is None
            else measure_this_machine(ranks, engines, args.disk, current_progress().say)
        )
        failed = False
    except RuntimeError as error:
        if lost := lost_connection(error, ranks):
            raise RunError(f"{lost}.") from error
        raise
    finally:
        watch.stop(failed)
        if not failed or ranks.world_size == 1:  # to part could mean to wait for a rank that is gone
            stop_process_group()
    if not ranks.is_first:
        return 0
    if args.json:
        print(as_json(report))
    else:
        print_report(report)
    if description is not None:
        _save(description, args.save)
    return 0


def _save(description: HardwareProfile, path: Path) -> None:
    from zero_inference.errors import RunError
    from zero_inference.hardware.profile import write_profile

    try:
        write_profile(description, path)
    except OSError as error:
        raise RunError(f"--save {path}: {error.strerror}; the rates above were not saved.") from error
    current_progress().say(f"machine: {path}")
    if caveat := description.caveat():
        current_progress().say(f"warning: {caveat}")
