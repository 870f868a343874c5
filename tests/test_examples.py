"""Each script of examples/ does what its first lines say."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest
from conftest import ROOT, need_lm_eval


@pytest.fixture
def example(no_gpu, tmp_path, monkeypatch, capfd):
    """example(name, *arguments) -> what it printed."""
    monkeypatch.chdir(tmp_path)

    def start(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capfd.readouterr().out

    return start


def test_generate(example, smollm2_folder):
    printed = example("generate.py", "smollm2-135m", "The capital of Italy is")
    assert "'The capital of Italy is Rome" in printed and "'Water boils at" in printed


def test_plan_a_machine(example):
    printed = example("plan_a_machine.py", "llama-2-7b", "rtx4090", 64)
    assert printed.startswith("Fastest: stream int4, device, batch 8: predicted at most ")
    assert "Run it there with: " in printed and "64 GiB of host memory" in printed
    assert re.search(r"^16 +\w+ +\d", printed, re.MULTILINE)  # the data frame


def test_compare_int4(example, readable, tmp_path):
    need_lm_eval()
    text = tmp_path / "text.txt"
    text.write_text("The river was low that year, and the boats lay on the mud.")
    printed = example("compare_int4.py", readable, text)
    rows = {line[:15].strip(): line[15:].split() for line in printed.splitlines()[1:-1]}
    assert all(float(perplexity) > 1 for perplexity in rows["perplexity"])
    assert len(rows["token/s"]) == 2 and all(float(speed) > 0 for speed in rows["token/s"])
    assert float(rows["weights (GB)"][0]) > float(rows["weights (GB)"][1])


def test_score_with_lm_eval(example, smollm2_folder):
    need_lm_eval()
    printed = example("score_with_lm_eval.py")
    assert "The capital of France is Paris (log-likelihood -" in printed and "The opposite of hot is cold" in printed


def test_nvme_offload(example, smollm2_folder, tmp_path):
    printed = example("nvme_offload.py", "smollm2-135m", tmp_path / "disk")
    read = float(re.search(r"a token reads ([\d.]+) GB from disk", printed)[1])
    (record,) = map(json.loads, next((tmp_path / "logs").glob("*.jsonl")).read_text().splitlines())
    assert read == pytest.approx(record["transfers"]["disk_read_bytes_per_step"] / 1e9, abs=6e-4) and read > 0
    assert not (tmp_path / "disk").exists(), "a checkpoint in 16 bits is read in place"
