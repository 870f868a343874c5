"""What a run on a GPU prints and records: typed results that no machine without one makes."""

from __future__ import annotations

import json

import pytest
from conftest import replace

from zero_inference.measure.steadiness import decode_spread
from zero_inference.planning.roofline import StepWork, decode_roofline
from zero_inference.records.hardware import Environment, LinkUse, Rates, TracedLinkUse
from zero_inference.records.schema import Loop, MachineLoad, Measured, MovedPerStep, Predicted, Quality, Request, Result
from zero_inference.records.write import RunLog
from zero_inference.report.results import cores_in_words, faster_in_words, print_results, times_table
from zero_inference.utils.environment import describe_environment

RATES = Rates(
    link_gb_per_s=50.0,
    link_spread=0.02,
    link_kind="host to device, pinned",
    device_copy_gb_per_s=2000.0,
    matmul_tflops=500.0,
    disk_gb_per_s=None,
)
MOVED = MovedPerStep(host_to_device_bytes_per_step=10**9, device_to_host_bytes_per_step=0, disk_read_bytes_per_step=0)
IN_STREAM = LinkUse(
    steps=4, busy_s=6.0, slot_wait_s=3.0, host_late_s=0.3, step_start_s=0.7, copied_bytes=240 * 10**9, ahead_bytes=0
)
LOOPS = [
    Loop(prefill_s=0.49, decode_s=0.1, total_s=0.6, step_s=[0.025] * 4),
    Loop(prefill_s=0.51, decode_s=0.1, total_s=0.6, step_s=[0.025] * 4),
]
SCORES = {"accuracy": 0.5, "stderr": 0.25, "correct": 2, "total": 4, "outcomes": "0110", "accuracy_in_dtype": None}


def measured(link_use) -> Measured:
    return Measured(
        model_bytes=24 << 30, cache_bytes=2**28, hidden_bytes=3, weight_bytes=13 << 29, load_s=1.0, compile_s=0.0, cold_total_s=None,
        warmup_total_s=[], warmed_up=None, settling_s=[], loops=LOOPS, evenness=decode_spread(LOOPS), prefill_latency_s=0.5,
        prefill_throughput=16.0, decode_latency_s=0.1, decode_throughput=40.0, total_latency_s=0.6,
        total_throughput=8.0, peak_gpu_bytes=2**30, peak_host_bytes=31 << 30, output_ids_sha256="ab", transfers=MOVED,
        decode_weights_gb_per_s=64.0, limit=decode_roofline(RATES, MOVED, 0, StepWork(10**9, 10**9), True, 4, 0.1),
        link_use=link_use, device="cuda",
    )  # fmt: skip


def result(link_use=IN_STREAM) -> Result:
    scores = SCORES | {"batch_size": 1, "truncated": 0, "seconds": 2.0}
    made = Result(
        machine=MachineLoad(load_average_before=0.5, usable_cores=2.0),
        measured=measured(link_use),
        quality=Quality(by_task={"mmlu": scores}),
        environment=Environment(**describe_environment()),
    )
    made.add_facts({
        "quantized_fraction": 0.975, "not_quantized": ["a"], "norm_modules_patched": 9, "norm_kernels_unused_because": None
    })  # fmt: skip
    return made


def request(**changes) -> Request:
    known = dict(
        timestamp="t", argv=[], engine="stream", model="org/m", model_type="opt", dtype="float16", world_size=1, num_nodes=1,
        batch_size=1, prompt_len=8, gen_len=5, quant_bits=4, quant_group_size=64, cpu_offload=True, disk_offload=False,
        kv_offload=False, norm_kernels="auto", dummy=True, pin_kv_cache=False, async_kv_offload=False, seed=0,
        pin_memory=True, cpu_compute="auto", cpu_threads=None, dummy_routing=None, options={}, weights_place="cpu",
    )  # fmt: skip
    return Request(**(known | changes))


@pytest.mark.parametrize(
    "use, words",
    [
        (IN_STREAM, "40.0% of the time, mostly because the device computes longer than a layer copies"),
        (
            TracedLinkUse(busy_s=3.0, idle_s=1.0, copied_bytes=10**9, gb_per_s_while_busy=1 / 3),
            "25.0% of the time, by the trace",
        ),
        (None, None),
    ],
)
def test_the_results_of_a_gpu(use, words, capsys):
    print_results(request(), result(use))
    lines = capsys.readouterr().out.splitlines()
    if words:
        assert lines.pop(-2) == f"the link was idle {words}"
    assert lines == [
        "m, stream, int4, batch 1, prompt 8, 5 generated",
        "median of 2 loops               seconds       min to max   token/s",
        "------------------------------------------------------------------",
        "time to first token (prefill)     0.500   0.490 to 0.510      16.0",
        "decode (4 steps)                  0.100   0.100 to 0.100      40.0",
        "total                             0.600   0.600 to 0.600      8.00",
        "model 24 GiB at 16 bits, stored 6.5 GiB (97.5% int4), KV cache 0.25 GiB, peak GPU 1 GiB, peak host",
        "  31 GiB",
        "80.0% of the link's limit: 0.931 GiB a step at 50.0 GB/s (host to device, pinned, +- 1.0%)",
        "mmlu: accuracy 50.0% +- 25.0% (2 of 4)",
    ]


