"""Committed runs planned again: for the rates that their cores had, and all of them for the ranges of predicted times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predictions import HOSTS, RESULTS, ranges_of, ratios, with_cores_of_run, within_others
from zero_inference.config.run_options import parse_options
from zero_inference.hardware.profile import read_profile
from zero_inference.models.spec import resolve_model
from zero_inference.planning.cost import RANGES
from zero_inference.records.read import read_records

HOST = "h200-kept/ninth_host"
ROOT = Path(__file__).resolve().parent.parent


def planned_with(run: str, model: str):
    """The machine of that host, as it was kept and as the run had it, and the record."""
    kept = read_profile(RESULTS / HOST / "machine.json")
    record = list(read_records(Path(RESULTS / HOST / f"{run}.jsonl")))[-1]
    spec = resolve_model(parse_options(["--model", model, "--dummy"]), "cuda")
    return kept, with_cores_of_run(kept, record, spec), record


def test_cores_are_as_fast_as_in_the_run():
    kept, found, record = planned_with("llama13b-int4-bs8-auto", "llama-2-13b")
    moved, planned = record["transfers"], record["stream"]["cores"]["of_step_gbps"]
    rate = moved["cores_bytes_per_step"] / moved["cores_busy_s_per_step"] / 1e9
    assert rate == pytest.approx(55.6, abs=0.1) and planned == pytest.approx(69.3, abs=0.1)
    for before, after in zip(kept.cores.products, found.cores.products):
        assert after.cores_gb_per_s == pytest.approx(before.cores_gb_per_s * rate / planned)
        assert (after.link_gb_per_s, after.hand_off_s) == (before.link_gb_per_s, before.hand_off_s)
    assert found.link_gb_per_s == kept.link_gb_per_s


@pytest.mark.parametrize(
    "run, model", [("mixtral-int4-auto", "mixtral-8x7b"), ("llama13b-int4-bs1-off", "llama-2-13b")]
)
def test_a_mixture_and_a_run_without_cores_keep_what_was_measured(run, model):
    kept, found, _ = planned_with(run, model)
    assert found == kept


def test_ranges_are_those_of_committed_runs_and_hold_for_hosts_that_they_were_not_made_from():
    found = list(ratios())
    assert ranges_of(found) == RANGES and {each.host for each in found} == set(HOSTS)
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for kind, (low, high) in RANGES.items():
        assert f"| {low:.2f} to {high:.2f} | {sum(each.kind == kind for each in found)} |" in design, kind
    inside = within_others(found)
    every = {host: [each for of_kind in kinds.values() for each in of_kind] for host, kinds in inside.items()}
    whole = [each for of_host in every.values() for each in of_host]
    for those in (whole, every["h100-readme"]):
        assert f"{sum(those)} of {len(those)}" in design
    for kind in RANGES:
        known = [each for of_host in inside.values() for each in of_host.get(kind, [])]
        assert len(known) > 20 and sum(known) >= 0.9 * len(known), kind
    for host, kinds in inside.items():
        known = [each for of_kind in kinds.values() for each in of_kind]
        assert sum(known) >= 0.75 * len(known), host
