"""The options of run_model.py, by group. Each `dest` is a field of RunConfig, but for the few that `read` names.

What was not typed is not in the namespace: a file of options may say it, and the defaults stand behind both.
"""

from __future__ import annotations

import argparse

from zero_inference.config import DEFAULTS, DTYPES, DUMMY_ROUTING
from zero_inference.options import values
from zero_inference.options.parser import MODEL_GIVEN, examples
from zero_inference.options.run_engine import add_engine_options, add_stream_options
from zero_inference.options.run_quality import add_quality_options
from zero_inference.options.values import default

DTYPE = f"{{{','.join(DTYPES)}}}"


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of run_model.py."""
    parser.usage = "%(prog)s [MODEL] [options]"  # which are too many for a line of usage
    for add_group in (
        _add_model_options,
        _add_work_options,
        add_engine_options,
        add_stream_options,
        add_quality_options,
        _add_output_options,
        _add_plan_options,
    ):
        add_group(parser)
    for action in list(parser._actions):
        if action.dest in DEFAULTS:
            action.default = argparse.SUPPRESS
            if isinstance(action, argparse._StoreTrueAction):
                _add_off(parser, action)


def _add_off(parser: argparse.ArgumentParser, flag: argparse.Action) -> None:
    """--no-FLAG, which turns off what a file of options turned on."""
    parser.add_argument(
        f"--no-{flag.option_strings[0][2:]}",
        dest=flag.dest,
        action="store_false",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def add_model(group: argparse._ActionsContainer, note: str = "") -> None:
    """The model, as the first argument or as --model; `read.model_of` tells which it is."""
    group.add_argument(
        MODEL_GIVEN, metavar="MODEL", nargs="?", help="the same as --model MODEL; write it first, before the options"
    )
    group.add_argument("--model", metavar="NAME_OR_PATH", help=f"hub name, local folder or preset{note}")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model", examples("python run_model.py facebook/opt-13b --dummy --dtype bf16"))
    add_model(model, f" {default('model')}")
    model.add_argument(
        "--dummy",
        action="store_true",
        help="random weights and token ids from --seed; needs no network, no tokenizer and no checkpoint on disk",
    )
    model.add_argument(
        "--dummy-routing",
        metavar=f"{{{','.join(DUMMY_ROUTING)}}}",
        help="tokens fed to a --dummy mixture of experts. text: drawn so that experts are reused as published traces of text reuse "
        "them; greedy: the model's own tokens, which with random weights choose the same experts again and again "
        f"{default('dummy_routing')}",
    )
    model.add_argument(
        "--dtype",
        type=values.dtype,
        metavar=DTYPE,
        help="type to compute in; fp16, half, bf16, fp32 and torch.float16 work too. auto: that of the checkpoint, and bfloat16 on a "
        f"CPU {default('dtype')}",
    )
    model.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")


def _add_work_options(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group(
        "work",
        examples(
            "python run_model.py smollm2-135m --prompt 'The capital of France is'",
            "python run_model.py facebook/opt-13b --batch-size 8 --prompt-len 128 --gen-len 64",
        ),
    )
    work.add_argument(
        "--batch-size",
        type=values.number_or_auto,
        metavar="B",
        help="sequences over all GPUs, or auto for the best of 1 to 64 (default: 1, or the number of --prompt)",
    )
    work.add_argument(
        "--prompt-len",
        type=int,
        metavar="P",
        help="tokens of each prompt, without padding (default: 512, or the length of the longest --prompt)",
    )
    work.add_argument("--gen-len", type=int, metavar="G", help=f"tokens to generate {default('gen_len')}")
    work.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="generate from this text. Repeat it for several sequences; all are brought to the length of the longest "
        "(default: built-in text)",
    )
    work.add_argument(
        "--prompts",
        metavar="FILE",
        help="generate from a text file with one prompt a line, each cut or filled up to --prompt-len (default: built-in text)",
    )
    work.add_argument(
        "--chat", action="store_true", help="put --prompt or --prompts into the chat template of the model's tokenizer"
    )
    work.add_argument("--loops", type=int, metavar="N", help=f"measured generations {default('loops')}")
    work.add_argument(
        "--warmup", type=int, metavar="N", help=f"generations before the measured ones {default('warmup')}"
    )
    work.add_argument(
        "--warmup-spread",
        type=float,
        metavar="SHARE",
        help="end the warm-up as soon as its last three generations differ by less than this share, such as 0.05; --warmup is then "
        "the most (default: not used)",
    )
    work.add_argument(
        "--seed", type=int, metavar="N", help=f"seed of random weights, token ids and samples {default('seed')}"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group(
        "output", examples("python run_model.py facebook/opt-13b --cpu-offload --log-file opt-13b.log")
    )
    output.add_argument(
        "--log-file",
        metavar="FILE",
        help="append the log to this file, and the record to the .jsonl beside it (default: a name made of the options, in --log-dir)",
    )
    output.add_argument("--log-dir", metavar="DIR", help=f"folder of logs and records {default('log_dir')}")
    output.add_argument("--trace", metavar="FILE", help="write a Chrome trace of copies and decoder layers")
    output.add_argument(
        "--verbose", type=int, choices=(0, 1, 2), help=f"0: quiet, 2: with tracebacks {default('verbose')}"
    )
    output.add_argument("--local-rank", type=int, metavar="N", help="set by the deepspeed launcher")


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group(
        "plan and options in a file",
        examples(
            "python run_model.py facebook/opt-66b --engine stream --dry-run --save-config run.yaml",
            "python run_model.py --config run.yaml --batch-size 8",
            "python run_model.py facebook/opt-66b --engine stream --dry-run --machine rtx4090",
        ),
    )
    plan.add_argument(
        "--dry-run",
        action="store_true",
        help="load nothing; show whether the run fits and how fast it is predicted to be (exit code 2 if it does not fit)",
    )
    plan.add_argument(
        "--json", action="store_true", help="print the dry run as one JSON object, with every option as resolved"
    )
    plan.add_argument(
        "--machine",
        metavar="FILE_OR_NAME",
        help="--dry-run for another machine: a file that `zero-inference link --save FILE` wrote there, or a typical machine such as "
        "rtx4090 or 2xrtx4090 (`zero-inference plan --machines` lists them)",
    )
    plan.add_argument(
        "--assume",
        metavar="gpus=1x24GiB,host=128GiB,...",
        help="--dry-run for a machine described here, or for that of --machine with other figures: gpus, host "
        "(memory; GiB without a unit), link, pageable (the link from memory that is not page-locked), peers (between GPUs), cores, "
        "memory (rates in GB/s), matmul "
        "(TFLOP/s), disk, disk_free",
    )
    plan.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="read options from a YAML file with lines such as `batch-size: 8` and `cpu-offload: true`. Options that are typed win, and "
        "--no-cpu-offload turns off what the file turns on. May be repeated: later files win",
    )
    plan.add_argument(
        "--save-config",
        metavar="FILE",
        help="with --dry-run: write the options that differ from the defaults to a YAML file",
    )
