"""An index of weights that is damaged, or leads out of its folder, is refused in one line."""

from __future__ import annotations

import json

import pytest

from zero_inference.errors import RunError
from zero_inference.models.checkpoint_files import checkpoint_files

BAD = {
    "a list": b"[1]",
    "no map": b"{}",
    "a map of another kind": b'{"weight_map": [1]}',
    "null": b'{"weight_map": null}',
    "a number": b'{"weight_map": {"a": 1}}',
    "mixed": b'{"weight_map": {"a": "x", "b": null}}',
    "not UTF-8": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "empty": b"",
    "nothing in it": b'{"weight_map": {}}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_index_is_named(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(BAD[name])
    with pytest.raises(
        RunError,
        match="model.safetensors.index.json: (damaged, or no index|names .*, which is not a file in its folder)",
    ):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/hostname", "a/../../b"])
def test_an_index_leads_to_its_own_folder_alone(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name, "b": "there"}}))
    (tmp_path / "there").touch()
    with pytest.raises(RunError, match=f"names '{name}', which is not a file in its folder"):
        checkpoint_files(tmp_path)
