#!/usr/bin/env python3
"""The table of docs/measured.md, made from committed records.

    python scripts/results_table.py              prints it
    python scripts/results_table.py --write      puts it into docs/measured.md, between its two marks

A row a record of the folders below, the last one of a file, and of what was measured again the last one; GB is 1e9 bytes, GiB 2^30.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_table import RESULTS, DocsTable, last_record  # noqa: E402
from zero_inference.utils.format import decimals  # noqa: E402
from zero_inference.utils.tables import Column, texts_of  # noqa: E402

FOLDERS = ("h200", "h200-shared", "h200-x2", "h200-x4")
CORES = (  # of these, the last one that has a case
    "h200-cores",
    "h200-graphs",
    "h200-fixed",
    "h200-ahead",
    "h200-balanced",
    "h200-beside",
)
FEWEST_TOKENS = 2  # with fewer decode steps a run is there for its prefill
COLUMNS = (
    Column("case", "case", dtype="string"),
    Column("batch", "batch x prompt", dtype="string"),
    Column("tokens", "tokens x loops", dtype="string"),
    Column("decode_throughput", "decode token/s", decimals(1)),
    Column("step_s", "s a step", decimals(4)),
    Column("decode_weights_gbps", "GB/s of weights", decimals(1)),
    Column("share", "of the limit", dtype="string"),
    Column("peak_gib", "peak GPU GiB", decimals(1)),
    Column("record", "record", dtype="string"),
)
PAGE = DocsTable(
    COLUMNS, [ROOT / "docs" / "measured.md"], "<!-- results: scripts/results_table.py", "<!-- end of results -->"
)
BITS = {16: "", 8: "int8", 4: "int4"}


def table() -> str:
    """Markdown, without a line break at its end."""
    rows = []
    latest = {path.stem: path for folder in CORES for path in measured(folder)}
    for paths in (*map(measured, FOLDERS), latest.values()):
        found = []
        for path in paths:
            record = last_record(path)
            order = record["model"], record["quant_bits"] != 16, -record["quant_bits"], record["engine"]
            found.append((order, row(record, path)))
        rows += [each for _, each in sorted(found, key=lambda each: (each[0], texts_of([each[1]], COLUMNS)))]
    return PAGE.text(rows)


def measured(folder: str) -> list[Path]:
    """Its files whose last record is of a run that succeeded, and decoded."""
    from zero_inference.records.schema import STATUS_OK

    paths = sorted((RESULTS / folder).glob("*.jsonl"))
    records = map(last_record, paths)
    return [
        path for path, found in zip(paths, records) if found["status"] == STATUS_OK and found["gen_len"] > FEWEST_TOKENS
    ]


def row(record: dict, path: Path) -> dict[str, object]:
    """By COLUMNS."""
    share, spread = record["limit"]["fraction_of_limit"], record["limit"].get("link_spread")
    bound_by_link = record["limit"].get("bound_by") == "link"
    error = f" +- {spread / 2:.1%}" if spread is not None and bound_by_link else ""
    return record | {
        "case": label(record),
        "batch": f"{record['batch_size']} x {record['prompt_len']}",
        "tokens": f"{record['gen_len']} x {len(record['loops'])}",
        "decode_weights_gbps": None if chooses_experts(record["model_type"]) else record["decode_weights_gbps"],
        "step_s": record["decode_latency_s"] / (record["gen_len"] - 1),
        "share": None if share is None else f"{share:.1%}{error}",
        "peak_gib": record["peak_gpu_bytes"] / 2**30,
        "record": f"{path.parent.name}/{path.stem}",
    }


def chooses_experts(model_type: str) -> bool:
    """Whether a decode step reads some of the weights only, which older records do not say."""
    from transformers import AutoConfig

    return hasattr(AutoConfig.for_model(model_type), "num_experts_per_tok")


def label(record: dict) -> str:
    """Model, width and what the engine was asked for."""
    name = record["model"].split("/")[-1]
    width = BITS[record["quant_bits"]] or {"float16": "fp16", "bfloat16": "bf16"}.get(record["dtype"], record["dtype"])
    options = [record["engine"]]
    options += [
        f"--{name.replace('_', '-')}"
        for name in ("cpu_offload", "disk_offload", "kv_offload")
        if record[name] and (record["engine"], name) != ("stream", "cpu_offload")
    ]
    if record.get("pin_memory") is False and record["engine"] == "deepspeed" and record["cpu_offload"]:
        options.append("--pin-memory 0")
    stream = record.get("stream") or {}
    if stream.get("resident_layers"):
        options.append(
            f"{stream['resident_layers']} of {stream['resident_layers'] + stream['streamed_layers']} layers on the GPU"
        )
    if cores := stream.get("cores"):
        options.append(f"and {cores['threads']} core{'s' * (cores['threads'] > 1)}")
    if record["norm_kernels"] != "auto":
        options.append(f"--norm-kernels {record['norm_kernels']}")
    gpus = f", {record['world_size']} GPUs" if record["world_size"] > 1 else ""
    return f"{name} {width}, {' '.join(options)}{gpus}"


if __name__ == "__main__":
    sys.exit(PAGE.main(sys.argv[1:], __doc__.split("\n")[0], table))
