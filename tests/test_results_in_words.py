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
from zero_inference.report.advice import advice
from zero_inference.report.results import cores_in_words, print_results, times_table
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
        (
            IN_STREAM,
            "the link was idle 40.0% of the time, mostly because the device computes longer than a layer copies",
        ),
        (
            LinkUse(
                steps=4,
                busy_s=6.0,
                slot_wait_s=0.0,
                host_late_s=0.0,
                step_start_s=0.0,
                copied_bytes=10**9,
                ahead_bytes=0,
            ),
            None,
        ),
        (
            TracedLinkUse(busy_s=3.0, idle_s=1.0, copied_bytes=10**9, gb_per_s_while_busy=1 / 3),
            "the link was idle 25.0% of the time, by the trace",
        ),
        (None, None),
    ],
)
def test_the_results_of_a_gpu(use, words, capsys):
    print_results(request(), result(use))
    lines = capsys.readouterr().out.splitlines()
    if words:
        assert lines.pop(-2) == words
    assert lines == [
        "m, stream, int4, batch 1, prompt 8, 5 generated",
        "median of 2 loops               seconds       min to max   token/s",
        "------------------------------------------------------------------",
        "time to first token (prefill)     0.500   0.490 to 0.510      16.0",
        "decode (4 steps)                  0.100   0.100 to 0.100      40.0",
        "total                             0.600   0.600 to 0.600      8.00",
        "GiB: model 24.0 at 16 bits, stored 6.50 (97.5% int4), KV cache 0.250, peak GPU 1.00, peak host 31.0",
        "80.0% of the link's limit: 0.931 GiB a step at 50.0 GB/s +- 1.0% (host to device, pinned)",
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


def test_advice_is_given_where_the_record_shows_what_helps():
    def said(share=0.958, bound="link", use=None, **changes):
        limit = replace(measured(None).limit, bound_by=bound, fraction_of_limit=share)
        return advice(request(**changes), replace(measured(use), limit=limit))

    busy = LinkUse(
        steps=4, busy_s=9.9, slot_wait_s=0.1, host_late_s=0.0, step_start_s=0.0, copied_bytes=10**9, ahead_bytes=0
    )
    assert said(use=busy, quant_bits=16) == [
        "the link is busy 99% of the time; only fewer bytes a token help: --quant-bits 4 or a larger --batch-size"
    ]
    assert said() == ["the link sets the speed; only fewer bytes a token help: a larger --batch-size"]
    assert said(kv_offload=True) == ["the link sets the speed"]
    assert "--cpu-compute auto or a larger" in said(cpu_compute="off")[0]
    assert said(bound="disk", cpu_offload=False)[0].startswith(
        "the disk sets the speed; only fewer bytes a token help: --cpu-offload"
    )
    assert said(share=0.8) == [] and said(bound="matmul") == [] and said(bound=None, share=None) == []
    assert said(share=0.17, engine="deepspeed") == [
        "83% of the link's speed is unused: --engine stream copies while it computes"
    ]
    assert said(share=0.8, pin_memory=False) == [
        "weights in host memory are not page-locked: --pin-memory 1 copies faster"
    ]
    on_cpu = replace(measured(None), device="cpu")
    assert advice(request(), on_cpu) == []


def test_a_step_far_from_its_limit_says_what_took_the_rest(capsys):
    """On a CPU a share of the limit of matrix products says little: what they take of a step, and what else does, says more."""

    def printed(bound: str, device: str, engine: str = "deepspeed") -> list[str]:
        of = measured(None)
        floors = replace(of.limit.floor_step_s, matmul=0.005, device_memory=0.005)
        limit = replace(of.limit, bound_by=bound, fraction_of_limit=0.2, floor_step_s=floors)
        made = result(None)
        loops = [
            *of.loops,
            Loop(prefill_s=0.5, decode_s=2.0, total_s=2.5, step_s=[0.5] * 4),
        ]  # slowed by other work, which the median is not
        made.measured = replace(of, limit=limit, device=device, loops=loops)
        print_results(request(engine=engine), made)
        return " ".join(capsys.readouterr().out.split("\nGiB: ")[1].split())

    products = "matrix products take 5.00 of the 25.0 ms of a step; the rest is starting operators"
    assert f"{products}, and fetching weights module by module, which a larger --batch-size shares" in printed(
        "matmul", "cpu"
    )
    assert f"{products}, which a larger" in printed("matmul", "cpu", "stream")
    assert "of the limit" not in printed("matmul", "cpu") and "of the limit" not in printed("device_memory", "cpu")
    on_gpu = printed("device_memory", "cuda")
    assert (
        "20.0% of the limit of device memory" in on_gpu
        and "reading weights and KV cache takes 5.00 of the 25.0 ms" in on_gpu
    )


def test_small_sizes_are_in_units_of_their_own(capsys):
    made = result(None)
    made.measured = replace(made.measured, model_bytes=263 << 20, weight_bytes=263 << 20, cache_bytes=3 << 20)
    print_results(request(), made)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model ")]
    assert line.startswith("model 0.257 GiB at 16 bits, stored 0.257 GiB (97.5% int4), KV cache 3 MiB, peak GPU 1 GiB")


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


def test_what_the_cores_read():
    moved = MovedPerStep(
        host_to_device_bytes_per_step=10**9,
        device_to_host_bytes_per_step=0,
        disk_read_bytes_per_step=0,
        cores_bytes_per_step=4 * 10**9,
        cores_busy_s_per_step=0.05,
    )
    assert cores_in_words(moved, 0.1, 90.0, True) == (
        "each step: 0.931 GiB copied to the device, 3.73 GiB read by the host's cores at 80.0 GB/s (planned: 90.0), busy 50%"
    )
    assert cores_in_words(moved, 0.1, None, True).endswith("at 80.0 GB/s, busy 50%")
    assert cores_in_words(
        MovedPerStep(
            host_to_device_bytes_per_step=0,
            device_to_host_bytes_per_step=0,
            disk_read_bytes_per_step=0,
            cores_bytes_per_step=4 * 10**9,
        ),
        0.1,
        None,
        False,
    ) == ("each step: 0 bytes fetched, 3.73 GiB read by the host's cores")
