"""What is measured, recorded and shown of a process that drives several devices; cuda devices here are stand-ins, whose calls are noted."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest
import torch
from conftest import ROOT, VOCAB, build_model, replace, too_few_gpus, write_record
from test_limits import ONE, link_use
from test_report import make_record

from zero_inference.cli import console_main, main
from zero_inference.config.run_config import RunConfig
from zero_inference.engines import resident
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import RunError
from zero_inference.kernels import rotary
from zero_inference.kernels.rotary import Form, Forms, rotary_kernel
from zero_inference.measure import engine_overhead, hardware_rates, loops, session
from zero_inference.measure.correctness import ReferenceLayers, check_copies_between
from zero_inference.measure.hardware_rates import LinkMonitor, update_rates
from zero_inference.measure.session import (
    link_use_in,
    loaded_model,
    measure_run,
    summarize_measurement,
    write_trace,
)
from zero_inference.models.mlp import choose_experts_reference
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.norms import ops
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import build_job
from zero_inference.records.hardware import GpuUse
from zero_inference.records.read import read_records
from zero_inference.records.schema import MovedPerStep, Record, StreamPlacement
from zero_inference.report.page import write_page
from zero_inference.report.results import print_results
from zero_inference.report.run import Run, label_runs
from zero_inference.utils import timing
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import detect_ranks, start_process_group

CPU = torch.device("cpu")
CUDA = tuple(torch.device("cuda", index) for index in range(2))
GB, GIB = 10**9, 1 << 30
COMMITTED = ROOT / "benchmarks" / "results"


@pytest.fixture
def gpus(monkeypatch):
    """Calls to GPUs in their order; `peaks` of a device's memory are taken one after the other."""
    calls, peaks = [], {device: [] for device in CUDA}
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: calls.append((name, device)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[device].pop(0))
    monkeypatch.setattr(
        hardware_rates, "host_to_device_rounds", lambda devices, *_: calls.append(("copies", devices)) or [110.0] * 3
    )
    return types.SimpleNamespace(calls=calls, peaks=peaks)


def test_links_are_measured_together_and_each_devices_peak_is_that_of_the_loops(gpus):
    link = LinkMonitor(replace(ONE, device=CUDA[0]), devices=CUDA)
    gpus.peaks[CUDA[0]], gpus.peaks[CUDA[1]] = [30, 20], [10, 50]
    for _ in range(3):  # before each of two loops and after the last
        link.between_loops()
    assert link.peak_bytes == [30, 50] and link.peak_gpu_bytes == 50
    each_time = [("synchronize", CUDA[0]), ("synchronize", CUDA[1]), ("copies", CUDA)]
    each_time += [("reset_peak_memory_stats", device) for device in CUDA]
    assert gpus.calls == 3 * each_time and link.rate() == (110.0, 0.0)


def test_a_loop_begins_when_all_devices_are_idle(gpus):
    loaded = LoadedModel(model=None, device=CPU, dtype=torch.float32, weight_bytes=0, devices=(CPU, CUDA[1]))
    clock = loops._StepClock(loaded, 1, lambda step: None, lambda: False)
    clock.start()
    assert gpus.calls == [("synchronize", CUDA[1])] and len(clock.marks) == 1
    timing.synchronize([CPU])
    assert len(gpus.calls) == 1


def test_the_rate_of_copies_is_the_sum_over_the_links(gpus):
    """Each of two links copied 110 GB in 2 s, so both together copy 110 GB/s, and 220 GB take no less than 2 s."""
    link = LinkMonitor(replace(ONE, device=CUDA[0]), devices=CUDA)
    link.rounds = [100.0] * 3
    link.uses = [link_use(4.0, copied_bytes=220 * GB)]
    assert link.copied_gb_per_s() == 110.0
    rates = update_rates(RATES, link, MovedPerStep.unknown())
    assert (rates.link_gb_per_s, rates.link_from) == (110.0, "loops")
    link.uses = [link_use(4.0, host_late_s=1.0, copied_bytes=220 * GB)]
    assert update_rates(RATES, link, MovedPerStep.unknown()).link_gb_per_s == 100.0, "a link was idle"


def test_a_link_that_copies_nothing_adds_no_rate():
    """A GPU may hold all of its layers."""
    link = LinkMonitor(ONE, timeline=TwoLinks(), devices=(CPU, CPU))
    link.between_loops()
    assert link.copied_gb_per_s() == 0.0
    link.between_loops()
    assert link.copied_gb_per_s() == 50.0


