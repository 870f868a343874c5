"""What a run on a GPU prints and records: typed results that no machine without one makes."""

from __future__ import annotations

import json

import pytest

from zero_inference.measure.steadiness import decode_evenness
from zero_inference.planning.limits import LeastWork, decode_limits
from zero_inference.records.limit import LinkUse, Rates, TracedLinkUse
from zero_inference.records.loops import Loop, MachineLoad, MovedPerStep
from zero_inference.records.run_log import RunLog
from zero_inference.records.schema import Measured, Quality, Request, Result
from zero_inference.records.scores import scores_of
from zero_inference.report.results import cores_in_words, print_results

RATES = Rates(50.0, 0.02, "host to device, pinned", 2000.0, 500.0, None)
MOVED = MovedPerStep(10**9, 0, 0)
IN_STREAM = LinkUse(4, 6.0, 3.0, 0.3, 0.7, 240 * 10**9, 0)
LOOPS = [Loop(0.5, 0.1, 0.6, [0.025] * 4), Loop(0.5, 0.1, 0.6, [0.025] * 4)]
SCORES = {"accuracy": 0.5, "stderr": 0.25, "correct": 2, "total": 4, "outcomes": "0110"}


def measured(link_use) -> Measured:
    return Measured(
        model_bytes=1, cache_bytes=2, hidden_bytes=3, weight_bytes=3 << 29, load_s=1.0, cold_total_s=None,
        warmup_total_s=[], warmed_up=None, settling_s=[], loops=LOOPS, evenness=decode_evenness(LOOPS), prefill_latency_s=0.5,
        prefill_throughput=16.0, decode_latency_s=0.1, decode_throughput=40.0, total_latency_s=0.6,
        total_throughput=8.0, peak_gpu_bytes=2**30, peak_host_bytes=5, output_ids_sha256="ab", transfers=MOVED,
        decode_weights_gb_per_s=64.0, limit=decode_limits(RATES, MOVED, 0, LeastWork(10**9, 10**9), True, 4, 0.1),
        link_use=link_use, device="cuda",
    )  # fmt: skip


def result(link_use=IN_STREAM) -> Result:
    scores = scores_of("mmlu", SCORES | {"batch_size": 1, "truncated": 0, "seconds": 2.0})
    made = Result(
        machine=MachineLoad(0.5, 2.0), measured=measured(link_use), quality=Quality({"mmlu": scores}), environment={}
    )
    made.add_facts({
        "quantized_fraction": 0.975, "not_quantized": ["a"], "norm_modules_patched": 9, "norm_kernels_unused_because": None
    })  # fmt: skip
    return made


@pytest.mark.parametrize(
    "use, words",
    [
        (
            IN_STREAM,
            "the link stood idle 40.0% of the time, mostly waiting for a free slot: the device computes longer",
        ),
        (LinkUse(4, 6.0, 0.0, 0.0, 0.0, 10**9, 0), "the link was hardly ever idle"),
        (TracedLinkUse(3.0, 1.0, 10**9, 1 / 3), "in the trace the link stood idle 25.0% of the time"),
        (None, None),
    ],
)
def test_the_results_of_a_gpu(use, words, capsys):
    print_results("the block", result(use))
    lines = capsys.readouterr().out.splitlines()
    said = [lines.pop(3)] if words else []
    assert all(line.startswith(words) for line in said)
    assert lines == [
        "the block",
        "decode latency of 2 loops: 0.100 to 0.100 s, 0.0% of the median apart",
        "decode moves 0.931 GiB to the device a step (host to device, pinned: 50.0 GB/s +- 1.0%) and runs at 80.0% of that limit",
        "quantized: 97.5% of the weights, 1.500 GB stored",
        "mmlu: accuracy 50.0% +- 25.0% (2 of 4)",
    ]


def test_the_record_of_a_gpu_has_the_keys_of_schema_1(tmp_path):
    request = Request(
        timestamp="t", argv=[], engine="stream", model="m", model_type="opt", dtype="float16", world_size=1, num_nodes=1,
        batch_size=1, prompt_len=8, gen_len=5, quant_bits=4, quant_group_size=64, cpu_offload=True, disk_offload=False,
        kv_offload=False, norm_kernels="auto", dummy=True, pin_kv_cache=False, async_kv_offload=False, seed=0,
        pin_memory=True, cpu_compute="auto", cpu_threads=None, options={}, weights_place="cpu",
    )  # fmt: skip
    files = RunLog.at(tmp_path / "run.log", request, result())
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


def test_what_the_cores_read():
    moved = MovedPerStep(10**9, 0, 0, 4 * 10**9, 0.05)
    assert cores_in_words(moved, 0.1, 90.0, True) == (
        "each decode step: 0.931 GiB copied to the device, 3.73 GiB read by the host's cores at 80.0 GB/s (90.0 measured before, beside a "
        "busy link), busy 50% of the time"
    )
    assert cores_in_words(moved, 0.1, None, True).endswith("at 80.0 GB/s, busy 50% of the time")
    assert cores_in_words(MovedPerStep(0, 0, 0, 4 * 10**9), 0.1, None, False) == (
        "each decode step: 0 bytes fetched, 3.73 GiB read by the host's cores"
    )
