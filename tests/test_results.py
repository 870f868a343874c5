"""What README and docs say was measured is what the committed records and tables hold."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import draw_engines  # noqa: E402
import tables  # noqa: E402
from tables import last_record, significant  # noqa: E402

README, MEASURED, BIG_MODELS, KERNELS, PERFORMANCE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/measured.md", "docs/big-models.md", "docs/kernels.md", "docs/performance.md")
)


def folder_in(page: str, table: str) -> Path:
    return next(ROOT / found[2] for found in tables.MARK.finditer(page) if found[1] == table)


PICTURE = folder_in(README, "readme")
NORMS = ROOT / "benchmarks" / "results" / "26_11_21_19_14"


@pytest.mark.parametrize("name, page", [("results", MEASURED), ("readme", README), ("big-models", BIG_MODELS)])
def test_tables_are_those_of_the_records(name, page):
    assert f"scripts/tables.py {name}" in page and tables.updated(page, [name]) == page, f"run scripts/tables.py {name}"


@pytest.mark.parametrize("model", ["llama-2-13b", pytest.param("llama-3.1-405b", marks=pytest.mark.slow)])
def test_rows_of_the_planned_table_are_what_plans_predict(model):
    assert f"| {' | '.join(tables.planned_row(model))} |" in README, "run scripts/tables.py planned"


def test_the_rates_that_pages_quote_from_the_picture_are_those_it_is_drawn_from():
    deepspeed, cpu, page_locked, repacked, ours = draw_engines.bars(PICTURE)
    assert (
        f"first token after {page_locked.first_token_s:.3g} s (page-locked), {repacked.rate:.3g} token/s (repacked); "
        f"stream {ours.first_token_s:.3g} s and {ours.rate:.3g}"
    ) in PERFORMANCE
    for bar in (deepspeed, page_locked, ours):
        assert f"| {bar.first_token_s:.3g} | {bar.rate:.3g} |" in BIG_MODELS
    for bar in (cpu, repacked):
        assert bar.first_token_s is None and f"| not measured | {bar.rate:.3g} |" in BIG_MODELS
    assert f"It decodes {repacked.rate / ours.rate - 1:.0%} faster here" in " ".join(README.split())
    assert ours.rate <= 1.02 * ours.bound
    on_gpu = last_record(PICTURE / f"{draw_engines.STREAM}.jsonl")["stream"]["resident_layers"]
    assert f"and {on_gpu} layers fit" in " ".join(README.split()) and f"| {on_gpu} of 80 layers |" in BIG_MODELS
    card = last_record(PICTURE.parent / "h100-prompts" / "host3" / "llama-3.1-70b-card-of-24gib.jsonl")
    assert f"{card['decode_throughput']:.3g} token/s" in BIG_MODELS


def test_the_rates_of_a_mixture_beside_llama_cpp_are_those_of_its_records():
    ours = {gib: last_record(PICTURE / f"qwen3-30b-a3b-gpu{gib}.jsonl") for gib in (2, 10)}
    rows = json.loads((PICTURE / "llamacpp-qwen3-30b-a3b.json").read_text())["rows"]
    rate, prefill = max(row["tokens_per_s"] for row in rows), max(row["prefill_tokens_per_s"]["512"] for row in rows)
    assert (
        f"{512 / prefill:.3g} s and {rate:.3g} at best, stream {ours[2]['prefill_latency_s']:.3g} s and "
        f"{ours[2]['decode_throughput']:.3g}, with 10 GiB of experts on the GPU {ours[10]['decode_throughput']:.3g}"
    ) in PERFORMANCE
    assert (
        f"{ours[2]['decode_throughput']:.0f} token/s and llama.cpp {rate:.0f}, both with the experts in host memory"
        in README.replace("\n", " ")
    )


def test_the_rates_of_other_engines_are_those_of_their_records():
    def rate(folder: Path, name: str) -> float:
        return last_record(folder / f"{name}.jsonl")["decode_throughput"]

    of_13b = [rate(PICTURE, name) for name in ("deepspeed-llama-2-13b", "llama-2-13b-gpu0-bs1")]
    of_70b = [rate(PICTURE, name) for name in ("deepspeed-llama-3.1-70b", "llama-3.1-70b-24gib-bs1")]
    assert (
        f"Llama-2-13B {of_13b[0]:.1f} token/s, stream {of_13b[1]:.1f} (nothing on the GPU); 70B {of_70b[0]:.2f}, stream {of_70b[1]:.1f}"
        in PERFORMANCE
    )
    accelerate, deepspeed, stream = (
        rate(PICTURE, name) for name in ("opt13b-accelerate", "opt13b-fp16", "opt13b-fp16-stream")
    )
    assert f"batch 8: {accelerate:.1f} token/s, DeepSpeed {deepspeed:.1f}, stream {stream:.1f}" in PERFORMANCE


def test_the_picture_is_drawn_for_light_and_dark_pages(tmp_path):
    draw_engines.draw(PICTURE, tmp_path)
    for name in draw_engines.COLOURS:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG" and f"docs/images/{name}" in README


def test_pages_say_how_many_predictions_of_the_table_were_close():
    records = tables.big_model_records(folder_in(BIG_MODELS, "big-models"))
    pairs = [tables.predicted_and_measured(record) for *_, record in records]
    decoded = sum(abs(predicted / measured - 1) <= 0.1 for (predicted, measured), _ in pairs)
    begun = sum(abs(measured / predicted - 1) <= 0.15 for _, (predicted, measured) in pairs)
    words = f"Of the {len(records)} rows above, the token/s of {decoded} were within 10% of the prediction, and the "
    words += f"time to first token of {begun} within 15%"
    assert words in BIG_MODELS.replace("\n", " ")
    assert all(record["peak_gpu_bytes"] <= gib << 30 for _, _, gib, record in records)


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


@pytest.mark.parametrize(
    "host, case, peer",
    [
        ("first_host", "gpt-oss-20b-8gib", "llamacpp-gpt-oss-20b"),
        ("second_host", "gpt-oss-120b-24gib", "llamacpp-gpt-oss-120b"),
        ("second_host", "qwen3-235b-a22b-int4", None),
    ],
)
def test_rows_of_published_checkpoints_are_those_of_the_records(host, case, peer):
    folder = ROOT / "benchmarks" / "results" / "h200-formats" / host
    record = last_record(folder / f"{case}.jsonl")
    of_peer = ["", ""]
    if peer:
        rows = json.loads((folder / f"{peer}.json").read_text())["rows"]
        prefill = max(row["prefill_tokens_per_s"].get("512", 0) for row in rows)
        decode = max(row["tokens_per_s"] for row in rows)
        of_peer = [f"{512 / prefill:.3f}", f"{decode:.1f}"]
    cells = [
        significant(record["peak_host_bytes"] / 2**30),
        str(record["prompt_len"]),
        significant(record["prefill_latency_s"]),
        of_peer[0],
        significant(record["decode_throughput"]),
        of_peer[1],
        f"{record['limit']['fraction_of_limit']:.1%}",
    ]
    assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in BIG_MODELS


def test_no_record_names_a_path_of_the_machine_it_was_made_on():
    for path in (ROOT / "benchmarks" / "results").rglob("*"):
        if path.suffix in (".jsonl", ".txt", ".csv", ".md", ".tsv", ".json"):
            assert not re.search(r'["\s:](/work|/root|/home|/tmp)/', path.read_text()), path
