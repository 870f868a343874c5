"""Models side by side: the statistics on noisy samples, the benchmark of one model, and comparisons from end to end."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, VOCAB, build_model, need_lm_eval, without_gpus

from zero_inference.architectures import (
    ArchitectureBenchmark,
    BenchmarkConfig,
    command,
    compare_architectures,
    summarize,
)
from zero_inference.architectures import statistics as stats
from zero_inference.architectures.arms import Arm, check_arm, failure_reason, read_arms, read_plan, speed_only
from zero_inference.architectures.command import measure_quick_rates
from zero_inference.architectures.comparison import alternate_runs, build_frame, quality_rows
from zero_inference.cli import console_main, run_parser
from zero_inference.config.parser import option_rows
from zero_inference.config.run_options import parse_options
from zero_inference.errors import UsageError
from zero_inference.measure import loops
from zero_inference.utils import GB
from zero_inference.utils.processes import ChildRun


@functools.cache
def decay(steps: int) -> np.ndarray:
    """Of noise that each step passes on to the next, by 0.9: row i has what step i still has of each step before."""
    age = np.subtract.outer(np.arange(steps), np.arange(steps))
    return np.tril(0.9 ** np.maximum(age, 0))


def runs_of(
    rng: np.random.Generator, speeds: list[float], rounds: int, noise: str, steps: int = 60
) -> list[list[float]]:
    """Throughput of each run of each arm, from step times as machines give them: arm i needs 1 / speeds[i] a step.

    Every step time is the arm's, times a slow drift of the machine over all runs, a level of the run, autocorrelated noise
    within the run, and now and then an outlier.
    """
    order = alternate_runs(range(len(speeds)), 2 * rounds)
    spread = {"quiet": 0.003, "noisy": 0.03, "heavy": 0.02, "jumps": 0.01}[noise]
    drift = rng.normal(0, 0.15) + rng.normal(0, 0.1) * math.sin(rng.uniform(0, 6))
    machine, results = 0.0, [[] for _ in speeds]
    for turn, (_, arm) in enumerate(order):
        if noise == "jumps" and rng.random() < 0.15:
            machine = rng.normal(0, 0.1)  # a neighbour comes or goes, and stays
        level = spread * (rng.standard_t(2) if noise == "heavy" else rng.normal()) + drift * turn / len(order) + machine
        within = np.zeros(steps)
        within[1:] = decay(steps - 1) @ rng.normal(0, 0.01, steps - 1)
        times = np.exp(level + within) / speeds[arm]
        times[rng.random(steps) < (0.0005 if noise == "quiet" else 0.02)] *= rng.uniform(2, 8)
        results[arm].append(steps / times.sum())
    return results


@pytest.mark.parametrize("rounds", [3, 8])
@pytest.mark.parametrize("noise", ["quiet", "noisy", "heavy", "jumps"])
def test_equal_arms_are_no_difference_in_19_of_20(noise, rounds):
    rng = np.random.default_rng([rounds, len(noise), ord(noise[0])])
    comparisons = 100
    verdicts = [stats.speedup(*reversed(runs_of(rng, [1.0, 1.0], rounds, noise))).verdict for _ in range(comparisons)]
    assert verdicts.count(stats.NO_DIFFERENCE) >= 0.95 * comparisons
    assert stats.TOO_FEW not in verdicts


def test_many_steps_of_few_runs_do_not_make_a_difference():
    """Resampling steps, as if they were independent, would call most pairs of equal arms different."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        assert stats.speedup(*runs_of(rng, [1.0, 1.0], 2, "noisy", steps=500)).verdict == stats.TOO_FEW


def test_a_real_difference_is_found_and_its_size():
    rng = np.random.default_rng(7)
    found = []
    for _ in range(60):
        slow, fast = runs_of(rng, [1.0, 1.1], 3, "quiet")
        ratio = stats.speedup(fast, slow)
        found.append(ratio.verdict)
        assert ratio.median == pytest.approx(1.1, rel=0.1) and ratio.low <= ratio.median <= ratio.high
        assert stats.speedup(slow, fast).median == pytest.approx(1 / ratio.median)
    assert found.count(stats.FASTER) > 45 and stats.SLOWER not in found


