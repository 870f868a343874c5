"""The command line: help with examples that work, mistyped names, other spellings of values, the model as first argument."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest
import torch

from zero_inference.cli import console_main, console_parser, main, run_parser
from zero_inference.config.parser import OTHER_OPTIONS, Parser
from zero_inference.config.run_config import RunConfig, config_from_args, parse_options


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    """Return the subcommands of `parser` and theirs by name: {'plan': ..., 'micro matmul': ...}."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found |= {name: command, **{f"{name} {inner}": each for inner, each in commands_of(command).items()}}
    return found


PARSERS = {"run_model.py": run_parser(), "zero-inference": console_parser(), **commands_of(console_parser())}


def examples_of(parser: Parser) -> list[str]:
    """Return the commands that the help of `parser` shows as examples."""
    texts = [parser.description, *(group.description for group in parser._action_groups), parser.epilog]
    return [line.strip() for text in texts for line in (text or "").splitlines() if line.startswith("  ")]


def refused(capsys, command: str) -> str:
    """The one line with which `command` is refused."""
    words = shlex.split(command)
    start = main if words[0] == "run_model.py" else console_main
    try:
        code = start(words)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err.splitlines()
    assert code == 2 and len(error) == 1, error
    return error[0]


def test_version_tells_of_the_libraries(capsys):
    for start in (main, console_main):
        with pytest.raises(SystemExit) as ended:
            start(["program", "--version"])
        words = r"zero-inference [\d.]+ \(torch \S+, transformers \S+, deepspeed \S+, accelerate \S+\)\n"
        assert ended.value.code == 0 and re.fullmatch(words, capsys.readouterr().out)


def test_a_command_without_a_subcommand_shows_where_to_start(capsys):
    assert console_main(["zero-inference"]) == 2
    out, err = capsys.readouterr()
    assert not out and "Start here" in err and "zero-inference plan" in err
    assert all(re.search(rf"^    {name} ", err, re.MULTILINE) for name in ("run", "plan", "report", "link", "compare"))


def test_every_group_of_run_model_and_every_command_has_an_example():
    for group in PARSERS["run_model.py"]._action_groups:
        own = not group._group_actions or group.title == "options"  # -h and --version
        assert own or "run_model.py" in group.description, group.title
    for name, parser in PARSERS.items():
        assert examples_of(parser), name


