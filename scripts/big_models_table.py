#!/usr/bin/env python3
"""The tables of measured big models in README.md (a few rows) and docs/big-models.md, made from committed results.

    python scripts/big_models_table.py [FOLDER]            prints that of docs/big-models.md
    python scripts/big_models_table.py [FOLDER] --write    puts both into their pages, between two marks

A row is a record of benchmarks/results: what was predicted of the run before loading, and what was then measured (in bold). It stands under
the smallest of some usual sizes of GPU memory that the run stays in. Memory is the peak of the run. With FOLDER, such as
benchmarks/results/NAME, which `scripts/measure_gpu.py FOLDER readme` measured, rows are of its records where it has them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_table import RESULTS, DocsTable, last_record, rounded  # noqa: E402
from zero_inference.records.schema import STATUS_OK  # noqa: E402
from zero_inference.utils.format import significant  # noqa: E402
from zero_inference.utils.tables import Column  # noqa: E402

ONE, MANY = "h200-big-models/bs1", "h200-big-models/bs32"
# By model: GiB of GPU memory, case of scripts/measure_gpu.py, and the record in whose place it comes, with its host. Of the H200's
# mixtures only those that lie on the GPU are here: the others ran with greedy tokens, for which random weights choose the same experts
# again and again.
ROWS = {
    "Llama-2-13B": [
        (8, "llama-2-13b-8gib-bs1", "H100-2", "h100-big-models/llama-2-13b-8gib-bs1"),
        (8, "llama-2-13b-8gib-bs32", "H200", f"{MANY}/llama-2-13b/trials/01"),
        (12, "llama-2-13b-12gib-bs1", "H200", f"{ONE}/llama-2-13b/trials/02"),
        (24, "llama-2-13b-24gib-bs32", "H200", f"{MANY}/llama-2-13b/trials/04"),
    ],
    "Qwen3-30B-A3B (mixture)": [
        (8, "qwen3-30b-a3b-gpu2", "H100-2", "h100-big-models/qwen3-30b-a3b-experts-on-cpu"),
        (16, "qwen3-30b-a3b-gpu10", "H100-1", "h100-predicted/qwen3-gpu10"),
        (24, "qwen3-30b-a3b-24gib-bs1", "H200", f"{ONE}/qwen3-30b-a3b/trials/04"),
    ],
    "Mixtral-8x7B (mixture)": [
        (24, "mixtral-8x7b-24gib-bs1", "H100-1", "h100-predicted/mixtral-16"),
        (48, "mixtral-8x7b-48gib-bs1", "H200", f"{ONE}/mixtral-8x7b/trials/04"),
    ],
    "Llama-3.1-70B": [
        (12, "llama-3.1-70b-12gib-bs1", "H200", f"{ONE}/llama-3.1-70b/trials/01"),
        (24, "llama-3.1-70b-24gib-bs1", "H200", f"{ONE}/llama-3.1-70b/trials/03"),
        (24, "llama-3.1-70b-24gib-bs1", "H100-2", "h100-big-models/llama-3.1-70b-24gib-bs1"),
        (24, "llama-3.1-70b-24gib-bs32", "H200", f"{MANY}/llama-3.1-70b/trials/04"),
        (48, "llama-3.1-70b-48gib-bs1", "H200", f"{ONE}/llama-3.1-70b/trials/04"),
        (48, "llama-3.1-70b-48gib-bs32", "H200", f"{MANY}/llama-3.1-70b/trials/02"),
    ],
    "gpt-oss-120b (mixture)": [(24, "gpt-oss-120b-24gib-bs1", "", None)],
    "Llama-3.1-405B": [(140, "llama-3.1-405b-140gib", "H200", "h200-kept/thirteenth_host/llama405b-int4-bs32-auto")],
}
COLUMNS = (
    Column("model", "model, 4 bits", dtype="string"),
    Column("gpu", "GPU memory", dtype="string"),
    Column("gpu_peak", "used (GiB)", significant),
    Column("host_peak", "host (GiB)", significant),
    Column("batch", "sequences", dtype="string"),
    Column("first_token", "first token (s)", dtype="string"),
    Column("rate", "token/s", dtype="string"),
    Column("machine", "on", dtype="string"),
)


# Cases of one sequence that README shows; docs/big-models.md has all.
IN_README = {
    "llama-2-13b-8gib-bs1",
    "qwen3-30b-a3b-gpu2",
    "mixtral-8x7b-24gib-bs1",
    "llama-3.1-70b-24gib-bs1",
    "gpt-oss-120b-24gib-bs1",
}
MARKS = "<!-- big models: scripts/big_models_table.py", "<!-- end of big models -->"
README_TABLE = DocsTable(COLUMNS[:4] + COLUMNS[5:7], [ROOT / "README.md"], *MARKS)
DOCS_TABLE = DocsTable(COLUMNS, [ROOT / "docs" / "big-models.md"], *MARKS)


def table(folder: Path | None = None) -> str:
    """Return the table of docs/big-models.md as Markdown, without a line break at its end."""
    return DOCS_TABLE.text([row_of(*each) for each in records(folder)])


def readme_table(folder: Path | None = None) -> str:
    """Return the rows of `IN_README`, which `folder` must hold."""
    rows = [
        row_of(model, "", gib, last_record(ROOT / folder / f"{case}.jsonl"))
        for model, of_model in ROWS.items()
        for gib, case, _, _ in of_model
        if case in IN_README
    ]
    return README_TABLE.text([row for index, row in enumerate(rows) if row not in rows[:index]])


def records(folder: Path | None = None) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Return model, host, GiB of GPU memory and record of each row; the records of `folder` (from ROOT) stand in for others once."""
    found: dict[Path, tuple[str, str, int, dict[str, Any]]] = {}
    for model, rows in ROWS.items():
        for gib, case, host, name in rows:
            path = ROOT / folder / f"{case}.jsonl" if folder else None
            if path and path.exists() and (record := last_record(path))["status"] == STATUS_OK:
                gpu = record["environment"]["gpus"][0]["name"].split()[1]
                found[path] = model, gpu, gib, record
            elif name:
                path = RESULTS / f"{name}.jsonl"
                found[path] = model, host, gib, last_record(path)
    return list(found.values())


