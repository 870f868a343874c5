"""Entry points of run_model.py and `zero-inference`: commands, exit codes, and one or two lines on stderr for an error."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from zero_inference.config.options import DEFAULTS, OPTIONS
from zero_inference.config.parser import Parser, Version, examples
from zero_inference.config.run_config import (
    add_model,
    add_run_arguments,
    config_from_args,
    first_rank_alone,
    make_config,
    model_argument,
    parse_options,
)
from zero_inference.errors import RunError, UsageError
from zero_inference.utils import interpreter
from zero_inference.utils.format import first_line, printable
from zero_inference.utils.launch import read_launch
from zero_inference.utils.processes import as_installed_command, launcher_watch, move_rank_option
from zero_inference.utils.progress import Progress, first_rank, importing

FIRST_RANK_SPEAKS_S = 10.0  # other ranks wait before they report bad usage, which the first one usually reports
BROKEN_PIPE = 128 + signal.SIGPIPE  # exit code in a shell when the reader has closed the pipe

DESCRIPTION = "Generate text with a language model that is bigger than the GPU, and measure how fast it is."
START_HERE = (
    "Start here: which configurations of a model fit this machine, and how fast each is predicted to be:\n\n"
    "  zero-inference plan facebook/opt-13b\n\n"
    "`zero-inference COMMAND --help` shows the options of a command, with examples."
)


def run_command(args: argparse.Namespace, argv: list[str]) -> int:
    launcher_watch.start()
    config = config_from_args(args)  # before torch is imported
    launch = read_launch(args.local_rank)
    if launch.rank and first_rank_alone(config, launch):
        return 0
    if model_argument(args) is None and not args.config and not config.json:
        Progress(config.verbose > 0 and first_rank()).say(f"no model was named, so this is the default, {config.model}")
    if config.verbose < 2:  # when a rank is gone, torch's store logs a page of C++ frames at each request
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with interpreter.postpone_collections():
        with importing("torch and transformers", config.verbose > 0):
            from zero_inference.runner import run

        run(config, argv, args.local_rank)
    return 0


CONVERTED = (
    "model dummy dtype quant_bits quant_group_size seed dummy_routing trust_remote_code offload_dir verbose".split()
)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run that decide the bytes of its weights."""
    parser.usage = "%(prog)s MODEL [options]"
    parser.description = (
        "Write a model's weights to a file in --offload-dir. Runs of --engine stream with the same model, --quant-bits, --dtype and "
        "--offload-dir then read from it what is on NVMe, and do not write it anew. Checkpoints in 16 bits, in FP8 with block scales in "
        "float32 and in MXFP4 need no conversion, unless their weights are transposed. Remove the file when you need it no more."
    )
    parser.epilog = examples("zero-inference convert llama-2-13b --dummy --quant-bits 4 --offload-dir /mnt/nvme")
    add_model(parser, replace(OPTIONS["model"], default=None))
    for name in CONVERTED[1:]:
        OPTIONS[name].add_to(parser)


def convert_command(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name, None) for name in CONVERTED} | {"model": model_argument(args)}
    if given["model"] is None:
        raise UsageError("name a model first: zero-inference convert MODEL, a hub name, a local folder or a preset.")
    on_disk = dict(engine="stream", disk_offload=True, gpu_memory=0, host_memory=0, prompt_len=1, gen_len=1)
    config = make_config(given | on_disk)  # before torch is imported
    if config.auto:
        raise UsageError("--quant-bits auto: a file has weights of certain bits; name them.")
    with interpreter.postpone_collections():
        with importing("torch and transformers", config.verbose > 0):
            from zero_inference.runner import convert

        print(convert(config))
    return 0


