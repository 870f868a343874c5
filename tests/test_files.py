"""Files: replaced whole or not at all, locks that are given up, folders of caches."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from conftest import write_record
from test_report import make_record

from zero_inference.cli import console_main
from zero_inference.errors import UsageError
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.files import check_output_file, extensions_folder, hold_lock, models_folder, write_atomically


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path):
    path, link = tmp_path / "page", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with pytest.raises(KeyboardInterrupt), write_atomically(link) as file:
        file.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with write_atomically(link) as file:
        file.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_only_what_can_be_replaced_may_be(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for bad in ("pipe", "loop", "nowhere/x", "x" * 256, "", "/dev/null"):
        with pytest.raises(UsageError, match="--html .* cannot be written"):
            check_output_file("--html", tmp_path / bad)
    (tmp_path / "empty").touch()
    for good in ("new", "empty", "x" * 255):
        check_output_file("--html", tmp_path / good)
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "loop", "empty"}


@pytest.mark.parametrize(
    "name, words",
    [
        ("run.jsonl", "has the name of a log or record"),
        ("link.html", "has the name of a log or record"),
        ("pipe.html", "cannot be written (not a regular file)"),
        ("hard.html", "cannot be written (it holds what runs have measured)"),
    ],
)
def test_a_page_is_never_written_over_records_nor_waits_for_a_reader(name, words, tmp_path, capsys):
    write_record(tmp_path / "run.jsonl", make_record())
    write_benchmark_log(tmp_path / "run.log", *range(10))
    (tmp_path / "link.html").symlink_to("run.jsonl")
    os.link(tmp_path / "run.jsonl", tmp_path / "hard.html")
    os.mkfifo(tmp_path / "pipe.html")
    before = (tmp_path / "run.jsonl").read_bytes(), (tmp_path / "run.log").read_bytes()
    assert console_main(["zero-inference", "report", str(tmp_path), "--html", str(tmp_path / name)]) == 2
    assert f"{name} {words}" in capsys.readouterr().err
    assert before == ((tmp_path / "run.jsonl").read_bytes(), (tmp_path / "run.log").read_bytes())


def test_a_lock_is_free_again_and_one_that_is_kept_is_given_up(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with hold_lock(path), pytest.raises(TimeoutError, match="has kept it locked for 0 s"), hold_lock(path, 0.1):
            pass


def test_cache_folders(monkeypatch, tmp_path):
    for name in ("ZERO_INFERENCE_CACHE", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = tmp_path / ".cache" / "zero-inference"
    assert (models_folder(), extensions_folder()) == (ours, ours / "extensions")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # an empty variable is not the current folder
    monkeypatch.setenv(
        "TORCH_EXTENSIONS_DIR", str(ours / "extensions" / "torch-2-deepspeed-0")
    )  # of DeepSpeed's engine
    assert (models_folder(), extensions_folder()) == (ours, ours / "extensions")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert models_folder() == tmp_path / "elsewhere" / "zero-inference"
    monkeypatch.setenv("ZERO_INFERENCE_CACHE", "~/models")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/compiled")
    assert (models_folder(), extensions_folder()) == (tmp_path / "models", Path("/compiled"))
