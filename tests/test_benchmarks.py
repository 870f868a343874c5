"""Programs of benchmarks/ and scripts/measure_gpu.py: cases within a time limit, GGUF files of peers, traced kernels,
ranges of predicted times."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import ROOT, need_packages
from test_presets import PARAMETERS

from benchmarks.peers import gguf_file, llama_cpp
from benchmarks.predictions import HOSTS, ranges_of, ratios, within_others
from benchmarks.traced_run import Kernel, main, print_kernels
from zero_inference import runner
from zero_inference.config.run_config import parse_options
from zero_inference.models.built_in import find_preset
from zero_inference.planning.cost import RANGES
from zero_inference.planning.plan import Plan

sys.path.insert(0, str(ROOT / "scripts"))
import measure_gpu  # noqa: E402

SHORT = "--prompt-len 8 --gen-len 3 --loops 1 --warmup 0"
TINY = f"""
tiny:
  planned: 9 plan opt-125m --machine rtx4090 --engine stream --batch-size 1 --quant-bits 4 --prompt-len 8 -- {SHORT}
  two: 9 run opt-125m --engine resident {SHORT} & -c "print('in RESULTS')"
  peer: 9 llama_cpp --model llama-3.2-1b
"""
QUICK = """
quick:
  says: 1 -c "print('measured')"
  hangs: 1 -c "import time; time.sleep(60)"
others:
  long: 50 -c "print(1)"
  says:
