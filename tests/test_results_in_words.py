"""What a run on a GPU prints and records, from committed records: no machine without one makes these."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT, replace

from zero_inference.records.hardware import LinkUse, TracedLinkUse
from zero_inference.records.read import read_records
from zero_inference.records.schema import Loop, Measured, MovedPerStep, Record
from zero_inference.records.write import RunLog
from zero_inference.report.results import cpu_in_words, faster_in_words, limit_in_words, print_results, times_table

DOCS = ROOT / "benchmarks" / "results" / "h200-big-models" / "docs"


def record_of(name: str, **changes) -> Record:
    (file,) = DOCS.glob(f"*{name}*.jsonl")
    return Record.read(read_records(file)[-1] | changes)


@pytest.fixture
def measured() -> Measured:
    return record_of("opt-13b").result.measured


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_pages_show_what_the_run_of_their_example_prints(page, capsys):
    record = record_of("opt-13b")
    print_results(record.request, record.result)
    assert capsys.readouterr().out in (ROOT / page).read_text()


TIMELINE = dict(steps=4, busy_s=6.0, slot_wait_s=3.0, host_late_s=0.3, step_start_s=0.7, copied_bytes=1, ahead_bytes=0)
TRACED = dict(busy_s=3.0, idle_s=1.0, copied_bytes=10**9, gb_per_s_while_busy=1 / 3)


@pytest.mark.parametrize("use, words", [
    (LinkUse(**TIMELINE), "40.0% of the time, mostly because the device computes longer than a layer copies"),
    (TracedLinkUse(**TRACED), "25.0% of the time, by the trace"),
])  # fmt: skip
def test_an_idle_link_and_scores_are_printed(use, words, capsys):
    scores = {"accuracy": 0.5, "stderr": 0.25, "correct": 2, "total": 4, "outcomes": "0110", "accuracy_in_dtype": None}
    record = record_of("llama-2-13b", quality={"mmlu": scores | {"batch_size": 1, "truncated": 0, "seconds": 2.0}})
    result = record.result.model_copy(update={"measured": replace(record.result.measured, link_use=use)})
    print_results(record.request, result)
    lines = capsys.readouterr().out.splitlines()
    assert f"the link was idle {words}" in lines and lines[-1] == "mmlu: accuracy 50.0% +- 25.0% (2 of 4)"
    assert "a decode step took 24.9 ms as one CUDA graph, 32.4 ms launched kernel by kernel" in lines


def test_predicted_times_stand_beside_the_measured_with_their_ranges(measured):
    predicted = replace(measured.predicted, prefill_s=0.25, decode_s=0.125)
    ranges = {"prefill_range_s": [0.2, 0.4], "decode_range_s": [0.12, 0.15]}
    lines = times_table(replace(measured, predicted=replace(predicted, **ranges))).splitlines()
    said = ["0.250 (0.200 to 0.400)", "0.125 (0.120 to 0.150)", "0.375 (0.320 to 0.550)"]
    assert [line.split("  ")[-1].strip() for line in lines[2:]] == said and max(map(len, lines)) <= 100
    lines = times_table(replace(measured, predicted=replace(predicted, prefill_s=None))).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["-", "0.125", "-"]


def test_a_run_of_one_loop_or_of_one_token_has_no_row_or_column_for_what_it_lacks(measured):
    one = Loop(prefill_s=0.5, decode_s=0.0, total_s=0.5, step_s=[])
    lines = times_table(replace(measured, loops=[one], decode_throughput=None, predicted=None)).splitlines()
    assert lines[0].split() == ["1", "loop", "seconds", "token/s"]
    assert [line.split()[0] for line in lines[2:]] == ["time", "total"]


@pytest.mark.parametrize(
    "share, bound, changes, options",
    [
        (0.95, "link", dict(quant_bits=16), ["--quant-bits 4", "a larger --batch-size"]),
        (0.95, "link", dict(kv_offload=True), []),
        (0.95, "link", dict(cpu_compute="off"), ["--cpu-compute auto", "a larger --batch-size"]),
        (0.95, "disk", {}, ["a larger --host-memory or --gpu-memory", "a larger --batch-size"]),
        (0.95, "disk", dict(engine="deepspeed"), ["--cpu-offload", "a larger --batch-size"]),
        (0.80, "link", {}, []),
        (0.80, "link", dict(pin_memory=False), ["--pin-memory 1"]),
        (0.17, "link", dict(engine="deepspeed"), ["--engine stream"]),
        (0.20, "matmul", {}, ["a larger --batch-size"]),
        (None, None, {}, []),
    ],
)
def test_options_are_named_where_the_record_shows_what_helps(measured, share, bound, changes, options):
    request = record_of("opt-13b").request
    request = replace(request, **dict(engine="stream", quant_bits=4, pin_memory=True, cpu_compute="auto") | changes)
    limit = replace(measured.limit, bound_by=bound, fraction_of_limit=share)
    line = faster_in_words(request, replace(measured, limit=limit)) or ""
    assert line.count(", ") + bool(line) == len(options) and all(option in line for option in options)
    assert faster_in_words(request, replace(measured, limit=limit, device="cpu")) is None


@pytest.mark.parametrize(
    "rates, source",
    [
        (dict(disk_alone_gb_per_s=2.0), ""),
        (dict(disk_alone_gb_per_s=1.75), " (measured in the loops; reads alone: 1.75 GB/s)"),
        ({}, ""),  # an older record
    ],
)
def test_the_line_of_the_disks_limit_reports_what_measured_it(measured, rates, source):
    of_disk = replace(measured.limit.rates, disk_gb_per_s=2.0, **rates)
    limit = replace(measured.limit, bound_by="disk", fraction_of_limit=0.98, rates=of_disk)
    moved = replace(measured.transfers, disk_read_bytes_per_step=2**30)
    found = limit_in_words(replace(measured, limit=limit, transfers=moved))
    assert found == f"98.0% of the disk's limit: 1 GiB a step at 2.00 GB/s{source}"


def test_what_the_cpu_reads(measured):
    gb = 10**9
    moved = replace(MovedPerStep.unknown(), host_to_device_bytes_per_step=gb, cores_bytes_per_step=4 * gb)
    loop = Loop(prefill_s=0.5, decode_s=0.1, total_s=0.6, step_s=[0.025] * 4)
    words = "each step: 0.931 GiB copied to the device, 3.73 GiB read by the CPU at 320 GB/s, busy 50%"
    moved = replace(moved, cores_busy_s_per_step=0.0125)
    assert cpu_in_words(replace(measured, transfers=moved, loops=[loop]), None) == words


def test_the_record_of_a_gpu_is_written_as_it_was(tmp_path):
    (old,) = read_records(next(DOCS.glob("*llama-2-13b*.jsonl")))
    record = Record.read(old)
    files = RunLog(tmp_path / "run.log", record.request, record.result)
    files.write()
    new = json.loads((tmp_path / "run.jsonl").read_text())
    assert not files.unwritten and old.keys() <= new.keys() and list(new["limit"]) == list(old["limit"])
    for key in ("limit", "loops", "transfers", "link_use", "environment", "decode_weights_gbps", "quality", "options"):
        assert new[key] == old[key]
    assert f"peak gpu mem: {old['peak_gpu_bytes'] / 2**30:.3f} GB" in (tmp_path / "run.log").read_text()
