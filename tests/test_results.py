"""What README says was measured is what the committed records and tables hold."""

from __future__ import annotations

import csv
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import results_table  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
NORMS = ROOT / "benchmarks" / "results" / "26_11_21_19_14"


def test_readmes_table_is_that_of_the_records():
    assert results_table.replaced(README, results_table.table()) == README, "run scripts/results_table.py --write"


@pytest.mark.parametrize("case", sorted(path.name for path in NORMS.iterdir() if path.is_dir()))
def test_readmes_norm_rates_are_those_of_the_tables(case):
    """Of the last size of each table, the largest."""
    cells = re.search(rf"^\| {case} \| (.*) \|$", README, re.MULTILINE)[1].split(" | ")
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