"""
LOST = "group:\n  says: 1 -c 'import no_such_module'\n"


def measure(folder, text, *arguments):
    cases = folder.parent / "cases.yaml"
    cases.write_text(text)
    return measure_gpu.main([str(folder), "--cases", str(cases), *arguments])


@pytest.mark.slow
def test_cases_leave_what_can_be_committed(tmp_path, capsys):
    results = tmp_path / "the results"
    assert measure(results, TINY, "tiny") == 1
    assert "left (no time, or no --llama): peer\n" in capsys.readouterr().err
    kinds = [("planned", "jsonl plan.json txt"), ("two", "jsonl txt")]
    names = {f"{case}.{kind}" for case, kinds_of in kinds for kind in kinds_of.split()}
    assert {path.name for path in results.iterdir()} == {*names, "steps.txt", "table.md"}
    record, plan = (json.loads((results / f"planned.{kind}").read_text()) for kind in ("jsonl", "plan.json"))
    assert plan["configurations"][0]["command"].endswith(" --engine stream --quant-bits 4 --dummy --prompt-len 8")
    assert (record["engine"], record["quant_bits"], record["gen_len"], record["status"]) == ("stream", 4, 3, "ok")
    assert record["argv"][record["argv"].index("--log-file") + 1] == "RESULTS/planned.log"
    assert "in RESULTS\n" in (results / "two.txt").read_text()
    assert re.fullmatch(r"(planned|two) \d+ s, exit code 0\n" * 2, (results / "steps.txt").read_text())
    assert not any(str(folder) in path.read_text() for path in results.iterdir() for folder in (ROOT, tmp_path))


@pytest.mark.slow
def test_a_case_that_fails_or_hangs_takes_nothing_away(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure_gpu, "AT_LEAST_S", 10)
    results = tmp_path / "results"
    assert measure(results, QUICK, "others", "--limit-s", "40") == 1
    assert (results / "says.txt").read_text() == "measured\n" and not (results / "long.txt").exists()
    assert capsys.readouterr().err.endswith("left (no time, or no --llama): long\n")
    assert measure(results, LOST, "group") == 1
    assert (results / "says.txt").read_text() == "measured\n" and "no_such_module" in (
        results / "says.part"
    ).read_text()
    assert measure(results, QUICK, "quick") == 1
    assert capsys.readouterr().err.endswith("failed: hangs\n") and not (results / "says.part").exists()
    assert [line.split()[-1] for line in (results / "steps.txt").read_text().splitlines()] == ["0", "1", "0", "124"]


def test_every_command_is_one_that_its_program_takes(tmp_path, monkeypatch):
    from zero_inference.cli import console_parser

    groups = yaml.safe_load((ROOT / "scripts" / "measure_gpu.yaml").read_text())
    (tmp_path / "llama_cpp_python-1.tar.gz").touch()
    args, cases = measure_gpu.parse_args([str(tmp_path), *groups, "--llama", str(tmp_path)])
    for name, (_, lines) in cases.items():
        for line in lines:
            program, *options = measure_gpu.command_of(line, name, args)[1:]
            kind = line.split()[0]
            if kind == "run":
                parse_options(options)
            elif kind == "llama_cpp":
                monkeypatch.setattr(sys, "argv", [program, *options])
                assert llama_cpp.parse_args().model
            elif program == "-m":
                assert options.pop(0) == "zero_inference"
                console_parser(["zero-inference", *options], []).parse_args(options)
            else:
                assert (ROOT / program).is_file()
            if kind == "plan":
                parse_options([*measure_gpu.RUN, *shlex.split(line.partition(" -- ")[2]), "--model", options[1]])


def test_times_and_gaps_of_the_second_half_are_told_by_kernel(capsys):
    """Each second kernel begins 20 us behind the end of the one before; two overlap."""
    kernels = []
    for step in range(20):
        kernels += [Kernel(100.0 * step, 30.0, "product"), Kernel(100.0 * step + 50.0, 50.0, "wait")]
    kernels.append(Kernel(1975.0, 25.0, "copy"))
    print_kernels(kernels)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.0 ms, of which 0.2 nothing computes"
    assert [line.split() for line in lines[1:4]] == [
        ["0.50", "ms", "in", "10", "x", "wait"],
        ["0.30", "ms", "in", "10", "x", "product"],
        ["0.03", "ms", "in", "1", "x", "copy"],
    ]
    assert any(line.split()[:3] == ["0.20", "ms", "before"] and line.endswith("wait") for line in lines)


def test_a_run_is_told_by_its_stages(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Plan, "load", Plan.load)  # put back afterwards, as the next one
    monkeypatch.setattr(runner, "measure_run", runner.measure_run)
    options = "--model opt-125m --dummy --engine resident --prompt-len 4 --gen-len 2 --loops 1 --warmup 0 --log-dir"
    assert main([*options.split(), str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert [stage for stage in ("before loading; predicted: ", "] loaded: ", "] measured: ") if stage not in out] == []


DENSE = dict(
    model_type="llama", vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip
OF_EXPERTS = dict(head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
EXPERTS = DENSE | OF_EXPERTS | dict(model_type="qwen3_moe")


GPT_OSS = DENSE | OF_EXPERTS | dict(
    model_type="gpt_oss", rope_theta=150000.0, sliding_window=128, rope_scaling=dict(
        rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096),
)  # fmt: skip


def read_random_gguf(config, path, monkeypatch):
    """Write a file, and return its metadata and tensors as the package gguf reads them."""
    need_packages("the independent reader", "gguf")
    from gguf import GGUFReader

    monkeypatch.setattr(gguf_file, "CHUNK_BLOCKS", 50)  # so that tensors are longer than what was drawn
    nbytes = gguf_file.write_random_gguf(config, path)
    file = GGUFReader(path)
    assert nbytes == sum(tensor.n_bytes for tensor in file.tensors)
    return {name: field.contents() for name, field in file.fields.items()}, {each.name: each for each in file.tensors}


def has_deviation(tensor, deviation):
    from gguf import quants

    weights = quants.dequantize(tensor.data, tensor.tensor_type)
    return weights.std() == pytest.approx(deviation, rel=0.1) and abs(weights.mean()) < 0.1 * deviation


@pytest.mark.parametrize("config", [DENSE, EXPERTS, GPT_OSS], ids=["llama", "qwen3_moe", "gpt_oss"])
def test_a_random_gguf_has_the_tensors_of_its_config(config, tmp_path, monkeypatch):
    metadata, tensors = read_random_gguf(config, tmp_path / "model.gguf", monkeypatch)
    arch = {"llama": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}[config["model_type"]]
    assert metadata["general.architecture"] == arch and metadata["tokenizer.ggml.model"] == "none"
    assert metadata[f"{arch}.vocab_size"] == 96 and metadata[f"{arch}.block_count"] == 2
    embedding = tensors["token_embd.weight"]
    of_type = "Q8_0" if config is GPT_OSS else "Q4_0"
    assert (tuple(embedding.shape), embedding.tensor_type.name) == ((64, 96), of_type)
    assert has_deviation(embedding, 0.02 if config is DENSE else gguf_file.embedding_std(SimpleNamespace(**config)))
    norm = tensors["blk.1.attn_norm.weight"].data
    assert norm.dtype == np.float32 and norm.shape == (64,) and (norm == 1.0).all()
    down = tensors["blk.1.ffn_down.weight" if config is DENSE else "blk.1.ffn_down_exps.weight"]
    assert tuple(down.shape) == ((160, 64) if config is DENSE else (32, 64, 8)) and has_deviation(down, 0.02)
    if config is not DENSE:
        routers = [tensors[f"blk.{layer}.ffn_gate_inp.weight"].data for layer in (0, 1)]
        assert routers[0].std() == pytest.approx(0.02, rel=0.2) and (routers[0] != routers[1]).all()


def test_a_random_gguf_of_gpt_oss_has_biases_sinks_windows_and_yarn(tmp_path, monkeypatch):
    metadata, tensors = read_random_gguf(GPT_OSS, tmp_path / "model.gguf", monkeypatch)
    assert metadata["general.file_type"] == 38 and metadata["gpt-oss.attention.sliding_window"] == 128
    scaling = {name.rpartition(".")[2]: value for name, value in metadata.items() if ".rope.scaling." in name}
    assert scaling.pop("original_context_length") == 4096 and scaling.pop("type") == "yarn"
    assert scaling == {"factor": 32.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
    assert (tensors["blk.1.post_attention_norm.weight"].data == 1.0).all() and "blk.1.ffn_norm.weight" not in tensors
    shapes = {"attn_sinks.weight": (4,), "attn_k.bias": (64,), "attn_output.bias": (64,), "ffn_gate_inp.bias": (8,)}
    for name, shape in (shapes | {"ffn_up_exps.bias": (32, 8), "ffn_down_exps.bias": (64, 8)}).items():
        tensor = tensors[f"blk.1.{name}"]
        assert (tuple(tensor.shape), tensor.tensor_type.name) == (shape, "F32"), name
        assert 0 < np.abs(tensor.data).mean() < 0.04, name


# What llama.cpp's loader prints for the files of ggml-org.
PUBLISHED = {"gpt-oss-20b": ((289, 98, 72), 11.27), "gpt-oss-120b": ((433, 146, 108), 59.02)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_gguf_of_gpt_oss_has_the_types_and_bytes_of_the_published_one(name):
    tensors = list(gguf_file.tensors_of(find_preset(name).config))
    types = [tensor.type.name for tensor in tensors]
    gib = sum(tensor.nbytes for tensor in tensors) / 2**30
    assert (tuple(map(types.count, ("F32", "Q8_0", "MXFP4"))), round(gib, 2)) == PUBLISHED[name]


@pytest.mark.parametrize(
    "name", ["llama-2-13b", "llama-3.2-1b", "mixtral-8x7b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b"]
)
def test_a_gguf_has_as_many_weights_as_its_preset(name):
    preset = find_preset(name)
    counted = sum(int(np.prod(t.shape)) for t in gguf_file.tensors_of(preset.config))
    assert counted == PARAMETERS[preset.name]


LLAMA_BENCH = """#!/bin/sh
# prints as llama-bench does, a line a test: prompts first, for each number of threads; generation of 9 tokens never ends
while [ $# -gt 0 ]; do
  case $1 in -p) p=$2 ;; -n) n=$2 ;; -d) d=$2 ;; -t) t=$2 ;; esac
  shift
