import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zero_inference
from zero_inference import utils
from zero_inference.measure.session import output_ids_sha256
from zero_inference.records import schema
from zero_inference.records.read import parse_log, read_records
from zero_inference.records.schema import Loop, Record, Result
from zero_inference.records.write import append_record, as_json

ROOT = Path(zero_inference.__file__).resolve().parents[1]

# Section 4 of the contract, written out a second time on purpose.
REQUIRED = """
schema_version status timestamp argv engine model model_type dtype world_size num_nodes batch_size prompt_len
gen_len quant_bits quant_group_size cpu_offload disk_offload kv_offload norm_kernels dummy model_bytes cache_bytes
hidden_bytes weight_bytes load_s cold_total_s loops prefill_latency_s prefill_throughput decode_latency_s
decode_throughput total_latency_s total_throughput peak_gpu_bytes peak_host_bytes output_ids_sha256 transfers limit
ds_config environment
""".split()


COMMITTED = ROOT / "benchmarks" / "results" / "h100-predicted"


def good_record(**changes) -> dict:
    """A record as this version writes it, of a run that was committed."""
    line = json.loads(min(COMMITTED.glob("*.jsonl")).read_text().splitlines()[0])
    return as_json(Record.read({**line, **changes}))


def good_parts() -> dict:
    record = Record.read(good_record())
    return {"status": "ok", "request": record.request, "result": record.result}


def test_fields_are_those_of_the_contract():
    assert list(schema.REQUIRED) == REQUIRED
    assert schema.SCHEMA_VERSION == 1


def test_a_record_comes_back_as_written(tmp_path):
    path = tmp_path / "made" / "run.jsonl"
    first, second = good_record(), good_record(batch_size=3, seed=7, decode_spread=0.5)
    for record in (first, second):
        append_record(path, Record.read(record))
    assert path.read_bytes().count(b"\n") == 2
    assert read_records(path) == [first, second]
    assert list(first)[: len(REQUIRED)] == REQUIRED and second["batch_size"] == 3


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"result": Result()}, "lacks its measurements"),
        ({"status": "failed"}, "lacks its error"),
        ({"status": "good"}, "status"),
        ({"schema_version": 2}, "schema_version"),
        ({"note": "more"}, "note\n  Extra inputs"),
    ],
)
def test_a_record_that_is_not_whole_or_has_undeclared_keys_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Record(**good_parts() | changes)


def test_a_part_names_all_that_it_lacks_and_all_that_it_does_not_declare():
    with pytest.raises(ValueError) as error:
        Loop(prefill_s=1.0, decode_s="long", step_s=[], moved_bytes=1)
    assert [each["loc"] for each in error.value.errors()] == [("decode_s",), ("total_s",), ("moved_bytes",)]


def test_numbers_that_json_lacks_become_null_and_foreign_types_plain(tmp_path):
    path = tmp_path / "run.jsonl"
    record = Record.read(good_record())
    measured = record.result.measured.model_copy(
        update={"decode_throughput": math.nan, "load_s": math.inf, "peak_gpu_bytes": np.int64(5)}
    )
    ds_config = {"nested": [-math.inf, (1, np.arange(2))], 3: Path("a/b"), "flag": np.bool_(True)}
    engine = record.result.engine.model_copy(update={"ds_config": ds_config})
    result = record.result.model_copy(update={"measured": measured, "engine": engine})
    append_record(path, record.model_copy(update={"result": result}))
    back = json.loads(path.read_text(), parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    assert [back[k] for k in ("decode_throughput", "load_s", "peak_gpu_bytes")] == [None, None, 5]
    assert back["ds_config"] == {"nested": [None, [1, [0, 1]]], "3": "a/b", "flag": True}


def test_torn_lines_cost_no_other_record(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"torn": "\xc3')
    append_record(path, Record.read(good_record()))  # begins a new line
    with path.open("ab") as file:
        file.write(b'{"status": "ok", "mod')
    assert read_records(path) == [good_record()]
    assert f"{path}:1: skipped line that is no JSON object, and 1 more" in capsys.readouterr().err


def test_parse_log_reads_si_units_under_the_names_of_the_record(tmp_path, capsys):
    path = tmp_path / "run.log"
    sizes = [131399321792, 20535312384, 160432128]
    utils.write_benchmark_log(path, *sizes, None, 3.456, 2370.37, 52.789, None, 56.245, 9.103)
    with path.open("a") as file:
        file.write("model size: 1.000 GB\tcache si")  # a torn block between two whole ones
        file.write("\n")
    utils.write_benchmark_log(path, 2**30, *range(1, 10))
    first, second = parse_log(path)
    assert set(first) < set(REQUIRED)
    for key, size in zip(("model_bytes", "cache_bytes", "hidden_bytes"), sizes):
        assert abs(first[key] - size) <= utils.GB / 2000 + 1
    assert first["peak_gpu_bytes"] is None and first["decode_throughput"] is None
    assert first["prefill_latency_s"] == 3.456 and first["total_throughput"] == 9.103
    assert second["model_bytes"] == 2**30 and second["decode_latency_s"] == 6.0
    assert f"{path}: skipped" in capsys.readouterr().err


WRITER = """
import json, sys
from zero_inference import utils
from zero_inference.records.schema import Record
from zero_inference.records.write import append_record
folder, writer = sys.argv[1], int(sys.argv[2])
record = json.load(open(f"{folder}/record.json"))
print("ready", flush=True)
sys.stdin.readline()
for turn in range(4):
    record.update(model=f"{writer}/{turn}", argv=["x" * 997 * writer])
    append_record(f"{folder}/run.jsonl", Record.read(record))
    utils.write_benchmark_log(f"{folder}/run.log", 0, 0, 0, 0, writer, turn, 0, 0, 0, 0)
"""


WRITERS = 16


def test_processes_appending_at_once_lose_and_tear_nothing(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(good_record()))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(writer)], **pipes) for writer in range(WRITERS)]
    try:
        assert {writer.stdout.readline() for writer in writers} == {
            "ready\n"
        }  # all have started before the first may write
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for writer in writers:
            writer.communicate(timeout=60)
            assert writer.returncode == 0
    finally:
        for writer in writers:
            writer.kill()
    every = {(writer, turn) for writer in range(WRITERS) for turn in range(4)}
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert (
        len(lines) == 4 * WRITERS and {tuple(map(int, json.loads(line)["model"].split("/"))) for line in lines} == every
    )
    blocks = parse_log(tmp_path / "run.log")
    assert (tmp_path / "run.log").read_text().count("\n") == 16 * WRITERS == 4 * len(blocks)
    assert {(block["prefill_latency_s"], block["prefill_throughput"]) for block in blocks} == every


def test_output_ids_hash_is_of_int64_little_endian_rows():
    import torch

    ids = [[3, -1, 50271], [4, 5, 2**40]]
    across = torch.tensor(ids).T.contiguous().T  # not contiguous
    for given in (ids, torch.tensor(ids), np.array(ids, dtype=">i8"), across):
        assert output_ids_sha256(given) == hashlib.sha256(struct.pack("<6q", 3, -1, 50271, 4, 5, 2**40)).hexdigest()
    assert output_ids_sha256(np.array([[1, 2]], dtype=np.int32)) == output_ids_sha256([[1, 2]])
    for odd in ([1, 2, 3], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="ids must be integers"):
            output_ids_sha256(odd)