def test_rates_of_one_device_are_those_of_the_fastest_of_different_gpus(monkeypatch):
    names = dict(zip(CUDA, ("slow", "fast")))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.get)
    rates = {CUDA[0]: 900.0, CUDA[1]: 3000.0}
    assert hardware_rates._of_fastest(CUDA, rates.get) == 3000.0
    names[CUDA[1]] = "slow"
    assert hardware_rates._of_fastest(CUDA, rates.get) == 900.0, "of equal ones the first"

    def fails(device):
        raise torch.OutOfMemoryError

    assert hardware_rates._of_fastest(CUDA, fails) is None


def record_of(**changes) -> Record:
    """A run of two GPUs of one process, from the committed run of one."""
    (file,) = (COMMITTED / "h200-big-models" / "docs").glob("*opt-13b*.jsonl")
    return Record.read(read_records(file)[-1] | {"num_gpus": 2, "gpus": TWO} | changes)


TWO = [
    {"index": 0, "name": "NVIDIA H200", "peak_bytes": 3 * GIB, "weight_bytes": GIB,
     "host_to_device_bytes_per_step": 2 * GIB, "link_busy_share": 0.995, "link_gbps_while_busy": 55.25},
    {"index": 1, "name": "NVIDIA H200", "peak_bytes": 2 * GIB, "weight_bytes": None,
     "host_to_device_bytes_per_step": None, "link_busy_share": None, "link_gbps_while_busy": None},
]  # fmt: skip
RATES = record_of().result.measured.limit.rates
LINES = [
    "GPU 0: peak 3 GiB, 1 GiB of weights stay, 2 GiB a step over its link at 55.2 GB/s, busy 99.5%",
    "GPU 1: peak 2 GiB",
]


