#!/usr/bin/env python3
"""Makes the tables of README.md, docs/big-models.md and docs/measured.md again, from committed records and plans.

    python scripts/tables.py results
    python scripts/tables.py planned                         (a minute)
    python scripts/tables.py readme big-models --folder benchmarks/results/NAME

A page holds a table between `<!-- scripts/tables.py NAME FOLDER -->` and `<!-- end of table -->`:
results: a row a record of the folders below, the last one of a file, and of what was measured again the last one.
planned: speeds on a card of 24 GB by the size of host memory.
big-models, and of it readme: what was predicted of a run before loading, and what was then measured (in bold). A row stands under the
smallest of some usual sizes of GPU memory that the run stays in. Records of FOLDER, which `scripts/measure_gpu.py FOLDER readme` measured,
stand in for others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/big-models.md", "docs/measured.md")
MARK = re.compile(r"<!-- scripts/tables.py (\S+?)(?: (\S+))? -->\n.*?<!-- end of table -->", re.DOTALL)
sys.path.insert(0, str(ROOT))

from zero_inference.report.run import weights_in_short  # noqa: E402
from zero_inference.utils.format import significant  # noqa: E402

Row = list[str]

# results
FOLDERS = ("h200", "h200-shared", "h200-x2", "h200-x4")
# runs with the CPU backend; a case is shown from the last of these folders that has it
CPU_FOLDERS = ("h200-cores", "h200-graphs", "h200-fixed", "h200-ahead", "h200-balanced", "h200-beside")
MIN_TOKENS = 3  # with fewer a run is there for its prefill

# planned
MODELS = {
    "llama-2-13b": "Llama-2-13B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B (mixture)",
    "llama-3.1-70b": "Llama-3.1-70B",
    "gpt-oss-120b": "gpt-oss-120b (mixture)",
    "qwen3-235b-a22b": "Qwen3-235B-A22B (mixture)",
    "llama-3.1-405b": "Llama-3.1-405B",
}
HOST_GIB = (64, 128, 256)
BITS = (4, 8, 16)

# big-models
ONE, MANY = "h200-big-models/bs1", "h200-big-models/bs32"
# By model: GiB of GPU memory, case of scripts/measure_gpu.py, and the record in whose place it comes, with its host. Of the H200's
# mixtures only those that lie on the GPU are here: the others ran with greedy tokens, for which random weights choose the same experts
# again and again.
BIG_MODELS = {
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
    "gpt-oss-120b (mixture), MXFP4": [(24, "gpt-oss-120b-24gib", "H200", "h200-formats/third_host/gpt-oss-120b-24gib")],
    "Llama-3.1-405B": [(140, "llama-3.1-405b-140gib", "H200", "h200-kept/thirteenth_host/llama405b-int4-bs32-auto")],
}
# those of one sequence that README shows
IN_README = "llama-2-13b-8gib-bs1 qwen3-30b-a3b-gpu2 mixtral-8x7b-24gib-bs1 llama-3.1-70b-24gib-bs1".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=TABLES, metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--folder", type=Path, help="results of `scripts/measure_gpu.py FOLDER readme`")
    args = parser.parse_args()
    folder = os.path.relpath(args.folder, ROOT) if args.folder else None
    for name in PAGES:
        page = ROOT / name
        page.write_text(updated(page.read_text(encoding="utf-8"), args.names, folder), encoding="utf-8")


def updated(page: str, names: Iterable[str], folder: str | None = None) -> str:
    """Return a page's text with the named tables made again, of `folder` or else of those in its marks."""

    def replace(found: re.Match) -> str:
        name, results = found[1], found[2] and (folder or found[2])
        if name not in names:
            return found[0]
        mark = " ".join(filter(None, ["scripts/tables.py", name, results]))
        return f"<!-- {mark} -->\n{TABLES[name](results and ROOT / results)}\n<!-- end of table -->"

    return MARK.sub(replace, page)


