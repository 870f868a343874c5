"""benchmarks/plan_candidates.py: which candidates are tried in which turn, and what follows from what they did."""

import json
import shlex
import sys

import pytest
import torch
from test_timing import FAST

from benchmarks import plan_candidates
from benchmarks.candidate_trials import Candidate, Trials
from zero_inference.hardware.profile import write_profile
from zero_inference.records.read import read_records
from zero_inference.utils.environment import describe_environment, rate_versions

# Stands for `zero-inference run`: a record of the rate that --model says; `fails` and `hangs` do what they say.
PROGRAM = """
import json, sys, time
value = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv[:-1]) if name.startswith("--")}
if value["--model"] == "fails":
    sys.exit("loading ...\\nerror: out of memory")
time.sleep(60 if value["--model"] == "hangs" else 0)
record = dict(status="ok", decode_throughput=float(value["--model"]), argv=sys.argv[1:])
open(value["--log-file"].removesuffix(".log") + ".jsonl", "a").write(json.dumps(record) + "\\n")
"""


def candidate(does, predicted, place=1, engine="stream", gib=0):
    """One that decodes `does` token/s when it is run."""
    row = dict(command=f"python run_model.py --model {does} --gpu-memory {gib}", tokens_per_s=predicted, place=place)
    row |= dict(engine=engine, quant_bits=4, gpus=1, weights="host", keys_and_values="device")
    row |= dict(host_bytes=8 * 10**9, device_bytes=16 * 10**9, prefill_s=0.5, step_s=8 / predicted)
    return Candidate(row["command"], predicted, row)


def trials_of(*pairs, results=None, gen_len=32):
    """Each pair by the (does, predicted) of its candidates, the best first."""
    found = {
        ("opt-30b", float(number)): [candidate(*each, place) for place, each in enumerate(pair, 1)]
        for number, pair in enumerate(pairs)
    }
    return Trials(found, results if results is not None else {}, gen_len)


def done(rate, tokens=17, failed=None):
    return dict(tokens=tokens, measured_tokens_per_s=rate, failed=failed, log="trials/01.jsonl")


def names(candidates):
    return [shlex.split(each.command)[3] for each in candidates]


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ran = []

    def command(name, ranks, *arguments):
        ran.append(arguments)
        return [sys.executable, str(path), *arguments]

    monkeypatch.setattr(plan_candidates, "isolated_ranks", command)
    return ran


@pytest.fixture
def run(tmp_path, program, monkeypatch):
    """Call the script with plans made by `trials_of`; its exit code and what candidates.json has then."""

    def call(pairs, *arguments):
        monkeypatch.setattr(plan_candidates, "plan_all", lambda args: trials_of(*pairs).pairs)
        code = plan_candidates.main([str(tmp_path / "results"), "--model", "opt-30b", *arguments])
        return code, json.loads((tmp_path / "results" / "candidates.json").read_text())

    return call


def test_a_plan_whose_best_failed_does_not_hold_and_another_failure_does_not_matter():
    first, second = trials_of([("9", 100), ("8", 90)]).due()
    for failed, other, holds in ((first, second, False), (second, first, True)):
        results = {failed.command: done(None, failed="error: out of memory"), other.command: done(1.0)}
        (row,) = trials_of([("9", 100), ("8", 90)], results=results).verdicts()
        assert row["holds"] == holds and row["tried"] == "2 of 2" and row["best_measured"] == 1.0


def test_each_is_run_as_its_command_says_and_written_down(run, program, tmp_path, capsys):
    code, found = run([[("100", 90), ("fails", 80), ("3", 10)]])
    assert code == 0
    options = [shlex.join(each) for each in program]
    assert options[0].startswith("run --model 100 --gpu-memory 0 --gen-len 17 --loops 1 --warmup 1 --log-file ")
    assert "--gen-len 5 " in options[2] and len(options) == 3
    rows = found["candidates"]
    assert [row["measured_tokens_per_s"] for row in rows] == [100, None, 3]
    assert [row["failed"] for row in rows] == [None, "error: out of memory", None]
    assert [row["predicted_tokens_per_s"] for row in rows] == [90, 80, 10] and rows[2]["log"] == "trials/03.jsonl"
    (record,) = read_records(tmp_path / "results" / "trials" / "03.jsonl")
    assert record["decode_throughput"] == 3
    out = capsys.readouterr().out
    assert out == (tmp_path / "results" / "table.md").read_text() and "3 of 3" in out and "100.0%" in out


def test_a_trial_that_hangs_is_ended(run, monkeypatch):
    monkeypatch.setattr(plan_candidates, "MIN_TIMEOUT_S", 1)
    monkeypatch.setattr(plan_candidates, "TIMEOUT_FACTOR", 0.01)
    code, found = run([[("hangs", 90)]])
    assert code == 1 and found["candidates"][0]["failed"] == "ended as it took longer than 1 s"


def test_what_cannot_be_done_is_refused(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        plan_candidates.main([str(tmp_path), "--model", "opt-30b", "--gen-len", "1"])
    assert ended.value.code == 2 and "--gen-len 1: at least 2" in capfd.readouterr().err
    (tmp_path / "candidates.json").write_text("[]")
    assert plan_candidates.main([str(tmp_path), "--model", "opt-30b"]) == 2
    assert "candidates.json was not written by this script" in capfd.readouterr().err
    assert plan_candidates.main([str(tmp_path / "new"), "--model", "opt-30b", "--machine", "no-such"]) == 2
    assert "error: opt-30b with all GiB: no plan (exit code 2)" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine file has no GPU")
def test_a_small_model_is_planned_and_every_candidate_runs(tmp_path, checkpoints, copied_runs, monkeypatch):
    here = {
        "gpus": (),
        "versions": rate_versions(describe_environment()),
        "link_gb_per_s": 10.0,
        "device_gb_per_s": 20.0,
    }
    write_profile(FAST.model_copy(update=here), tmp_path / "machine.json")
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", str(tmp_path / "machine.json"))
    sizes = "--batch-size 2 --prompt-len 8 --gen-len 6 --engine resident accelerate".split()
    results = tmp_path / "results"
    assert plan_candidates.main([str(results), "--model", str(checkpoints("llama")), *sizes]) in (0, 1)
    rows = json.loads((results / "candidates.json").read_text())["candidates"]
    assert len(rows) == 2 and all(row["measured_tokens_per_s"] > 0 and row["gpu_memory"] == "all" for row in rows)
    for row in rows:
        (record,) = read_records(results / row["log"])
        assert record["decode_throughput"] == row["measured_tokens_per_s"] and record["gen_len"] == row["tokens"]
        assert record["dummy"] and len(record["warmup_total_s"]) == len(record["loops"]) == 1
    assert "2 of 2" in (results / "table.md").read_text()