@pytest.mark.parametrize("example", sorted({each for parser in PARSERS.values() for each in examples_of(parser)}))
def test_examples_in_the_help_are_valid(example, tmp_path, monkeypatch):
    """With the real parser, and validated where they are options of a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: opt-13b\nengine: stream\n")
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name
    )  # lm-eval, whose absence is no fault of an example
    words = shlex.split(example)
    if "run_model.py" in words:
        assert config_from_args(run_parser().parse_args(words[words.index("run_model.py") + 1 :]))
    else:
        program = words.index("zero_inference") if "--module" in words else 0  # as the launcher starts it
        own, _, after = (" ".join(map(shlex.quote, words[program + 1 :])) + " ").partition(" -- ")
        args = console_parser().parse_args(shlex.split(own))
        if args.command == "run":
            assert config_from_args(args)
        if args.command == "compare":
            for arm in [f"--model {model}" for model in args.model] + [arm.partition("=")[2] for arm in args.arm]:
                assert parse_options(shlex.split(f"{after} {arm}"))
        assert args.action


@pytest.mark.parametrize("width", [60, 100])
def test_help_fits_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main(["run_model.py", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines if "run_model.py" not in line and "{" not in line)
    assert "    python run_model.py --config run.yaml --batch-size 8" in lines  # as it is typed, whatever the width


REFUSED = {
    "run_model.py --cpu_offlod=1": "error: there is no option --cpu-offlod; did you mean --cpu-offload?",
    "run_model.py --xyzzy": "error: there is no option --xyzzy; see run_model.py --help",
    "run_model.py --engine steam": "--engine steam: choose one of deepspeed, stream, accelerate, resident, auto; did you mean stream?",
    "run_model.py --quality mmlx": "choose one of mmlu, hellaswag, humaneval, perplexity; did you mean mmlu?",
    "run_model.py --dtype int4": "use --quant-bits 4",
    "run_model.py --dtype fp8": "use --quant-bits 8",
    "run_model.py --quant-bits int3": "error: --quant-bits int3: choose one of stored, 16, 8, 4, auto",
    "run_model.py --gen-len x": "error: --gen-len x: not a whole number",
    "run_model.py --gen-len": "error: --gen-len needs a value",
    "run_model.py --dry-run=1": "error: --dry-run takes no value",
    "run_model.py --gpu-memory 10XB": "--gpu-memory 10XB: not a size of memory; write 10 (GiB), 10GiB",
    "run_model.py opt-125m opt-350m": "error: unexpected argument opt-350m",
    "run_model.py opt-125m --model opt-350m": "two models were given, opt-125m and --model opt-350m",
    "run_model.py --max_new_tokens 5": "there is no option --max-new-tokens; use --gen-len G",
    "run_model.py -ngl 20": "use --gpu-memory GIB with --engine stream",
    "run_model.py --offload=nvme": "there is no option --offload; use --disk-offload",
    "run_model.py opt-125m --top-k 5": "there is no option --top-k; runs have --temperature and --top-p",
    "run_model.py opt-125m --temp 0.7": "there is no option --temp; use --temperature T",
    "run_model.py opt-125m --gpu-memory 4": "use --engine stream, or drop --gpu-memory",
    "run_model.py llama-2-7b.Q4_K_M.gguf": "--model llama-2-7b.Q4_K_M.gguf: GGUF is not read",
    "run_model.py https://huggingface.co/facebook/opt-1.3b/tree/main": "give the repository's name, facebook/opt-1.3b.",
    "run_model.py model.safetensors": "--model model.safetensors is a file; give the folder",
    "zero-inference plan opt-13b -ngl 3": "there is no option -ngl; use --max-gpu-memory GIB",
    "zero-inference generate": "there is no command generate; use run",
    "zero-inference plan x --machine nosuch": "--machine nosuch: no such file",
    "zero-inference plan x --assume gpus=1x24,host=lots": "--assume host=lots: give it as in host=128GiB",
    "zero-inference reprot": "command reprot: choose one of run, plan, convert, report, link, micro, compare; did you mean report?",
    "zero-inference report --form csv": "error: there is no option --form; did you mean --format?",
    "zero-inference report --format cvs": "error: --format cvs: choose one of table, md, csv, json; did you mean csv?",
    "zero-inference link --verbose x": "error: --verbose x: no valid int",
    "zero-inference plan": "name a model first: zero-inference plan MODEL",
    "zero-inference plan x --quant-bits auto": "error: --quant-bits auto: choose one of stored, 16, 8, 4",
}


@pytest.mark.parametrize("command, said", REFUSED.items())
def test_what_is_mistyped_is_told_with_what_was_meant(command, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert said in refused(capsys, command)


def test_what_other_tools_call_an_option_leads_to_one_that_there_is():
    there = {name for parser in PARSERS.values() for name in parser.option_names()}
    assert {advice.partition(" ")[0].rstrip(",") for advice in OTHER_OPTIONS} <= there
    theirs = {f"--{name}" for names in OTHER_OPTIONS.values() for name in names.split()}
    assert not theirs & set(PARSERS["run_model.py"].option_names())


@pytest.mark.parametrize(
    "option, value, spellings",
    [
        ("dtype", "float16", ("fp16", "half", "float16", "torch.float16", "FP16", torch.float16)),
        ("quant_bits", 4, ("int4", "4bit", "4-bit")),
        ("quant_bits", 8, ("int8", "8")),
        ("quant_bits", 16, ("fp16", "16bit")),
        ("gpu_memory", 10, ("10", "10 GiB", "10G")),
        ("gpu_memory", 0.5, ("0.5", "512M")),
        ("gpu_memory", 10e9 / 2**30, ("10GB",)),
        ("gpu_memory", 1024, ("1T",)),
    ],
)
def test_a_value_may_be_spelled_as_people_do(option, value, spellings):
    for said in spellings:
        typed = parse_options(["--engine", "stream", f"--{option.replace('_', '-')}", str(said)])
        given = RunConfig(engine="stream", **{option: said}).validate()
        assert getattr(typed, option) == getattr(given, option) == pytest.approx(value, rel=1e-12)
    assert parse_options(["--quant-bits", "auto"]).auto == ("quant_bits",)
    args = console_parser().parse_args("plan opt-13b --max-gpu-memory 512M --max-host-memory 10GB".split())
    assert (args.max_gpu_memory, args.max_host_memory) == pytest.approx((0.5, 10e9 / 2**30))


@pytest.mark.parametrize(
    "words",
    [
        "facebook/opt-66b --cpu-offload",
        "--cpu-offload facebook/opt-66b",
        "--local_rank=0 facebook/opt-66b --cpu-offload --gen-len 32",  # as the deepspeed launcher starts it
        "--gen-len 32 facebook/opt-66b --cpu-offload",
        "facebook/opt-66b --model facebook/opt-66b --cpu-offload",
        "--model facebook/opt-66b --cpu-offload",
    ],
)
def test_the_model_may_be_the_first_argument(words):
    expected = RunConfig(model="facebook/opt-66b", cpu_offload=True)
    assert config_from_args(run_parser().parse_args(shlex.split(words))) == expected
    assert config_from_args(console_parser().parse_args(["run", *shlex.split(words)])) == expected
