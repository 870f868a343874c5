"""When Python's collector runs: not while libraries are imported, again from loading on, and as before once a run ends."""

from __future__ import annotations

import gc

import pytest

from zero_inference.cli import main
from zero_inference.utils import garbage


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_collections_are_put_off_and_come_back_whatever_happens():
    with pytest.raises(ValueError), garbage.postpone_collections():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    with garbage.postpone_collections():
        garbage.resume_collections()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.disable()
    with garbage.postpone_collections():
        garbage.resume_collections()
        assert not gc.isenabled()
    assert not gc.isenabled(), "who had switched it off keeps it so"
    gc.enable()
    garbage.resume_collections()
    assert gc.get_freeze_count() == 0, "there is nothing to end"


def test_a_run_loads_with_the_collector_on_and_without_what_was_imported(checkpoints, tmp_path, monkeypatch):
    from zero_inference import runner
    from zero_inference.engines import resident

    seen, load, detect = [], resident.load, runner.detect_ranks
    monkeypatch.setattr(
        runner, "detect_ranks", lambda *args: seen.append((gc.isenabled(), gc.get_freeze_count())) or detect(*args)
    )
    monkeypatch.setattr(
        resident, "load", lambda *args: seen.append((gc.isenabled(), gc.get_freeze_count())) or load(*args)
    )
    options = [
        "run_model.py",
        "--model",
        str(checkpoints("opt")),
        "--engine",
        "resident",
        "--dtype",
        "float32",
        "--prompt-len",
        "4",
        "--gen-len",
        "2",
        "--loops",
        "1",
        "--warmup",
        "0",
        "--log-file",
        str(tmp_path / "run.log"),
    ]
    assert main(options) == 0
    assert seen[0] == (False, 0) and seen[1][0] and seen[1][1] > 100_000
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert main([*options, "--prompt-len", "5000"]) == 2 and gc.isenabled()
