"""Where a comparison puts its files, whatever its arms are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_inference.architectures.arms import read_arms
from zero_inference.architectures.command import new_folder
from zero_inference.cli import console_main
from zero_inference.config.run_options import parse_options
from zero_inference.errors import UsageError


def test_comparisons_that_start_in_the_same_second_have_folders_of_their_own(tmp_path):
    """They shared one, and took each other's runs for theirs."""
    made = [new_folder(tmp_path / "logs") for _ in range(5)]
    assert len(set(made)) == 5 and sorted(made) == sorted((tmp_path / "logs").iterdir())


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("logs").touch()
    assert console_main(["zero-inference", "compare", "--model", "opt-125m", "--model", "opt-1.3b"]) == 2
    assert "error: the log folder logs" in capfd.readouterr().err


def test_long_names_make_files_and_hostile_ones_are_refused():
    """A long one was OSError: File name too long."""
    first, second = read_arms([], [f"{'é' * 300}=--model opt-125m", f"{'n' * 300}=--model opt-125m"], [], parse_options)
    assert len(f"{first.file_stem}-10000.jsonl".encode()) < 255 and len(f"{second.file_stem}-check.out") < 255
    with pytest.raises(UsageError, match="write a name"):
        read_arms([], ["a\x1b[31m=--model opt-125m", "b=--model opt-125m"], [], parse_options)
