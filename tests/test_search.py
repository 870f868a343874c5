"""`zero-inference plan` and what is `auto`: configurations compared by what their plans predict."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, need_lm_eval, without_gpus
from test_machine import H200, MACHINE, job_of, planned
from test_timing import FAST

from zero_inference import load
from zero_inference.cli import console_main, main
from zero_inference.config.run_config import RunConfig
from zero_inference.config.run_options import parse_options
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware import cache
from zero_inference.hardware.cache import cached_profile, why_outdated
from zero_inference.hardware.machine import ProfiledMachine, limit_memory, resolve_machine
from zero_inference.hardware.profile import write_profile
from zero_inference.planning import answer, search
from zero_inference.planning.answer import in_json, rows_of
from zero_inference.planning.choose import choose, hint
from zero_inference.planning.cost import PassTime, Times
from zero_inference.planning.explain import headline, why_none
from zero_inference.planning.plan import make_plan, plan_with
from zero_inference.planning.search import (
    GOALS,
    Candidate,
    SearchSpace,
    command_of,
    faster_than,
    find_candidates,
    options_of,
    pareto_front,
    ranked,
)
from zero_inference.records.read import read_records
from zero_inference.utils.environment import describe_environment, rate_versions
from zero_inference.utils.format import format_seconds, significant
from zero_inference.utils.processes import run_child
from zero_inference.utils.ranks import detect_ranks

GIB = 1 << 30
LINE = "gpus=1x24GiB,host=256GiB,link=25GB/s,cores=60GB/s,memory=1000GB/s,matmul=150TFLOP/s"


@pytest.fixture(scope="module")
def found():
    """Of OPT-30B on an H200 of which 24 GiB may be used."""
    machine = limit_memory(ProfiledMachine(FAST.model_copy(update={"cores": MACHINE.cores})), device_bytes=24 * GIB)
    job = job_of("--model opt-30b --dummy --prompt-len 128 --engine stream", machine)
    return find_candidates(job, SearchSpace(batch_sizes=(1, 8, 32)))


def test_everything_that_fits_is_there_and_what_does_not_is_told(found):
    asked = {(each.config.engine, each.config.quant_bits, each.config.batch_size) for each in found.candidates}
    assert {("stream", bits, batch) for bits in (16, 8, 4) for batch in (1, 8, 32)} <= asked
    assert ("deepspeed", 4, 8) in asked and ("accelerate", 16, 1) in asked
    assert all(each.plan.fits for each in found.candidates)
    assert "resident" in {plan.job.config.engine for plan in found.too_large} and ("resident", 16, 1) not in asked
    assert all(each.plan.weights.device_peak_bytes <= 24 * GIB for each in found.candidates)
    assert not any(each.config.disk_offload for each in found.candidates), "something fits elsewhere"


def test_the_best_comes_first_by_each_goal(found):
    by = {goal: ranked(found.candidates, goal)[0] for goal in GOALS}
    assert by["throughput"].tokens_per_s == max(each.tokens_per_s for each in found.candidates)
    assert by["latency"].times.step.seconds == min(each.times.step.seconds for each in found.candidates)
    assert by["memory"].memory_bytes == min(each.memory_bytes for each in found.candidates)
    assert by["throughput"].config.batch_size > by["latency"].config.batch_size == 1


def test_nobody_beats_the_front_in_both(found):
    front = pareto_front(found.candidates)
    assert front[0].times.step.seconds == min(each.times.step.seconds for each in found.candidates)
    assert front[-1].tokens_per_s == max(each.tokens_per_s for each in found.candidates)
    for each in front:
        for other in found.candidates:
            faster = other.times.step.seconds < each.times.step.seconds and other.tokens_per_s > each.tokens_per_s
            assert not faster


def test_a_command_asks_for_its_configuration(found):
    for each in found.candidates:
        again = parse_options(options_of(each.config))
        assert replace(again, dry_run=True) == each.config
        assert command_of(each.config).startswith(
            "deepspeed --num_gpus 1 " if each.config.engine == "deepspeed" else "python "
        )


def test_trying_by_trial_takes_first_what_was_measured(found):
    best = ranked(found.candidates, "throughput")
    slower = replace(best[0], measured_tokens_per_s=0.5)
    assert ranked([slower, best[1]], "throughput")[0] is best[1]


def test_nothing_is_loaded_and_a_large_model_takes_seconds(monkeypatch, capfd):
    monkeypatch.setattr("zero_inference.models.weights.load_weights", lambda *_: pytest.fail("weights were loaded"))
    asked = ["plan", "--model", "llama-3.1-405b", "--dummy", "--json", "--engine", "stream", "deepspeed"]
    assert console_main(["zero-inference", *asked, "--assume", LINE]) == 0
    answer = json.loads(capfd.readouterr().out)
    (first, *_) = answer["configurations"]
    assert first["engine"] == "stream" and first["quant_bits"] == 4 and first["place"] == 1
    assert "--engine stream" in first["command"] and first["front"] is True
    assert {each["at_most"] for each in answer["configurations"] if each["engine"] == "deepspeed"} == {True}


def test_the_smallest_machine_has_the_gpu_that_is_there(capfd):
    """One that needs only more host memory is smaller than one with a GPU of 200 GiB, though that needs less in all."""
    asked = ["plan", "--model", "llama-3.1-405b", "--dummy", "--engine", "stream", "deepspeed"]
    small = "gpus=1x24GiB,host=64GiB,link=25GB/s,memory=900GB/s,matmul=100TFLOP/s,disk_free=10GiB"
    assert console_main(["zero-inference", *asked, "--assume", small]) == 2
    there, _, needed = capfd.readouterr().err.partition("the smallest machine that could run it has ")
    assert "23.5 GiB of device memory" in there and "10 GiB of disk" in there
    device, host = map(float, re.findall(r"([0-9.]+) GiB of (?:free device|host) memory", needed))
    assert device < 23.5 and 200 < host < 256 and "--engine stream --quant-bits 4" in needed


def unfitting(out: str) -> list[str]:
    """What a plan says of each configuration that does not fit, without line breaks."""
    said = out.partition("Does not fit:\n")[2].partition("\n\n")[0].replace("\n    ", " ")
    return [line.strip() for line in said.splitlines() if line.startswith("  ")]


def test_every_engine_that_does_not_fit_has_what_would(capfd):
    asked = ["plan", "--model", "llama-3.1-405b", "--dummy", "--engine", "stream", "deepspeed", "--machine", "h200-sxm"]
    assert console_main(["zero-inference", *asked]) == 0
    lines = unfitting(capfd.readouterr().out)
    assert len(lines) > 3 and all("; fits with --" in line for line in lines)


def test_the_table_is_for_people(capfd, tmp_path):
    asked = [*"plan --model llama-2-13b --dummy --batch-size 1 8 --goal latency --assume".split(), LINE]
    assert console_main(["zero-inference", *asked, "--plot", str(tmp_path / "front.svg")]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("Shortest decode step: stream engine, int4, batch 1: ")
    assert re.search(r"1: (\S+) s \((\S+) to \S+\) a step, ", lines[0]), "with its range"
    assert "a machine that is not there (assumed): 1 x GPU with 24 GiB" in out.replace("\n", " ")
    head = next(number for number, line in enumerate(lines) if "engine: weights, KV cache" in line)
    assert lines[head].split()[-5:] == ["(s)", "token", "(s)", "(GiB)", "(GiB)"] or "bound by" in lines[head]
    first = lines[head + 2].split()
    assert first[:2] == ["*1", "stream:"] and "int4" in first and "device," in first
    assert max(map(len, [line for line in lines if "run_model.py" not in line and "--assume" not in line])) <= 100
    assert (
        "resident fp16 on the device: 24.7 GiB of device memory, 23.5 GiB free; fits with --engine stream"
        in unfitting(out)
    )
    place = lines.index("1. stream: int4 device, KV device, batch 1:")
    assert lines[place + 1].split()[:4] == ["python", "run_model.py", "--model", "llama-2-13b"]
    assert lines[place + 1].endswith(f"  # --assume {LINE}")
    assert lines[-1] == f"For the details of one, add --dry-run --assume {LINE}."
    assert "picture: " in err and (tmp_path / "front.svg").stat().st_size > 10_000


@pytest.mark.parametrize(
    "options, said",
    [
        (
            "--assume gpus=1x4GiB,host=8GiB,link=25GB/s,memory=900GB/s --engine stream",
            "the smallest machine that could run it has",
        ),
        (
            "--assume gpus=1x4GiB,host=8GiB,link=25GB/s,memory=900GB/s --plot front.svg",
            "the rate of the disk (disk=) is not known",
        ),
        ("--assume gpus=1x4GiB,hots=8GiB", "hots=8GiB (did you mean host=?)"),
        ("--max-gpu-memory=-1", "--max-gpu-memory -1: must be more than 0 GiB"),
        (
            "--max-gpu-memory 8 --assume gpus=0,host=64GiB",
            "--max-gpu-memory 8: the machine has no GPU; use --max-host-memory",
        ),
        ("--max-host-memory 0", "--max-host-memory 0: must be more than 0 GiB"),
        ("--batch-size 0", "--batch-size 0: must be at least 1"),
        ("--plot front.xls --assume gpus=0,host=1GiB", "the name must end in .png, .pdf or .svg"),
        (f"--verify 2 --assume {LINE}", "--verify runs configurations"),
        ("--num-gpus 2 --machine rtx4090", "--num-gpus 2: the machine has 1 GPU: use 1 to 1"),
        ("--num-gpus 1 --assume gpus=0,host=64GiB", "--num-gpus 1: the machine has no GPU: drop it"),
        (
            "--num-gpus 2 --batch-size 1 3 --machine 2xrtx4090",
            "does not divide over --num-gpus 2; use 2, a multiple of 2, or 1 GPU",
        ),
        (
            "--max-host-memory 256 --machine rtx4090",
            "rtx4090 has only 64 GiB; for a machine with more use --assume host=256GiB",
        ),
        ("--max-gpu-memory 48 --machine 2xrtx4090", "for a machine with more use --assume gpus=2x48GiB"),
        ("--machines", "drop the model, or name a machine with --machine"),
        (f"--verify -1 --assume {LINE}", "must be at least 0"),
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


@pytest.mark.parametrize(
    "machine, engine, lacking",
    [
        ("gpus=0,host=16GiB,memory=60GB/s,disk_free=500GiB", "deepspeed", "the disk (disk=)"),
        ("gpus=1x24GiB,host=999GiB,link=25GB/s", "stream", "device memory (memory=)"),
        ("gpus=1x80GiB,host=999GiB,link=25GB/s,memory=900GB/s", "accelerate", "pageable copies (pageable=)"),
    ],
)
def test_what_fits_is_listed_where_a_rate_is_not_known(machine, engine, lacking, capfd):
    asked = ["plan", "opt-30b", "--dummy", "--engine", engine, "--batch-size", "1", "2", "--assume", machine]
    assert console_main(["zero-inference", *asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    rows = answer["not_predicted"]["configurations"]
    assert not answer["configurations"] and answer["not_predicted"]["count"] == len(rows) >= 2
    assert all(row["tokens_per_s"] is None and row["engine"] == engine for row in rows)
    assert console_main(["zero-inference", *asked]) == 0
    out = capfd.readouterr().out
    first = " ".join(out.partition("\n\n")[0].split())
    assert first.startswith(f"{len(rows)} configurations of opt-30b fit, but how fast they are is not known: ")
    assert f"the rate of {lacking} is not known" in first
    table_rows = [line for line in out.splitlines() if re.match(r" *\d+ +\w+: ", line)]
    assert len(table_rows) == len(rows) and all(re.search(r" \? +\? +\? .* \?$", line) for line in table_rows)
    assert f"\n   {rows[0]['command']}  # --assume {machine}\n" in out


def test_the_rest_is_listed_with_all_that_is_asked_for(capfd):
    asked = (
        "plan llama-2-13b --dummy --engine stream accelerate --quant-bits 16 --batch-size 1 --machine rtx4090".split()
    )
    assert console_main(["zero-inference", *asked, "--all"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"\n 2  accelerate: \S+ host, KV device +1 +\? ", out) and "; --all lists" not in out
    assert console_main(["zero-inference", *asked]) == 0
    out = capfd.readouterr().out
    assert "accelerate: " not in out.partition("\n1. ")[0] and "is not known; --all lists" in " ".join(out.split())


def test_times_that_nobody_counts_in_seconds_are_durations(capfd):
    """122 GiB at 1 MB/s."""
    where = ["--machine", "rtx4090", "--assume", "host=32GiB,disk=0.001GB/s,disk_free=500GiB"]
    asked = ["plan", "opt-66b", "--dummy", "--engine", "deepspeed", "--quant-bits", "16", "--batch-size", "1", *where]
    assert console_main(["zero-inference", *asked, "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["configurations"]
    hours = f"{row['step_s'] / 3600:.0f} h" if row["step_s"] % 3600 < 30 else f"{int(row['step_s'] // 3600)} h "
    assert row["step_s"] > 100_000
    assert console_main(["zero-inference", *asked]) == 0
    out = capfd.readouterr().out
    assert f" ≥{hours}" in out and not re.search(r"≥\d{4}", out)
    run = ["run_model.py", "opt-66b", "--dummy", "--disk-offload", "--dry-run", *where]
    assert main(run) == 0
    assert f"(decode step at least {hours}" in capfd.readouterr().out
    assert [format_seconds(each) for each in (0.2949, 59.96, 599, 600, 165_621)] == [
        "0.295 s",
        "60 s",
        "599 s",
        "10 min",
        "46 h",
    ]


def test_a_mixture_says_where_its_experts_are_copied_whole(capfd):
    """Those of Qwen3 the CPU multiplies, where its rate is known."""
    where = ["--quant-bits", "16", "--batch-size", "1", "--dummy", "--machine", "rtx4090", "--assume"]

    def said(model: str, machine: str, engine: str = "stream") -> str:
        assert console_main(["zero-inference", "plan", model, "--engine", engine, *where, machine]) == 0
        return " ".join(capfd.readouterr().out.split())

    assert "experts of a layer" not in said("qwen3-30b-a3b", "cores=60GB/s")
    unused = "stream copies all 128 experts of a layer in each step, a token uses 8: the CPU computes nothing"
    assert f"{unused}: the rate of the host's cores is not known" in said("qwen3-30b-a3b", "host=64GiB")
    assert "deepspeed copies all 128 experts of a layer in each step" in said(
        "qwen3-30b-a3b", "host=64GiB", "deepspeed"
    )
    assert "experts of a layer" not in said("llama-4-scout", "host=512GiB"), "a token goes through all of them"
    dry = ["run_model.py", "gpt-oss-120b", "--engine", "stream", "--dry-run", *where[4:], "host=512GiB,cores=60GB/s"]
    assert main(dry) == 0
    out = capfd.readouterr().out
    assert main([*dry, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    whole = answer["moved_per_step"]["host_to_device_bytes_per_step"] > answer["sizes"]["weight_bytes"] / 2
    why = "stream copies all 128 experts of a layer in each step, a token uses 4: the CPU does not multiply experts of this form"
    assert (f"  experts        {why}" in out) is whole


def test_a_first_token_that_takes_less_than_a_step_says_why(capfd):
    asked = "plan qwen3-30b-a3b --dummy --engine stream --quant-bits 16 --batch-size 1 --machine rtx4090".split()
    assert console_main(["zero-inference", *asked, "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["configurations"]
    assert row["prefill_s"] < row["step_s"]
    why = "the first token takes less than a step: its first layers are still on the device from the generation before"
    assert console_main(["zero-inference", *asked]) == 0
    assert why in " ".join(capfd.readouterr().out.split())
    fewer = [*asked, "--quant-bits", "4"]
    assert console_main(["zero-inference", *fewer]) == 0
    assert "first token takes less" not in capfd.readouterr().out, "all is on the device, and a prompt takes longer"


def test_a_preset_whose_published_checkpoint_is_refused_says_so(capfd):
    """gpt-oss is published in MXFP4. With random weights it runs, and so does a preset published in fp8 with block scales."""
    where = "--engine stream --quant-bits 4 --batch-size 1 --machine h200-sxm --assume host=999GiB".split()
    refused = "its weights are quantized (mxfp4), and of quantized checkpoints only fp8 with block scales is read"

    def said(*model: str) -> str:
        assert console_main(["zero-inference", "plan", *model, *where]) == 0
        return " ".join(capfd.readouterr().out.split())

    out = said("gpt-oss-120b")
    assert refused in out and "--dummy plans and runs random weights" in out
    assert "quantized" not in said("gpt-oss-120b", "--dummy") and "quantized" not in said("deepseek-v3")


def test_one_sequence_on_two_gpus_says_what_uses_both(capfd):
    asked = "plan llama-2-13b --dummy --engine stream --quant-bits 16 --kv-offload off --batch-size 1 2".split()
    assert console_main(["zero-inference", *asked, "--machine", "2xrtx4090"]) == 0
    out = capfd.readouterr().out
    why = "batch 1 runs on one of the 2 GPUs, because they divide the batch: --batch-size 2 uses both"
    assert why in " ".join(out.split())
    head = next(line for line in out.splitlines() if "engine: weights" in line)
    end = head.index("GPUs") + len("GPUs")
    rows = [line for line in out.splitlines() if re.match(r"[* ]*\d+ +stream: ", line)]
    assert sorted(line[:end].split()[-1] for line in rows) == ["1", "1", "2"] and max(map(len, rows)) <= 100
    assert console_main(["zero-inference", *asked, "--machine", "2xrtx4090", "--num-gpus", "1"]) == 0
    assert "batch 1 runs on one" not in capfd.readouterr().out
    assert console_main(["zero-inference", *asked, "--machine", "rtx4090"]) == 0
    assert "GPUs" not in capfd.readouterr().out


def test_a_model_is_needed(capfd):
    assert console_main(["zero-inference", "plan", "--machine", "rtx4090"]) == 2
    assert "name a model first" in capfd.readouterr().err


def test_typical_machines_are_listed(capfd):
    assert console_main(["zero-inference", "plan", "--machines"]) == 0
    lines = capfd.readouterr().out.splitlines()
    head = " ".join(" ".join(lines[:2]).split())
    assert max(map(len, lines)) <= 100 and "--machine" in head and "link GB/s" not in lines[0] and "assumed" in head
    (line,) = [line for line in lines if line.split()[0] == "rtx4090"]
    assert line.split() == [
        "rtx4090",
        "RTX",
        "4090",
        "24",
        "1008",
        "PCIe",
        "4",
        "x16",
        "31.5",
        "the",
        "link",
        "165.2",
        "165.2",
        "64",
    ]
    assert console_main(["zero-inference", "plan", "--machines", "--json"]) == 0
    names = [each["name"] for each in json.loads(capfd.readouterr().out)]
    assert len(names) == len(lines) - 3 and "a100-80" in names and "h100-sxm" in names


def test_a_plan_from_a_datasheet_says_that_it_is_one(capfd):
    asked = "plan --model llama-2-13b --dummy --batch-size 1 --quant-bits 16 --machine rtx4090 --engine stream resident".split()
    assert console_main(["zero-inference", *asked]) == 0
    out = capfd.readouterr().out
    assert "on rtx4090 (datasheet): 1 x RTX 4090, 64 GiB of host memory (assumed)." in out.replace("\n", " ")
    assert "\n≤, ≥: bounds, because rates are from datasheets, which no run reaches\n" in out
    assert re.search(r"\*1  stream: \S+ \d+% host, KV device +1 +≤[0-9.]+ +≥[0-9.]+ +≥[0-9.]+ ", out)
    assert " GPUs" not in out and "the host's cores (their rate" in out and "kernel launches" in out
    assert console_main(["zero-inference", *asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["machine_source"] == "datasheet" and "(datasheet)" in answer["machine"]
    for each in answer["configurations"]:
        assert each["at_most"] and not each["with_host"] and each["without_cores"] and each["gpus"] == 1


def started(monkeypatch, ranks: int) -> None:
    """As a launcher starts the first of several ranks."""
    names = dict(RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29501")
    for name, value in {**names, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)


def test_several_gpus_are_planned_as_a_launcher_plans_them(monkeypatch, capfd):
    """The same figures as of `--dry-run` in two ranks, for every engine that runs in two."""
    line = f"{LINE.replace('1x24GiB', '3x24GiB')},disk=3GB/s"
    asked = (
        "plan --model llama-2-13b --dummy --batch-size 2 6 --quant-bits 16 4 --kv-offload off --json --assume".split()
    )
    assert console_main(["zero-inference", *asked, line]) == 0
    all_of_them = json.loads(capfd.readouterr().out)["configurations"]
    assert {(each["gpus"], each["batch_size"]) for each in all_of_them} == {(1, 2), (1, 6), (2, 2), (2, 6), (3, 6)}
    of_two = [each for each in all_of_them if (each["gpus"], each["batch_size"]) == (2, 6)]
    assert {each["engine"] for each in of_two} == {"stream", "deepspeed"}, (
        "resident does not fit, accelerate is one process"
    )
    assert [each["engine"] for each in all_of_them if each["gpus"] == 1].count("accelerate") == 0, "no pageable rate"
    started(monkeypatch, 2)
    for each in of_two:
        launcher, options = each["command"].split(" run_model.py ")
        assert launcher == "deepspeed --num_gpus 2"
        assert main(["run_model.py", *options.split(), "--dry-run", "--assume", line]) == 0
        out = capfd.readouterr().out
        prefill, step, rate = (significant(each[name]) for name in ("prefill_s", "step_s", "tokens_per_s"))
        most, least = ("at most ", "at least ") if each["at_most"] else ("", "")
        within = each["tokens_per_s_range"]
        rate += "" if within is None else f" ({significant(within[0])} to {significant(within[1])})"
        assert (within is None) == each["at_most"] and (within is None or within[0] < each["tokens_per_s"] < within[1])
        assert out.startswith(f"It fits. Predicted: {most}{rate} token/s (decode step {least}{step} s, bound by ")
        assert f"), first token {least}{prefill} s" in out.splitlines()[0]
        rows = {line[2:17].strip(): line[17:] for line in out.splitlines()}
        assert rows["device memory"] == f"{each['device_bytes'] / GIB:.3g} of 23.5 GiB free of each GPU"
        assert rows["host memory"].startswith(f"{each['host_bytes'] / GIB:.3g} of 256 GiB free")
        assert ("the host's cores (their rate" in rows["not counted"]) == each["without_cores"]


def test_more_gpus_bring_the_weights_sooner_and_say_what_is_not_known(capfd):
    asked = "plan --model opt-30b --dummy --engine stream --quant-bits 16 --kv-offload off --batch-size 8".split()
    machine = ["--assume", LINE.replace("1x24GiB", "4x24GiB"), "--max-gpu-memory", "14"]
    assert console_main(["zero-inference", *asked, *machine, "--num-gpus", "2", "4"]) == 0
    out = capfd.readouterr().out
    said = out.replace("\n    ", " ")
    assert (
        "4 GPUs" in out.splitlines()[0] and "how fast the GPUs exchange weights is not known (--assume peers=)" in said
    )
    assert "the host's cores (their rate" in said and "\n   deepspeed --num_gpus 4 run_model.py" in out
    assert console_main(["zero-inference", *asked, *machine, "--json"]) == 0
    by = {each["gpus"]: each for each in json.loads(capfd.readouterr().out)["configurations"]}
    assert sorted(by) == [1, 2, 4] and not by[1]["without_cores"] and by[2]["without_cores"] and by[4]["at_most"]
    assert by[2]["step_s"] / by[4]["step_s"] == pytest.approx(2, rel=0.05), "each link brings half as much"
    linked = [*machine[:1], f"{machine[1]},peers=link", *machine[2:]]
    assert console_main(["zero-inference", *asked, *linked, "--num-gpus", "4"]) == 0
    out = capfd.readouterr().out
    assert "exchange weights" not in out
    assert console_main(["zero-inference", *asked, *linked, "--num-gpus", "4", "--json"]) == 0
    (only,) = json.loads(capfd.readouterr().out)["configurations"]
    assert only["step_s"] == pytest.approx(4 * by[4]["step_s"], rel=0.05), "each gets all of it over its own link"
    assert by[4]["tokens_per_s"] == pytest.approx(8 / by[4]["step_s"]), "of all ranks"


def test_weights_on_every_gpu_are_counted_once_each(capfd):
    asked = (
        "plan --model llama-2-13b --dummy --quant-bits 16 --kv-offload off --batch-size 8 --json --goal memory".split()
    )
    line = LINE.replace("1x24GiB", "2x80GiB")
    assert console_main(["zero-inference", *asked, "--engine", "resident", "--assume", line]) == 0
    one, two = json.loads(capfd.readouterr().out)["configurations"]
    assert (one["gpus"], two["gpus"]) == (1, 2), "two take twice the memory"
    assert not one["at_most"] and not two["at_most"], "what they do is known"
    assert one["tokens_per_s"] < two["tokens_per_s"] < 2 * one["tokens_per_s"]


def test_what_fits_no_number_of_gpus_is_told_of_the_most(capfd):
    asked = "plan --model opt-66b --dummy --quant-bits 16 --batch-size 2 --engine deepspeed stream --assume".split()
    assert console_main(["zero-inference", *asked, LINE.replace("1x24GiB", "2x24GiB")]) == 0
    out = capfd.readouterr().out
    (line,) = unfitting(out)
    assert (
        line.startswith("deepspeed fp16 on the device, 2 GPUs: ")
        and " GiB of device memory, 23.5 GiB free; fits with --" in line
    )


def test_a_generation_takes_its_first_token_and_all_others(found):
    for each in found.candidates:
        assert each.total_s == pytest.approx(each.times.prefill.seconds + 31 * each.times.step.seconds)
    rows = rows_of(found.candidates, found.candidates)
    (row, *_) = in_json(rows, found.candidates)
    assert row["total_s"] == found.candidates[0].total_s
    assert row["total_tokens_per_s"] == pytest.approx(row["batch_size"] * 32 / row["total_s"])


def test_a_trial_runs_in_as_many_processes_as_gpus(copied_runs, tmp_path, monkeypatch):
    """On a CPU, where ranks take gloo."""
    job = job_of(
        "--model opt-125m --dummy --dtype bfloat16 --prompt-len 8 --gen-len 3 --batch-size 2",
        resolve_machine(None, None),
    )
    two = replace(job, ranks=replace(job.ranks, world_size=2, local_world_size=2))
    plan = plan_with(two, engine="resident", cpu_offload=False)
    monkeypatch.setattr("zero_inference.planning.search.run_child", functools.partial(run_child, env=without_gpus()))
    times = Times(PassTime(1.0, "launches"), PassTime(1.0, "launches"))
    rate = search._measured_tokens_per_s(Candidate(plan, times), tmp_path, 1, print)
    (record,) = read_records(tmp_path / "1.jsonl")
    assert rate == record["decode_throughput"] > 0 and record["world_size"] == 2


def test_the_smallest_machine_is_one_that_does(capfd):
    asked = ["plan", "--model", "opt-66b", "--dummy", "--engine", "stream", "--batch-size", "1"]
    rates = "link=25GB/s,memory=900GB/s,cores=50GB/s"
    assert console_main(["zero-inference", *asked, "--assume", f"gpus=1x4GiB,host=8GiB,{rates}"]) == 2
    device, host = map(
        float,
        re.search(r"has ([0-9.]+) GiB of free device.* and ([0-9.]+) GiB of host", capfd.readouterr().err).groups(),
    )
    enough = f"gpus=1x{device + 0.6:.2f}GiB,host={host + 0.1:.1f}GiB,{rates}"  # a context takes half a GiB
    assert console_main(["zero-inference", *asked, "--assume", enough]) == 0


def test_a_part_of_a_machine():
    whole = ProfiledMachine(MACHINE)
    part = limit_memory(whole, device_bytes=10 * GIB, host_bytes=20 * GIB)
    ranks = whole.ranks_there(detect_ranks())
    assert (part.free_device_bytes(ranks, False), part.available_host_bytes()) == (10 * GIB, 20 * GIB)
    assert limit_memory(whole, 999 * GIB).free_device_bytes(ranks, False) == whole.free_device_bytes(ranks, False)
    assert limit_memory(whole).available_host_bytes() == whole.available_host_bytes() and not part.is_here
    assert (part.gpus(), part.profile(), part.instructions()) == (1, MACHINE, "amx")


@pytest.fixture
def kept_here(monkeypatch, tmp_path):
    """A file that describes this machine, without its GPUs."""
    monkeypatch.setattr(cache, "describe_environment", lambda: describe_environment() | {"gpus": []})
    environment = describe_environment()
    path = tmp_path / "machine.json"
    versions = rate_versions(environment)
    here = FAST.model_copy(update={"gpus": (), "versions": versions, "link_gb_per_s": 10.0, "device_gb_per_s": 20.0})
    write_profile(here, path)
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", str(path))
    return path, here


def test_a_kept_machine_is_used_until_something_changes(kept_here):
    path, here = kept_here
    assert cached_profile() == here and why_outdated(here) is None
    write_profile(here.model_copy(update={"versions": here.versions | {"torch": "1.0"}}), path)
    assert cached_profile() is None
    assert why_outdated(here.model_copy(update={"versions": {}})).startswith("torch was None and is 2")
    assert why_outdated(here.model_copy(update={"gpus": MACHINE.gpus})) == "its GPUs have changed"
    earlier = here.model_copy(update={"measured_with": 1})
    assert why_outdated(earlier) == "the profile is from an older version"
    write_profile(earlier, path)
    assert cached_profile() is None
    path.write_text("{")
    assert cached_profile() is None
    path.unlink()
    assert cached_profile() is None


def test_a_machine_that_was_not_measured_is_measured_once(monkeypatch, tmp_path, capfd):
    path = tmp_path / "new" / "machine.json"
    monkeypatch.setenv("ZERO_INFERENCE_MACHINE", str(path))
    monkeypatch.setattr(
        "zero_inference.hardware.measure_profile.measure_this_machine",
        lambda ranks, disk, say: ({"warnings": ["no link"]}, MACHINE),
    )
    lines: list[str] = []
    cache.measure_and_cache(lines.append)
    assert (
        path.is_file()
        and lines[0].startswith("measuring this machine; the results are kept")
        and lines[1] == "warning: no link"
    )
    cache.measure_and_cache(lines.append)
    assert "measuring this machine again (torch was 2.11 and is " in lines[2]
    path.write_text("a letter")
    with pytest.raises(UsageError, match="not one that this version reads; remove it"):
        cache.measure_and_cache(lines.append)
    assert path.read_text() == "a letter"


def test_rates_measured_beside_other_programs_are_marked(kept_here, capfd):
    path, here = kept_here
    busy = here.model_copy(update={"others_cpu_share": 0.9})
    write_profile(busy, path)
    caveat = (
        "rates were measured while other programs used 90% of the CPU and may be too low; "
        "zero-inference link --save measures again"
    )
    assert cached_profile() == busy and busy.caveat() == caveat
    asked = ["run_model.py", "--model", "opt-125m", "--dummy", "--engine", "resident", "--gen-len", "2", "--loops", "1"]
    assert main([*asked, "--dry-run"]) == 0 and caveat in " ".join(capfd.readouterr().out.split())


def test_a_file_from_before_use_of_the_cpu_was_noted_is_not_taken_to_be_of_a_busy_machine(kept_here):
    path, here = kept_here
    said = json.loads(path.read_text())
    assert said.pop("others_cpu_share") is None
    path.write_text(json.dumps(said))
    assert cached_profile() == here and here.caveat() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine file has no GPU")
def test_what_is_left_open_is_found_and_recorded(kept_here, tmp_path, capfd):
    asked = "--model opt-125m --dummy --engine auto --batch-size auto --quant-bits auto --prompt-len 8 --gen-len 3 --dtype bfloat16"
    run = f"{asked} --goal latency --loops 1 --warmup 0 --log-file {tmp_path / 'run.log'}"
    assert main(["run_model.py", *run.split()]) == 0
    err = capfd.readouterr().err
    (record,) = read_records(tmp_path / "run.jsonl")
    assert (
        record["chosen"]["options"] == ["engine", "quant_bits", "batch_size"] and record["chosen"]["goal"] == "latency"
    )
    assert record["batch_size"] == 1
    assert f"chosen: --engine {record['engine']} --quant-bits {record['quant_bits']} --batch-size 1: predicted " in err
    assert len(record["chosen"]["over"]) == 5 and all(": " in each for each in record["chosen"]["over"])
    assert record["chosen"]["decode_throughput"] == pytest.approx(2 / record["predicted"]["decode_s"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine file has no GPU")
def test_load_takes_what_the_plan_finds(kept_here, checkpoints):
    ids, shape = torch.arange(3, 8)[None], {"dtype": "float32", "max_length": 12, "verbose": 0}
    with load(checkpoints("llama"), engine="resident", **shape) as model:
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with load(checkpoints("llama"), engine="auto", quant_bits="auto", **shape) as model:
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine file has no GPU")
def test_a_named_engine_is_kept_and_bits_come_before_speed(kept_here, capfd):
    asked = "--model opt-125m --dummy --engine stream --quant-bits auto --batch-size auto --dry-run --dtype bfloat16"
    assert main(["run_model.py", *asked.split()]) == 0
    assert "chosen: --engine stream --quant-bits 16 --batch-size 64" in capfd.readouterr().err
    assert main(["run_model.py", *asked.replace("--quant-bits auto ", "").replace("stream", "auto").split()]) == 0
    assert "--quant-bits 16" in capfd.readouterr().err


def test_what_auto_cannot_do(monkeypatch, capfd):
    asked = [
        *"run_model.py --model opt-66b --dummy".split(),
        *"--engine auto --dry-run --assume".split(),
        "gpus=1x8GiB,host=50GiB,link=25GB/s,cores=60GB/s,memory=1000GB/s,disk=3GB/s,disk_free=50GiB",
    ]
    assert main(asked) == 2
    err = capfd.readouterr().err
    assert (
        "--engine auto: none of 7 ways to run opt-66b fits" in err
        and "the smallest machine that could run it has" in err
    )
    assert main([*asked, "--quant-bits", "auto"]) == 0, "rounded weights fit"
    assert "chosen: --engine stream --quant-bits 4" in capfd.readouterr().err
    assert main(["run_model.py", "--engine", "auto", "--cpu-offload"]) == 2
    assert "drop --cpu-offload, or name an engine" in capfd.readouterr().err
    assert main(["run_model.py", "--goal", "latency"]) == 2
    assert "add --engine auto" in capfd.readouterr().err
    names = dict(
        WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29501"
    )
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    two = "run_model.py --model opt-125m --dummy --engine auto --dry-run --assume".split()
    assert main([*two, "gpus=2x24GiB,host=8GiB"]) == 2
    assert "this works in one process only, and 2 were started" in capfd.readouterr().err


def test_faster_options_are_named_with_their_factor():
    def plan(options: str, **changes):
        machine = FAST.model_copy(update={"cores": MACHINE.cores} | changes)
        return make_plan(job_of(f"{options} --dummy", ProfiledMachine(machine)))

    def rate(options: str) -> float:
        found = plan(f"--model llama-2-13b --prompt-len 64 {options}")
        return found.times.tokens_per_s(found.job.config.batch_size)

    slow = plan("--model llama-2-13b --prompt-len 64 --cpu-offload --quant-bits 8")
    own = rate("--cpu-offload --quant-bits 8")
    found = {each.options: each for each in faster_than(slow)}
    assert list(found) == ["--engine stream", "--batch-size 64"], "on this device, 4 bits gain less than half over 8"
    for options, each in found.items():
        asked = "--quant-bits 8 " + (options if "--engine" in options else f"--cpu-offload {options}")
        assert each.tokens_per_s == pytest.approx(rate(asked)) and each.times == pytest.approx(rate(asked) / own)
    assert [each.options for each in faster_than(slow, "latency")] == ["--engine stream"] and not faster_than(
        slow, "memory"
    )
    first = found["--engine stream"]
    most = "at most " if first.at_most else ""
    line = f"hint: --engine stream gives {most}{significant(first.tokens_per_s)} token/s ({significant(first.times)} times as many)"
    assert hint(slow, None) == f"{line}; zero-inference plan compares them"
    streamed = plan("--model llama-2-13b --engine stream --gpu-memory 0 --prompt-len 64")
    fewer = rate("--engine stream --gpu-memory 0 --quant-bits 4") / rate("--engine stream --gpu-memory 0")
    assert "--quant-bits 4 gives " in hint(streamed, None) and f"({fewer:.1f} times" in hint(streamed, None)
    assert "--batch-size" not in hint(streamed, None), "who named an engine has a batch"
    assert (
        hint(plan("--model opt-66b --cpu-offload --batch-size 64 --quant-bits 4", link_gb_per_s=5000.0), None) is None
    )
    unknown = plan("--model llama-2-13b --cpu-offload", link_gb_per_s=None)
    assert unknown.times is None and not faster_than(unknown)
    said = why_none(search.SearchResult([], [unknown], []), "llama-2-13b")
    assert said.startswith("1 configuration of llama-2-13b fits, but how fast it is is not known: the rate of ")
    assert said.endswith("; measure it with zero-inference link --save, or add it to --assume.")


def test_docs_show_what_a_plan_prints(capfd):
    """Some of its lines, as they are."""
    asked, shown = re.search(
        r"^zero-inference (plan [^\n]*--machine[^\n]*)\n```\n\n```text\n(.*?)```",
        (ROOT / "docs" / "big-models.md").read_text(),
        re.M | re.S,
    ).groups()
    assert console_main(["zero-inference", *shlex.split(asked)]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert (
        shown.splitlines() == [line for line in printed if line in shown.splitlines()] and len(shown.splitlines()) > 5
    )


def test_what_auto_did_not_choose_is_printed_with_the_option_to_type(capfd):
    """70B on a 24 GB card: 16 bits fit, at a fifth of the speed that 4 bits have. Plan, dry run and its JSON say so."""
    where = ["--machine", "rtx4090", "--assume", "host=256GiB,cores=60GB/s"]
    asked = ["run_model.py", "llama-3.1-70b", "--dummy", "--engine", "auto", "--dry-run", *where]
    assert main(asked) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  faster ")]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    bits, batch = answer["faster"]
    assert bits["options"] == "--quant-bits 4" and batch["options"].startswith("--batch-size ")
    assert main([*asked, "--json", *bits["options"].split()]) == 0
    with_them = json.loads(capfd.readouterr().out)
    assert with_them["predicted"]["decode_throughput"] == pytest.approx(bits["tokens_per_s"])
    factor = bits["tokens_per_s"] / answer["predicted"]["decode_throughput"]
    assert factor == pytest.approx(bits["times"]) and 3 < factor < 6
    said = f"--quant-bits 4 gives at most {significant(bits['tokens_per_s'])} token/s ({factor:.1f} times as many)"
    assert said in line and f", {batch['options']} gives at most " in line
    assert not [each for each in with_them["faster"] if "bits" in each["options"]]
    assert console_main(["zero-inference", "plan", "llama-3.1-70b", "--dummy", "--engine", "stream", *where]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert (
        f"stream engine, bf16, batch 1 (at most {significant(answer['predicted']['decode_throughput'])} token/s predicted): {said}"
        in out
    )
    quick = [*asked, "--quant-bits", "auto", "--goal", "throughput"]  # README's row for the fastest
    assert main(quick) == 0
    assert "chosen: --engine stream --quant-bits 4" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine file has no GPU")
def test_the_best_are_tried(kept_here, copied_runs, tmp_path):
    path, _ = kept_here
    asked = "plan --model opt-125m --dummy --dtype bfloat16 --prompt-len 8 --gen-len 3 --batch-size 1 --quant-bits 16"
    ways = ["--engine", "resident", "stream"]
    command = [
        sys.executable,
        "-m",
        "zero_inference",
        *asked.split(),
        *ways,
        *"--kv-offload off --verify 2 --json".split(),
    ]
    environment = without_gpus() | {"ZERO_INFERENCE_MACHINE": str(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rates = [each["measured_tokens_per_s"] for each in json.loads(done.stdout)["configurations"]]
    assert len(rates) == 2 and rates == sorted(rates, reverse=True) and rates[-1] > 0
    assert done.stderr.count("token/s, predicted") == 2


def test_a_configuration_without_anything_open_stays_as_it_is():
    config = RunConfig(model="opt-125m", dummy=True)
    assert choose(config, None, None, None, print) == (config, None, None)
    with pytest.raises(UsageError, match="--engine quick: choose one of"):
        RunConfig(engine="quick").validate()


def test_keys_and_values_on_the_host_cross_the_link_as_fast_as_they_can(capfd):
    """Page-locked and ahead of their layer: else a plan would not be the best with them there."""
    asked = "plan --model opt-13b --dummy --engine stream --quant-bits 16 --batch-size 32 --kv-offload on --json --assume".split()
    line = "gpus=1x80GiB,host=256GiB,link=25GB/s,pageable=5GB/s,memory=2000GB/s,matmul=300TFLOP/s"
    assert console_main(["zero-inference", *asked, line]) == 0
    (found,) = json.loads(capfd.readouterr().out)["configurations"]
    assert "--kv-offload --pin-kv-cache --async-kv-offload" in found["command"] and found["bound_by"] == "link"
    keys = 40 * 2 * 5120 * 2 * 32 * (512 + 16)
    assert found["step_s"] == pytest.approx(keys / 25e9, rel=0.05)


def test_a_part_of_the_device_is_in_the_command_too(capfd):
    asked = "plan --model llama-3.1-8b --dummy --json --engine stream --quant-bits 16 --batch-size 1".split()
    assert (
        console_main(["zero-inference", *asked, "--max-gpu-memory", "10", "--kv-offload", "off", "--assume", LINE]) == 0
    )
    answer = json.loads(capfd.readouterr().out)
    (only,) = answer["configurations"]
    command = only["command"].split()[2:]
    assert only["device_bytes"] < 10 * GIB and 0 < float(command[command.index("--gpu-memory") + 1]) < 9
    assert main(["run_model.py", *command, "--dry-run", "--assume", LINE]) == 0
    low, high = only["tokens_per_s_range"]
    said = f"It fits. Predicted: {only['tokens_per_s']:.3g} ({low:.3g} to {high:.3g}) token/s "
    assert said in capfd.readouterr().out


def test_what_the_stream_engine_refuses_is_no_candidate():
    """Its plan keeps a reserve on the device, which the sizes alone do not show."""
    machine = ProfiledMachine(
        FAST.model_copy(update={"gpus": (H200.model_copy(update={"free_bytes": int(15.5 * GIB)}),)})
    )
    job = job_of("--model llama-3.1-8b --dummy --prompt-len 40000 --engine stream", machine)
    found = find_candidates(job, SearchSpace(engines=("stream",), quant_bits=(16,), batch_sizes=(1, 2, 4)))
    for each in found.candidates:
        assert make_plan(job_of(shlex.join(options_of(each.config)), machine)).fits


@pytest.mark.parametrize(
    "options",
    ["--engine stream --pin-memory 0", "--engine stream --pin-memory 1", "--quality perplexity,mmlu --quality-data ."],
)
def test_options_are_written_as_they_are_read(options):
    if "--quality" in options:
        need_lm_eval()
    config = parse_options([*shlex.split(options), "--model", "opt-125m"])
    assert parse_options(options_of(config)) == config


def test_those_that_failed_come_last_and_are_not_on_the_front(found, monkeypatch):
    monkeypatch.setattr(search, "_measured_tokens_per_s", lambda each, *_: None if each.config.quant_bits == 4 else 1.0)
    best = ranked([each for each in found.candidates if each.config.batch_size == 1], "throughput")
    tried = search.verify(best, len(best), "throughput", lambda line: None)
    failed = [each.failed for each in tried]
    assert any(failed) and failed == sorted(failed) and not any(each.failed for each in pareto_front(tried))
    monkeypatch.setattr(search, "_measured_tokens_per_s", lambda *_: None)
    with pytest.raises(RunError, match="every run failed"):
        search.verify(best, 2, "throughput", lambda line: None)


def test_a_bound_without_its_overhead_comes_behind_those_that_have_it(capfd):
    """DeepSpeed's bound is the highest with this batch, but nobody knows what its hooks take on that machine."""
    asked = "plan llama-3.1-70b --dummy --machine rtx4090 --quant-bits 4 --batch-size 64".split()
    assert console_main(["zero-inference", *asked, "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["configurations"]
    assert [(row["engine"], row["front"]) for row in rows] == [("stream", True), ("deepspeed", False)]
    assert rows[0]["tokens_per_s"] < rows[1]["tokens_per_s"], "by its bound it would be the first"
    assert console_main(["zero-inference", *asked]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert out.startswith("Fastest: stream engine, int4, batch 64: ")
    assert (
        "deepspeed is ranked after the others, because its overhead is not in its bound: deepspeed engine, int4" in out
    )
    assert console_main(["zero-inference", *asked, "--goal", "memory"]) == 0
    assert capfd.readouterr().out.startswith("Least memory: stream engine") is (
        rows[0]["device_bytes"] + rows[0]["host_bytes"] < rows[1]["device_bytes"] + rows[1]["host_bytes"]
    )
    alone = "plan llama-3.1-70b --dummy --machine rtx4090 --quant-bits 4 --batch-size 64 --engine deepspeed".split()
    assert console_main(["zero-inference", *alone]) == 0
    assert "ranked after" not in capfd.readouterr().out, "there is nothing before it"


def test_keys_and_values_are_moved_where_that_promises_something(monkeypatch, capfd):
    """Both places are planned; host memory is shown where the batch fits only so, or decodes clearly faster."""

    def places(batch: int, *more: str) -> list[tuple[str, float]]:
        asked = f"plan --model opt-30b --dummy --engine stream --quant-bits 4 --prompt-len 512 --batch-size {batch} --all --json"
        assert console_main(["zero-inference", *asked.split(), *more, "--assume", LINE]) == 0
        rows = json.loads(capfd.readouterr().out)["configurations"]
        return [(row["keys_and_values"], row["tokens_per_s"]) for row in rows]

    monkeypatch.setattr(search, "LEAST_GAIN", 0.0)
    both = dict(places(8))
    assert set(both) == {"host", "device"} and both["host"] < 1.05 * both["device"]
    monkeypatch.undo()
    assert places(8) == [("device", both["device"])]
    assert places(8, "--kv-offload", "on") == [("host", both["host"])], "who asks for it gets it"
    assert [place for place, _ in places(64)] == ["host"], "on the device they do not fit"


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-2-13b"])
def test_a_command_for_a_part_of_the_device_does_the_same_on_all_of_it(model):
    """Its ring has as many slots, and not as many as the whole device has room for."""
    whole = ProfiledMachine(FAST.model_copy(update={"cores": MACHINE.cores}))
    job = job_of(
        f"--model {model} --dummy --prompt-len 128 --engine stream", limit_memory(whole, device_bytes=12 * GIB)
    )
    found = find_candidates(job, SearchSpace(engines=("stream",), batch_sizes=(1, 8)))
    assert len(found.candidates) > 3
    for each in found.candidates:
        again = planned(shlex.join(options_of(each.config)), whole)
        assert again.weights.device_peak_bytes == each.plan.weights.device_peak_bytes <= 12 * GIB
        assert again.weights.placement.ring_depth == each.plan.weights.placement.ring_depth
        assert again.times == each.times


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_terminal_and_loses_nothing(columns, found, monkeypatch, capsys):
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 40)))
    monkeypatch.setattr(answer.sys.stdout, "isatty", lambda: True, raising=False)
    best = ranked(found.candidates, "throughput")
    text = re.sub(
        r"\x1b\[[0-9;]*m", "", answer.table(rows_of(best, best), [each.plan for each in best], every_column=False)
    )
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    for each in best:
        assert significant(each.tokens_per_s) in text and significant(each.times.step.seconds) in text
    for word in ("stream:", "deepspeed:", "int4", "bound by", "batch"):
        assert word in text


