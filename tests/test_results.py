"""What README and docs say was measured is what the committed records and tables hold."""

from __future__ import annotations

import csv
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import big_models_table  # noqa: E402
import draw_engines  # noqa: E402
import results_table  # noqa: E402

README, MEASURED, BIG_MODELS, KERNELS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/measured.md", "docs/big-models.md", "docs/kernels.md")
)
NORMS = ROOT / "benchmarks" / "results" / "26_11_21_19_14"


def test_the_table_of_runs_is_that_of_the_records():
    made = results_table.PAGE.put_into(MEASURED, results_table.table())
    assert made == MEASURED, "run scripts/results_table.py --write"


@pytest.mark.parametrize("page", [README, BIG_MODELS], ids=["README", "docs"])
def test_the_table_of_big_models_is_that_of_the_records(page):
    made = big_models_table.PAGES.put_into(page, big_models_table.table())
    assert made == page, "run scripts/big_models_table.py --write"


def test_the_rates_that_pages_quote_from_the_picture_are_those_it_is_drawn_from():
    deepspeed, llama_cpp, *_ = draw_engines.bars()
    assert f"{deepspeed.rate:.1f} token/s in the picture" in README
    assert f"CPU cores alone: {llama_cpp.rate:.1f} token/s in the picture" in README
    assert all(bar.rate <= 1.02 * bar.limit for bar in draw_engines.bars() if bar.limit)


def test_the_picture_is_drawn(tmp_path):
    draw_engines.draw(tmp_path / "engines.png")
    assert (tmp_path / "engines.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("case", sorted(path.name for path in NORMS.iterdir() if path.is_dir()))
def test_the_norm_rates_are_those_of_the_tables(case):
    """Of the last size of each table, the largest."""
    cells = re.search(rf"^\| {case} \| (.*) \|$", KERNELS, re.MULTILINE)[1].split(" | ")
    largest = {}
    for direction in ("fwd", "bwd"):
        with open(NORMS / case / "bf16" / f"{case}-bf16-{direction}-perf.csv", newline="") as table:
            largest[direction] = list(csv.DictReader(table))[-1]
    for cell, provider in zip(cells, ("Cuda", "Compiled", "Liger", "Quack", "Torch")):
        if cell == "-":
            assert f"{provider} (GB/s)" not in largest["fwd"]
        else:
            assert cell == " / ".join(
                f"{float(row[f'{provider} (GB/s)']):.0f}" for row in (largest["fwd"], largest["bwd"])
            )


def test_no_record_names_a_path_of_the_machine_it_was_made_on():
    for path in (ROOT / "benchmarks" / "results").rglob("*"):
        if path.suffix in (".jsonl", ".txt", ".csv", ".md", ".tsv", ".json"):
            assert not re.search(r'["\s:](/work|/root|/home|/tmp)/', path.read_text()), path