def run_parser() -> Parser:
    parser = Parser(prog="run_model.py", description=f"{DESCRIPTION} Start it with python, deepspeed or torchrun.")
    parser.add_argument("--version", action=Version)
    add_run_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run run_model.py; return the exit code."""
    argv = sys.argv if argv is None else argv
    parser = run_parser()
    _prepare_streams()
    args = parser.parse_args(argv[1:])
    return _guarded(lambda: run_command(args, argv), getattr(args, "verbose", DEFAULTS["verbose"]))


def console_parser(argv: Sequence[str] = (), after: Sequence[str] = ()) -> Parser:
    """Return the parser of the `zero-inference` command. `argv` is the whole command line, for the record of a run; `after` are the words
    after `--`, which `compare` passes to each run."""
    from zero_inference.architectures import command as compare
    from zero_inference.hardware import command as link
    from zero_inference.micro import command as micro
    from zero_inference.planning import command as plan
    from zero_inference.report import command as report

    parser = Parser(prog="zero-inference", description=DESCRIPTION, epilog=START_HERE)
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)

    def add(name: str, purpose: str, add_arguments: Callable, action: Callable) -> None:
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        add_arguments(command)
        command.set_defaults(action=action)

    def add_run(command: Parser) -> None:
        add_run_arguments(command)
        for group in command._action_groups:
            group.description = group.description and as_installed_command(group.description)
        command.epilog = examples("zero-inference run facebook/opt-13b --dummy --engine stream --dry-run")

    def measure_link(args: argparse.Namespace) -> int:
        if not args.engines:
            return link.main(args)
        launcher_watch.start()
        from zero_inference.measure.engine_overhead import print_engine_overheads

        print_engine_overheads()
        return 0

    def run_comparison(args: argparse.Namespace) -> int:
        return compare.main(args, list(after), parse_options)

    purpose = "generate with a model and measure it, the same as run_model.py"
    add("run", purpose, add_run, lambda args: run_command(args, list(argv)))
    purpose = "show which configurations of a model this machine, or another one, can run, and how fast"
    add("plan", purpose, plan.add_arguments, plan.main)
    add("convert", "write weights once, as runs of --engine stream read them from NVMe", add_convert, convert_command)
    add("report", "show all runs in a log folder in one table", report.add_arguments, report.main)
    add("link", "measure the link, the disk and the device of this machine", link.add_arguments, measure_link)
    add("micro", "time matrix products, element-wise operations and layers", micro.add_arguments, micro.main)
    add("compare", "compare models or configurations in alternating runs", compare.add_arguments, run_comparison)
    return parser


def console_main(argv: list[str] | None = None) -> int:
    """Run the `zero-inference` command; return the exit code."""
    argv = move_rank_option(sys.argv if argv is None else argv)
    from zero_inference.architectures.command import split

    own, after = split(argv[1:])
    parser = console_parser(argv, after)
    _prepare_streams()
    args = parser.parse_args(own)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _guarded(lambda: args.action(args), getattr(args, "verbose", DEFAULTS["verbose"]))


@interpreter.reserve_stack
def _guarded(action: Callable[[], int], verbose: int) -> int:
    """Return the exit code of `action`, after a message to stderr if it fails."""

    def complain(words: str) -> None:
        with contextlib.suppress(OSError):  # stderr may be closed
            print(f"error: {printable(words)}", file=sys.stderr, flush=True)

    try:
        try:
            os.getcwd()
        except FileNotFoundError:  # torch's math library would abort the process
            raise UsageError("the current folder was removed; change to one that is there.") from None
        code = action()
        sys.stdout.flush()
        return code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return BROKEN_PIPE
        if verbose >= 2:
            import traceback

            print(printable(traceback.format_exc()), file=sys.stderr)
        rank = os.environ.get("RANK", "0")
        if isinstance(error, UsageError) and rank.isdigit() and int(rank):
            time.sleep(FIRST_RANK_SPEAKS_S)  # the launcher ends this process after the first rank's message
        known = isinstance(error, (UsageError, RunError))
        complain(str(error) if known else f"{type(error).__name__}: {first_line(error)} (--verbose 2 shows where)")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        complain("stopped by the user")
        return 130
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # or the interpreter would try to flush it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _prepare_streams() -> None:
    """Open closed streams on /dev/null: output must not end a run, nor go to a file that got the stream's number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)  # for children too
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for what the encoding lacks


def _reader_left() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
