"""A lock that somebody keeps for ever, or a FIFO in its place, is told and not waited for without end."""

from __future__ import annotations

import fcntl
import os

import pytest
from conftest import need_smollm2

from zero_inference.errors import UsageError
from zero_inference.models import smollm2
from zero_inference.runtime.locks import held_lock


def test_a_lock_is_free_again_and_one_that_is_kept_is_given_up(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with held_lock(path), pytest.raises(TimeoutError, match="has kept it locked for 0 s"), held_lock(path, 0.1):
            pass


def test_a_pipe_of_its_name_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with held_lock(tmp_path / "lock"):
        pass


def test_a_foreign_lock_on_the_cache_is_an_error_that_names_it(tmp_path, monkeypatch):
    """The run waited for it for ever."""
    need_smollm2()
    monkeypatch.setenv("ZERO_INFERENCE_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "LOCK_S", 0.1)
    gguf, version = smollm2._find_gguf()
    monkeypatch.setattr(smollm2, "_convert_in_child", None)  # it is not reached
    path = smollm2.checkpoint_place(gguf, version).with_suffix(".lock")
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            UsageError, match=r"\.lock in the cache cannot be used \(another process has kept it locked"
        ):
            smollm2.smollm2_checkpoint()