done
for threads in $(echo "$t" | tr , ' '); do
  line='"n_threads": '$threads', "cpu_info": "a CPU", "gpu_info": "a GPU"'
  [ "$p" = 0 ] || echo '{'$line', "n_prompt": '$p', "n_gen": 0, "n_depth": '${d:-0}', "avg_ts": 100, "samples_ts": [100]}'
  [ "$n" = 9 ] && exec sleep 60
  [ "$n" = 0 ] || echo '{'$line', "n_prompt": 0, "n_gen": '$n', "n_depth": '${d:-0}', "avg_ts": '$threads', "samples_ts": [1]}'
done
"""


def test_llama_bench_gives_a_row_for_each_number_of_threads_and_what_it_printed_before_its_time_was_up(tmp_path):
    program = tmp_path / "llama-bench" / "llama-bench"
    program.parent.mkdir()
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    (tmp_path / "llama-3.2-1b-q4_0.gguf").touch()  # is used: --keep
    options = ["-ngl 5 -t 2,4", "-ngl 5 -t 8 -p 0 -d 0", "-ngl 5 -t 4 -p 64 -d 0 -n 9"]
    made = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "peers" / "llama_cpp.py", "--model", "llama-3.2-1b", "--cuda", "--keep"]
        + ["--programs", tmp_path, "--work", tmp_path, "--prompt-len", "32", "--gen-len", "3", "--timeout", "1"]
        + [word for each in options for word in ("--options", each)],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [
        (row["threads"], row["prefill_tokens_per_s"], row["tokens_per_s"]) for row in json.loads(made.stdout)["rows"]
    ]
    assert rows == [(2, {"32": 100}, 2), (4, {"32": 100}, 4), (8, {}, 8), (4, {"64": 100}, None)]
    assert [row.get("depth") for row in json.loads(made.stdout)["rows"]] == [32, 32, 0, None]


@pytest.mark.slow
def test_ranges_are_those_of_committed_runs_and_hold_for_hosts_that_they_were_not_made_from():
    found = list(ratios())
    assert ranges_of(found) == RANGES and {each.host for each in found} == set(HOSTS)
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for kind, (low, high) in RANGES.items():
        assert f"| {low:.2f} to {high:.2f} | {sum(each.kind == kind for each in found)} |" in design, kind
    inside = within_others(found)
    every = {host: [each for of_kind in kinds.values() for each in of_kind] for host, kinds in inside.items()}
    whole = [each for of_host in every.values() for each in of_host]
    for those in (whole, every["h100-readme"]):
        assert f"{sum(those)} of {len(those)}" in design
    for kind in RANGES:
        known = [each for of_host in inside.values() for each in of_host.get(kind, [])]
        assert len(known) > 20 and sum(known) >= 0.9 * len(known), kind
    for host, kinds in inside.items():
        known = [each for of_kind in kinds.values() for each in of_kind]
        assert sum(known) >= 0.75 * len(known), host
