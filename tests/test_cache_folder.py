"""One rule says where files go that are made once and used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_inference.utils.files import extensions_folder, models_folder


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, tmp_path):
    for name in ("ZERO_INFERENCE_CACHE", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_everything_is_in_the_users_cache(monkeypatch, tmp_path):
    assert models_folder() == tmp_path / ".cache" / "zero-inference"
    assert extensions_folder() == tmp_path / ".cache" / "zero-inference" / "extensions"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert models_folder() == tmp_path / "elsewhere" / "zero-inference"
    assert extensions_folder() == tmp_path / "elsewhere" / "zero-inference" / "extensions"


def test_an_empty_variable_is_none_and_not_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert models_folder().parent == extensions_folder().parents[1] == tmp_path / ".cache"


def test_a_folder_that_the_user_names_wins(monkeypatch):
    monkeypatch.setenv("ZERO_INFERENCE_CACHE", "~/models")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/compiled")
    assert models_folder() == Path("~/models").expanduser() and extensions_folder() == Path("/compiled")


def test_the_folder_of_deepspeeds_modules_is_not_taken_for_the_users_choice(monkeypatch, tmp_path):
    ours = tmp_path / ".cache" / "zero-inference" / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(ours / "torch-2-deepspeed-0"))
    assert extensions_folder() == ours