def test_the_interval_is_the_bootstrap_of_the_median_with_wider_tails():
    """Against a plain calculation of the bootstrap's own distribution for 6 pairs."""
    assert stats.expanded_tail(6) == pytest.approx(0.0005, abs=1e-4)
    assert stats.expanded_tail(10**5) == pytest.approx(0.015, abs=1e-5)
    # 4 or more of 6 draws fall on the smallest pair with probability 0.0087, more than the tail: the interval ends there
    rates = [1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    ratio = stats.speedup(rates, [1.0] * 6)
    assert (ratio.low, ratio.high) == (pytest.approx(1.01), pytest.approx(1.06)) and ratio.verdict == stats.FASTER
    assert ratio.median == pytest.approx(math.sqrt(1.03 * 1.04))
    assert stats.speedup(rates, [1.0] * 6) == ratio, "the same samples give the same interval"
    assert stats.speedup([2.0], [1.0]).verdict == stats.TOO_FEW
    assert stats.speedup([3.0] * 8, [3.0] * 8).verdict == stats.NO_DIFFERENCE


@pytest.mark.parametrize(
    "candidate, baseline", [([1.0, 2.0], [1.0]), ([], []), ([1.0, 0.0], [1.0, 1.0]), ([math.nan], [1.0])]
)
def test_runs_without_a_partner_or_a_rate(candidate, baseline):
    with pytest.raises(ValueError):
        stats.speedup(candidate, baseline)


def test_percentiles_need_samples_beyond_them():
    assert stats.percentile(range(99), 99) is None and stats.percentile(range(101), 99) == 99.0
    assert (
        stats.percentile(range(19), 95) is None
        and stats.percentile([5.0], 50) == 5.0
        and stats.percentile([], 50) is None
    )


def test_runs_alternate():
    assert [name for _, name in alternate_runs(["A", "B"], 4)] == list("ABBAABBA")
    assert [name for _, name in alternate_runs(["A", "B", "C"], 2)] == list("ABCCBA")


def test_differences_of_scores_have_an_error():
    def apart(
        score: float, error: float | None, baseline: float, baseline_error: float | None, items: int | None = 200
    ):
        return stats.difference(stats.Score(score, error, items), stats.Score(baseline, baseline_error, 200))

    assert apart(0.50, 0.03, 0.46, 0.04) == (pytest.approx(0.04), pytest.approx(0.05), stats.NO_DIFFERENCE)
    assert apart(0.60, 0.03, 0.46, 0.04)[2] == "higher" and apart(0.2, 0.0283, 0.4, 0.0347)[2] == "lower"
    assert apart(0.9, None, 0.1, 0.02) == (pytest.approx(0.8), None, stats.NO_ERROR) == apart(0.9, 0.02, 0.1, None)
    assert apart(0.9, 0.05, 0.1, 0.02, items=29)[2] == apart(0.9, 0.05, 0.1, 0.02, items=None)[2] == stats.TOO_FEW_ITEMS


def test_models_of_equal_accuracy_are_rarely_called_different():
    """All outcomes of two models that answer each item rightly with probability p, weighted by how likely they are."""

    def rate_of_verdicts(n: int, m: int, p: float) -> float:
        def outcomes(items: int):
            for right in range(items + 1):
                share = right / items
                error = math.sqrt(share * (1 - share) / (items - 1))  # as quality.evaluate.mean_and_stderr has it
                yield math.comb(items, right) * p**right * (1 - p) ** (items - right), stats.Score(share, error, items)

        return sum(
            one * other
            for one, score in outcomes(n)
            for other, baseline in outcomes(m)
            if stats.difference(score, baseline)[2] != stats.NO_DIFFERENCE
        )

    least = stats.LEAST_ITEMS
    assert max(rate_of_verdicts(least, least, p) for p in (0.01, 0.05, 0.2, 0.335, 0.5)) < 0.04
    assert max(rate_of_verdicts(least, 100, p) for p in (0.01, 0.05, 0.2)) < 0.05, "no item right is not certainty"


def test_summary_of_speed_and_quality():
    rows = []
    for number in range(6):
        for name, rate in (("plain", 100.0), ("int4", 300.0 + number)):
            rows.append(
                {
                    "architecture": name,
                    "type": "speed",
                    "config": "decode",
                    "pass": number,
                    "throughput": rate,
                    "memory_gb": 2.0,
                    "flops": 10,
                }
            )
    for name, accuracy in (("plain", 0.5), ("int4", 0.3)):
        scores = {
            "mmlu": {"accuracy": accuracy, "stderr": 0.01, "correct": 500, "total": 1000},
            "perplexity": 12.5,
            "hellaswag": {"accuracy": accuracy, "stderr": None, "correct": 1, "total": 1},
            "humaneval": {
                "pass_at_k": {1: accuracy, 5: 0.6},
                "stderr": {1: 0.04, 5: 0.04},
                "problems": 164,
                "n": 10,
                "k": [1, 5],
            },
            "few": {"pass_at_k": {1: accuracy}, "stderr": {1: 0.0}, "problems": 3, "n": 1, "k": [1]},
        }
        rows += [{"architecture": name, "pass": 0} | row for row in quality_rows(scores)]
    rows.append({"architecture": "broken", "type": "failed", "pass": 0, "error": "RuntimeError: no"})
    table = summarize(build_frame(rows), "plain").set_index(["architecture", "config"])
    fast = table.loc[("int4", "decode")]
    assert fast.speedup == pytest.approx(3.025, rel=1e-5) and fast.verdict == "faster"
    assert fast.speedup_low <= 3.025 <= fast.speedup_high
    assert table.loc[("plain", "decode")].verdict == "baseline" and fast.throughput == 302.5 and fast.runs == 6
    worse = table.loc[("int4", "mmlu")]
    assert worse.accuracy_difference == pytest.approx(-0.2) and worse.accuracy_difference_stderr == pytest.approx(
        0.01 * 2**0.5
    )
    assert worse.verdict == "lower" and table.loc[("int4", "humaneval pass@5")].verdict == "no difference"
    assert table.loc[("int4", "humaneval pass@1")].verdict == "lower"
    one = table.loc[("int4", "hellaswag")]
    assert one.verdict == "no standard error" and math.isnan(one.stderr) and math.isnan(one.accuracy_difference_stderr)
    assert table.loc[("int4", "few pass@1")].verdict == "too few items"
    assert ("int4", "perplexity") not in table.index
    assert table[table.type == "failed"].error.tolist() == ["RuntimeError: no"]
    with pytest.raises(ValueError, match="int8.*plain, int4, broken"):
        summarize(build_frame(rows), "int8")


def llama_step_flops(config, positions: int, queries: int, logits: int) -> int:
    """Products of a forward of `queries` tokens that see `positions`, with logits of `logits` of them; by llama's formulas."""
    h, kv = config.hidden_size, config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    linear = 2 * queries * (h * h * 2 + 2 * h * kv + 3 * h * config.intermediate_size)
    attention = 4 * queries * positions * h
    rotary = (
        2 * queries * (config.hidden_size // config.num_attention_heads // 2)
    )  # angles, an outer product, once a forward
    return config.num_hidden_layers * (linear + attention) + 2 * logits * h * config.vocab_size + rotary


def test_generation_counts_what_it_did():
    model = build_model("llama")
    benchmark = ArchitectureBenchmark(model, "cpu")
    own = model.generation_config
    result = benchmark.benchmark_generation(7, 5, num_runs=20)
    assert result.name == "gen_p7_l5" and model.generation_config is own
    assert result.throughput == pytest.approx(5 / (result.latency_p50 / 1e3))
    assert (
        result.latency_p50 <= result.latency_p95 and result.latency_p99 is None
    )  # 20 runs say nothing of one in a hundred
    steps = [llama_step_flops(model.config, 7, 7, 1)] + [
        llama_step_flops(model.config, 7 + n, 1, 1) for n in range(1, 5)
    ]
    assert result.flops == pytest.approx(sum(steps), rel=1e-3)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    cache = 2 * 3 * 2 * 8 * (7 + 4) * 4  # keys and values of 3 layers, 2 heads of 8, 11 positions, in float32
    assert weights + cache < result.memory_gb * GB < weights + cache + 400_000


def test_batch_throughput_counts_what_it_did():
    model = build_model("llama")
    result = ArchitectureBenchmark(model, "cpu").benchmark_batch_throughput(3, 16, num_runs=100)
    assert result.name == "batch_b3_s16" and result.throughput == pytest.approx(48 / (result.latency_p50 / 1e3))
    assert result.latency_p99 >= result.latency_p95
    assert result.flops == pytest.approx(3 * llama_step_flops(model.config, 16, 16, 16), rel=1e-3)
    logits = 3 * 16 * VOCAB * 4
    assert result.memory_gb * GB > sum(parameter.nbytes for parameter in model.parameters()) + logits


def test_memory_is_the_weights_and_the_most_held():
    model = torch.nn.Linear(64, 32, bias=False)
    benchmark = ArchitectureBenchmark(model, "cpu")
    with benchmark.measure_memory() as memory:
        for _ in range(3):  # one after the other, so the peak is that of two blocks
            block = torch.ones(1 << 20, dtype=torch.uint8)
            twice = block + block
            del block, twice
    assert memory.peak_bytes == 64 * 32 * 4 + (2 << 20)


def test_a_batch_of_own_prompts_and_what_cannot_be():
    benchmark = ArchitectureBenchmark(build_model("opt"), "cpu")
    ids = torch.randint(3, VOCAB, (2, 9))
    assert benchmark.benchmark_generation(ids, 2, num_runs=1).name == "gen_p9_l2"
    for call, words in (
        (lambda: benchmark.benchmark_generation(0, 4), "prompt_tokens is 0"),
        (lambda: benchmark.benchmark_generation(4, 0), "generation_length is 0"),
        (lambda: benchmark.benchmark_generation(torch.ones(3), 4), r"ids \[batch, P\]"),
        (lambda: benchmark.benchmark_generation(120, 9), "129 positions"),
        (lambda: benchmark.benchmark_batch_throughput(1, 200), "200 positions"),
        (lambda: benchmark.benchmark_batch_throughput(1, 8, num_runs=0), "num_runs is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_architectures_in_one_process():
    """Models and makers of models, alternating; one that fails does not take the others along."""
    made = []

    def maker():
        made.append(1)
        return build_model("gpt_neox")

    def broken():
        raise RuntimeError("no such weights\nand more")

    opt = build_model("opt").train()
    config = {
        "device": "cpu",
        "generation": [(4, 3)],
        "batch": [(2, 8)],
        "passes": 2,
        "generation_runs": 2,
        "batch_runs": 2,
    }
    frame = compare_architectures({"opt": opt, "neox": maker, "broken": broken}, config)
    speed = frame[frame.type == "speed"]
    assert (
        speed["architecture"].tolist() == ["opt"] * 2 + ["neox"] * 4 + ["opt"] * 2 and len(made) == 2 and opt.training
    )
    assert speed["config"].unique().tolist() == ["gen_p4_l3", "batch_b2_s8"] and (speed.throughput > 0).all()
    assert frame[frame.type == "failed"].error.tolist() == ["RuntimeError: no such weights"]
    table = summarize(frame, "opt")
    assert set(table[(table.architecture == "neox")].verdict) == {"too few runs"}
    for wrong in ({"passes": 0}, {"generation": [], "batch": []}):
        with pytest.raises(ValueError):
            BenchmarkConfig(**wrong)


def test_warm_up_ends_when_loops_are_alike():
    assert loops.is_steady([9.0, 1.0, 1.04, 1.02], 0.05) and not loops.is_steady([1.0, 1.0], 0.05)
    assert not loops.is_steady([1.0, 1.06, 1.0], 0.05)


@pytest.mark.parametrize(
    "models, arms, shared, words",
    [
        (["opt-125m"], [], [], "1 arm was given"),
        ([], [], [], "nothing to compare"),
        (["opt-125m", "opt-125m"], [], [], "two arms are called opt-125m"),
        ([], ["int4 --model x", "b=--model y"], [], "write a name, ="),
        ([], ["a=--model 'x", "b=--model y"], [], "No closing quotation"),
        ([], ["a=--modle x", "b=--model y"], [], "arm a: there is no option --modle; did you mean --model?"),
        ([], ["a=--model x", "b=--model y --quant-bits 3"], [], "arm b: --quant-bits 3: choose one of 16, 8, 4, auto"),
        (
            [],
            ["a=--model x", "b=--model y --engine resident --cpu-offload"],
            [],
            "arm b: --engine resident keeps every weight",
        ),
        ([], ["a=--model x", "b=--model y --log_file z.log"], [], "arm b: --log-file is set by compare itself"),
        (["a", "b"], [], ["--dry-run"], "arm a: --dry-run is set by compare itself"),
        (["a", "b"], [], ["--trace", "./t.json"], "arm b: --trace ./t.json is also written by arm a"),
    ],
)
def test_arms_that_cannot_be_meant(models, arms, shared, words):
    with pytest.raises(UsageError) as refused:
        read_arms(models, arms, shared, parse_options)
    assert words in str(refused.value)


def test_arms_are_models_or_configurations():
    arms = read_arms(
        ["facebook/opt-125m", "other/opt-125m", "opt-1.3b"],
        ["half price=--quant_bits 4 --engine stream --batch-size 2"],
        ["--dummy", "--batch-size", "4"],
        parse_options,
    )
    assert [arm.name for arm in arms] == ["facebook/opt-125m", "other/opt-125m", "opt-1.3b", "half price"]
    assert [arm.config.batch_size for arm in arms] == [4, 4, 4, 2] and arms[3].config.quant_bits == 4
    assert arms[0].file_stem == "facebook_opt-125m" and all(arm.config.dummy for arm in arms)


def test_scores_are_asked_for_once():
    """Whatever run_model.py declares as an option about scores is dropped, and nothing else."""
    of_scores, others = [], []
    for row in option_rows(run_parser()):
        if row.options:
            words = [row.options[-1], *(["1"] if row.value else [])]
            (of_scores if row.group == "quality" else others).append(words)
    others.append(["facebook/opt-125m"])  # after an option about scores that takes no value, too
    assert (
        ["--pass-at-k", "1"] in of_scores and ["--perplexity-stride", "1"] in of_scores and ["--engine", "1"] in others
    )
    assert ["--allow-code-execution"] in of_scores
    mixed = [word for pair in zip_longest(others, of_scores, fillvalue=[]) for words in pair for word in words]
    assert speed_only(mixed) == [word for words in others for word in words]
    assert speed_only(["--model", "x", "--quality_data=data", "--quant-bits", "4"]) == [
        "--model",
        "x",
        "--quant-bits",
        "4",
    ]


def test_the_runs_without_scores_are_valid_too(tmp_path):
    need_lm_eval()
    (tmp_path / "perplexity.txt").write_text("words to be read " * 50)
    asked = [
        "--quality",
        "perplexity,humaneval",
        "--quality-data",
        str(tmp_path),
        "--perplexity-window",
        "64",
        "--perplexity-stride",
        "32",
        "--allow-code-execution",
        "--humaneval-samples",
        "4",
        "--pass-at-k",
        "1,2",
    ]
    arms = read_arms(["a", "b"], [], asked, parse_options)
    assert [arm.config.pass_at_k for arm in arms] == [(1, 2)] * 2
    assert all(parse_options(speed_only(arm.options)).quality == () for arm in arms)


def test_the_last_words_of_a_run(tmp_path):
    def why(output: str, code: int) -> str:
        (tmp_path / "out").write_text(output)
        return failure_reason(ChildRun(code, tmp_path / "out"))

    assert why("loading\nerror: does not fit\n[rank0] launcher's remark\n", 2) == "does not fit"
    assert why("loading\nKilled\n", 137) == "Killed (exit code 137)" and why("", 9) == "exit code 9, without output"


def test_every_arm_is_checked_before_any_run_and_one_that_may_not_fit_is_warned_of(
    tmp_path, capfd, copied_runs, monkeypatch
):
    """The first arm is estimated not to fit, and the check goes on to the second, of which only a run can see that it is wrong: the
    model has 2048 positions. So nothing is run, and no file of the current folder either."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "deepspeed.py").write_text("raise SystemExit('a file of the current folder was run')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    capfd.readouterr()
    code = console_main(
        [
            "zero-inference",
            "compare",
            "--arm",
            "big=--model opt-6.7b --engine stream --batch-size 65536",
            "--arm",
            "long=--model opt-125m --batch-size 2 --prompt-len 5000",
            "--num-gpus",
            "2",
            "--log-dir",
            str(tmp_path / "logs"),
            "--",
            "--dummy",
        ]
    )
    shown = capfd.readouterr()
    assert (
        code == 2
        and "warning: arm big: It does not fit. " in shown.err
        and "error: arm long: --prompt-len 5000 and --gen-len 32 need 5032 positions" in shown.err
        and not shown.out
    )
    assert "--dry-run" not in shown.err
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["big-check.out", "long-check.out"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_comparison_leaves_no_process(tmp_path, sent):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "zero_inference",
            "compare",
            "--model",
            "opt-125m",
            "--model",
            "opt-1.3b",
            "--log-dir",
            str(tmp_path),
            "--",
            "--dummy",
        ],
        cwd=ROOT,
        env=without_gpus(),
        start_new_session=True,
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
    options = ["--engine", "resident", "--prompt_len", "6", "--gen-len", "4", "--dtype", "float32", "--loops", "2"]
    code = console_main(
        [
            "zero-inference",
            "compare",
            "--arm",
            f"one=--model {folder}",
            "--arm",
            f"two=--model {folder}",
            "--arm",
            f"none=--model {broken}",
            "--rounds",
            "1",
            "--warmup-tries",
            "3",
            "--format",
            "json",
            "--log-dir",
            str(tmp_path),
            "--",
            *options,
        ]
    )
    shown = capfd.readouterr()
    report = json.loads(shown.out)
    assert code == 1 and "1 of 3 arms failed: none" in shown.err
    one, two, none = report["arms"]
    assert none["error"] and none["runs"] == 1 and "decode_throughput" not in none
    assert one["decode_verdict"] == "baseline" and two["decode_verdict"] == "too few runs"
    assert two["same_ids"] and two["decode_speedup_low"] <= two["decode_speedup"] <= two["decode_speedup_high"]
    assert one["step_samples"] == 2 * 2 * 3 and one["step_p99_s"] is None and one["peak_host_bytes"] > 0
    runs = [(run["arm"], run["pass"], run["status"]) for run in report["runs"]]
    assert runs == [("one", 0, "ok"), ("one", 1, "ok"), ("two", 0, "ok"), ("two", 1, "ok"), ("none", 0, "failed")]
    good = [run for run in report["runs"] if run["status"] == "ok"]
    ended = {
        f"{run['arm']}-{run['pass']}": (tmp_path / f"{run['arm']}-{run['pass']}.jsonl").stat().st_mtime_ns
        for run in good
    }
    assert sorted(ended, key=ended.get) == ["one-0", "two-0", "two-1", "one-1"], "timestamps are whole seconds"
    assert all(len(run["warmup_total_s"]) == 3 and run["warmed_up"] in (True, False) for run in good)


def test_an_estimate_comes_before_the_first_run(tmp_path, monkeypatch, no_gpu):
    """From the plan's prediction, or on a CPU from bytes and products at rates that take a moment to measure."""
    words = "--model opt-125m --dummy --engine resident --dtype float32 --prompt-len 16 --gen-len 5 --loops 2"
    arm = Arm("a", tuple(words.split()), parse_options(words.split()))
    assert command.predict_run_s(arm, read_plan(arm, tmp_path), 1) is None
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", str(tmp_path / "none.json"))
    assert check_arm(arm, ["--warmup", "1"], tmp_path) is None
    found = read_plan(arm, tmp_path)
    monkeypatch.setattr(command, "measure_quick_rates", lambda: (10.0, 50.0))
    step_s = found["sizes"]["weight_bytes"] / 10e9
    prefill_s = max(step_s, found["sizes"]["model_bytes"] * 16 / 50e9)
    loading_s = command.START_S + found["sizes"]["weight_bytes"] / command.LOADED_BYTES_PER_S
    assert command.predict_run_s(arm, found, 1) == pytest.approx(loading_s + 3 * (prefill_s + 4 * step_s))
    found["predicted"] |= {"prefill_s": 10.0, "decode_step_s": 1.0, "load_s": 7.0}
    assert command.predict_run_s(arm, found, 3) == pytest.approx(command.START_S + 7 + 5 * 14)
    assert command._about([30.0] * 4, [30.0] * 4) == ", about 2 min" and command._about([None, 1.0], [1.0, 1.0]) == ""
    assert command._about([60.0] * 4, [90.0] * 4).startswith(", about 4 min to 6 min, by how many warm-up loops")
    taken = command.RunTimes({"a": 5.0, "b": None})
    assert taken.expected_s(["a", "a"]) == 10 and taken.expected_s(["a", "b"]) is None
    memory, cores = measure_quick_rates()
    assert 0.1 < memory < 10_000 and 0.1 < cores < 1e6


def test_one_round_has_one_warm_up_loop_in_each_run(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(command, "_check_all", lambda arms, args, extra, *_: seen.append(extra))
    monkeypatch.setattr(command, "_run_all", lambda *_: pytest.fail("stop"))
    for more in ([], ["--rounds", "1"], ["--rounds", "1", "--warmup-tries", "4"]):
        with pytest.raises(pytest.fail.Exception):
            console_main(
                [
                    "zero-inference",
                    "compare",
                    "--model",
                    "opt-125m",
                    "--model",
                    "opt-1.3b",
                    *more,
                    "--log-dir",
                    str(tmp_path),
                ]
            )
    settled = ["--warmup-spread", "0.05"]
    assert seen == [["--warmup", "10", *settled], ["--warmup", "1"], ["--warmup", "4", *settled]]


def test_the_table_of_recorded_runs(tmp_path, capsys):
    """Every format from the same records, which are made up here: 6 passes, a third as fast, scores with errors."""
    from zero_inference.architectures import table
    from zero_inference.utils.tables import render, shown_columns

    arms = read_arms([], ["fp16=--model x", "int4=--model x --quant-bits 4", "gone=--model y"], [], parse_options)

    def record(slow: float, accuracy: float, number: int) -> dict:
        steps = [0.01 * slow * (1 + 0.001 * (number + step)) for step in range(10)]
        return {
            "status": "ok",
            "dtype": "float16",
            "loops": [{"step_s": steps}] * 2,
            "decode_throughput": 10 / sum(steps),
            "prefill_throughput": 500.0,
            "total_throughput": 9 / sum(steps),
            "peak_gpu_bytes": 3 << 30,
            "peak_host_bytes": 1 << 30,
            "weight_bytes": 1 << 30,
            "limit": {"fraction_of_limit": 0.9},
            "warmed_up": number > 0,
            "output_ids_sha256": str(slow),
            "quality": {"mmlu": {"accuracy": accuracy, "stderr": 0.02, "total": 500}},
        }

    runs = {
        "fp16": [(n, record(1.0, 0.6, n)) for n in range(6)],
        "int4": [(n, record(3.0, 0.5, n)) for n in range(6)],
        "gone": [(0, {"status": "failed", "error": "does not fit:\n20 GB"})],
    }
    rows = table.arm_rows(arms, runs, "fp16")
    fp16, int4, gone = rows
    assert (
        int4["decode_speedup"] == pytest.approx(1 / 3)
        and int4["decode_verdict"] == "slower"
        and int4["same_ids"] is False
    )
    assert (
        int4["prefill_verdict"] == "no difference"
        and int4["step_samples"] == 120
        and int4["step_p99_s"] > int4["step_p95_s"]
    )
    assert int4["quality"]["mmlu"]["difference"] == pytest.approx(-0.1) and int4["mmlu_verdict"] == "lower"
    assert fp16["unsettled_runs"] == 1 and gone["error"] == "does not fit: 20 GB"
    columns = table.columns(rows)
    first, *_ = csv.DictReader(io.StringIO(render(rows, columns, "csv")))
    assert float(first["decode_throughput"]) == fp16["decode_throughput"] and first["total_verdict"] == "baseline"
    columns, for_people = table.compact_for_display(columns, rows)
    text = render(for_people, shown_columns(for_people, columns), "md")
    assert (
        "0.333x (0.333 - 0.333)" in text and "does not fit: 20 GB" in text and "-0.1000" in text and "total" not in text
    )
    narrow = render(for_people, shown_columns(for_people, columns), "table", width=100, turn=True)
    assert max(map(len, narrow.splitlines())) <= 100 and "0.333x (0.333 - 0.333)" in narrow
    assert narrow.split()[:4] == ["arm", "fp16", "int4", "gone"]
    command._print_table(rows, "fp16", "table")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100 and "not settled" in " ".join(printed.split())
    runs["fp16"] = runs.pop("gone")
    runs["gone"] = []
    assert table.captions(table.arm_rows(arms[:2], runs, "fp16"), "fp16")[0] == "no speedup: the baseline fp16 failed"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "a", "--model", "b", "--baseline", "c"], "--baseline c: there is no such arm; the arms are a, b"),
        (["--model", "a", "--model", "b", "--rounds", "0"], "0 is less than 1"),
        (["--model", "a", "--model", "b", "--warmup-tries", "2"], "2 is less than 3"),
        (["--model", "a", "--model", "b", "--num-gpus", "2"], "arm a: --batch-size 1 does not divide"),
    ],
)
def test_bad_usage(options, words, capsys):
    try:
        code = console_main(["zero-inference", "compare", *options])
    except SystemExit as left:
        code = left.code
    shown = capsys.readouterr()
    assert code == 2 and words in shown.err and not shown.out


def test_warm_up_options_of_a_run(checkpoints, tmp_path):
    from zero_inference.records.read import read_records

    options = [
        "--model",
        str(checkpoints("opt")),
        "--prompt-len",
        "6",
        "--gen-len",
        "2",
        "--dtype",
        "float32",
        "--loops",
        "1",
        "--engine",
        "resident",
        "--log-file",
        str(tmp_path / "run.log"),
    ]
    assert console_main(["zero-inference", "run", *options, "--warmup", "8", "--warmup-spread", "0.99"]) == 0
    assert console_main(["zero-inference", "run", *options, "--warmup", "4", "--warmup-spread", "1e-9"]) == 0
    easy, hard = read_records(tmp_path / "run.jsonl")
    assert 3 <= len(easy["warmup_total_s"]) <= 8 and easy["cold_total_s"] == easy["warmup_total_s"][0]
    assert len(hard["warmup_total_s"]) == 4 and hard["warmed_up"] is False
    assert console_main(["zero-inference", "run", *options, "--warmup", "2", "--warmup-spread", "0.05"]) == 2