def test_a_run_prints_a_line_for_each_gpu(capsys):
    record = record_of()
    print_results(record.request, record.result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "opt-13b, deepspeed, fp16, 2 GPUs, batch 1, prompt 512, 32 generated"
    assert [line for line in lines if line.startswith("GPU ")] == LINES
    one = record_of(num_gpus=1, gpus=None)
    print_results(one.request, one.result)
    out = capsys.readouterr().out
    assert "\nGPU " not in out and out.startswith("opt-13b, deepspeed, fp16, batch 1")


def test_the_page_has_a_line_for_each_gpu_of_the_fastest_run(tmp_path):
    one = Run.read(record_of(num_gpus=1, gpus=None, decode_throughput=1.0).as_dict())
    write_page(tmp_path / "page.html", "logs", label_runs([Run.read(record_of().as_dict()), one]), False)
    page = (tmp_path / "page.html").read_text()
    assert all(line in page for line in LINES) and "deepspeed, host, fp16, 2 GPUs, batch 1" in page
    assert "GPUs used" in page


def test_gpus_are_written_as_they_were_read_and_left_out_for_one():
    assert record_of().as_dict()["gpus"] == TWO and record_of().as_dict()["num_gpus"] == 2
    without = record_of(gpus=None).as_dict()
    assert "gpus" not in without and without["environment"]["gpus"]
    assert record_of(gpus=[3, "x"]).result.measured.gpus is None


def test_reports_tell_runs_by_their_gpus_and_older_ones_by_their_ranks(tmp_path, capsys):
    runs = [
        make_record(model="one", num_gpus=1),
        make_record(model="two", num_gpus=2),
        make_record(model="old", world_size=4, device="cuda"),
        make_record(model="failed", num_gpus=None, status="failed", error="no memory"),
        make_record(model="cpus", num_gpus=0, world_size=2, device="cpu"),
    ]
    for record in runs:
        write_record(tmp_path / "runs.jsonl", record)
    assert console_main(["zero-inference", "report", str(tmp_path), "--format", "json"]) == 0
    rows = {row["model"]: row["num_gpus"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {"one": 1, "two": 2, "old": 4, "failed": 1, "cpus": None}
    said = [Run.read(record).processors for record in runs]
    assert said == [None, "2 GPUs", "4 GPUs", None, "2 ranks"]
    assert Run.read(make_record(world_size=2, device="cpu")).processors == "2 ranks", "an older one without a GPU"


def test_committed_records_without_the_number_of_gpus_have_one_for_each_rank():
    found = set()
    for path in COMMITTED.rglob("*.jsonl"):
        for data in read_records(path):
            if data.get("status") == "ok" and "world_size" in data and "num_gpus" not in data:
                gpus = Run.read(data).num_gpus
                assert gpus in (None, data["world_size"]), path
                found.add(gpus)
    assert found >= {1, 2}


def test_copies_between_devices_that_arrive_changed_end_a_run(monkeypatch):
    copied, to = [], torch.Tensor.to

    def broken(tensor, device):
        copied.append(device)
        return to(tensor, "cpu") * (copied[-2:] != [CUDA[1], CUDA[0]])

    monkeypatch.setattr(torch.Tensor, "to", broken)
    check_copies_between(CUDA[:1])
    assert not copied
    with pytest.raises(RunError, match="from cuda:1 to cuda:0 arrive changed.* --num-gpus 1"):
        check_copies_between(CUDA)
    assert copied == [CUDA[0], CUDA[1], CUDA[1], CUDA[0]]


class TwoLinks:
    """A timeline of two links, of which the second copied nothing."""

    def restart(self) -> None:
        pass

    def link_use(self):
        return self.by_device()[0]

    def by_device(self):
        return [link_use(2.0, slot_wait_s=0.5, copied_bytes=100 * GB, steps=4), None]


@pytest.mark.skipif(not too_few_gpus(1), reason="with GPUs the engine names its devices")
def test_a_record_has_a_gpu_for_each_device_of_its_process(checkpoints, tmp_path, monkeypatch):
    """The whole way from a loaded model to its record, with the CPU twice."""

    def load_on_two(*args):
        loaded = load(*args)
        loaded.devices, loaded.timeline = (CPU, CPU), TwoLinks()
        stream = {name: 3 for name, field in StreamPlacement.model_fields.items() if field.is_required()}
        loaded.facts["stream"] = stream | {"layers_by_gpu": [2, 1], "resident_bytes_by_gpu": [700, 300]}
        return loaded

    load, tried = resident.load, []
    monkeypatch.setattr(resident, "load", load_on_two)
    monkeypatch.setattr(session, "has_kernels", lambda *_: True)
    monkeypatch.setattr(
        session,
        "rotary_kernel",
        lambda model, device, dtype: tried.append(device) or rotary_kernel(model, device, dtype),
    )
    words = "--engine resident --dtype float32 --prompt-len 4 --gen-len 3 --loops 1 --warmup 0 --log-file"
    command = ["run_model.py", "--model", str(checkpoints("llama")), *words.split(), str(tmp_path / "run.log")]
    assert main(command) == 0
    (record,) = read_records(tmp_path / "run.jsonl")
    assert record["num_gpus"] == 0 and record["world_size"] == 1 and tried == [CPU, CPU]
    unknown = dict.fromkeys(GpuUse.model_fields) | {"index": 0}
    unknown["link_gbps_while_busy"] = unknown.pop("link_gb_per_s_while_busy")
    assert record["gpus"] == [
        unknown | {"weight_bytes": 700, "host_to_device_bytes_per_step": 25 * GB, "link_busy_share": 0.8, "link_gbps_while_busy": 50.0},
        unknown | {"weight_bytes": 300},
    ]  # fmt: skip
    assert record["stream"]["layers_by_gpu"] == [2, 1] and record["link_use"]["busy_s"] == 2.0
    assert Record.read(record).as_dict() == record


def test_a_run_over_two_devices_is_measured_and_its_layers_are_compared(checkpoints, tmp_path, monkeypatch):
    """The stream engine: each device's link has its bytes, which add up to the counted ones, and a wrong layer of either is found."""
    config = RunConfig(
        model=str(checkpoints("opt")), engine="stream", dtype="float32", batch_size=2, prompt_len=6, gen_len=9,
        gpu_memory=0, cpu_compute="off", loops=2, warmup=1,
    ).validate()  # fmt: skip
    ranks = detect_ranks()
    start_process_group(ranks)
    spec = resolve_model(config, ranks.device.type)
    job = build_job(config, spec, ranks)
    devices = CUDA if job.on_gpu else (CPU, CPU)
    plan = make_plan(replace(job, devices=devices, free_by_device=job.machine.free_device_bytes(devices)))
    ids, compared, differs = random_ids(0, 2, 6, VOCAB), [], ReferenceLayers._differs
    monkeypatch.setattr(
        ReferenceLayers, "_differs", lambda self, *args: compared.append(args[0]) or differs(self, *args)
    )
    with loaded_model(plan, Progress(enabled=False)) as (loaded, load_s, compare):
        found = measure_run(plan, loaded, ids, Progress(enabled=False), compare)
        measured = summarize_measurement(found, load_s, 0.0)
        write_trace(found, tmp_path / "trace.json")
    assert compared and len(found.link.uses) == 2 and measured.limit.rates.link_gb_per_s > 0
    counted = measured.transfers.host_to_device_bytes_per_step
    over_links = [gpu.host_to_device_bytes_per_step for gpu in measured.gpus]
    slot = loaded.facts["stream"]["slot_bytes"]
    steps = config.gen_len - 1
    assert len(over_links) == 2 and min(over_links) > 0
    assert sum(over_links) == pytest.approx(counted, abs=2 * slot / steps), "without the first copy of each link"
    use = measured.link_use
    assert use.busy_s == pytest.approx(sum(each.busy_s for each in loaded.timeline.by_device()))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_use_of_links_in_a_trace_is_summed_over_devices():
    def copy(ts, dur, device):
        name = "Memcpy HtoD (Pinned -> Device)"
        return {"cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": {"bytes": 1000, "device": device}}

    layers = [{"cat": "user_annotation", "name": "layer 0", "ts": ts, "dur": 1} for ts in (0, 100)]
    first = [copy(100, 50, 0), copy(160, 40, 0)]
    second = [copy(130, 10, 1), copy(150, 20, 1)]
    alone = [link_use_in(layers + copies) for copies in (first, second)]
    both = link_use_in(layers + second + first)
    assert [round(use.idle_s * 1e6) for use in alone] == [10, 10]
    assert both.busy_s == pytest.approx(120e-6) and both.idle_s == pytest.approx(20e-6) and both.copied_bytes == 4000


def test_the_rotary_kernel_is_tried_and_used_on_each_device(monkeypatch):
    model, forms = build_model("llama"), Forms(Form(1, False), None, None)
    devices = CPU, torch.device("meta")
    monkeypatch.setattr(rotary, "supported_forms", lambda own, device, dtype: forms)
    with rotary_kernel(model, devices[0], torch.float32), rotary_kernel(model, devices[1], torch.float32):
        replaced = vars(sys.modules[type(model).__module__])[rotary.NAME]
        assert replaced.forms == {(device, torch.float32): forms for device in devices}
    assert replaced.users == 0


def test_the_overhead_of_engines_is_measured_on_one_gpu(monkeypatch):
    """Without a profile, a plan would take all of them wherever weights are in host memory."""
    asked = {}

    def refuse(config, spec, ranks):
        asked[config.engine] = config.num_gpus
        raise RunError("nothing is loaded")

    monkeypatch.setattr(engine_overhead, "plan_run", refuse)
    monkeypatch.setattr(engine_overhead, "resolve_model", lambda *_: None)
    with contextlib.ExitStack() as stack:
        for engine, bits, options in engine_overhead.ENGINES:
            engine_overhead._load_or_print(engine, bits, options, "llama", replace(ONE, device=CUDA[0]), stack)
    assert asked == {"stream": 1, "resident": 1, "accelerate": None, "deepspeed": None}


@pytest.mark.skipif(too_few_gpus(2), reason="needs two GPUs")
def test_kernels_run_on_any_device_whichever_is_current():
    """Norms, rotation and routing on the second GPU while the first is current."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4096).to(torch.bfloat16), torch.randn(4096).to(torch.bfloat16)
    logits = torch.randn(5, 64)
    for device in CUDA:
        with torch.cuda.device(CUDA[1 - device.index]):
            found = ops.rms_norm(x.to(device), weight.to(device))
            assert found.device == device
            torch.testing.assert_close(found.cpu(), ops.rms_norm_ref(x, weight), rtol=1e-2, atol=1e-2)
            _, ids = torch.ops.zero_inference.choose_experts(logits.to(device), 8, True, True, True)
            assert torch.equal(ids.cpu(), choose_experts_reference(logits, 8, True, True, True)[1])
            model = build_model("llama", "bfloat16").to(device)
            tokens = torch.arange(3, 21, device=device).reshape(2, 9)
            expected = model(tokens).logits
            with torch.no_grad(), rotary_kernel(model, device, torch.bfloat16):
                assert torch.equal(model(tokens).logits, expected)
