"""The sweep starts real processes: here of a small program with run_model.py's options that writes real records."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from zero_inference.records.read import read_records

PROGRAM = """
import argparse, os, subprocess, sys, time
from zero_inference.records.schema import Record
from zero_inference.records.write import append_record

parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("--dummy", "--cpu-offload", "--disk-offload", "--kv-offload"):
    parser.add_argument(flag, action="store_true")
for name, kind in (("model", str), ("engine", str), ("dtype", str), ("log-dir", str), ("batch-size", int), ("prompt-len", int),
                   ("gen-len", int), ("quant-bits", int), ("quant-group-size", int), ("loops", int), ("local_rank", int)):
    parser.add_argument(f"--{name}", type=kind)
args = parser.parse_args()
if args.batch_size == 13:
    parser.error("argument --batch-size: 13 is unlucky")
if args.batch_size == 99:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(os.path.join(args.log_dir, "pids.tmp"), "w") as file:
        file.write(f"{os.getpid()} {sleeper.pid}")
    os.rename(os.path.join(args.log_dir, "pids.tmp"), os.path.join(args.log_dir, "pids"))
    time.sleep(60)
if args.batch_size == 55 or int(os.environ.get("RANK", 0)):
    sys.exit(0)
failed = args.batch_size == 7
record = {name: getattr(args, name) for name in ("model", "engine", "dtype", "batch_size", "prompt_len", "gen_len", "quant_bits",
          "cpu_offload", "disk_offload", "kv_offload", "dummy")}
record |= {"argv": sys.argv, "world_size": int(os.environ.get("WORLD_SIZE", 1)), "status": "failed" if failed else "ok"}
record |= {"error": "out of memory: asked 9 GiB,\\nfound 3 GiB"} if failed else {"total_throughput": 10.0 * args.batch_size}
append_record(os.path.join(args.log_dir, "runs.jsonl"), Record.read(record))
print("[rank0]: RuntimeError: the traceback", file=sys.stderr)
sys.exit(failed)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def command(program, *words):
    own = ["--program", program, "--log-dir", program.parent / "logs", "--launcher", "python"]
    return [str(word) for word in (sys.executable, ROOT / "scripts" / "sweep.py", *own, *words)]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def sweep(program, *words, cwd=None):
    return subprocess.run(
        command(program, *words), env=environment(), capture_output=True, text=True, timeout=120, cwd=cwd
    )


def progress(done):
    return [line for line in done.stderr.splitlines() if line.startswith("[")]


def records(program):
    return read_records(program.parent / "logs")


def test_a_failed_case_is_named_and_the_rest_still_runs(program):
    done = sweep(program, "--batch-size", 7, 13, 55, 3)
    assert done.returncode == 1
    failed, refused, silent, good = progress(done)
    assert failed.startswith("[1/4] ") and "failed: out of memory: asked 9 GiB, found 3 GiB" in failed
    assert "argument --batch-size: 13 is unlucky (exit code 2)" in refused and "wrote no record" in silent
    assert good.endswith(": 30.000 token/s")
    output = re.search(r"\(see (.+\.out)\)", refused)[1]
    assert "usage: program.py" in Path(output).read_text()
    assert "batch" in done.stdout and "30.0" in done.stdout and "unlucky" in done.stdout


def test_every_combination_reaches_the_program_once(program):
    axes = ("--offload", "cpu", "disk", "--quant-bits", 16, 4, "--quant-group-size", 32, 64, "--kv_offload", 0, 1)
    words = ("--model", "org/a", *axes, "--dummy")
    listed = sweep(program, *words, "--list").stdout.splitlines()
    assert len(set(listed)) == len(listed) == 12, "the group size makes no second case where nothing is quantized"
    assert not (program.parent / "logs").exists()
    assert "--quant-group-size" not in sweep(program, "--quant-bits", 4, "--list").stdout, "it depends on the bits"
    done = sweep(program, *words[:5], *words[5:8], "--kv-offload", 0, 1, "--dummy")
    assert done.returncode == 0, done.stderr
    got = {(r["cpu_offload"], r["disk_offload"], r["quant_bits"], r["kv_offload"]) for r in records(program)}
    assert got == {(cpu, not cpu, bits, kv) for cpu in (True, False) for bits in (16, 4) for kv in (True, False)}
    assert len(records(program)) == 8 and all(r["dummy"] and r["model"] == "org/a" for r in records(program))


