"""Models side by side: the statistics on noisy samples, the benchmark of one model, and comparisons from end to end."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, VOCAB, build_model, without_gpus
from scipy import stats

from zero_inference.architectures import (
    ArchitectureBenchmark,
    BenchmarkConfig,
    command,
    compare_architectures,
    comparison,
    summarize,
)
from zero_inference.architectures.command import read_arms
from zero_inference.architectures.comparison import alternate_runs, percentile
from zero_inference.cli import console_main
from zero_inference.config.options import OPTIONS
from zero_inference.config.run_config import parse_options
from zero_inference.errors import UsageError
from zero_inference.utils import GB
from zero_inference.utils.format import render, shown_columns

TINY = "--engine resident --prompt-len 6 --gen-len 4 --dtype float32 --loops 2".split()


def noisy_runs(rng: np.random.Generator, speeds: list[float], rounds: int, noise: str) -> list[list[float]]:
    """Throughput of each run of each arm on a machine that drifts over all runs, where runs differ by `noise`."""
    order = alternate_runs(range(len(speeds)), 2 * rounds)
    drift = rng.normal(0, 0.15)
    machine, results = 0.0, [[] for _ in speeds]
    for turn, (_, arm) in enumerate(order):
        if noise == "jumps" and rng.random() < 0.15:
            machine = rng.normal(0, 0.1)  # a neighbour comes or goes, and stays
        level = 0.02 * rng.standard_t(2) if noise == "heavy" else 0.003 * rng.normal()
        results[arm].append(speeds[arm] * math.exp(level + drift * turn / len(order) + machine))
    return results


@pytest.mark.parametrize("rounds", [3, 8])
@pytest.mark.parametrize("noise", ["quiet", "heavy", "jumps"])
def test_equal_arms_are_no_difference_in_19_of_20_and_a_real_one_is_found(noise, rounds):
    rng = np.random.default_rng([rounds, ord(noise[0])])
    verdicts = [comparison.speedup(*noisy_runs(rng, [1.0, 1.0], rounds, noise))["verdict"] for _ in range(200)]
    assert verdicts.count(comparison.NO_DIFFERENCE) >= 190
    found = [comparison.speedup(*noisy_runs(rng, [1.5, 1.0], rounds, noise)) for _ in range(40)]
    assert [each["verdict"] for each in found].count("faster") >= 36
    assert all(each["speedup_low"] <= each["speedup"] <= each["speedup_high"] for each in found)
    assert np.median([each["speedup"] for each in found]) == pytest.approx(1.5, rel=0.05)


def test_the_interval_of_six_pairs_is_their_range():
    """P(all 6 pairs of equal arms on one side) = 2 / 2^6 = 3%; of 5 pairs it is 6%, so these give no verdict."""
    rates = [1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    found = comparison.speedup(rates, [1.0] * 6)
    assert found == pytest.approx(
        {"speedup": math.sqrt(1.03 * 1.04), "speedup_low": 1.01, "speedup_high": 1.06} | {"verdict": "faster"}
    )
    assert comparison.speedup([1.0] * 6, rates)["verdict"] == "slower"
    assert comparison.speedup([3.0] * 8, [3.0] * 8)["verdict"] == comparison.NO_DIFFERENCE
    few = comparison.speedup(rates[:5], [1.0] * 5)
    assert few["verdict"] == comparison.TOO_FEW_RUNS and few["speedup"] == pytest.approx(1.03)
    assert math.isnan(few["speedup_low"])
    for wrong in (0.0, math.nan):
        with pytest.raises(ValueError, match="not above 0"):
            comparison.speedup(rates, [wrong] * 6)


def test_percentiles_need_samples_beyond_them_and_runs_alternate():
    assert percentile(range(99), 99) is None and percentile(range(101), 99) == 99.0
    assert percentile(range(19), 95) is None and percentile([5.0], 50) == 5.0 and percentile([], 50) is None
    assert [name for _, name in alternate_runs(["A", "B"], 4)] == list("ABBAABBA")
    assert [name for _, name in alternate_runs(["A", "B", "C"], 2)] == list("ABCCBA")


def test_models_of_equal_accuracy_are_rarely_called_different():
    """All outcomes of two models that answer each item rightly with probability p, weighted by how likely they are."""

    items = comparison.MIN_ITEMS
    shares = [right / items for right in range(items + 1)]
    errors = [math.sqrt(share * (1 - share) / (items - 1)) for share in shares]
    scores = [{"accuracy": share, "stderr": error, "total": items} for share, error in zip(shares, errors)]
    found = [[comparison.score_difference(one, other)["verdict"] for other in scores] for one in scores]
    called = np.array(found) != comparison.NO_DIFFERENCE
    for p in (0.01, 0.05, 0.335):
        likely = stats.binom.pmf(range(items + 1), items, p)
        assert likely @ called @ likely < 0.04


def test_summary_of_speed_and_quality():
    rows = []
    for number in range(6):
        for name, rate in (("plain", 100.0), ("int4", 300.0 + number)):
            run = {"architecture": name, "type": "speed", "config": "decode", "pass": number}
            rows.append(run | {"throughput": rate, "memory_gb": 2.0, "flops": 10})
    for name, accuracy in (("plain", 0.5), ("int4", 0.3)):
        scores = {
            "mmlu": {"accuracy": accuracy, "stderr": 0.03, "total": 1000},
            "perplexity": {"perplexity": 12.5},
            "hellaswag": {"accuracy": accuracy, "stderr": None, "total": 1},
            "humaneval": {"pass_at_k": {1: accuracy, 5: 0.6}, "stderr": {1: 0.04, 5: 0.04}, "problems": 164},
            "few": {"pass_at_k": {1: accuracy}, "stderr": {1: 0.0}, "problems": 3},
        }
        rows += [{"architecture": name, "pass": 0} | row for row in comparison.quality_rows(scores)]
    rows.append({"architecture": "broken", "type": "failed", "pass": 0, "error": "RuntimeError: no"})
    summary = summarize(comparison.build_frame(rows), "plain").set_index(["architecture", "config"])
    fast = summary.loc[("int4", "decode")]
    assert fast.speedup == pytest.approx(3.025, rel=1e-5)
    assert fast.speedup_low <= 3.025 <= fast.speedup_high
    assert summary.loc[("plain", "decode")].verdict == "baseline" and fast.throughput == 302.5 and fast.runs == 6
    worse = summary.loc[("int4", "mmlu")]
    assert worse.accuracy_difference == pytest.approx(-0.2)
    assert worse.accuracy_difference_stderr == pytest.approx(0.03 * 2**0.5)
    assert summary.loc["int4"].verdict.to_dict() == {
        "decode": "faster",
        "mmlu": "lower",
        "hellaswag": "no standard error",
        "humaneval pass@1": "lower",
        "humaneval pass@5": "no difference",
        "few pass@1": "too few items",
    }
    assert summary[summary.type == "failed"].error.tolist() == ["RuntimeError: no"]
    with pytest.raises(ValueError, match="int8.*plain, int4, broken"):
        summarize(comparison.build_frame(rows), "int8")


def llama_step_flops(config, positions: int, queries: int, logits: int) -> int:
    """Products of a forward of `queries` tokens that see `positions`, with logits of `logits` of them; by llama's formulas."""
    h, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head_dim
    linear = 2 * queries * (h * h * 2 + 2 * h * kv + 3 * h * config.intermediate_size)
    attention = 4 * queries * positions * h
    rotary = 2 * queries * (head_dim // 2)  # angles, an outer product, once a forward
    return config.num_hidden_layers * (linear + attention) + 2 * logits * h * config.vocab_size + rotary


def test_generation_and_batches_count_what_they_did():
    model = build_model("llama")
    benchmark, own = ArchitectureBenchmark(model, "cpu"), model.generation_config
    result = benchmark.benchmark_generation(7, 5, num_runs=20)
    assert result.name == "gen_p7_l5" and model.generation_config is own
    assert result.throughput == pytest.approx(5 / (result.latency_p50 / 1e3))
    assert result.latency_p50 <= result.latency_p95 and result.latency_p99 is None
    later = [llama_step_flops(model.config, 7 + n, 1, 1) for n in range(1, 5)]
    assert result.flops == pytest.approx(llama_step_flops(model.config, 7, 7, 1) + sum(later), rel=1e-3)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    cache = 2 * 3 * 2 * 8 * (7 + 4) * 4  # keys and values of 3 layers, 2 heads of 8, 11 positions, in float32
    assert weights + cache < result.memory_gb * GB < weights + cache + 400_000

    result = benchmark.benchmark_batch_throughput(3, 16, num_runs=100)
    assert result.name == "batch_b3_s16" and result.throughput == pytest.approx(48 / (result.latency_p50 / 1e3))
    assert result.latency_p99 >= result.latency_p95
    assert result.flops == pytest.approx(3 * llama_step_flops(model.config, 16, 16, 16), rel=1e-3)
    assert result.memory_gb * GB > weights + 3 * 16 * VOCAB * 4, "the logits"


def test_memory_is_the_weights_and_the_most_held():
    benchmark = ArchitectureBenchmark(torch.nn.Linear(64, 32, bias=False), "cpu")
    with benchmark.measure_memory() as memory:
        for _ in range(3):  # one after the other, so the peak is that of two blocks
            block = torch.ones(1 << 20, dtype=torch.uint8)
            twice = block + block
            del block, twice
    assert memory.peak_bytes == 64 * 32 * 4 + (2 << 20)


def test_a_batch_of_own_prompts_and_what_cannot_be():
    benchmark = ArchitectureBenchmark(build_model("opt"), "cpu")
    assert benchmark.benchmark_generation(torch.randint(3, VOCAB, (2, 9)), 2, num_runs=1).name == "gen_p9_l2"
    for arguments, words in (
        ((0, 4), "prompt_tokens is 0"),
        ((torch.ones(3), 4), r"ids \[batch, P\]"),
        ((120, 9), "129 positions"),
        ((4, 4, 0), "num_runs is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            benchmark.benchmark_generation(*arguments)
    with pytest.raises(ValueError, match="200 positions"):
        benchmark.benchmark_batch_throughput(1, 200)


def test_architectures_in_one_process():
    """Models and makers of models, alternating; one that fails does not take the others along."""
    made = []

    def maker():
        made.append(1)
        return build_model("gpt_neox")

    def broken():
        raise RuntimeError("no such weights\nand more")

    opt = build_model("opt").train()
    config = dict(device="cpu", generation=[(4, 3)], batch=[(2, 8)], passes=2, generation_runs=2, batch_runs=2)
    frame = compare_architectures({"opt": opt, "neox": maker, "broken": broken}, config)
    speed = frame[frame.type == "speed"]
    assert speed["architecture"].tolist() == ["opt"] * 2 + ["neox"] * 4 + ["opt"] * 2
    assert len(made) == 2 and opt.training and (speed.throughput > 0).all()
    assert frame[frame.type == "failed"].error.tolist() == ["RuntimeError: no such weights"]
    summary = summarize(frame, "opt")
    assert set(summary[summary.architecture == "neox"].verdict) == {"too few runs"}
    with pytest.raises(ValueError, match="nothing to do"):
        BenchmarkConfig(generation=[], batch=[])


@pytest.mark.parametrize(
    "models, arms, shared, words",
    [
        ("opt-125m", [], "", "two arms are needed, and 1 given"),
        ("opt-125m opt-125m", [], "", "two arms are called opt-125m"),
        ("", ["int4 --model x", "b=--model y"], "", "write a name, ="),
        ("", ["a=--model 'x", "b=--model y"], "", "No closing quotation"),
        ("", ["a=--modle x", "b=--model y"], "", "arm a: there is no option --modle; did you mean --model?"),
        (
            "",
            ["a=--model x", "b=--model y --quant-bits 3"],
            "",
            "arm b: --quant-bits 3: choose one of stored, 16, 8, 4, auto",
        ),
        ("", ["a=--model x", "b=--model y --log_file z.log"], "", "arm b: --log-file is set by compare itself"),
        ("a b", [], "--dry-run", "arm a: --dry-run is set by compare itself"),
        ("a b", [], "--trace ./t.json", "arm b: --trace ./t.json is also written by arm a"),
    ],
)
def test_arms_that_cannot_be_meant(models, arms, shared, words):
    with pytest.raises(UsageError) as refused:
        read_arms(models.split(), arms, shared.split(), parse_options)
    assert words in str(refused.value)


def test_arms_are_models_or_configurations():
    arms = read_arms(
        ["facebook/opt-125m", "other/opt-125m", "opt-1.3b"],
        ["half price=--quant_bits 4 --engine stream --batch-size 2", f"{'é' * 300}=--model opt-125m"],
        ["--dummy", "--batch-size", "4"],
        parse_options,
    )
    assert [arm.name for arm in arms[:4]] == ["facebook/opt-125m", "other/opt-125m", "opt-1.3b", "half price"]
    assert [arm.config.batch_size for arm in arms] == [4, 4, 4, 2, 4] and arms[3].config.quant_bits == 4
    assert arms[0].file_stem == "facebook_opt-125m" and all(arm.config.dummy for arm in arms)
    assert len(f"{arms[4].file_stem}-10000.jsonl".encode()) < 255, "a long name was OSError: File name too long"


def test_an_arm_that_would_take_all_gpus_takes_one_where_that_is_asked():
    texts = [
        "a=--model x --engine stream",
        "b=--model x --engine deepspeed",
        "c=--model x --engine stream --num-gpus 2",
    ]
    options = [arm.on_one_gpu().options for arm in read_arms([], texts, [], parse_options)]
    assert [words[-2:] for words in options] == [("--num-gpus", "1"), ("--engine", "deepspeed"), ("--num-gpus", "2")]


def test_only_the_first_run_of_an_arm_scores():
    for option in OPTIONS.values():
        words = [option.flag] if isinstance(option.default, bool) else [option.flag, "1"]
        left = [] if option.group == "quality" else words
        assert command.speed_only(["--model", "x", *words, "facebook/opt-125m"]) == [
            "--model",
            "x",
            *left,
            "facebook/opt-125m",
        ]
    assert command.speed_only(["--quality_data=data", "--seed", "1"]) == ["--seed", "1"]


def run_compare(*words: str) -> int:
    try:
        return console_main(["zero-inference", "compare", *words])
    except SystemExit as left:
        return left.code


def test_every_arm_is_checked_before_any_run_and_one_that_may_not_fit_is_warned_of(
    tmp_path, capfd, copied_runs, monkeypatch
):
    """The first arm is estimated not to fit, and the check goes on to the second, of which only a run can see that it is wrong: the
    model has 2048 positions. So nothing is run, and no file of the current folder either."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "deepspeed.py").write_text("raise SystemExit('a file of the current folder was run')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    capfd.readouterr()
    big = "big=--model opt-6.7b --engine stream --batch-size 65536"
    long = "long=--model opt-125m --batch-size 2 --prompt-len 5000"
    folder = tmp_path / "logs"
    code = run_compare("--arm", big, "--arm", long, "--num-gpus", "2", "--log-dir", str(folder), "--", "--dummy")
    shown = capfd.readouterr()
    assert code == 2 and not shown.out and "warning: arm big: It does not fit. " in shown.err
    assert "error: arm long: --prompt-len 5000 and --gen-len 32 need 5032 positions" in shown.err
    assert sorted(path.name for path in folder.iterdir()) == ["big-check.out", "long-check.out"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_comparison_leaves_no_process(tmp_path, sent):
    words = f"compare --model opt-125m --model opt-1.3b --log-dir {tmp_path} -- --dummy".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "zero_inference", *words], cwd=ROOT, env=without_gpus(), start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (pids := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.02)
    (child,) = map(int, pids)
    process.send_signal(sent)
    assert process.wait(60) == 128 + sent
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_two_equal_arms_as_processes_and_one_that_fails(checkpoints, copied_runs, tmp_path, capfd):
    folder, broken = checkpoints("llama"), tmp_path / "broken"
    shutil.copytree(folder, broken)
    for shard in broken.glob("*.safetensors"):
        shard.write_bytes(b"not a checkpoint")
    capfd.readouterr()
    arms = ["--arm", f"one=--model {folder}", "--arm", f"two=--model {folder}", "--arm", f"none=--model {broken}"]
    settings = f"--rounds 1 --warmup-tries 3 --format json --log-dir {tmp_path}".split()
    code = run_compare(*arms, *settings, "--", *TINY)
    shown = capfd.readouterr()
    report = json.loads(shown.out)
    assert code == 1 and "1 of 3 arms failed: none" in shown.err
    assert "compare: 6 runs, 2 of each arm" in shown.err and "compare: run 1 of 6 (one): " in shown.err
    one, two, none = report["arms"]
    assert none["error"] and none["runs"] == 1 and "decode_throughput" not in none
    assert one["decode_verdict"] == "baseline" and two["decode_verdict"] == "too few runs"
    assert two["same_ids"] and two["decode_speedup"] > 0 and two["decode_speedup_low"] is None
    assert one["step_samples"] == 2 * 2 * 3 and one["step_p99_s"] is None and one["peak_host_bytes"] > 0
    runs = [(run["arm"], run["pass"], run["status"]) for run in report["runs"]]
    assert runs == [("one", 0, "ok"), ("one", 1, "ok"), ("two", 0, "ok"), ("two", 1, "ok"), ("none", 0, "failed")]
    ended = [f"{name}-{number}" for name, number, status in runs if status == "ok"]
    ended.sort(key=lambda name: (tmp_path / f"{name}.jsonl").stat().st_mtime_ns)
    assert ended == ["one-0", "two-0", "two-1", "one-1"], "timestamps are whole seconds"
    good = [run for run in report["runs"] if run["status"] == "ok"]
    assert all(len(run["warmup_total_s"]) == 3 and run["warmed_up"] in (True, False) for run in good)


def test_one_round_has_one_warm_up_loop_in_each_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "check_arms", lambda arms, extra, *_: pytest.fail(" ".join(extra)))
    for words, options in (
        ("", "--warmup 10 --warmup-spread 0.05"),
        ("--rounds 1", "--warmup 1"),
        ("--rounds 1 --warmup-tries 4", "--warmup 4 --warmup-spread 0.05"),
    ):
        with pytest.raises(pytest.fail.Exception, match=f"^{options}$"):
            run_compare("--model", "opt-125m", "--model", "opt-1.3b", *words.split())
    assert [folder.name.startswith("compare-2") for folder in Path("logs").iterdir()] == [True] * 3


def test_the_table_of_recorded_runs(capsys):
    """Every format from the same records, which are made up here: 6 passes, a third as fast, scores with errors."""
    arms = read_arms([], ["fp16=--model x", "int4=--model x --quant-bits 4", "gone=--model y"], [], parse_options)
    configs = {arm.name: arm.config for arm in arms}

    def record(slow: float, accuracy: float, number: int) -> dict:
        steps = [0.01 * slow * (1 + 0.001 * (number + step)) for step in range(10)]
        rates = dict(decode_throughput=10 / sum(steps), prefill_throughput=500.0, total_throughput=9 / sum(steps))
        peaks = dict(peak_gpu_bytes=3 << 30, peak_host_bytes=1 << 30, weight_bytes=1 << 30)
        quality = {"mmlu": {"accuracy": accuracy, "stderr": 0.02, "total": 500}}
        quality |= {"perplexity": {"perplexity": 20 * accuracy, "stderr": 1.5}}
        facts = dict(
            dtype="float16",
            quant_bits=16,
            output_ids_sha256=str(slow),
            limit={"fraction_of_limit": 0.9},
            quality=quality,
        )
        return dict(status="ok", loops=[{"step_s": steps}] * 2, warmed_up=number > 0) | rates | peaks | facts

    runs = {
        "fp16": [(n, record(1.0, 0.6, n)) for n in range(6)],
        "int4": [(n, record(3.0, 0.5, n)) for n in range(6)],
        "gone": [(0, {"status": "failed", "error": "does not fit:\n20 GB"})],
    }
    rows = comparison.arm_rows(configs, runs, "fp16")
    fp16, int4, gone = rows
    assert int4["decode_speedup"] == pytest.approx(1 / 3) and int4["decode_verdict"] == "slower"
    assert int4["same_ids"] is False and int4["prefill_verdict"] == "no difference"
    assert int4["step_samples"] == 120 and int4["step_p99_s"] > int4["step_p95_s"]
    assert int4["quality"]["mmlu"]["difference"] == pytest.approx(-0.1) and int4["mmlu_verdict"] == "lower"
    assert fp16["unsettled_runs"] == 1 and gone["error"] == "does not fit: 20 GB"
    first, *_ = csv.DictReader(io.StringIO(render(rows, comparison.list_columns(rows, compact=False), "csv")))
    assert float(first["decode_throughput"]) == fp16["decode_throughput"] and first["total_verdict"] == "baseline"
    text = render(rows, shown_columns(rows, comparison.list_columns(rows, compact=True)), "md")
    assert "0.333x (0.333 - 0.333)" in text and "does not fit: 20 GB" in text and "-0.1000" in text
    assert "total" not in text and [row.get("perplexity") for row in rows] == [12.0, 10.0, None] and "12.000" in text
    command.print_table(rows, "fp16", "table")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100 and "not settled" in " ".join(printed.split())
    assert printed.split()[:4] == ["arm", "fp16", "int4", "gone"]
    failed = comparison.arm_rows(configs, runs, "gone")
    assert comparison.list_captions(failed, "gone")[0] == "no speedup: the baseline gone failed"
    assert failed[0]["decode_throughput"] > 0 and failed[0]["decode_speedup"] is None


@pytest.mark.parametrize(
    "words, error",
    [
        ("--baseline c", "--baseline c: there is no such arm; the arms are a, b"),
        ("--rounds 0", "0 is less than 1"),
        ("--warmup-tries 2", "2 is less than 3"),
        ("--num-gpus 2", "arm a: --batch-size 1 does not divide"),
        ("", "the log folder logs/compare-2"),
    ],
)
def test_bad_usage(words, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs").touch()
    code = run_compare("--model", "a", "--model", "b", *words.split())
    shown = capsys.readouterr()
    assert code == 2 and error in shown.err and not shown.out


def test_warm_up_options_of_a_run(checkpoints, tmp_path):
    run = ["zero-inference", "run", "--model", str(checkpoints("opt")), *TINY, "--log-file", str(tmp_path / "run.log")]
    assert console_main([*run, *"--warmup 8 --warmup-spread 0.99".split()]) == 0
    assert console_main([*run, *"--warmup 4 --warmup-spread 1e-9".split()]) == 0
    easy, hard = (json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines())
    assert 3 <= len(easy["warmup_total_s"]) <= 8 and easy["cold_total_s"] == easy["warmup_total_s"][0]
    assert len(hard["warmup_total_s"]) == 4 and hard["warmed_up"] is False
    assert console_main([*run, *"--warmup 2 --warmup-spread 0.05".split()]) == 2