def test_a_pipe_gets_100_columns_and_all_columns_only_where_they_are_asked_for(found):
    best = ranked(found.candidates, "throughput")
    rows = rows_of(best, best)
    plans = [each.plan for each in best]
    text, wide = answer.table(rows, plans, every_column=False), answer.table(rows, plans, every_column=True)
    assert max(map(len, text.splitlines())) <= 100 < max(map(len, wide.splitlines()))
    assert (
        "total" in wide and "cores" in wide and "total" not in text and len(wide.splitlines()) <= len(text.splitlines())
    )


def test_the_first_line_is_the_best_and_what_one_sequence_gets(found):
    best = ranked(found.candidates, "throughput")
    one = ranked([each for each in best if each.config.batch_size == 1], "latency")[0]
    line, first = headline(best, "throughput"), best[0]

    def speed(each: Candidate) -> str:
        return f"{'at most ' if each.times.at_least else ''}{significant(each.tokens_per_s)} token/s"

    kind = f"{first.config.engine} engine, int{first.config.quant_bits}, batch {first.config.batch_size}"
    assert line.startswith(f"Fastest: {kind}: {speed(first)} predicted. For one sequence: ")
    assert line.endswith(f"batch 1: {speed(one)} predicted.")
    tried = headline([replace(first, measured_tokens_per_s=50.0), *best[1:]], "throughput")
    assert f": 50 token/s measured, {speed(first).removesuffix(' token/s')} predicted." in tried
    least = headline(ranked(found.candidates, "memory"), "memory")
    assert least.startswith("Least memory: ") and " GiB of device and host memory, " in least
