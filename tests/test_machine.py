"""Plans for another machine: its description in a file or a line, and what the plan says of runs that an H200 has done."""

import json
import shlex

import pytest
import torch
from conftest import ROOT, empty_preset, replace

from benchmarks.predictions import options_of
from zero_inference.cli import main
from zero_inference.config.run_config import parse_options
from zero_inference.engines.base import Job
from zero_inference.engines.stream.cpu_plan import NO_LINK, why_no_cpu_compute
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine, resolve_machine
from zero_inference.hardware.profile import (
    MEASURED_WITH,
    AttentionRates,
    ConcurrentRates,
    CpuAttentionRate,
    CpuProductRate,
    CpuProfile,
    CpuWorkload,
    DeviceAttentionTime,
    DeviceProductRate,
    EngineOverhead,
    Gpu,
    HardwareProfile,
    LaunchOverhead,
    LoadingRates,
    concurrent_rates,
    interpolate,
    read_profile,
    write_profile,
)
from zero_inference.hardware.spec import CONTEXT_BYTES, cards, parse_assumed, typical_machines
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.kv_cache.host import SLOTS
from zero_inference.models.empty_model import build_empty_model
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import Plan, build_job
from zero_inference.planning.roofline import planned_step_bound
from zero_inference.records.read import read_records
from zero_inference.utils.ranks import Ranks, detect_ranks

GIB = 1 << 30
H200 = Gpu(name="NVIDIA H200", memory_bytes=140 * GIB, free_bytes=139 * GIB)


def rates(format: str, rows: int, cores: float, link: float = 50.0, hand_off_s: float = 1e-4) -> CpuProductRate:
    return CpuProductRate(
        format=format,
        rows=rows,
        link_gb_per_s=link,
        cores_gb_per_s=cores,
        cores_alone_gb_per_s=cores + 10,
        hand_off_s=hand_off_s,
    )


def work(format: str, rows: int, heads: int = 0) -> CpuWorkload:
    scheme = GroupQuantization(int(format[3:]), 64) if format.startswith("int") else None
    return CpuWorkload(torch.bfloat16, scheme, rows, 5120, heads)


CORES = CpuProfile(
    threads=15,
    instructions="amx",
    read_gb_per_s=120.0,
    products=(rates("int4", 1, 100.0), rates("int4", 8, 80.0), rates("int4", 32, 50.0, hand_off_s=3e-4)),
)
MACHINE = HardwareProfile(
    measured_with=MEASURED_WITH,
    source="measured",
    name="test",
    measured_at="2026-11-23T00:00:00+00:00",
    versions={"torch": "2.11", "deepspeed": None},
    gpus=(H200,),
    host_memory_bytes=120 * GIB,
    disk_free_bytes=None,
    link_gb_per_s=55.0,
    device_gb_per_s=4200.0,
    matmul_tflops={"bfloat16": 700.0},
    cores=CORES,
)


def test_a_description_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "machine.json"
    write_profile(replace(MACHINE, peers_gb_per_s="link"), path)
    assert read_profile(path).peers_gb_per_s == "link"
    write_profile(MACHINE, path)
    assert read_profile(path) == MACHINE
    written = json.loads(path.read_text())
    # keys as in the record
    assert written["link_gbps"] == 55.0 and written["cores"]["products"][2]["cores_gbps"] == 50.0


