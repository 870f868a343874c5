"""The offload folder belongs to the user: only what this tool marked as its own is removed, and nothing in it makes a run wait."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from conftest import VOCAB, small_disk
from transformers import AutoConfig

from zero_inference.cli import main
from zero_inference.engines import accelerate
from zero_inference.engines import offload_folder as workspace
from zero_inference.engines.offload_folder import OffloadWorkspace, check_offload_folder
from zero_inference.hardware.bench_copies import disk_read_rate


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def left_by_a_killed_run(folder: Path, size: int = 1000) -> Path:
    """A workspace whose process ended without removing it."""

    def hold(sender) -> None:
        path = OffloadWorkspace(folder).path
        (path / "zero_stage_3").mkdir()
        (path / "zero_stage_3" / "weights").write_bytes(bytes(size))
        sender.send(path)
        os._exit(9)

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=hold, args=(sender,))
    process.start()
    path = receiver.recv()
    process.join(60)
    assert path.is_dir()
    return path


def test_what_is_not_marked_is_left_alone(tmp_path):
    for name in ("zero-inference-thesis", "zero-inference-a1b2c3d4"):  # the second as this tool names its own
        (tmp_path / name).mkdir()
        (tmp_path / name / "chapter").write_text("years of work")
    (tmp_path / "zero-inference-12345678").write_text("a file")
    (tmp_path / "zero-inference-locked00").mkdir()
    (tmp_path / "zero-inference-locked00" / "lock").write_text("of another program")
    (tmp_path / "elsewhere").mkdir()
    marked = tmp_path / "elsewhere" / "lock"
    marked.write_bytes(workspace.MARK)
    (tmp_path / "zero-inference-linked00").symlink_to(tmp_path / "elsewhere")
    named_otherwise = tmp_path / "zero-inference-thesis-2"
    named_otherwise.mkdir()
    (named_otherwise / "lock").write_bytes(workspace.MARK)
    before = tree(tmp_path)
    check_offload_folder(tmp_path, 0)
    OffloadWorkspace(tmp_path).close()
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_workspace_of_another_user_is_left_alone(tmp_path):
    remain = left_by_a_killed_run(tmp_path)
    os.chown(remain / "lock", 12345, -1)
    before = tree(tmp_path)
    check_offload_folder(tmp_path, 0)
    assert tree(tmp_path) == before


def test_remains_of_killed_runs_are_removed_also_half_removed_ones(tmp_path):
    whole, half = left_by_a_killed_run(tmp_path), left_by_a_killed_run(tmp_path)
    (half / "zero_stage_3" / "weights").unlink()
    assert re.fullmatch(r"zero-inference-\w{8}", whole.name)
    check_offload_folder(tmp_path, 0)
    assert not os.listdir(tmp_path)


def test_neither_a_fifo_nor_a_foreign_lock_makes_a_run_wait(tmp_path):
    for place in (tmp_path, tmp_path / "zero-inference-fifo0000"):
        place.mkdir(exist_ok=True)
        os.mkfifo(place / "lock")
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        in_time(lambda: check_offload_folder(tmp_path, 0))
    finally:
        os.close(held)
    assert sorted(os.listdir(tmp_path)) == ["lock", "zero-inference-fifo0000"]


def in_time(action, limit_s: float = 30) -> None:
    """Run `action` in a process of its own that is killed after `limit_s`."""
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"still waiting after {limit_s} s")
    assert process.exitcode == 0


@pytest.fixture
def disk_of_8_mib(tmp_path):
    """A mounted file system."""
    with small_disk(tmp_path / "disk", "8m") as folder:
        try:
            os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("this kernel's tmpfs has no O_DIRECT")
        (folder / "probe").unlink()
        yield folder


def model_of(folder: Path, width: int, layers: int) -> Path:
    """A configuration with `layers` times 10 `width`^2 weights in matrices that are large enough to be swapped."""
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, vocab_size=VOCAB)
    heads = dict(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64)
    AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], **sizes, **heads).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_a_disk_that_fills_while_loading(engine, disk_of_8_mib, tmp_path, monkeypatch, capfd):
    usage = shutil.disk_usage(disk_of_8_mib)
    options = f"--engine {engine} --dummy --prompt-len 4 --gen-len 2 --dtype float32 --disk-offload"
    folders = f"--model {model_of(tmp_path / 'model', 512, 2)} --offload-dir {disk_of_8_mib} --log-file {tmp_path / 'run.log'}"
    with monkeypatch.context() as patch:  # another program writes there meanwhile
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 40))
        assert main(["run_model.py", *options.split(), *folders.split()]) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line and str(disk_of_8_mib) in line and "--offload-dir" in line
    (record,) = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert record["status"] == "failed" and record["error"] in line
    assert os.listdir(disk_of_8_mib) == []


def test_accelerate_plans_the_space_of_a_tied_weight_that_it_writes_twice(checkpoints, no_gpu, tmp_path, monkeypatch):
    planned, written = [], []
    check, reserve = accelerate.check_offload_folder, accelerate.reserve
    monkeypatch.setattr(accelerate, "check_offload_folder", lambda *args: planned.append(args[1]) or check(*args))
    monkeypatch.setattr(accelerate, "reserve", lambda *args: written.append(args[1]) or reserve(*args))
    options = "--engine accelerate --disk-offload --dtype float32 --prompt-len 4 --gen-len 2 --loops 1 --warmup 0"
    folders = f"--model {checkpoints('opt')} --offload-dir {tmp_path / 'offload'} --log-file {tmp_path / 'run.log'}"
    assert main(["run_model.py", *options.split(), *folders.split()]) == 0
    assert 0 <= sum(written) - planned[0] < 10_000, "its index"


def test_a_killed_speed_test_leaves_no_file(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=disk_read_rate, args=(tmp_path,))
    process.start()
    files = Path(f"/proc/{process.pid}/fd")

    def under_way() -> bool:
        return any(
            os.path.islink(file) and "read-test-" in os.readlink(file) and os.stat(file).st_size
            for file in files.iterdir()
        )

    wait_for(under_way)
    process.kill()
    process.join()
    assert os.listdir(tmp_path) == []


def wait_for(condition, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)