def test_good_cases_are_not_run_again_failed_and_others_are(program):
    assert sweep(program, "--batch-size", 2, 7).returncode == 1
    again = sweep(program, "--batch-size", 2, 7)
    assert again.returncode == 1 and "already" in progress(again)[0] and "20.0" in again.stdout
    assert [r["batch_size"] for r in records(program)] == [2, 7, 7]
    assert sweep(program, "--batch-size", 2, "--redo").returncode == 0
    assert [r["batch_size"] for r in records(program)] == [2, 7, 7, 2]
    assert sweep(program, "--batch-size", 2, "--list").stdout == ""
    for change in (("--gen-len", 31), ("--dummy",), ("--offload", "cpu"), ("--", "--loops", 1)):
        assert len(sweep(program, "--batch-size", 2, "--list", *change).stdout.splitlines()) == 1, change


@pytest.mark.parametrize(
    "launcher, start",
    [("deepspeed", "deepspeed --num_gpus 2 "), ("torchrun", "torchrun --standalone --nproc-per-node=2 ")],
)
def test_listed_commands_have_launchers_with_the_number_of_gpus(program, launcher, start):
    listed = sweep(program, "--list", "--launcher", launcher, "--num-gpus", 2, "--", "--loops=1").stdout
    assert listed.startswith(start) and "--loops=1" in shlex.split(listed)


def test_the_stream_engine_needs_no_launcher_for_several_gpus(program):
    listed = sweep(program, "--list", "--engine", "stream", "--num-gpus", 0, 2).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["python", "python"]
    assert "--num-gpus" not in listed[0] and "--num-gpus 2" in listed[1]


@pytest.mark.slow
def test_launchers_run_every_rank_and_no_file_of_the_current_folder(program, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "torch.py").write_text("raise SystemExit('a file of the current folder was run')")
    for launcher, ranks in (("deepspeed", 1), ("torchrun", 2)):
        words = ("--launcher", launcher, "--num-gpus")
        done = sweep(program, *words, ranks, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert records(program)[-1]["world_size"] == ranks
    assert [len(sweep(program, "--list", *words, n).stdout.splitlines()) for n in (2, 3)] == [0, 1]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--num-gpus", 2), "one process"), (("--time-limit", 0), "above 0"), (("--quant-bits", 5), "invalid choice"),
        (("--", "--batch_size", 3), "--batch-size after the --"), (("--program", "gone.py"), "no program gone.py"),
    ],
)  # fmt: skip
def test_bad_usage_is_exit_code_2_before_anything_runs(program, words, said):
    done = sweep(program, *words)
    assert done.returncode == 2 and said in done.stderr and not (program.parent / "logs").exists()


def running(pid):
    """False for a zombie too: nothing may reap an orphan here."""
    return psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_leaves_no_process_and_continues_later(program, sent, code):
    pids_file = program.parent / "logs" / "pids"
    words = command(program, "--batch-size", 1, 99, 3)
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not pids_file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(pid) for pid in pids_file.read_text().split()]
    assert all(map(running, pids))
    process.send_signal(sent)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert not any(map(running, pids))
    assert [r["batch_size"] for r in records(program)] == [1]
    assert "already" in progress(sweep(program, "--batch-size", 1, 3))[0]


def test_a_case_that_takes_too_long_is_ended_and_the_rest_still_runs(program):
    done = sweep(program, "--batch-size", 99, 3, "--time-limit", 4)
    assert done.returncode == 1, done.stderr
    assert "failed: ended as it took longer than --time-limit 4" in progress(done)[0]
    assert progress(done)[1].endswith(": 30.000 token/s")
    assert not any(running(pid) for pid in (program.parent / "logs" / "pids").read_text().split())


@pytest.mark.parametrize("name", ["opt-1.3b", "opt-30b", "opt-66b", "opt-175b", "bloom-176b", "llama2-70b"])
def test_scripts_of_the_classic_cases_list_their_cases(name, program):
    words = [ROOT / "scripts" / f"{name}.sh", "--list", "--batch-size", "3", "--program", program]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env=environment() | {"PATH": path}, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # 2 places x 3 widths x KV cache there or here; the batch sizes were replaced
    assert len(set(done.stdout.splitlines())) == 12
    assert all("--batch-size 3" in line and line.startswith("deepspeed ") for line in done.stdout.splitlines())
