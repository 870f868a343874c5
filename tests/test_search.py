"""`zero-inference plan` and what is `auto`: configurations compared by what their plans predict."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, without_gpus
from test_machine import MACHINE, job_of, planned
from test_timing import FAST

from zero_inference import load
from zero_inference.cli import console_main, main
from zero_inference.config.run_config import RunConfig, parse_options
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware import measure_profile, profile
from zero_inference.hardware.machine import Machine
from zero_inference.hardware.profile import cached_profile, why_outdated, write_profile
from zero_inference.planning import search
from zero_inference.planning.output import rows_of
from zero_inference.planning.search import (
    GOALS,
    choose,
    command_of,
    find_candidates,
    headline,
    options_of,
    pareto_front,
    ranked,
)
from zero_inference.records.read import read_records
from zero_inference.utils.environment import describe_environment, rate_versions
from zero_inference.utils.format import significant

pytestmark = pytest.mark.usefixtures("presets_built_once")

GIB = 1 << 30
LINE = "gpus=1x24GiB,host=256GiB,link=25GB/s,cores=60GB/s,memory=1000GB/s,matmul=150TFLOP/s"
WITH_CORES = Machine(FAST.model_copy(update={"cores": MACHINE.cores}))


@pytest.fixture
def plan_text(capfd):
    """plan_text(options) -> what `zero-inference plan` prints."""

    def call(options: str, *more: str) -> str:
        capfd.readouterr()
        model, *words = options.split()
        assert console_main(["zero-inference", "plan", model, "--dummy", *words, *more]) == 0
        return capfd.readouterr().out

    return call


@pytest.fixture
def plan_json(plan_text):
    return lambda options, *more: json.loads(plan_text(options, *more, "--json"))


@pytest.fixture(scope="module")
def found():
    """Of OPT-30B on an H200 of which 24 GiB may be used."""
    job = job_of(
        "--model opt-30b --dummy --prompt-len 128 --engine stream", replace(WITH_CORES, device_limit_bytes=24 * GIB)
    )
    return find_candidates(job, batch_sizes=(1, 8, 32))


def test_all_that_fits_is_a_candidate(found):
    planned = {(each.job.config.engine, each.job.quant_bits, each.job.config.batch_size) for each in found.candidates}
    assert {("stream", bits, batch) for bits in (16, 8, 4) for batch in (1, 8, 32)} <= planned
    assert ("deepspeed", 4, 8) in planned and ("accelerate", 16, 1) in planned
    assert "resident" in {plan.job.config.engine for plan in found.too_large} and ("resident", 16, 1) not in planned
    assert not any(each.job.config.disk_offload for each in found.candidates), "something fits elsewhere"
    for each, row in zip(found.candidates, rows_of(found)):
        assert each.fits and each.engine_plan.device_peak_bytes <= 24 * GIB
        assert row["total_s"] == pytest.approx(each.times.prefill.seconds + 31 * each.times.step.seconds)
        assert row["total_tokens_per_s"] == pytest.approx(row["batch_size"] * 32 / row["total_s"])


def test_the_best_comes_first_by_each_goal(found):
    by = {goal: ranked(found.candidates, goal)[0] for goal in GOALS}
    assert by["throughput"].tokens_per_s == max(each.tokens_per_s for each in found.candidates)
    assert by["latency"].times.step.seconds == min(each.times.step.seconds for each in found.candidates)
    assert by["memory"].memory_bytes == min(each.memory_bytes for each in found.candidates)
    for each in pareto_front(found.candidates):
        for other in found.candidates:
            assert other.times.step.seconds >= each.times.step.seconds or other.tokens_per_s <= each.tokens_per_s
    best = ranked(found.candidates, "throughput")
    slower = replace(best[0], measured_tokens_per_s=0.5)
    assert ranked([slower, best[1]], "throughput")[0] is best[1], "measured before predicted"
    tried = replace(found, candidates=[replace(best[0], measured_tokens_per_s=50.0), *best[1:]])
    line = headline(tried, "throughput")
    assert line.startswith("Fastest: ") and ": 50 token/s measured, predicted " in line and "For one sequence: " in line


def test_a_command_asks_for_its_configuration(found):
    for each in found.candidates:
        assert replace(parse_options(options_of(each.job.config)), dry_run=True) == each.job.config
        launcher = "deepspeed --num_gpus 1 " if each.job.config.engine == "deepspeed" else "python "
        assert command_of(each.job.config).startswith(launcher)


def test_nothing_is_loaded_and_a_large_model_takes_seconds(monkeypatch, plan_json):
    monkeypatch.setattr("zero_inference.models.weights.load_weights", lambda *_: pytest.fail("weights were loaded"))
    answer = plan_json("llama-3.1-405b --engine stream deepspeed --batch-size 1", "--assume", LINE)
    (first, *_) = answer["configurations"]
    assert first["engine"] == "stream" and first["quant_bits"] == 4 and first["place"] == 1
    assert "--engine stream" in first["command"] and first["front"] is True
    assert {each["at_most"] for each in answer["configurations"] if each["engine"] == "deepspeed"} == {True}
    assert all("fits with --" in line for line in answer["too_large"])


def test_the_table_is_for_people(plan_text, tmp_path):
    picture = tmp_path / "front.svg"
    out = plan_text("llama-2-13b --batch-size 1 8 --goal latency --plot", str(picture), "--assume", LINE)
    lines = out.splitlines()
    assert re.match(
        r"Shortest decode step: stream int4, device, batch 1: predicted (\S+) \((\S+) to \S+\) token/s", lines[0]
    )
    assert "a machine that is not there (assumed): 1 x GPU with 24 GiB" in lines[1]
    assert any(line.startswith("*1  stream int4, device ") for line in lines)
    needs = "does not fit: resident fp16, device, batch 1: needs 24.7 GiB of device memory (23.5 GiB free)"
    assert f"{needs}; fits with --engine stream" in lines
    place = lines.index("1. stream int4, device, batch 1:")
    assert lines[place + 1].split()[:4] == ["python", "run_model.py", "--model", "llama-2-13b"]
    assert lines[place + 1].endswith(f"  # --assume {LINE}")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    "options, said",
    [
        (
            "--assume gpus=1x4GiB,host=8GiB,link=25GB/s,memory=900GB/s --engine stream",
            "smallest machine that could run it",
        ),
        (
            "--assume gpus=1x4GiB,host=8GiB,link=25GB/s,memory=900GB/s --plot front.svg",
            "the rate of the disk (disk=) is not",
        ),
        ("--assume gpus=1x4GiB,hots=8GiB", "hots=8GiB: use gpus, host"),
        ("--max-gpu-memory=-1", "--max-gpu-memory -1: must be more than 0 GiB"),
        ("--max-gpu-memory 8 --assume gpus=0,host=64GiB", "has no GPU; use --max-host-memory"),
        ("--batch-size 0", "--batch-size 0: must be at least 1"),
        ("--plot front.xls --assume gpus=0,host=1GiB", "the name must end in .png, .pdf or .svg"),
        (f"--verify 2 --assume {LINE}", "--verify runs configurations"),
        ("--num-gpus 2 --machine rtx4090", "--num-gpus 2: the machine has 1 GPUs"),
        (
            "--engine deepspeed --num-gpus 2 --batch-size 1 3 --machine 2xrtx4090",
            "does not divide over --num-gpus 2; use 2",
        ),
        (
            "--max-host-memory 256 --machine rtx4090",
            "has only 64 GiB; for a machine with more use --assume host=256GiB",
        ),
        ("--max-gpu-memory 48 --machine 2xrtx4090", "for a machine with more use --assume gpus=2x48GiB"),
        ("--machines", "drop the model, or name a machine with --machine"),
        (f"--quant-bits 4 --engine resident --assume {LINE}", "none of these engines"),
    ],
)
def test_what_cannot_be_planned(options, said, capfd):
    try:
        code = console_main(["zero-inference", "plan", "--model", "opt-30b", "--dummy", *options.split()])
    except SystemExit as ended:  # of the parser
        code = ended.code
    assert code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


def test_limits_are_refused_before_this_machine_is_measured(no_gpu, monkeypatch, capfd):
    monkeypatch.setattr(measure_profile, "measure_and_cache", lambda say: pytest.fail("it takes a minute"))
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", "/nonexistent/machine.json")
    assert console_main("zero-inference plan --model opt-125m --dummy --max-gpu-memory 8".split()) == 2
    assert "--max-gpu-memory 8: the machine has no GPU" in capfd.readouterr().err


def test_the_smallest_machine_is_one_that_does(plan_json, capfd):
    options, rates = "opt-66b --engine stream --batch-size 1", "link=25GB/s,memory=900GB/s,cores=50GB/s"
    small = f"gpus=1x4GiB,host=8GiB,{rates}"
    assert console_main(["zero-inference", "plan", *options.split(), "--dummy", "--assume", small]) == 2
    needed = re.search(r"has ([0-9.]+) GiB of device.* and ([0-9.]+) GiB of host", capfd.readouterr().err).groups()
    device, host = map(float, needed)
    enough = f"gpus=1x{device + 0.6:.2f}GiB,host={host + 0.1:.1f}GiB,{rates}"  # a context takes half a GiB
    assert plan_json(options, "--assume", enough)["configurations"]


@pytest.mark.parametrize(
    "machine, engine, lacking",
    [
        ("gpus=0,host=16GiB,memory=60GB/s,disk_free=500GiB", "deepspeed", "the disk (disk=)"),
        ("gpus=1x24GiB,host=999GiB,link=25GB/s", "stream", "device memory (memory=)"),
        ("gpus=1x80GiB,host=999GiB,link=25GB/s,memory=900GB/s", "accelerate", "pageable copies (pageable=)"),
    ],
)
def test_what_fits_is_listed_where_a_rate_is_not_known(machine, engine, lacking, plan_text, plan_json):
    options = f"opt-30b --engine {engine} --batch-size 1 2 --assume {machine}"
    answer = plan_json(options)
    rows = answer["not_predicted"]["configurations"]
    assert not answer["configurations"] and answer["not_predicted"]["count"] == len(rows) >= 2
    assert all(row["tokens_per_s"] is None and row["engine"] == engine for row in rows)
    out = plan_text(options)
    assert f"the rate of {lacking} is not known" in out.splitlines()[0]
    assert f"\n   {rows[0]['command']}  # --assume {machine}\n" in out


def test_a_mixture_says_where_its_experts_are_copied_whole(plan_text):
    """Those of Qwen3 the CPU multiplies, where its rate is known."""
    where = "--quant-bits 16 --batch-size 1 --machine rtx4090 --assume"
    assert "experts of a layer" not in plan_text(f"qwen3-30b-a3b --engine stream {where} cores=60GB/s")
    out = plan_text(f"qwen3-30b-a3b --engine stream deepspeed {where} host=64GiB")
    unused = "stream copies all 128 experts of a layer in each step, a token uses 8: the CPU computes nothing"
    assert f"{unused}: the rate of the CPU is not known" in out
    assert "deepspeed copies all 128 experts of a layer in each step" in out


def test_typical_machines_are_listed(capfd):
    assert console_main(["zero-inference", "plan", "--machines"]) == 0
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.split()[0] == "rtx4090"]
    assert line.split() == "rtx4090 RTX 4090 24 1008 PCIe 4 x16 31.5 the link 165.2 165.2 64".split()
    assert console_main(["zero-inference", "plan", "--machines", "--json"]) == 0
    names = [each["name"] for each in json.loads(capfd.readouterr().out)]
    assert len(names) == len(lines) - 3 and "a100-80" in names and "h100-sxm" in names


def started(monkeypatch, ranks: int) -> None:
    """As a launcher starts the first of several ranks."""
    names = dict(RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29501")
    for name, value in {**names, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)


def test_several_gpus_are_planned_as_they_are_started(monkeypatch, capfd, plan_json):
    """The same figures as of `--dry-run` of the command: in two ranks of DeepSpeed, and in one process of the stream engine."""
    line = f"{LINE.replace('1x24GiB', '3x24GiB')},disk=3GB/s"
    options = "llama-2-13b --batch-size 2 6 --quant-bits 4 --kv-offload off --assume"
    rows = plan_json(options, line)["configurations"]
    assert {(each["gpus"], each["batch_size"]) for each in rows} == {(n, batch) for n in (1, 2, 3) for batch in (2, 6)}
    of_three = {each["engine"] for each in rows if (each["gpus"], each["batch_size"]) == (3, 2)}
    assert "stream" in of_three and "deepspeed" not in of_three, "two sequences do not divide over three ranks"
    of_two = [each for each in rows if (each["gpus"], each["batch_size"]) == (2, 6)]
    assert {each["engine"] for each in of_two} == {"stream", "deepspeed"}, "accelerate is one process"

    def compare_dry_run(row: dict, options: str) -> list[dict]:
        assert main(["run_model.py", *options.split(), "--dry-run", "--json", "--assume", line]) == 0
        dry = json.loads(capfd.readouterr().out)
        names = {"prefill_s": "prefill_s", "step_s": "decode_step_s", "tokens_per_s": "decode_throughput"}
        names |= {
            "tokens_per_s_range": "decode_throughput_range",
            "bound_by": "bound_by",
            "bounds_because": "bounds_because",
        }
        assert {name: row[name] for name in names} == {name: dry["predicted"][key] for name, key in names.items()}
        assert row["tokens_per_s_range"] is None, "no runs with several GPUs were compared"
        needs = {
            place: [need for need in dry["needs"] if need["place"] == place]
            for place in ("device memory", "host memory")
        }
        assert max(need["needed_bytes"] for need in needs["device memory"]) == row["device_bytes"]
        assert needs["host memory"][0]["needed_bytes"] == row["host_bytes"]
        return needs["device memory"]

    for row in of_two:
        launcher, options = row["command"].split(" run_model.py ")
        if row["engine"] == "stream":
            assert launcher == "python" and options.endswith("--num-gpus 2")
            needs = compare_dry_run(row, options)
            assert [need["which"] for need in needs] == ["of GPU 0", "of GPU 1"], "the first has the vocabulary"
            continue
        assert launcher == "deepspeed --num_gpus 2"
        with monkeypatch.context() as of_launcher:
            started(of_launcher, 2)
            (need,) = compare_dry_run(row, options)
        assert need["which"] == "of each GPU"


def test_auto_uses_the_gpus_that_help_or_those_that_are_named(capfd):
    asked = "run_model.py --model opt-30b --dummy --engine auto --dry-run --json --assume".split()
    line = LINE.replace("1x24GiB", "2x24GiB")
    for options, gpus in (([], 2), (["--num-gpus", "1"], 1)):
        assert main([*asked, line, *options]) == 0
        config = json.loads(capfd.readouterr().out)["config"]
        assert (config["engine"], config["num_gpus"], config["world_size"]) == ("stream", gpus, 1)


def test_more_gpus_bring_the_weights_sooner(plan_json):
    options = "opt-30b --engine stream --quant-bits 16 --kv-offload off --batch-size 7 --max-gpu-memory 12 --assume"
    line = "gpus=4x24GiB,host=256GiB,link=25GB/s,memory=1000GB/s,matmul=150TFLOP/s"
    by = {each["gpus"]: each for each in plan_json(options, line)["configurations"]}
    assert sorted(by) == [1, 2, 4], "any batch goes with any number of GPUs"
    weight_bytes = 2 * 29_974_540_288
    for gpus, row in by.items():
        assert (
            row["without_cores"]
            and row["bound_by"] == "link"
            and row["tokens_per_s"] == pytest.approx(7 / row["step_s"])
        )
        share = int(re.match(r"(\d+)% host", row["weights"])[1]) / 100
        assert row["step_s"] == pytest.approx(share * weight_bytes / (gpus * 25e9), rel=0.02)
        assert row["bounds_because"] == ["the links of several GPUs may slow each other down"] * (gpus > 1)


def test_of_several_gpus_those_that_help_are_used(capfd):
    """A model that one GPU holds gains nothing by a second; one that streams has twice the link."""

    def dry(options: str) -> dict:
        where = ["--assume", LINE.replace("1x24GiB", "2x24GiB"), "--dry-run", "--json"]
        assert main(["run_model.py", *options.split(), "--dummy", "--engine", "stream", *where]) == 0
        return json.loads(capfd.readouterr().out)

    small, large = dry("--model opt-1.3b"), dry("--model opt-30b")
    assert small["config"]["num_gpus"] == 1 and small["gpus"] is None
    assert large["config"]["num_gpus"] == 2 and large["config"]["world_size"] == 1
    assert [each["layers"] for each in large["gpus"]] == [24, 24]
    moved = large["moved_per_step"]["host_to_device_bytes_per_step"]
    assert sum(each["host_to_device_bytes_per_step"] for each in large["gpus"]) == pytest.approx(moved, abs=2)
    where = ["--dummy", "--dry-run", "--assume", "gpus=2x40GiB,host=64GiB"]
    for engine, links in (("resident", 0), ("stream --gpu-memory 10", 1)):
        assert main(["run_model.py", *f"--model opt-30b --num-gpus 2 --engine {engine}".split(), *where]) == 0
        printed = capfd.readouterr().out
        assert printed.count("\n  layers         24 on GPU 0, 24 on GPU 1\n") == 1
        assert (
            len(re.findall(r"\n  links          each decode step \S+ GiB to GPU 0, \S+ GiB to GPU 1\n", printed))
            == links
        )
    for options, count in (("--model opt-30b --num-gpus 1", 1), ("--model opt-1.3b --num-gpus all", 2)):
        assert dry(options)["config"]["num_gpus"] == count, "as asked"
    where = "--machine 2xrtx4090 --assume host=128GiB,cores=60GB/s --dry-run --json"
    shared = "run_model.py --model llama-3.1-70b --dummy --engine stream --quant-bits 4 --cpu-compute 0.5"
    assert main([*shared.split(), *where.split()]) == 0
    assert json.loads(capfd.readouterr().out)["config"]["num_gpus"] == 1, "two hold all weights, and leave the CPU none"
    assert dry("--model opt-30b --num-gpus 1")["faster"][0]["options"] == "--num-gpus all"
    one = "--model opt-30b --num-gpus 1"
    assert (
        main(
            [
                "run_model.py",
                *one.split(),
                *"--dummy --engine stream --dry-run --assume".split(),
                "gpus=2x24GiB,host=30GiB",
            ]
        )
        == 2
    )
    assert "It would fit with one of: --num-gpus all" in capfd.readouterr().out


@pytest.mark.parametrize(("gpu_memory", "count"), [(0, 1), (6, 2)])
def test_a_mixture_uses_a_second_gpu_only_for_a_large_gain(gpu_memory, count, capfd):
    """Without resident experts two H200s were slower than one, on the host that this profile is of."""
    options = f"--model qwen3-30b-a3b --quant-bits 4 --gpu-memory {gpu_memory} --prompt-len 128 --gen-len 64"
    profile = ROOT / "benchmarks" / "results" / "h200-x2-one-process" / "sixth_host" / "machine.json"
    where = ["--dummy", "--engine", "stream", "--dry-run", "--json", "--machine", str(profile)]
    assert main(["run_model.py", *options.split(), *where]) == 0
    assert json.loads(capfd.readouterr().out)["config"]["num_gpus"] == count


@pytest.fixture
def kept_here(monkeypatch, tmp_path):
    """A file that describes this machine, without its GPUs."""
    monkeypatch.setattr(profile, "describe_environment", lambda: describe_environment() | {"gpus": []})
    path = tmp_path / "machine.json"
    versions = rate_versions(describe_environment())
    here = FAST.model_copy(update={"gpus": (), "versions": versions, "link_gb_per_s": 10.0, "device_gb_per_s": 20.0})
    write_profile(here, path)
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", str(path))
    return path, here


def test_a_kept_machine_is_used_until_something_changes(kept_here):
    path, here = kept_here
    assert cached_profile() == here and why_outdated(here) is None
    assert why_outdated(here.model_copy(update={"versions": {}})).startswith("torch was None and is 2")
    assert why_outdated(here.model_copy(update={"gpus": MACHINE.gpus})) == "its GPUs have changed"
    earlier = here.model_copy(update={"measured_with": 1})
    assert why_outdated(earlier) == "the profile is from an older version"
    for text in (write_profile(earlier, path) or path.read_text(), "{"):
        path.write_text(text)
        assert cached_profile() is None
    path.unlink()
    assert cached_profile() is None


def test_a_machine_that_was_not_measured_is_measured_once(monkeypatch, tmp_path):
    path = tmp_path / "new" / "machine.json"
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", str(path))
    monkeypatch.setattr(
        "zero_inference.hardware.measure_profile.measure_this_machine",
        lambda disk, say: ({"warnings": ["no link"]}, MACHINE),
    )
    lines: list[str] = []
    measure_profile.measure_and_cache(lines.append)
    assert path.is_file() and lines[0].startswith("measuring this machine; the results are kept")
    assert lines[1] == "warning: no link"
    measure_profile.measure_and_cache(lines.append)
    assert "measuring this machine again (torch was 2.11 and is " in lines[2]
    path.write_text("a letter")
    with pytest.raises(UsageError, match="not one that this version reads; remove it"):
        measure_profile.measure_and_cache(lines.append)
    assert path.read_text() == "a letter"


def test_rates_measured_beside_other_programs_are_marked(kept_here, capfd):
    path, here = kept_here
    busy = here.model_copy(update={"others_cpu_share": 0.9})
    write_profile(busy, path)
    assert cached_profile() == busy
    assert busy.caveat().startswith("rates were measured while other programs used 90% of the CPU")
    dry_run = "run_model.py --model opt-125m --dummy --engine resident --gen-len 2 --loops 1 --dry-run"
    assert main(dry_run.split()) == 0 and busy.caveat() in capfd.readouterr().out


file_without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine file has no GPU")


@file_without_gpu
def test_what_is_left_open_is_found_and_recorded(kept_here, tmp_path, capfd):
    asked = "--model opt-125m --dummy --engine auto --batch-size auto --quant-bits auto --prompt-len 8 --gen-len 3 --dtype bfloat16"
    run = f"{asked} --goal latency --loops 1 --warmup 0 --log-file {tmp_path / 'run.log'}"
    assert main(["run_model.py", *run.split()]) == 0
    err = capfd.readouterr().err
    (record,) = read_records(tmp_path / "run.jsonl")
    chosen = record["chosen"]
    assert chosen["options"] == ["engine", "quant_bits", "batch_size"] and chosen["goal"] == "latency"
    assert f"chosen: --engine {record['engine']} --quant-bits {record['quant_bits']} --batch-size 1: predicted " in err
    assert len(chosen["over"]) == 5 and all(": " in each for each in chosen["over"])
    assert chosen["decode_throughput"] == pytest.approx(2 / record["predicted"]["decode_s"])


@file_without_gpu
def test_load_takes_what_the_plan_finds(kept_here, checkpoints):
    ids, shape = torch.arange(3, 8)[None], {"dtype": "float32", "max_length": 12, "verbose": 0}
    with load(checkpoints("llama"), engine="resident", **shape) as model:
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with load(checkpoints("llama"), engine="auto", quant_bits="auto", **shape) as model:
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@file_without_gpu
def test_a_named_engine_is_kept_and_bits_come_before_speed(kept_here, capfd):
    asked = "--model opt-125m --dummy --engine stream --quant-bits auto --batch-size auto --dry-run --dtype bfloat16"
    assert main(["run_model.py", *asked.split()]) == 0
    assert "chosen: --engine stream --quant-bits 16 --batch-size 64" in capfd.readouterr().err
    assert main(["run_model.py", *asked.replace("--quant-bits auto ", "").replace("stream", "auto").split()]) == 0
    assert "--quant-bits 16" in capfd.readouterr().err


def test_what_auto_cannot_do(monkeypatch, capfd):
    machine = "gpus=1x8GiB,host=50GiB,link=25GB/s,cores=60GB/s,memory=1000GB/s,disk=3GB/s,disk_free=50GiB"
    asked = ["run_model.py", *"--model opt-66b --dummy --engine auto --dry-run --assume".split(), machine]
    assert main(asked) == 2
    err = capfd.readouterr().err
    assert "--engine auto: none of 7 ways to run opt-66b fits" in err and "the smallest machine that could run" in err
    assert main([*asked, "--quant-bits", "auto"]) == 0, "rounded weights fit"
    assert "chosen: --engine stream --quant-bits 4" in capfd.readouterr().err
    assert main(["run_model.py", "--engine", "auto", "--cpu-offload"]) == 2
    assert "drop --cpu-offload, or name an engine" in capfd.readouterr().err
    started(monkeypatch, 2)
    two = "run_model.py --model opt-125m --dummy --engine auto --dry-run --assume".split()
    assert main([*two, "gpus=2x24GiB,host=8GiB"]) == 2
    assert "this works in one process only, and 2 were started" in capfd.readouterr().err
    config = RunConfig(model="opt-125m", dummy=True)
    assert choose(config, None, None, None, print) == (config, None, None), "nothing is open"


def test_docs_show_what_a_plan_prints(capfd):
    """Some of its lines, as they are."""
    example = r"^zero-inference (plan [^\n]*--machine[^\n]*)\n```\n\n```text\n(.*?)```"
    text = (ROOT / "docs" / "big-models.md").read_text()
    asked, shown = re.search(example, text, re.M | re.S).groups()
    assert console_main(["zero-inference", *shlex.split(asked)]) == 0
    printed = capfd.readouterr().out.splitlines()
    lines = shown.splitlines()
    assert lines == [line for line in printed if line in lines] and len(lines) > 5


def test_what_auto_did_not_choose_is_printed_with_the_option_to_type(capfd):
    """70B on a 24 GB card: 16 bits fit, at a fifth of the speed that 4 bits have."""
    where = ["--machine", "rtx4090", "--assume", "host=256GiB,cores=60GB/s"]
    asked = ["run_model.py", "llama-3.1-70b", "--dummy", "--engine", "auto", "--dry-run", *where]
    assert main(asked) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  faster ")]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    bits, batch = answer["faster"]
    assert bits["options"] == "--quant-bits 4" and batch["options"].startswith("--batch-size ")
    assert f"--quant-bits 4 gives at most {significant(bits['tokens_per_s'])} token/s" in line
    assert main([*asked, "--json", *bits["options"].split()]) == 0
    with_them = json.loads(capfd.readouterr().out)
    assert with_them["predicted"]["decode_throughput"] == pytest.approx(bits["tokens_per_s"])
    factor = bits["tokens_per_s"] / answer["predicted"]["decode_throughput"]
    assert factor == pytest.approx(bits["times"]) and 3 < factor < 6
    assert not [each for each in with_them["faster"] if "bits" in each["options"]]
    assert main([*asked, "--json", "--goal", "latency"]) == 0
    assert [each["options"] for each in json.loads(capfd.readouterr().out)["faster"]] == ["--quant-bits 4"]
    quick = [*asked, "--quant-bits", "auto", "--goal", "throughput"]  # README's row for the fastest
    assert main(quick) == 0
    assert "chosen: --engine stream --quant-bits 4" in capfd.readouterr().err


@file_without_gpu
def test_the_best_are_tried(kept_here, copied_runs, tmp_path):
    path, _ = kept_here
    options = "plan --model opt-125m --dummy --dtype bfloat16 --prompt-len 8 --gen-len 3 --batch-size 1 --quant-bits 16"
    options += " --engine resident stream --kv-offload off --verify 2 --json"
    command = [sys.executable, "-m", "zero_inference", *options.split()]
    environment = without_gpus() | {"ZERO_INFERENCE_MACHINE": str(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rates = [each["measured_tokens_per_s"] for each in json.loads(done.stdout)["configurations"]]
    assert len(rates) == 2 and rates == sorted(rates, reverse=True) and rates[-1] > 0
    assert done.stderr.count("token/s, predicted") == 2


def test_those_that_failed_come_last_and_are_not_on_the_front(found, monkeypatch):
    monkeypatch.setattr(
        search, "_measured_tokens_per_s", lambda each, *_: None if each.job.config.quant_bits == 4 else 1.0
    )
    best = ranked([each for each in found.candidates if each.job.config.batch_size == 1], "throughput")
    tried = search.verify(best, len(best), "throughput", lambda line: None)
    failed = [each.failed for each in tried]
    assert any(failed) and failed == sorted(failed) and not any(each.failed for each in pareto_front(tried))
    monkeypatch.setattr(search, "_measured_tokens_per_s", lambda *_: None)
    with pytest.raises(RunError, match="every run failed"):
        search.verify(best, 2, "throughput", lambda line: None)


def test_keys_and_values_on_the_host_cross_the_link_as_fast_as_they_can(plan_json):
    """Page-locked and ahead of their layer: else a plan would not be the best with them there."""
    machine = "gpus=1x80GiB,host=256GiB,link=25GB/s,pageable=5GB/s,memory=2000GB/s,matmul=300TFLOP/s"
    options = f"opt-13b --engine stream --quant-bits 16 --batch-size 32 --kv-offload on --assume {machine}"
    (found,) = plan_json(options)["configurations"]
    assert "--kv-offload --pin-kv-cache --async-kv-offload" in found["command"] and found["bound_by"] == "link"
    keys = 40 * 2 * 5120 * 2 * 32 * (512 + 16)
    assert found["step_s"] == pytest.approx(keys / 25e9, rel=0.05)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-2-13b"])
def test_a_command_for_a_part_of_the_device_does_the_same_on_all_of_it(model):
    """Its ring has as many slots, and not as many as the whole device has room for."""
    part = replace(WITH_CORES, device_limit_bytes=12 * GIB)
    job = job_of(f"--model {model} --dummy --prompt-len 128 --engine stream", part)
    found = find_candidates(job, engines=("stream",), batch_sizes=(1, 8))
    assert len(found.candidates) > 3
    for each in found.candidates:
        again = planned(shlex.join(options_of(each.job.config)), WITH_CORES)
        assert again.engine_plan.device_peak_bytes == each.engine_plan.device_peak_bytes <= 12 * GIB
        assert again.engine_plan.placement.ring_depth == each.engine_plan.placement.ring_depth
        assert again.times == each.times


def test_a_bound_without_its_overhead_comes_after_those_that_have_it(plan_json):
    """DeepSpeed's bound is the highest with this batch, but what its hooks take on that machine is unknown."""
    rows = plan_json("llama-3.1-70b --machine rtx4090 --quant-bits 4 --batch-size 64")["configurations"]
    assert [(row["engine"], row["front"]) for row in rows] == [("stream", True), ("deepspeed", False)]
    assert rows[0]["tokens_per_s"] < rows[1]["tokens_per_s"], "by its bound it would be the first"


def test_keys_and_values_are_moved_where_that_promises_something(monkeypatch, plan_json):
    """Both places are planned; host memory is shown where the batch fits only so, or decodes clearly faster."""

    def places(batch: int, *more: str) -> list[tuple[str, float]]:
        options = f"opt-30b --engine stream --quant-bits 4 --prompt-len 512 --batch-size {batch} --assume {LINE}"
        rows = plan_json(options, *more)["configurations"]
        return [(row["keys_and_values"], row["tokens_per_s"]) for row in rows]

    monkeypatch.setattr(search, "MIN_KV_GAIN", 0.0)
    both = dict(places(8))
    assert set(both) == {"host", "device"} and both["host"] < 1.05 * both["device"]
    monkeypatch.undo()
    assert places(8) == [("device", both["device"])]
    assert places(8, "--kv-offload", "on") == [("host", both["host"])], "who asks for it gets it"
    assert [place for place, _ in places(64)] == ["host"], "on the device they do not fit"
