"""The offload folder belongs to the user: only what this tool marked as its own is removed, and nothing in it makes a run wait."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
from pathlib import Path

import pytest

from zero_inference.offload import workspace
from zero_inference.offload.workspace import OffloadWorkspace, check_offload_folder


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
