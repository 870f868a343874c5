"""scripts/same_results.py finds what changed for users, and nothing that a machine measures."""

from __future__ import annotations

import copy
import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import same_results

RESULT = {
    "command": "CHECKOUT/run_model.py --engine stream",
    "code": 0,
    "stdout": ["model size: 0.251 GB", "prefill latency: # s"],
    "stderr": [],
    "files": ["logs/run.log"],
    "log": {"run.log": ["model size: 0.251 GB"]},
    "trace": {},
    "records": {
        "run.jsonl": [
            {
                "status": "ok",
                "output_ids_sha256": "ab12",
                "weight_bytes": 730880,
                "load_s": 0.25,
                "decode_throughput": None,
                "transfers": {"host_to_device_bytes_per_step": 566784},
                "loops": [{"prefill_s": 0.5, "step_s": [0.125, 0.25]}],
                "limit": {"link_gbps": 55.5, "bound_by": "device_memory"},
                "environment": {"cpu_model": "one"},
            }
        ]
    },
}


@pytest.fixture
def compared(tmp_path, capsys):
    """change(record, result) -> (exit code, printed lines) of RESULT beside one that `change` was called with."""

    def compare(change):
        changed = copy.deepcopy(RESULT)
        change(changed["records"]["run.jsonl"][0], changed)
        for folder, result in (("before", RESULT), ("after", changed)):
            (tmp_path / folder / "results").mkdir(parents=True)
            (tmp_path / folder / "results" / "one.json").write_text(json.dumps(result))
        code = same_results.compare(tmp_path / "before", tmp_path / "after")
        return code, capsys.readouterr().out.splitlines()

    return compare


@pytest.mark.parametrize(
    "change",
    [
        lambda record, result: None,
        lambda record, result: record.update(load_s=3),
        lambda record, result: record["loops"][0].update(prefill_s=7.0, step_s=[1.0, 2.0]),
        lambda record, result: record["limit"].update(link_gbps=14.5, bound_by="matmul"),
        lambda record, result: record["environment"].update(cpu_model="other"),
    ],
    ids=["nothing", "a time", "a loop", "a limit", "the machine"],
)
def test_what_is_measured_may_differ(compared, change):
    assert compared(change) == (0, ["1 runs, no difference"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda record, result: result.update(code=1), "one: code was 0, is 1"),
        (
            lambda record, result: record.update(output_ids_sha256="cd34"),
            'one: records.run.jsonl[0].output_ids_sha256 was "ab12", is "cd34"',
        ),
        (
            lambda record, result: record["transfers"].clear(),
            "one: records.run.jsonl[0].transfers.host_to_device_bytes_per_step is gone, was 566784",
        ),
        (lambda record, result: record.pop("load_s"), 'one: records.run.jsonl[0].load_s is gone, was "a number"'),
        (
            lambda record, result: record.update(decode_throughput=9.5),
            'one: records.run.jsonl[0].decode_throughput was null, is "a number"',
        ),
        (
            lambda record, result: record["loops"][0]["step_s"].pop(),
            'one: records.run.jsonl[0].loops[0].step_s was ["a number", "a number"], is ["a number"]',
        ),
        (lambda record, result: result["stderr"].append("warning"), "one: stderr after only: 'warning'"),
        (
            lambda record, result: result.update(log={"run.log": ["model size: 0.252 GB"]}),
            'one: log.run.log[0] was "model size: 0.251 GB", is "model size: 0.252 GB"',
        ),
    ],
    ids=["code", "tokens", "part of an object", "a measured key", "null", "a step", "stderr", "log"],
)
def test_what_users_see_is_a_difference(compared, change, words):
    assert compared(change) == (1, [words, "1 runs, 1 difference"])


def test_a_new_key_is_a_note(compared):
    code, lines = compared(lambda record, result: record["limit"].update(host_gbps=3.0))
    assert code == 0 and lines == [
        'note: one: records.run.jsonl[0].limit.host_gbps is new: "a number"',
        "1 runs, no difference, 1 notes",
    ]


def test_a_case_that_was_not_run_again_is_a_difference(tmp_path, capsys):
    for folder, cases in (("before", ("one", "two")), ("after", ("one",))):
        (tmp_path / folder / "results").mkdir(parents=True)
        for case in cases:
            (tmp_path / folder / "results" / f"{case}.json").write_text(json.dumps(RESULT))
    assert same_results.compare(tmp_path / "before", tmp_path / "after") == 1
    assert capsys.readouterr().out.splitlines() == ["two: was run before only", "1 runs, 1 difference"]
    assert same_results.compare(tmp_path / "before", tmp_path / "after", "o*") == 0


@pytest.mark.parametrize(
    "line, masked",
    [
        (
            "prefill latency: 0.008 s\tprefill throughput: 3006.292 token/s",
            "prefill latency: # s\tprefill throughput: # token/s",
        ),
        ("peak gpu mem: 1.250 GB\tcache size: 0.019 GB", "peak gpu mem: # GB\tcache size: 0.019 GB"),
        (
            "7.5% of the disk's limit: 1.2 GiB a step at 1.44 GB/s",
            "#% of LIMIT",
        ),
        ("0.9% of the limit of this machine's memory: copies at 9.1 GB/s", "#% of LIMIT"),
        ("median of 3 loops                seconds     min to max   token/s", "median of 3 loops"),
        ("decode (31 steps)                   1.95   1.94 to 1.97      15.9", "decode (31 steps) #"),
        (
            "GiB: model 0.251 at 16 bits, stored 0.502, KV cache 0.004, peak host 1.31",
            "GiB: model 0.251 at 16 bits, stored 0.502, KV cache 0.004, peak host #",
        ),
        ("  host memory  0.42 of 22.74 GiB free", "  host memory  0.42 of # GiB free"),
        ("quantized: 93.8% of the weights, 0.001 GB stored", "quantized: 93.8% of the weights, 0.001 GB stored"),
    ],
)
def test_only_measured_numbers_of_a_line_are_masked(line, masked):
    assert same_results.lines_of(line) == [masked]


def test_cases_have_names_of_their_own():
    names = [case.name for case in same_results.CASES]
    assert len(set(names)) == len(names)


def test_paths_are_named_by_their_role_also_where_one_lies_in_another(monkeypatch, tmp_path):
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    place = same_results.Place(checkout, tmp_path / "after", tmp_path / "after" / "inputs")
    said = f"{checkout}/.venv/bin/python {checkout}/run_model.py {tmp_path}/after/inputs/llama {tmp_path}/after/run.log"
    assert place.named(said) == "PYTHON/bin/python CHECKOUT/run_model.py INPUTS/llama FOLDER/run.log"