def markdown(columns: str, rows: Iterable[Row]) -> str:
    """Return a table; `columns` are separated by bars."""
    lines = [columns.split("|"), ["---"] * len(columns.split("|")), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rounded(number: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def last_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text().splitlines()[-1])


def results_table(_: Path | None = None) -> str:
    latest = {path.stem: path for folder in CPU_FOLDERS for path in decoded(folder)}
    rows = []
    for paths in (*map(decoded, FOLDERS), latest.values()):
        found = []
        for path in paths:
            record = last_record(path)
            order = record["model"], record["quant_bits"] != 16, -record["quant_bits"], record["engine"]
            found.append((order, result_row(record, path)))
        rows += [row for _, row in sorted(found)]
    columns = (
        "case|batch x prompt|tokens x loops|decode token/s|s a step|GB/s of weights|of the limit|peak GPU GiB|record"
    )
    return markdown(columns, rows)


def decoded(folder: str) -> list[Path]:
    """Return the files of a folder of results whose last record is of a run that succeeded, with at least `MIN_TOKENS`."""
    records = {path: last_record(path) for path in sorted((RESULTS / folder).glob("*.jsonl"))}
    return [path for path, found in records.items() if found["status"] == "ok" and found["gen_len"] >= MIN_TOKENS]


def result_row(record: dict[str, Any], path: Path) -> Row:
    from transformers import AutoConfig

    share, spread = record["limit"]["fraction_of_limit"], record["limit"].get("link_spread")
    error = f" +- {spread / 2:.1%}" if spread is not None and record["limit"].get("bound_by") == "link" else ""
    # a decode step of a mixture reads some of the weights only, which older records do not say
    mixture = hasattr(AutoConfig.for_model(record["model_type"]), "num_experts_per_tok")
    return [
        label(record),
        f"{record['batch_size']} x {record['prompt_len']}",
        f"{record['gen_len']} x {len(record['loops'])}",
        f"{record['decode_throughput']:.1f}",
        f"{record['decode_latency_s'] / (record['gen_len'] - 1):.4f}",
        "-" if mixture or record["decode_weights_gbps"] is None else f"{record['decode_weights_gbps']:.1f}",
        "-" if share is None else f"{share:.1%}{error}",
        f"{record['peak_gpu_bytes'] / 2**30:.1f}",
        f"{path.parent.name}/{path.stem}",
    ]


def label(record: dict[str, Any]) -> str:
    """Return model, format of the weights and what the engine was asked for."""
    bits, dtype, engine = record["quant_bits"], record["dtype"], record["engine"]
    options = [
        f"--{name.replace('_', '-')}"
        for name in ("cpu_offload", "disk_offload", "kv_offload")
        if record[name] and (engine, name) != ("stream", "cpu_offload")
    ]
    if record.get("pin_memory") is False and engine == "deepspeed" and record["cpu_offload"]:
        options.append("--pin-memory 0")
    stream = record.get("stream") or {}
    if resident := stream.get("resident_layers"):
        options.append(f"{resident} of {resident + stream['streamed_layers']} layers on the GPU")
    if cores := stream.get("cores"):
        options.append(f"and {cores['threads']} core{'s' * (cores['threads'] > 1)}")
    if record["norm_kernels"] != "auto":
        options.append(f"--norm-kernels {record['norm_kernels']}")
    num_gpus = record.get("num_gpus") or record["world_size"]  # of records without it each rank has one
    weights = weights_in_short(bits, dtype)
    gpus = f", {num_gpus} GPUs" if num_gpus > 1 else ""
    return f"{record['model'].split('/')[-1]} {weights}, {' '.join([engine, *options])}{gpus}"


def planned_table(_: Path | None = None) -> str:
    columns = "|".join(["model", *(f"{bits} bits" for bits in BITS), "first token, 4 bits (s)"])
    return markdown(columns, map(planned_row, MODELS))


def planned_row(model: str) -> Row:
    """Return the cells of one model: each speed with the smallest host memory that gives it."""
    from zero_inference import plan

    speeds: dict[int, dict[str, int]] = {bits: {} for bits in BITS}  # token/s -> GiB
    first_token = 0.0
    for gib in HOST_GIB:
        assumed = f"host={gib}GiB,cores=60GB/s"
        shape = {"dummy": True, "batch_size": 1, "engine": "stream", "quant_bits": list(BITS)}
        for each in plan(model, machine="rtx4090", assume=assumed, **shape):
            if each.fits:
                speeds[each.bits].setdefault(rounded(each.tokens_per_s), gib)
                first_token = each.first_token_s if each.bits == 4 else first_token
    cells = [", ".join(f"{speed} ({gib} GiB)" for speed, gib in found.items()) or "-" for found in speeds.values()]
    return [MODELS[model], *cells, rounded(first_token)]


def big_models_table(folder: Path | None) -> str:
    columns = "model, 4 bits|GPU memory|used (GiB)|host (GiB)|sequences|first token (s)|token/s|on"
    return markdown(columns, [big_model_row(*each) for each in big_model_records(folder)])


def readme_table(folder: Path) -> str:
    rows = [
        big_model_row(model, "", gib, last_record(folder / f"{case}.jsonl"))
        for model, cases in BIG_MODELS.items()
        for gib, case in dict.fromkeys((gib, case) for gib, case, *_ in cases)
        if case in IN_README
    ]
    columns = "model, 4 bits|GPU memory|used (GiB)|host (GiB)|first token (s)|token/s"
    return markdown(columns, [[*row[:4], *row[5:7]] for row in rows])


def big_model_records(folder: Path | None) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Return model, host, GiB of GPU memory and record of each row; the records of `folder` stand in for others once."""
    found: dict[Path, tuple[str, str, int, dict[str, Any]]] = {}
    for model, rows in BIG_MODELS.items():
        for gib, case, host, name in rows:
            path = folder / f"{case}.jsonl" if folder else None
            if path and path.exists() and (record := last_record(path))["status"] == "ok":
                gpu = record["environment"]["gpus"][0]["name"].split()[1]
                found[path] = model, gpu, gib, record
            elif name:
                path = RESULTS / f"{name}.jsonl"
                found[path] = model, host, gib, last_record(path)
    return list(found.values())


def big_model_row(model: str, host: str, gib: int, record: dict[str, Any]) -> Row:
    gpu, memory = (significant(record[f"peak_{where}_bytes"] / 2**30) for where in ("gpu", "host"))
    rate, first_token = (f"{rounded(said)}, **{rounded(found)}**" for said, found in predicted_and_measured(record))
    return [model, f"{gib} GiB", gpu, memory, str(record["batch_size"]), first_token, rate, host]


def predicted_and_measured(record: dict[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (predicted, measured) token/s and (predicted, measured) seconds to the first token."""
    predicted = record["batch_size"] * (record["gen_len"] - 1) / record["predicted"]["decode_s"]
    first_token = record["predicted"]["prefill_s"], record["prefill_latency_s"]
    return (predicted, record["decode_throughput"]), first_token


TABLES = {"results": results_table, "planned": planned_table, "big-models": big_models_table, "readme": readme_table}

if __name__ == "__main__":
    main()