def damaged(**changes):
    return json.loads(MACHINE.model_dump_json(by_alias=True)) | changes


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "not JSON (EOF"),
        ("[1]", "all of it: input should be an object"),
        (damaged(host_memory_bytes="120 GiB"), "host_memory_bytes 120 GiB: input should be a valid integer"),
        (damaged(link_gbps=0), "link_gbps 0: input should be greater than or equal to 0.000000001"),
        (damaged(link_gbps=float("inf")), "link_gbps inf: input should be a finite number"),
        (damaged(link=55), "link is no key of this version"),
        (damaged(gpus=[{"name": "a", "memory_bytes": 5, "free_bytes": 6}]), "free_bytes 6 is more than memory_bytes 5"),
        (damaged(cores=damaged()["cores"] | {"products": damaged()["cores"]["products"] * 2}), "int4 with 1 rows 2"),
        (damaged(source="guessed"), "source guessed: input should be 'measured', 'datasheet' or 'assumed'"),
    ],
)
def test_a_file_that_cannot_be_is_refused_in_one_line(content, said, tmp_path, capfd):
    path = tmp_path / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["run_model.py", "--model", "opt-125m", "--dummy", "--dry-run", "--machine", str(path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: --machine {path}: ") and said in line
    assert line.endswith("`zero-inference link --save FILE` writes one.")


def test_what_is_assumed():
    found = parse_assumed(
        "gpus=2x24GiB, host=128GB,link=25GB/s,memory=1.0TB/s,matmul=150TFLOP/s,disk=3GB/s,disk_free=1TiB,cores=60GB/s"
    )
    gpu = Gpu(name="GPU with 24 GiB", memory_bytes=24 * GIB, free_bytes=24 * GIB - CONTEXT_BYTES)
    assert found.gpus == (gpu, gpu) and found.host_memory_bytes == 128 * 10**9 and found.source == "assumed"
    assert (found.link_gb_per_s, found.device_gb_per_s, found.disk_gb_per_s) == (25.0, 1000.0, 3.0)
    assert found.disk_free_bytes == 1 << 40 and found.matmul_tflops == {"float16": 150.0, "bfloat16": 150.0}
    for kind, rows in (("bfloat16", 1), ("int4", 1000)):
        both = concurrent_rates(found, work(kind, rows))
        assert (both.cores_gb_per_s, both.link_gb_per_s, both.hand_off_s) == pytest.approx((60, 25, 0))
    assert parse_assumed("gpus=1x24,host=128") == parse_assumed("gpus=1x24GiB,host=128GiB")
    assert parse_assumed("gpus=0,host=1GiB").gpus == ()
    two = [parse_assumed(f"gpus=2x24GiB,host=1GiB,peers={peers}").peers_gb_per_s for peers in ("300GB/s", "link")]
    assert two == [300.0, "link"]


def test_what_was_measured_of_another_device_is_not_kept():
    """Neither of a GPU where there is none now, nor with another memory."""
    work = EngineOverhead(engine="deepspeed", quant_bits=4, start_s=0.0, step_piece_s=0.0, prefill_piece_s=0.0)
    attention = (DeviceAttentionTime(heads=1, key_heads=32, positions=160, seconds=8e-6),)
    known = replace(
        MACHINE,
        device_products=(DeviceProductRate(format="bfloat16", rows=1, gb_per_s=15.0),),
        launches=LaunchOverhead(operator_s=1e-5, step_s=1e-3, attention=attention, attention_gb_per_s=1700.0),
        engine_overheads=(work,),
        loading=LoadingRates(
            draw_gb_per_s=700.0, quantize_int8_gb_per_s=6.0, quantize_int4_gb_per_s=6.0, keep_gb_per_s=4.0
        ),
        pageable_link_gb_per_s=10.0,
        process_bytes=10**9,
    )
    without = parse_assumed("gpus=0", known)
    left = replace(MACHINE, gpus=(), source="assumed", name="test with gpus=0")
    gone = {"link_gb_per_s": None, "device_gb_per_s": None, "cores": None, "matmul_tflops": {}}
    assert without == left.model_copy(update=gone)
    faster = parse_assumed("memory=8000GB/s,link=110GB/s", known)
    assert (faster.device_products, faster.engine_overheads, faster.loading) == ((), (), None)
    assert faster.launches == LaunchOverhead(operator_s=1e-5, step_s=1e-3), "attention depends on the memory"
    assert (faster.pageable_link_gb_per_s, faster.process_bytes) == (20.0, 10**9)
    assert parse_assumed("pageable=5GB/s,link=110GB/s", known).pageable_link_gb_per_s == 5.0
    assert parse_assumed("host=64GiB", known).engine_overheads == (work,)


def test_a_measured_machine_with_other_numbers():
    found = parse_assumed("HOST=64gib, link=11GB/s", MACHINE)
    assert (found.host_memory_bytes, found.link_gb_per_s, found.source) == (64 * GIB, 11.0, "assumed")
    assert found.name == "test with HOST=64gib, link=11GB/s" and found.gpus == MACHINE.gpus
    assert [each.link_gb_per_s for each in found.cores.products] == [10.0] * 3, "beside the cores a fifth as fast, too"
    assert [each.cores_gb_per_s for each in found.cores.products] == [100.0, 80.0, 50.0]


def test_the_bound_of_what_the_cores_do_alone_and_of_what_is_not_known():
    line = "gpus=1x24GiB,host=128GiB,link=25GB/s,cores=60GB/s,memory=1000GB/s"
    options = "--model llama-2-13b --dummy --engine stream --quant-bits 4 --gpu-memory 0 --cpu-compute 1"
    all_of_it = planned(options, resolve_machine(None, line)).engine_plan
    assert all_of_it.fetched_bytes == 5120 * 2, "a row of the embedding"
    assert planned_step_bound(all_of_it, parse_assumed(line)) == ("cores", pytest.approx(all_of_it.cpu_bytes / 60e9))
    by_deepspeed = "--model llama-2-13b --dummy --cpu-offload"
    no_link = planned(by_deepspeed, resolve_machine(None, "gpus=1x24GiB,host=128GiB,memory=1000GB/s")).engine_plan
    assert planned_step_bound(no_link, no_link.job.machine.profile()) is None, "the link binds it, at an unknown rate"
    mixture = "--model qwen3-30b-a3b --dummy --engine stream --quant-bits 4"
    step_s = planned_step_bound(planned(mixture, resolve_machine(None, line)).engine_plan, parse_assumed(line))[1]
    assert 300 < 1 / step_s < 1000, "3.3 billion active weights in half a byte"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "--assume has an empty part: use gpus, host"),
        ("gpu=1x24GiB", "--assume gpu=1x24GiB: use gpus, host"),
        ("gpus=24GiB,host=1GiB", "gpus=24GiB: give it as in gpus=1x24GiB"),
        ("gpus=\u00b2x24GiB,host=1GiB", "give it as in gpus="),
        ("gpus=1x10MiB,host=1GiB", "a GPU has 1 GiB or more"),
        ("gpus=1x99999999999TiB,host=1GiB", "up to 1 PiB"),
        ("gpus=1x24GiB", "host missing; write it as in gpus="),
        ("gpus=1x24GiB,host=-1GiB", "host_memory_bytes -1073741824: input should be greater"),
        ("gpus=1x24GiB,host=1GiB,link=25", "link=25: give it as in link=25GB/s"),
        ("gpus=1x24GiB,host=1GiB,link=0GB/s", "link_gb_per_s 0.0: input should be greater"),
        ("gpus=1x24GiB,host=1GiB,cores=60GB/s", "depends on link; add link="),
        ("gpus=1x24GiB,host=1GiB,link=25GB/s,cores=60GB/s", "depends on memory; add memory="),
        ("gpus=2x24GiB,host=1GiB,peers=fast", "peers=fast: give it as in peers=300GB/s"),
        ("host=1GiB,host=2GiB", "host is given twice"),
    ],
)
def test_what_cannot_be_assumed(text, said, capfd):
    assert main(["run_model.py", "--model", "opt-125m", "--dummy", "--dry-run", "--assume", text]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("option", ["--machine", "--assume"])
def test_another_machine_is_only_planned_for(option, capfd):
    assert main(["run_model.py", "--model", "opt-125m", "--dummy", option, "gpus=1x24GiB,host=1GiB"]) == 2
    assert "belongs to --dry-run" in capfd.readouterr().err


def test_rates_between_those_that_were_measured():
    """Times grow in straight lines: what a token more costs."""
    points = {1: 1.0, 8: 2.0, 32: 8.0}
    assert [interpolate(points, x) for x in (0, 1, 8, 20, 40)] == [1.0, 1.0, 2.0, 5.0, 10.0]
    assert interpolate({1: 2.0, 8: 1.0}, 100) == 1.0 and interpolate({8: 3.0}, 1) == interpolate({8: 3.0}, 64) == 3.0
    found = concurrent_rates(MACHINE, work("int4", 20))
    assert isinstance(found, ConcurrentRates) and found.rows == 20
    assert 1 / found.cores_gb_per_s == pytest.approx((1 / 80 + 1 / 50) / 2) and found.hand_off_s == pytest.approx(2e-4)
    others = tuple(rates("int8", each.rows, 90.0, hand_off_s=3 * each.hand_off_s) for each in CORES.products)
    both = replace(CORES, products=(*CORES.products, *others))
    of_both = concurrent_rates(replace(MACHINE, cores=both), work("int4", 20))
    assert of_both.hand_off_s == pytest.approx(4e-4), "the median of both formats: it has nothing to do with them"
    assert of_both.cores_gb_per_s == found.cores_gb_per_s
    assert (found.link_alone_gb_per_s, found.read_gb_per_s, found.device_gb_per_s) == (55.0, 120.0, 4200.0)
    assert "the CPU's rate of int8 products is not known" in concurrent_rates(MACHINE, work("int8", 1))
    assert "the rate of the CPU is not known" in concurrent_rates(replace(MACHINE, cores=None), work("int4", 1))
    slower = replace(CORES.products[1], call_s=4e-5)
    with_calls = replace(CORES, products=(CORES.products[0], slower, CORES.products[2]))
    assert concurrent_rates(replace(MACHINE, cores=with_calls), work("int4", 20)).call_s == pytest.approx(2e-5)
    assert found.call_s == 0.0, "a file from before it was measured"


def test_rates_of_attention_are_those_of_its_heads():
    points = [
        CpuAttentionRate(format="bfloat16", heads=heads, gb_per_s=beside, alone_gb_per_s=alone)
        for heads, beside, alone in ((1, 80.0, 100.0), (8, 40.0, 50.0))
    ]
    attending = replace(MACHINE, cores=replace(CORES, attention=tuple(points)))
    by_heads = {heads: concurrent_rates(attending, work("int4", 1, heads)).attended for heads in (0, 1, 4)}
    assert by_heads[0] is None and by_heads[1] == AttentionRates(pytest.approx(80.0), pytest.approx(100.0))
    assert 1 / by_heads[4].alone_gb_per_s == pytest.approx(4 / 700 + 3 / 350)
    assert concurrent_rates(MACHINE, work("int4", 1, 1)).attended is None
    asked = "--model llama-2-13b --dummy --dtype bfloat16 --engine stream --quant-bits 4 --prompt-len 512 --gen-len 8"
    options = f"{asked} --kv-offload --batch-size 8"
    plans = [planned(options, Machine(each)).engine_plan for each in (attending, MACHINE)]
    assert [each.placement.host_bytes for each in plans] == [0, 0] and all(each.cpu.attends for each in plans)
    assert [each.cpu.rates.attention_gb_per_s(True) for each in plans] == [pytest.approx(100.0), 120.0]
    extra_s = plans[0].cpu.kv_bytes / 1e9 * (1 / 100 - 1 / 120)
    assert plans[0].cost_terms.step_cpu.wait_s - plans[1].cost_terms.step_cpu.wait_s == pytest.approx(extra_s)
    on_device = planned(asked, Machine(attending)).engine_plan
    assert on_device.cpu is None, "nothing for them in host memory"


def job_of(options: str, machine) -> Job:
    """Return what a plan of `options` for `machine` is made from."""
    config = parse_options([*shlex.split(options), "--dry-run"])
    ranks = machine.ranks_there(detect_ranks())
    spec = resolve_model(config, ranks.device.type)
    return build_job(config, spec, ranks, machine=machine, empty_model=empty_preset(spec))


def planned(options: str, machine):
    return make_plan(job_of(options, machine))


def test_fetched_experts_leave_the_reserve_of_device_memory_alone():
    """Their memory comes out of the ring's, where that has slots to spare; else fewer or none are fetched."""
    fetch = []
    for model, gib in (("mixtral-8x7b", 7), ("qwen3-30b-a3b", 5.1), ("qwen3-30b-a3b", 7.6)):
        rates = "host=256GiB,link=55GB/s,pageable=10GB/s,cores=20GB/s,memory=1000GB/s,matmul=100TFLOP/s"
        machine = resolve_machine(None, f"gpus=1x{gib}GiB,{rates}")
        plan = planned(f"--model {model} --dummy --engine stream --quant-bits 4 --batch-size 8", machine)
        assert plan.engine_plan.min_free_bytes_on(0) <= plan.job.free_device_bytes
        fetch.append(max(plan.engine_plan.placement.quota, default=0))
    assert fetch[0] < 2 and 0 < fetch[1] < fetch[2] == 16


def test_experts_are_fetched_for_a_given_share_only_where_they_stay():
    """Else the device would compute what the CPU was asked to."""
    rates = "host=256GiB,link=55GB/s,pageable=10GB/s,cores=20GB/s,memory=1000GB/s,matmul=100TFLOP/s"
    options = "--model qwen3-30b-a3b --dummy --engine stream --quant-bits 4 --cpu-compute 1"
    for gpu_memory, stay in (("--gpu-memory 0", False), ("", True)):
        plan = planned(f"{options} {gpu_memory}", resolve_machine(None, f"gpus=1x8GiB,{rates}"))
        placement = plan.engine_plan.placement
        assert bool(placement.expert_slots) == bool(placement.quota) == stay
        assert min(placement.expert_slots.values(), default=0) >= max(placement.quota, default=0)


def test_a_plan_fits_only_where_the_reserve_of_device_memory_stays_free():
    """The device is as large as the plan asks for, and a byte smaller."""
    machine = resolve_machine(None, "gpus=1x80GiB,host=256GiB")
    plan = planned("--model opt-1.3b --dummy --engine stream --gpu-memory 1 --batch-size 8", machine)
    least = plan.engine_plan.min_free_bytes_on(0)
    for free, fits in ((least, True), (least - 1, False)):
        job = replace(plan.job, free_by_device=(free,))
        there = Plan(job, replace(plan.engine_plan, job=job))
        assert there.fits is fits
        assert least - plan.engine_plan.device_peak_bytes >= 1 << 30
        (need,) = [need for need in there.needs if need.place == "device memory"]
        assert need.with_reserve_bytes == least


def test_nothing_of_this_machine_is_asked(monkeypatch, tmp_path, capfd):
    # a process looks whether there is a GPU, and no further
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("mem_get_info", "get_device_properties", "get_device_capability", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} was asked"))
    monkeypatch.setattr(
        "zero_inference.hardware.machine.available_host_bytes", lambda: pytest.fail("host memory was asked")
    )
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    write_profile(MACHINE, tmp_path / "machine.json")
    asked = f"run_model.py --model llama-2-13b --dummy --dry-run --machine {tmp_path / 'machine.json'}"
    for options in (
        "--engine stream --quant-bits 4 --gpu-memory 0",
        "--cpu-offload",
        "--engine resident",
        "--engine accelerate --cpu-offload",
    ):
        assert main([*asked.split(), *options.split()]) == 0, options
        printed = capfd.readouterr().out
        assert "test (measured, 2026-11-23): 1 x NVIDIA H200, 120 GiB of host memory" in printed
        assert " of 139 GiB free" in printed and " of 120 GiB free" in printed


def test_typical_machines_are_what_datasheets_say():
    """By hand: 16 lanes of 16 GT/s, of which 128 of 130 bits are data; the card's figures are those of cards.json."""
    found = resolve_machine("rtx4090", None).profile()
    assert found.source == "datasheet" and found.host_memory_bytes == 64 * GIB
    assert found.link_gb_per_s == pytest.approx(16 * 16 * 128 / 130 / 8) and found.device_gb_per_s == 1008
    assert found.matmul_tflops == {"float16": 165.2, "bfloat16": 165.2, "float32": 82.6}
    assert found.gpus == (Gpu(name="RTX 4090", memory_bytes=24 * GIB, free_bytes=24 * GIB - CONTEXT_BYTES),)
    assert (found.launches, found.cores, found.pageable_link_gb_per_s, found.disk_gb_per_s) == (None,) * 4
    eight = resolve_machine("8x H100_SXM", None).profile()
    assert [gpu.name for gpu in eight.gpus] == ["H100 SXM"] * 8 and eight.host_memory_bytes == 8 * 256 * GIB
    assert (eight.peers_gb_per_s, found.peers_gb_per_s) == (450, "link"), "of 900 GB/s both ways"
    assert "bfloat16" not in resolve_machine("t4", None).profile().matmul_tflops
    for name, each in typical_machines().items():
        card = next(card for card in cards() if card.name == each.card)
        two = resolve_machine(f"2x{name}", None).profile()
        assert two.device_gb_per_s == card.memory.value and two.matmul_tflops["float16"] == card.tflops["fp16"].value
        assert [gpu.memory_bytes for gpu in two.gpus] == [card.memory_bytes] * 2


def test_what_is_assumed_of_a_typical_machine(capfd):
    """Rates that are still those of a datasheet are marked as such."""
    asked = "run_model.py --model llama-2-13b --dummy --engine stream --gpu-memory 0 --cpu-compute off --dry-run --machine rtx3090"
    assert main(asked.split()) == 0
    out = capfd.readouterr().out
    assert "at most" in out.splitlines()[0] and "at least" in out.splitlines()[0]
    assert "rtx3090 (datasheet): 1 x RTX 3090, 64 GiB of host memory (assumed)" in out and "from datasheets" in out
    larger = resolve_machine("rtx4090", "host=256GiB").profile()
    assert (larger.host_memory_bytes, larger.source) == (256 * GIB, "datasheet")
    assert larger.name == "rtx4090 with host=256GiB" and larger.link_gb_per_s > 31
    every = resolve_machine("rtx4090", "link=25GB/s,memory=900GB/s,matmul=150TFLOP/s,cores=60GB/s").profile()
    assert every.source == "assumed" and every.cores.read_gb_per_s == 60


@pytest.mark.parametrize(
    "name, said",
    [
        ("rtx409", "did you mean rtx4090"),
        ("2xrtx409", "did you mean 2xrtx4090"),
        ("0xrtx4090", "did you mean rtx4090"),
        ("gameboy", "no such file, and no typical machine of that name. There are rtx3090, rtx4090"),
        ("rtx4090.json", "No such file or directory; `zero-inference link --save FILE`"),
        (".", "Is a directory"),
    ],
)
def test_a_name_that_no_machine_has(name, said, capfd):
    assert main(["run_model.py", "--model", "opt-125m", "--dummy", "--dry-run", "--machine", name]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line and (" a100-80, " in line or "typical" not in line)


def test_a_file_is_taken_before_a_typical_machine_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(MACHINE, tmp_path / "rtx4090")
    assert resolve_machine("rtx4090", None).profile() == MACHINE
    assert resolve_machine("./rtx4090", None).profile() == MACHINE
    assert resolve_machine("rtx3090", None).profile().name == "rtx3090"


@pytest.mark.parametrize("options, fetched_share", [("--cpu-offload", 1), ("", 0)])
def test_what_gpus_send_each_other(options, fetched_share):
    """Of four, by hand: each fetches a quarter of what is in host memory, and gets three quarters of all weights from the others."""
    config = parse_options(shlex.split(f"--model opt-13b --dummy --batch-size 4 --dry-run {options}"))
    spec = resolve_model(config, "cuda")
    ranks = Ranks(rank=0, world_size=4, local_rank=0, local_world_size=4, device=torch.device("cuda", 0))
    empty_model = build_empty_model(spec)

    def step_s(peers) -> tuple[float, str, int]:
        machine = replace(MACHINE, gpus=(H200,) * 4, all_links_gb_per_s=4 * 55.0, peers_gb_per_s=peers)
        plan = make_plan(Job(config, spec, ranks, empty_model, (H200.free_bytes,), Machine(machine)))
        limit = planned_step_bound(plan.engine_plan, machine)[1]
        assert limit <= plan.times.step.seconds * 1.001, "the limit is a bound of what is predicted"
        weights = plan.engine_plan.fetched_bytes + plan.engine_plan.sharded_bytes
        # 13B in 16 bits; with DeepSpeed embedding and head, too, which are one weight
        assert weights == pytest.approx(2 * 12.85e9, rel=0.03)
        return plan.times.step.seconds, plan.times.step.bound_by, weights

    by_link, bound, weights = step_s("link")
    assert by_link == pytest.approx(weights * (fetched_share / 4 + 3 / 4) / 55e9, rel=0.02) and bound == "link"
    slow, bound, weights = step_s(1.0)
    assert slow == pytest.approx(weights * 3 / 4 / 1e9, rel=0.02) and bound == "peers"
    fast, unknown = step_s(1e6)[0], step_s(None)[0]
    assert fast == pytest.approx(unknown), "what is not known costs nothing"
    assert unknown < by_link


def test_cores_take_their_part_as_the_file_says():
    options = "--model llama-2-13b --dummy --engine stream --quant-bits 4 --gpu-memory 0"
    machine = Machine(MACHINE)
    plan = planned(options, machine).engine_plan
    moved = plan.moved_per_step()
    assert len(plan.cpu.cpus) == 15 and plan.cpu.instructions == "amx"
    # 100 GB/s and 50 GB/s, less the hand-offs and what the device reads
    assert 1.5 < moved.cores_bytes_per_step / moved.host_to_device_bytes_per_step < 2.0
    bound_by, step_s = planned_step_bound(plan, MACHINE)
    both = (moved.host_to_device_bytes_per_step + moved.cores_bytes_per_step) / 150e9
    assert bound_by in ("link", "link_and_cores") and step_s >= both
    alone = planned(f"{options} --cpu-compute off", machine).engine_plan
    assert planned_step_bound(alone, MACHINE) == ("link", pytest.approx(alone.fetched_bytes / 55e9))
    no_rates = Machine(replace(MACHINE, cores=None))
    assert "the rate of the CPU is not known" in planned(options, no_rates).engine_plan.no_cpu
    with pytest.raises(UsageError, match="test was measured with 15 threads"):
        planned(f"{options} --cpu-threads 4", machine)


def test_without_a_gpu_no_weights_cross_a_link():
    options = "--model llama-2-13b --dummy --engine stream --gpu-memory 0"
    one = job_of(options, Machine(MACHINE))
    assert why_no_cpu_compute(one) is None
    on_cpu = replace(one, ranks=replace(one.ranks, device=torch.device("cpu")), devices=(), free_by_device=())
    assert why_no_cpu_compute(on_cpu) == NO_LINK


def test_more_ranks_than_the_machine_has_gpus(monkeypatch, capfd):
    for name, value in dict(
        WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", MASTER_ADDR="localhost", MASTER_PORT="29501"
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zero_inference.cli.FIRST_RANK_SPEAKS_S", 0)
    asked = ["run_model.py", "--model", "opt-125m", "--dummy", "--batch-size", "2", "--dry-run", "--assume"]
    assert main([*asked, "gpus=1x24GiB,host=8GiB"]) == 2
    assert "2 ranks were started for a machine with 1 GPUs; start one rank per GPU" in capfd.readouterr().err
    assert main([*asked, "gpus=2x24GiB,host=8GiB,link=25GB/s"]) == 0


# Runs that an H200 has done, by their records: those whose placement the options alone decide.
RECORDS = """
    h200/opt13b-accelerate h200/opt13b-disk h200/opt13b-fp16 h200/opt13b-int4 h200/opt13b-int8 h200/opt13b-kv h200/opt13b-resident
    h200-shared/opt13b-fp16-stream h200-shared/opt13b-int4-stream h200-shared/opt13b-kv-stream h200-shared/opt30b-half-stream
    h200/opt30b-int4 h200-shared/llama70b-int4-stream h200-cores/llama13b-int4-bs1-off h200-fixed/deepspeed13b-int4
    h200-kept/fourth_host/deepspeed13b-bf16 h200-kept/sixth_host/candidates/trials/15 h200-kept/sixth_host/candidates/trials/20
    h200-kept/sixth_host/candidates/trials/21 h200-kept/sixth_host/candidates/trials/24
""".split()


def says_what_was_counted(plan, record: dict) -> None:
    """What is stored is equal, and what a step moves to a thousandth: DeepSpeed keeps a few vectors more or fewer on the device, and
    keys and values grow."""
    moved = plan.moved_per_step()
    plain, stored = (
        (0, 0)
        if "head_bits" in (record.get("stream") or {})
        else (plan.cost_terms.head_plain_bytes, plan.cost_terms.head_stored_bytes)
    )  # in 16 bits until then
    assert plan.weight_bytes - stored + plain == record["weight_bytes"]
    for name in ("host_to_device", "device_to_host", "disk_read", "cores"):
        key = f"{name}_bytes_per_step"
        assert (getattr(moved, key) or 0) == pytest.approx(record["transfers"].get(key) or 0, rel=1e-3), name


@pytest.mark.parametrize("name", RECORDS)
def test_the_plan_says_what_an_h200_counted(name):
    record = [
        each for each in read_records(ROOT / "benchmarks" / "results" / f"{name}.jsonl") if each["status"] == "ok"
    ][-1]
    options = options_of(record)
    memory = record["environment"]["gpus"][0]["memory_bytes"]
    machine = replace(MACHINE, gpus=(Gpu(name="", memory_bytes=memory, free_bytes=memory - GIB),))
    plan = planned(shlex.join(options), Machine(machine))
    says_what_was_counted(plan.engine_plan, record)
    slot = plan.job.kv_device_bytes // SLOTS if record["kv_offload"] else 0  # keys and values had one less then
    near = 0.03 if record["engine"] == "deepspeed" else 0.06
    moved = 0  # or made smaller since then
    if record["engine"] == "stream":
        moved = record["stream"]["workspace_bytes"] - plan.engine_plan.placement.workspace_bytes
        if not record["stream"].get("embedding_on_host"):
            moved += plan.engine_plan.placement.embedding_bytes
    assert plan.engine_plan.device_peak_bytes + moved - slot == pytest.approx(record["peak_gpu_bytes"], rel=near)


@pytest.mark.parametrize(
    "options",
    [
        "--engine stream --quant-bits 4 --quant-group-size 32 --cpu-compute 0.5 --kv-offload",
        "--engine accelerate --disk-offload",
        "--engine deepspeed --disk-offload --quant-bits 8 --model opt-125m --dummy",  # large enough for the disk
    ],
)
def test_the_plan_says_what_a_run_here_counts(options, checkpoints, tmp_path):
    """OPT's head is its embedding, which some engines bring twice."""
    offload = ["--offload-dir", str(tmp_path / "offload")] if "disk" in options else []
    sizes = "--prompt-len 16 --gen-len 8 --loops 1 --warmup 0 --batch-size 2 --dtype bfloat16"
    asked = ["--model", str(checkpoints("opt")), *sizes.split(), *options.split(), *offload]
    plan = planned(shlex.join(asked), resolve_machine(None, None)).engine_plan
    assert main(["run_model.py", *asked, "--log-file", str(tmp_path / "run.log")]) == 0
    says_what_was_counted(plan, read_records(tmp_path / "run.jsonl")[-1])
