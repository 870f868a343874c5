#!/usr/bin/env python3
"""The table "Your first big model" of README.md and docs/big-models.md, made from committed results.

    python scripts/big_models_table.py            prints it
    python scripts/big_models_table.py --write    puts it into both, between its two marks

A row is a model and an amount of GPU memory. The results are those of benchmarks/plan_candidates.py with `--best 1`: the configuration that
the plan ranked first, and how fast it then was. Memory is the peak of the run, in GiB; with 1 sequence, or with 32 where 1 was not run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_table import RESULTS, DocsTable, last_record  # noqa: E402
from zero_inference.runtime.tables import Column, significant  # noqa: E402

CANDIDATES = (RESULTS / "h200-big-models", RESULTS / "h200-together" / "table")  # the last one that has a row counts
LARGEST = RESULTS / "h200-kept" / "thirteenth_host" / "llama405b-int4-bs32-auto.jsonl"
MODELS = {
    "llama-2-13b": "Llama-2-13B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B (mixture)",
    "mixtral-8x7b": "Mixtral-8x7B (mixture)",
    "llama-3.1-70b": "Llama-3.1-70B",
}
BATCHES = (1, 32)
COLUMNS = (
    Column("model", "model, 4 bits", dtype="string"),
    Column("gpu", "GPU memory", dtype="string"),
    Column("gpu_peak", "used (GiB)", significant),
    Column("host_peak", "host memory used (GiB)", significant),
    Column("one", "1 sequence: predicted, measured (token/s)", dtype="string"),
    Column("many", "32 sequences: predicted, measured (token/s)", dtype="string"),
)


PAGES = DocsTable(
    COLUMNS,
    [ROOT / "README.md", ROOT / "docs" / "big-models.md"],
    "<!-- big models: scripts/big_models_table.py -->",
    "<!-- end of big models -->",
)


def table() -> str:
    """Markdown, without a line break at its end."""
    rows = [row for model, name in MODELS.items() for row in rows_of(model, name)]
    rows.append(row_of_largest())
    return PAGES.text(rows)


def rows_of(model: str, name: str) -> list[dict[str, Any]]:
    """By COLUMNS, a row for each amount of GPU memory that was tried."""
    tried = {batch: by_memory(model, batch) for batch in BATCHES}
    rows = []
    for gib in sorted({gib for found in tried.values() for gib in found}):
        found = [tried[batch].get(gib) for batch in BATCHES]
        record = next(each["record"] for each in found if each)
        rows.append(
            {"model": name, "gpu": f"{gib:g} GiB", "one": speeds(found[0]), "many": speeds(found[1])} | peaks(record)
        )
    return rows


def by_memory(model: str, batch: int) -> dict[float, dict[str, Any]]:
    """The candidates of `model`, each with its `record`, by GiB of GPU memory; none where nothing was tried."""
    found = {}
    for results in CANDIDATES:
        folder = results / f"bs{batch}" / model
        if folder.is_dir():
            candidates = json.loads((folder / "candidates.json").read_text())["candidates"]
            found |= {each["gpu_memory"]: each | {"record": last_record(folder / each["log"])} for each in candidates}
    return found


def speeds(candidate: dict[str, Any] | None) -> str:
    if candidate is None:
        return "-"
    predicted, measured = candidate["predicted_tokens_per_s"], candidate["measured_tokens_per_s"]
    if measured is None:
        return f"{rounded(predicted)}, failed"
    return f"{rounded(predicted)}, **{rounded(measured)}**"


def row_of_largest() -> dict[str, Any]:
    record = last_record(LARGEST)
    rate = record["batch_size"] * (record["gen_len"] - 1) / record["predicted"]["decode_s"]
    both = speeds({"predicted_tokens_per_s": rate, "measured_tokens_per_s": record["decode_throughput"]})
    return {"model": "Llama-3.1-405B", "gpu": "140 GiB", "one": "-", "many": both} | peaks(record)


def peaks(record: dict[str, Any]) -> dict[str, float]:
    return {"gpu_peak": record["peak_gpu_bytes"] / 2**30, "host_peak": record["peak_host_bytes"] / 2**30}


def rounded(rate: float) -> str:
    """Three digits, without an exponent."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


if __name__ == "__main__":
    sys.exit(PAGES.main(sys.argv[1:], __doc__.split("\n")[0], table))
