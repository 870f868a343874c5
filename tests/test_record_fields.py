"""The record's keys are declared once: what runs write is what `zero-inference report --fields` describes."""

from __future__ import annotations

import json

import pytest
import transformers
from conftest import ROOT
from test_records import REQUIRED

from zero_inference.cli import console_main, main
from zero_inference.records.field import list_keys
from zero_inference.records.read import read_records
from zero_inference.records.schema import Record, Request, Result, StreamPlacement
from zero_inference.report.command import prediction_rows
from zero_inference.report.run import Run

ENGINES = {
    "resident": [],
    "stream": "--gpu-memory 0 --quant-bits 4 --quant-group-size 16 --cpu-compute 0.5".split(),
    "deepspeed": ["--cpu-offload"],
    "accelerate": ["--cpu-offload"],
}
FREE = ("ds_config", "environment.packages", "options")  # what is under them is named by others


def keys_of(value, under: str = "") -> set[str]:
    """Dotted names of all keys of a record, an object's in a list behind `[]`; written apart from the code that declares them."""
    if isinstance(value, list):
        return set().union(*(keys_of(item, f"{under[:-1]}[].") for item in value if isinstance(item, dict)))
    found = set()
    for name, item in value.items():
        found.add(f"{under}{name}")
        if isinstance(item, (dict, list)) and f"{under}{name}" not in FREE:
            found |= keys_of(item, f"{under}{name}.")
    return found


@pytest.fixture(scope="module")
def records(checkpoints, tmp_path_factory) -> dict[str, dict]:
    """A record of each engine."""
    folder, found = tmp_path_factory.mktemp("records"), {}
    for engine, options in ENGINES.items():
        assert main(run_of(checkpoints, folder / f"{engine}.log", "--engine", engine, *options)) == 0
        (found[engine],) = read_records(folder / f"{engine}.jsonl")
    return found


def run_of(checkpoints, log, *options: str) -> list[str]:
    sizes = ["--prompt-len", "6", "--gen-len", "5", "--loops", "1", "--warmup", "1", "--dtype", "float32"]
    return ["run_model.py", "--model", str(checkpoints("llama")), *sizes, "--log-file", str(log), *options]


def test_every_key_of_every_engines_record_is_described(records):
    known = {one.key for one in list_keys(Record)}
    for engine, record in records.items():
        assert keys_of(record) - known == set(), engine


def test_every_described_key_without_a_condition_is_in_some_record(records):
    written = set().union(*map(keys_of, records.values()))
    assert {one.key for one in list_keys(Record) if one.only_with is None} - written == set()
    ofstream = {one.key for one in list_keys(Record) if one.only_with == "--engine stream"}
    assert ofstream <= keys_of(records["stream"]) and not ofstream & keys_of(records["resident"])
    quantized = {"quantized_fraction", "not_quantized"}
    assert quantized <= records["stream"].keys() and not quantized & records["deepspeed"].keys()


def test_descriptions_are_whole_and_no_key_is_described_twice():
    names = [one.key for one in list_keys(Record)]
    assert len(names) == len(set(names)) and set(REQUIRED) <= set(names)
    assert [one.key for one in list_keys(Record) if not one.meaning] == []
    for one in list_keys(Record):
        for suffix, unit in (("_bytes", "byte"), ("_s", "s"), ("_gbps", "GB/s"), ("_tflops", "TFLOP/s")):
            assert not one.key.endswith(suffix) or one.unit == unit, one


def test_a_run_that_failed_records_what_it_knew(checkpoints, tmp_path, monkeypatch, capfd):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("in a loop")

    monkeypatch.setattr(transformers.GenerationMixin, "generate", fails)
    assert main(run_of(checkpoints, tmp_path / "failed.log", "--engine", "resident")) == 1
    (record,) = read_records(tmp_path / "failed.jsonl")
    assert record["status"] == "failed" and "in a loop" in record["error"] and list(record)[-1] == "error"
    assert set(REQUIRED) <= record.keys() and record["schema_version"] == 1 and record["engine"] == "resident"
    assert record["usable_cores"] > 0 and record["environment"]["cpu_model"] and record["seed"] == 0
    assert record["loops"] is None and record["limit"] is None
    asked = set(Request.model_fields)
    assert record.keys() == {
        *REQUIRED, *asked, "norm_modules_patched", "load_average_before", "usable_cores", "error"
    }  # fmt: skip


COMMITTED = sorted((ROOT / "benchmarks" / "results").rglob("*.jsonl"))


def test_committed_records_of_schema_1_are_all_read(capsys):
    known, whole = {one.key for one in list_keys(Record)}, []
    for path in COMMITTED:
        records = read_records(path)
        assert len(records) == sum(1 for line in path.read_text().splitlines() if line.strip()) > 0
        whole += [record for record in records if record.keys() >= {"schema_version", "loops"}]
    assert not capsys.readouterr().err
    assert all(record["schema_version"] == 1 and keys_of(record) <= known for record in whole)
    assert len(whole) > 50 and any("decode_spread" not in record for record in whole), "some are older than newer keys"


def test_a_fact_that_nobody_declares_is_refused():
    result = Result()
    with pytest.raises(ValueError, match=r"speed\n  Extra inputs are not permitted"):
        result.add_facts({"ds_config": {}, "speed": 1})
    stream = {name: 3 for name, field in StreamPlacement.model_fields.items() if field.is_required()}
    result.add_facts({"stream": stream, "norm_modules_patched": 5})
    assert result.engine.stream.slot_bytes == 3 and result.norm_modules_patched == 5


@pytest.mark.parametrize("format", ["table", "json"])
def test_fields_are_printed_without_a_folder_of_runs(format, capfd):
    assert console_main(["zero-inference", "report", "--fields", "--format", format]) == 0
    out, keys = capfd.readouterr().out, [one.key for one in list_keys(Record)]
    if format == "table":
        lines = [line for line in out.splitlines() if line.strip()][2:]
        assert [line.split()[0] for line in lines if not line.startswith("    ")] == keys
        return
    by_key = {row["key"]: row for row in json.loads(out)}
    assert list(by_key) == keys and by_key["limit.link_gbps"]["unit"] == "GB/s" and "loops[].step_s" in by_key
    assert by_key["stream.slot_bytes"]["meaning"].endswith("; only with --engine stream")


def test_records_say_what_was_predicted(records):
    for engine, record in records.items():
        predicted = record["predicted"]
        assert predicted["weight_bytes"] == record["weight_bytes"] and predicted["peak_gpu_bytes"] is None
        (row,) = prediction_rows([Run.read(record)])
        assert (row["engine"], row["weight_bytes"], row["peak_gpu_bytes"]) == (engine, 0, None)
        moved = record["transfers"]["host_to_device_bytes_per_step"]
        assert predicted["host_to_device_bytes_per_step"] == pytest.approx(moved, rel=0.01), engine
