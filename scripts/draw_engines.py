#!/usr/bin/env python3
"""Draws docs/images/engines.png: token/s by engine beside the limit of the machine, from committed records.

    python scripts/draw_engines.py [FILE]

All runs are of one host (benchmarks/results/h200-beside): Llama-2-13B in 4 bits, one sequence. A bar is what was measured, its outline what
the rates of link, cores and memory that the same run measured would allow.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results" / "h200-beside"
OURS, OTHERS, LIMIT = "#1f77b4", "#8a8f98", "#c44e00"
RUNS = {
    "deepspeed13b-int4": "DeepSpeed ZeRO-Inference\nall weights over the link",
    "llama13b-int4-bs1-off": "stream engine\nall weights over the link",
    "llama13b-int4-bs1-auto": "stream engine\nlink and CPU cores together",
    "llama13b-int4-half-auto": "stream engine, half on the GPU\nlink and CPU cores together",
}
LLAMA_CPP = "llama.cpp, Q4_0\nCPU cores alone"


@dataclass(frozen=True)
class Bar:
    """Rates in token/s; `limit` is None where the program does not measure one."""

    label: str
    rate: float
    limit: float | None
    ours: bool


def bars() -> list[Bar]:
    found = []
    for name, label in RUNS.items():
        record = json.loads((FOLDER / f"{name}.jsonl").read_text().splitlines()[-1])
        limit = record["batch_size"] * (record["gen_len"] - 1) / record["limit"]["floor_decode_s"]
        found.append(Bar(label, record["decode_throughput"], limit, record["engine"] == "stream"))
    return [*found[:1], Bar(LLAMA_CPP, llama_cpp_rate(), None, False), *found[1:]]


def llama_cpp_rate() -> float:
    """Of one sequence, decoding."""
    results = json.loads((FOLDER / "llamacpp-llama13b.json").read_text())
    return next(each["tokens_per_s"] for each in results["rows"] if each["batch"] == 1)


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = bars()
    figure, axes = pyplot.subplots(figsize=(8.2, 3.6), layout="constrained")
    for place, bar in enumerate(reversed(found)):
        axes.barh(place, bar.rate, height=0.6, color=OURS if bar.ours else OTHERS)
        if bar.limit:
            axes.barh(place, bar.limit, height=0.6, fill=False, edgecolor=LIMIT, linewidth=1.4)
        share = f"  {bar.rate / bar.limit:.0%} of the limit" if bar.limit else ""
        axes.text(max(bar.rate, bar.limit or 0) + 0.5, place, f"{bar.rate:.1f}{share}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [bar.label for bar in reversed(found)], fontsize=9)
    axes.set_xlim(0, 52)
    axes.set_xlabel("decode, token/s (outline: what this machine's link, cores and memory allow)", fontsize=9)
    axes.set_title("Llama-2-13B, 4 bits, one sequence, one H200 host", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "engines.png")