def row_of(model: str, host: str, gib: int, record: dict[str, Any]) -> dict[str, Any]:
    """By COLUMNS."""
    rate, first_token = both(record)
    return {
        "model": model,
        "gpu": f"{gib} GiB",
        "gpu_peak": record["peak_gpu_bytes"] / 2**30,
        "host_peak": record["peak_host_bytes"] / 2**30,
        "batch": str(record["batch_size"]),
        "first_token": f"{rounded(first_token[0])}, **{rounded(first_token[1])}**",
        "rate": f"{rounded(rate[0])}, **{rounded(rate[1])}**",
        "machine": host,
    }


def both(record: dict[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (predicted, measured) of token/s, and of the seconds to the first token."""
    predicted = record["batch_size"] * (record["gen_len"] - 1) / record["predicted"]["decode_s"]
    first_token = record["predicted"]["prefill_s"], record["prefill_latency_s"]
    return (predicted, record["decode_throughput"]), first_token


def close_predictions(decode: float, first_token: float, folder: Path | None = None) -> tuple[int, int]:
    """Return how many rows decode, and begin, in a time that is within these shares of the predicted one."""
    pairs = [both(record) for *_, record in records(folder)]
    decoded = sum(abs(predicted / measured - 1) <= decode for (predicted, measured), _ in pairs)
    return decoded, sum(abs(measured / predicted - 1) <= first_token for _, (predicted, measured) in pairs)


if __name__ == "__main__":
    words = __doc__.split("\n")[0], "results of `scripts/measure_gpu.py FOLDER readme`"
    DOCS_TABLE.main(sys.argv[1:], words[0], table, words[1])
    if "--write" in sys.argv:
        README_TABLE.main(sys.argv[1:], words[0], readme_table, words[1])