def test_what_was_predicted_stands_beside_it():
    sizes = {field: 1 for field in Predicted.model_fields if "bytes" in field}
    predicted = Predicted(load_s=None, prefill_s=0.25, decode_s=0.125, bound_by="link", **sizes)
    lines = times_table(replace(measured(None), predicted=predicted)).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["0.250", "0.125", "0.375"]
    ranges = {"prefill_range_s": [0.2, 0.4], "decode_range_s": [0.12, 0.15]}
    lines = times_table(replace(measured(None), predicted=replace(predicted, **ranges))).splitlines()
    said = ["0.250 (0.200 to 0.400)", "0.125 (0.120 to 0.150)", "0.375 (0.320 to 0.550)"]
    assert [line.split("  ")[-1].strip() for line in lines[2:]] == said and max(map(len, lines)) <= 100
    lines = times_table(replace(measured(None), predicted=replace(predicted, prefill_s=None))).splitlines()
    assert lines[0].endswith("predicted (s)") and [line.split()[-1] for line in lines[2:]] == ["-", "0.125", "-"]


def test_a_run_of_one_loop_or_of_one_token_has_no_row_or_column_for_what_it_lacks():
    one = Loop(prefill_s=0.5, decode_s=0.0, total_s=0.5, step_s=[])
    lines = times_table(replace(measured(None), loops=[one], decode_throughput=None)).splitlines()
    assert lines[0].split() == ["1", "loop", "seconds", "token/s"]
    assert [line.split()[0] for line in lines[2:]] == ["time", "total"]


@pytest.mark.parametrize(
    "share, bound, changes, options",
    [
        (0.95, "link", dict(quant_bits=16), ["--quant-bits 4", "a larger --batch-size"]),
        (0.95, "link", dict(kv_offload=True), []),
        (0.95, "link", dict(cpu_compute="off"), ["--cpu-compute auto", "a larger --batch-size"]),
        (0.95, "disk", dict(cpu_offload=False), ["--cpu-offload"]),
        (0.80, "link", {}, []),
        (0.80, "link", dict(pin_memory=False), ["--pin-memory 1"]),
        (0.17, "link", dict(engine="deepspeed"), ["--engine stream"]),
        (0.20, "matmul", {}, ["a larger --batch-size"]),
        (None, None, {}, []),
    ],
)
def test_options_are_named_where_the_record_shows_what_helps(share, bound, changes, options):
    limit = replace(measured(None).limit, bound_by=bound, fraction_of_limit=share)
    line = faster_in_words(request(**changes), replace(measured(None), limit=limit))
    assert (line or "").count(", ") + bool(line) == len(options) and all(option in line for option in options)
    assert faster_in_words(request(**changes), replace(measured(None), limit=limit, device="cpu")) is None


def test_the_record_of_a_gpu_has_the_keys_of_schema_1(tmp_path):
    files = RunLog.at(tmp_path / "run.log", request(), result())
    files.write()
    assert not files.unwritten
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert list(record["link_use"]) == [
        "steps", "busy_s", "slot_wait_s", "host_late_s", "step_start_s", "copied_bytes", "ahead_bytes", "gbps_while_busy"
    ]  # fmt: skip
    assert record["link_use"]["gbps_while_busy"] == pytest.approx(40.0)
    assert list(record["limit"]) == [
        "link_gbps", "link_spread", "link_kind", "device_copy_gbps", "matmul_tflops", "disk_gbps", "link_from",
        "link_ahead_bytes", "floor_step_s", "bound_by", "floor_decode_s", "fraction_of_limit",
    ]  # fmt: skip
    assert record["limit"]["floor_step_s"] == pytest.approx({"device_memory": 5e-4, "matmul": 2e-6, "link": 0.02})
    assert record["norm_modules_patched"] == 9 and record["norm_kernels_unused_because"] is None
    assert record["quality"] == {"mmlu": SCORES | {"batch_size": 1, "truncated": 0, "seconds": 2.0}}
    assert record["decode_weights_gbps"] == 64.0 and record["ds_config"] is None and "stream" not in record
    assert set(record["loops"][0]) == {"prefill_s", "decode_s", "total_s", "step_s"}
    assert "peak gpu mem: 1.000 GB" in (tmp_path / "run.log").read_text()


def test_what_the_cpu_reads():
    moved = replace(MOVED, cores_bytes_per_step=4 * 10**9, cores_busy_s_per_step=0.0125)
    words = "each step: 0.931 GiB copied to the device, 3.73 GiB read by the CPU at 320 GB/s, busy 50%"
    assert cores_in_words(moved, measured(None), None) == words
