"""The sweep starts real processes: here of a small program with run_model.py's options that writes real records."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero_inference.records.read import read_records

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import argparse, os, sys, time
from datetime import datetime, timezone
from zero_inference.records.schema import Record
from zero_inference.records.write import append_record
from zero_inference.utils import get_filename

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--model")
parser.add_argument("--engine")
parser.add_argument("--dtype", default="auto")
parser.add_argument("--log-dir", default="logs")
for flag in ("--dummy", "--cpu-offload", "--disk-offload", "--kv-offload"):
    parser.add_argument(flag, action="store_true")
for name, default in (("batch-size", 1), ("prompt-len", 512), ("gen-len", 32), ("quant-bits", 16),
                      ("quant-group-size", 64), ("loops", 3), ("local_rank", 0)):
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
if args.batch_size == 13:
    parser.error("argument --batch-size: 13 is unlucky")
if args.batch_size == 99:
    import subprocess
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(os.path.join(args.log_dir, "pids.tmp"), "w") as file:
        file.write(f"{os.getpid()} {sleeper.pid}")
    os.rename(os.path.join(args.log_dir, "pids.tmp"), os.path.join(args.log_dir, "pids"))
    time.sleep(60)
if args.batch_size == 55:
    print("looks fine")
    sys.exit(0)
world = int(os.environ.get("WORLD_SIZE", 1))
if int(os.environ.get("RANK", 0)):
    sys.exit(0)
failed = args.batch_size == 7
record = {name: getattr(args, name) for name in ("model", "engine", "batch_size", "prompt_len", "gen_len", "quant_bits",
          "quant_group_size", "cpu_offload", "disk_offload", "kv_offload", "dummy")}
record |= {"timestamp": datetime.now(timezone.utc).isoformat(), "argv": sys.argv, "model_type": "opt",
           "dtype": "float32" if args.dtype == "auto" else args.dtype, "world_size": world, "num_nodes": 1,
           "norm_kernels": "off", "status": "failed" if failed else "ok"}
if failed:
    record["error"] = "out of memory: asked 9 GiB,\\nfound 3 GiB"
else:
    record |= dict.fromkeys(("model_bytes", "cache_bytes", "hidden_bytes", "weight_bytes", "load_s", "cold_total_s",
        "decode_latency_s", "decode_throughput", "prefill_throughput", "total_latency_s", "peak_gpu_bytes",
        "peak_host_bytes", "output_ids_sha256", "transfers", "limit", "ds_config", "environment"))
    record |= {"loops": [], "prefill_latency_s": 0.5, "total_throughput": 10.0 * args.batch_size}
name = get_filename(args.model, args.batch_size, args.prompt_len, args.gen_len, args.cpu_offload, args.disk_offload, 1,
                    world, args.kv_offload, args.quant_bits != 16)
append_record(os.path.join(args.log_dir, name + ".jsonl"), Record.read(record))
print("[rank0]: RuntimeError: the traceback", file=sys.stderr)
sys.exit(failed)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def command(program, *words):
    log_dir = program.parent / "logs"
    own = ["--program", program, "--log-dir", log_dir, "--launcher", "python"]
    return [str(word) for word in (sys.executable, ROOT / "scripts" / "sweep.py", *own, *words)]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def sweep(program, *words):
    return subprocess.run(command(program, *words), env=environment(), capture_output=True, text=True, timeout=60)


def progress(done):
    return [line for line in done.stderr.splitlines() if line.startswith("[")]


def records(program):
    return read_records(program.parent / "logs")


def test_a_failed_case_is_named_and_the_rest_still_runs(program):
    done = sweep(program, "--batch-size", 7, 13, 55, 3)
    assert done.returncode == 1
    lines = progress(done)
    assert [line.split()[0] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "failed: out of memory: asked 9 GiB, found 3 GiB" in lines[0]
    assert "argument --batch-size: 13 is unlucky (exit code 2)" in lines[1]
    assert "wrote no record" in lines[2]
    assert lines[3].endswith(": 30.000 token/s")
    # the file the line points to holds what the program printed
    output = re.search(r"\(see (.+\.out)\)", lines[1])[1]
    assert "usage: program.py" in Path(output).read_text()
    assert "batch" in done.stdout and "30.0" in done.stdout and "unlucky" in done.stdout


def test_every_combination_reaches_the_program(program):
    axes = ("--offload", "cpu", "disk", "--quant-bits", 16, 4, "--kv_offload", 0, 1)
    done = sweep(program, "--model", "org/a", *axes, "--dummy")
    assert done.returncode == 0, done.stderr
    got = {(r["cpu_offload"], r["disk_offload"], r["quant_bits"], r["kv_offload"]) for r in records(program)}
    assert got == {(cpu, not cpu, bits, kv) for cpu in (True, False) for bits in (16, 4) for kv in (True, False)}
    assert len(records(program)) == 8 and all(r["dummy"] and r["model"] == "org/a" for r in records(program))


def test_good_cases_are_not_run_again_failed_ones_are(program):
    assert sweep(program, "--batch-size", 2, 7).returncode == 1
    again = sweep(program, "--batch-size", 2, 7)
    assert again.returncode == 1 and "already" in progress(again)[0] and "20.0" in again.stdout
    assert [r["batch_size"] for r in records(program)] == [2, 7, 7]
    assert sweep(program, "--batch-size", 2, "--redo").returncode == 0
    assert [r["batch_size"] for r in records(program)] == [2, 2, 7, 7]


@pytest.mark.parametrize(
    "change",
    [
        ("--gen-len", 31), ("--dtype", "float32"), ("--dummy",), ("--offload", "cpu"), ("--kv-offload", 1),
        ("--quant-bits", 4, "--quant-group-size", 32), ("--model", "org/other"), ("--engine", "stream"),
        ("--", "--loops", 1),
    ],
)  # fmt: skip
def test_another_request_is_another_case(program, change):
    base = ["--model", "org/a", "--quant-bits", 4, "--batch-size", 2]
    assert sweep(program, *base).returncode == 0
    listed = sweep(program, *base, "--list", *change)
    # float32 is what the program's auto came to: the same request after all
    assert len(listed.stdout.splitlines()) == (0 if "--dtype" in change else 1)


def test_a_record_of_a_forced_dtype_does_not_answer_auto(program):
    assert sweep(program, "--dtype", "bfloat16").returncode == 0
    assert len(sweep(program, "--list").stdout.splitlines()) == 1
    assert len(sweep(program, "--list", "--dtype", "bfloat16").stdout.splitlines()) == 0


def test_group_size_makes_no_second_case_where_nothing_is_quantized(program):
    listed = sweep(program, "--list", "--quant-bits", 16, 4, "--quant-group-size", 32, 64).stdout.splitlines()
    assert len(listed) == 3


def test_the_stream_engine_keeps_weights_in_host_memory_either_way(program):
    listed = sweep(program, "--list", "--engine", "stream", "--offload", "gpu", "cpu").stdout.splitlines()
    assert len(listed) == 1 and "--cpu-offload" in listed[0]


def test_list_prints_runnable_commands_and_runs_nothing(program):
    done = sweep(program, "--list", "--batch-size", 2, 5, "--", "--loops=1")
    assert done.returncode == 0 and not (program.parent / "logs").exists()
    first, second = map(shlex.split, done.stdout.splitlines())
    assert first[0] == "python" and first[first.index("--batch-size") + 1] == "2" and "--loops=1" in first
    subprocess.run([sys.executable, *second[1:]], env=environment(), check=True, capture_output=True)
    assert records(program)[0]["batch_size"] == 5
    left = sweep(program, "--list", "--batch-size", 2, 5, "--", "--loops", "1")
    assert left.stdout.splitlines() == [done.stdout.splitlines()[0].replace("--loops=1", "--loops 1")]
    assert "1 of 2 cases" in left.stderr


@pytest.mark.parametrize(
    "launcher, start",
    [("deepspeed", "deepspeed --num_gpus 2 "), ("torchrun", "torchrun --standalone --nproc-per-node=2 ")],
)
def test_launchers_get_the_number_of_gpus(program, launcher, start):
    assert sweep(program, "--list", "--launcher", launcher, "--num-gpus", 2).stdout.startswith(start)
    assert "2" not in sweep(program, "--list", "--launcher", launcher).stdout.split("program.py")[0].split()


@pytest.mark.slow
def test_no_file_of_the_current_folder_is_run(program, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "torch.py").write_text("raise SystemExit('a file of the current folder was run')")
    words = command(program, "--launcher", "deepspeed", "--num-gpus", 1, "--", "--loops", 1)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrun_runs_every_rank_and_the_world_size_is_part_of_the_request(program):
    words = ("--launcher", "torchrun", "--num-gpus")
    done = sweep(program, *words, 2)
    assert done.returncode == 0, done.stderr
    assert records(program)[0]["world_size"] == 2
    assert [len(sweep(program, "--list", *words, n).stdout.splitlines()) for n in (1, 2)] == [1, 0]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--num-gpus", 2), "one process"),
        (("--time-limit", 0), "above 0"), (("--quant-bits", 5), "invalid choice"), (("--lst",), "--lst"),
        (("--", "--batch_size", 3), "--batch-size after the --"), (("--", "--log-file", "x"), "--log-dir"),
        (("--", "--dry-run"), "--list"), (("--program", "gone.py"), "no program gone.py"), (("--", "loops"), "'loops'"),
    ],
)  # fmt: skip
def test_bad_usage_is_exit_code_2_before_anything_runs(program, words, said):
    done = sweep(program, *words)
    assert done.returncode == 2 and said in done.stderr and not (program.parent / "logs").exists()


def running(pid):
    """False for a zombie too: nothing may reap an orphan here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_sweep_leaves_no_process_and_goes_on_later(program, sent, code):
    log_dir = program.parent / "logs"
    process = subprocess.Popen(
        command(program, "--batch-size", 1, 99, 3),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (log_dir / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(pid) for pid in (log_dir / "pids").read_text().split()]
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


CLASSIC = ("opt-1.3b", "opt-30b", "opt-66b", "opt-175b", "bloom-176b", "llama2-70b")


@pytest.mark.parametrize("script", [ROOT / "scripts" / f"{name}.sh" for name in CLASSIC], ids=CLASSIC)
def test_scripts_of_the_classic_cases_list_their_cases(script, program):
    words = [script, "--list", "--batch-size", "3", "--program", program, "--log-dir", program.parent / "logs"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env=environment() | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # 2 places x 3 widths x KV cache there or here; the batch sizes were replaced
    assert len(set(done.stdout.splitlines())) == 12
    assert all("--batch-size 3" in line and line.startswith("deepspeed ") for line in done.stdout.splitlines())


@pytest.mark.slow
def test_names_that_are_no_file_names_and_folders_that_cannot_be_made_cost_one_line(program):
    """Each ended the sweep with a traceback. A name too long for a file system ends that case alone."""
    done = sweep(program, "--engine", "a/../b", "stream", "--model", "n" * 240, "org/small")
    assert "Traceback" not in done.stderr and done.returncode == 1, done.stderr
    assert sum(line.endswith("10.000 token/s") for line in progress(done)) == 2
    (program.parent / "file").touch()
    for folder in ("file/x", "/proc/x"):
        done = sweep(program, "--log-dir", program.parent / folder)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "cannot be made" in done.stderr, (
            done.stderr
        )
