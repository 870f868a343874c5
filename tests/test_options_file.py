"""--config and --save-config: a YAML file of options."""

from __future__ import annotations

import shlex

import pytest
import yaml
from conftest import need_lm_eval

from zero_inference.architectures.command import read_arms, speed_only
from zero_inference.cli import console_main, main
from zero_inference.config.run_config import (
    RunConfig,
    expand_config_files,
    non_default_options,
    parse_options,
    save_options,
    shell_words,
)
from zero_inference.errors import UsageError
from zero_inference.records.read import read_records

CASES = (
    "facebook/opt-66b --cpu-offload --quant-bits 4 --batch-size 8 --pin-memory 0",
    "opt-13b --dummy --engine stream --gpu-memory 10GB --cpu-compute off --decode-graph off --norm-kernels off",
    "opt-13b --engine auto --quant-bits auto --batch-size auto --goal latency",
    "opt-13b --prompt 'Zwölf: \"yes\"' --prompt '- no # comment' --chat",
    "opt-13b --prompt hi --prompt-len 512 --batch-size 4",
    "opt-13b --warmup 9 --warmup-spread 5e-2 --log-dir 2024-01-01 --seed 7",
    "",
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """file(text) -> the name of a file with it, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write


@pytest.mark.parametrize("options", CASES)
def test_what_is_saved_is_read_back_as_the_same_run(options, file):
    config = parse_options(shlex.split(options))
    save_options("saved.yaml", non_default_options(config), "how to run it")
    assert parse_options(["--config", "saved.yaml"]) == config
    assert parse_options(shell_words(non_default_options(config))) == config


def test_a_dry_run_saves_what_differs_from_the_defaults(file, capsys, checkpoints):
    model = str(checkpoints("llama"))
    command = f"run_model.py {model} --dummy --engine resident --dtype fp16 --prompt-len 8 --gen-len 4 --dry-run --save-config run.yaml"
    assert main([*shlex.split(command), "--machine", "rtx4090"]) == 0
    assert "options: run.yaml" in capsys.readouterr().err
    text = open("run.yaml").read()
    assert text.startswith("# run with: zero-inference run --config run.yaml\n")
    assert yaml.safe_load(text) == {
        "model": model, "dummy": True, "engine": "resident", "prompt-len": 8, "gen-len": 4, "dtype": "float16"
    }  # fmt: skip
    again = parse_options(["--config", "run.yaml"])
    assert (
        again
        == RunConfig(model=model, dummy=True, engine="resident", prompt_len=8, gen_len=4, dtype="float16").validate()
    )


def test_what_is_typed_wins_over_the_file(file):
    name = file("model: a\ncpu_offload: true\nbatch-size: 8\nprompt: [one, two]\n--gen-len: 4\nverbose: null\n")
    assert parse_options(["--config", name]) == RunConfig(
        model="a", cpu_offload=True, batch_size=8, prompt=("one", "two"), prompt_len=0, gen_len=4
    )
    typed = ["--config", name, "b", "--no-cpu-offload", "--batch-size", "2", "--prompt", "three"]
    assert parse_options(typed) == RunConfig(model="b", batch_size=2, prompt=("three",), prompt_len=0, gen_len=4)
    other = file("gen-len: 5\nmodel: c\n", "other.yaml")
    assert parse_options(["--config", name, "--config", other]).gen_len == 5


def test_words_that_yaml_reads_otherwise_mean_what_was_written(file):
    name = file(
        "engine: stream\ndecode-graph: on\ncpu-compute: off\nnorm-kernels: off\npin-memory: true\ngpu-memory: 1GiB\n"
    )
    config = parse_options(["--config", name])
    assert (config.decode_graph, config.cpu_compute, config.norm_kernels) == ("on", "off", "off")
    assert config.pin_memory is True and config.gpu_memory == 1
    assert parse_options(expand_config_files(["--config", name])) == config
    assert parse_options(shell_words({"model": "a", "cpu_offload": True, "pin_memory": "true"})).pin_memory is True


REFUSED = {
    "cpu-offlod: true": "--config run.yaml: there is no option cpu-offlod; did you mean cpu-offload?",
    "max_new_tokens: 5": "--config run.yaml: there is no option max_new_tokens; use --gen-len G",
    "save-config: x": "--config run.yaml: there is no option save-config",
    "cpu-offload: 1": "--config run.yaml: cpu-offload 1: write true or false",
    "gen-len: 1.5": "--config run.yaml: gen-len 1.5: not a whole number",
    "gen-len: true": "--config run.yaml: gen-len true: not a whole number",
    "gen-len: [1, 2]": "--config run.yaml: gen-len [1, 2]: not a whole number",
    "engine: steam": "--config run.yaml: engine steam: choose one of",
    "model: {name: x}": "--config run.yaml: model {'name': 'x'}: write one value, in quotes",
    "log-dir: 2024-01-01": "log-dir 2024-01-01: write one value, in quotes",
    "quality: {mmlu: 1}": "--config run.yaml: quality {'mmlu': 1}: write a list",
    "prompt: 7": "--config run.yaml: prompt 7: write a text or a list of texts",
    "gen-len: 4\ngen_len: 5": "--config run.yaml: gen-len is there twice",
    "- gen-len": "not a mapping of options to values",
    "gen-len: [": "--config run.yaml: not YAML (",
    "!!python/object:os.system {}": "--config run.yaml: not YAML (",
}


@pytest.mark.parametrize("text, said", REFUSED.items())
def test_what_a_file_cannot_say(text, said, file):
    with pytest.raises(UsageError) as refused:
        parse_options(["--config", file(text)])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_files_that_cannot_be_read_or_written(file, capsys):
    with pytest.raises(UsageError, match="--config gone.yaml: no such file"):
        parse_options(["--config", "gone.yaml"])
    open("binary", "wb").write(b"\xff\x00")
    with pytest.raises(UsageError, match="--config binary: cannot be read"):
        parse_options(["--config", "binary"])
    with pytest.raises(UsageError, match="--save-config belongs to --dry-run, which was not given: add that"):
        parse_options(["--save-config", "x.yaml"])
    with pytest.raises(UsageError, match="--save-config gone/x.yaml cannot be written"):
        parse_options(["--dry-run", "--save-config", "gone/x.yaml"])
    kept = file('{"schema_version": 1}\n', "run.jsonl")
    with pytest.raises(UsageError, match="it holds what runs have measured"):
        parse_options(["--dry-run", "--save-config", kept])


def test_an_arm_of_compare_may_be_a_file(file):
    """Its options are written out, for a later run must not find another file, and scores are asked for once."""
    need_lm_eval()
    file("text", "text.txt")
    file("model: opt-13b\nquality: perplexity\nquality-data: text.txt\ngen-len: 4\n", "a.yaml")
    arms = read_arms([], ["x=--config a.yaml", "y=opt-13b --config a.yaml --gen-len 5"], [], parse_options)
    assert [(arm.config.model, arm.config.gen_len) for arm in arms] == [("opt-13b", 4), ("opt-13b", 5)]
    assert parse_options(arms[0].options) == arms[0].config and "--config" not in arms[0].options
    assert parse_options(speed_only(arms[1].options)) == RunConfig(model="opt-13b", gen_len=5)
    file("log-file: z.log\n", "b.yaml")
    with pytest.raises(UsageError, match="arm b: --log-file is set by compare itself"):
        read_arms([], ["a=opt-13b", "b=opt-13b --config b.yaml"], [], parse_options)


def test_a_record_says_every_option_of_its_run(file, checkpoints):
    """What was typed and what the file said, so that the run can be repeated without the file."""
    name = file(f"model: {checkpoints('llama')}\nengine: resident\nprompt-len: 8\ndtype: fp32\n")
    argv = ["zero-inference", "run", "--config", name, "--gen-len", "4", "--loops", "1", "--log-file", "run.log"]
    assert console_main(argv) == 0
    (record,) = read_records("run.jsonl")
    assert record["argv"] == argv and record["dtype"] == "float32"
    assert record["options"] == {
        "model": str(checkpoints("llama")), "engine": "resident", "loops": 1, "prompt-len": 8, "gen-len": 4, "dtype": "float32",
        "log-file": "run.log",
    }  # fmt: skip
    assert parse_options(shell_words(record["options"])) == parse_options(argv[2:])
