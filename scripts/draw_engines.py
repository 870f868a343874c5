#!/usr/bin/env python3
"""Draws docs/images/engines.png and engines-dark.png: time to first token and token/s by engine, from the records of one host.

    python scripts/draw_engines.py benchmarks/results/FOLDER [--to FOLDER]

FOLDER is of `scripts/measure_gpu.py FOLDER readme`: Llama-3.1-70B in 4 bits on 24 GiB of GPU memory, one sequence. The mark beside a bar is
what the link, CPU and memory rates that the same run measured allow.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.tables import last_record  # noqa: E402

STREAM, DEEPSPEED, LLAMA_CPP = "llama-3.1-70b-24gib-bs1", "deepspeed-llama-3.1-70b", "llamacpp-llama-3.1-70b-24gib"
LLAMA_CPP_OPTIONS = {
    "-dev none": "-dev none\nCPU alone",
    "-lm none --no-host 0": "-ngl 50\nweights page-locked",
    "-ngl 50 --no-host 1": "-ngl 50\nweights repacked for the CPU",
}
# by file: text, bars of ours, bars of others, bounds
COLOURS = {
    "engines.png": ("#24292f", "#1f77b4", "#9aa1ab", "#c44e00"),
    "engines-dark.png": ("#e6edf3", "#58a6ff", "#6e7681", "#ff9d57"),
}
PANELS = (
    ("first_token_s", "time to first token, s (shorter is better)"),
    ("rate", "decode, token/s (longer is better)"),
)


@dataclass(frozen=True)
class Bar:
    """One engine. `first_token_s` is None where it was not measured, `bound` (token/s that the machine's measured rates allow) where the
    program measures none."""

    label: str
    first_token_s: float | None
    rate: float
    bound: float | None
    ours: bool


def bars(folder: Path) -> list[Bar]:
    """Return the engines measured in `folder` from the top of the picture to its bottom, which is ours."""
    found = json.loads((folder / f"{LLAMA_CPP}.json").read_text())
    others = [llama_cpp_bar(found, options, words) for options, words in LLAMA_CPP_OPTIONS.items()]
    if (folder / f"{DEEPSPEED}.jsonl").exists():
        others.insert(0, run_bar(last_record(folder / f"{DEEPSPEED}.jsonl"), "DeepSpeed\n--cpu-offload", False))
    ours = run_bar(last_record(folder / f"{STREAM}.jsonl"), "stream engine\nGPU, link and CPU", True)
    return [*filter(None, others), ours]


def run_bar(record: dict[str, Any], label: str, ours: bool) -> Bar:
    bound = record["batch_size"] * (record["gen_len"] - 1) / record["limit"]["floor_decode_s"]
    return Bar(label, record["prefill_latency_s"], record["decode_throughput"], bound, ours)


def llama_cpp_bar(found: dict[str, Any], options: str, words: str) -> Bar | None:
    """Return the best of all numbers of threads with these options; None where they were not measured."""
    rows = [row for row in found["rows"] if options in row["options"] and row.get("threads")]
    prompts = [rate for row in rows if (rate := row["prefill_tokens_per_s"].get(str(found["prompt_len"])))]
    rates = [row["tokens_per_s"] for row in rows if row["tokens_per_s"]]
    first_token_s = found["prompt_len"] / max(prompts) if prompts else None
    return Bar(f"llama.cpp {words}", first_token_s, max(rates), None, False) if rates else None


def draw(results: Path, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    gpu = last_record(results / f"{STREAM}.jsonl")["environment"]["gpus"][0]["name"].split()[1]
    title = f"Llama-3.1-70B in 4 bits, 24 GiB of an {gpu}, one sequence, prompt of 512 tokens"
    for name, colours in COLOURS.items():
        draw_one(folder / name, title, bars(results), *colours)


def draw_one(path: Path, title: str, found: list[Bar], text: str, ours: str, others: str, bound: str) -> None:
    from matplotlib import pyplot

    with pyplot.rc_context({"text.color": text, "axes.labelcolor": text, "axes.edgecolor": text, "font.size": 10.5}):
        figure, panels = pyplot.subplots(1, 2, figsize=(9.4, 1.0 + 0.6 * len(found)), sharey=True, layout="constrained")
        for axes, (quantity, heading) in zip(panels, PANELS):
            values = [getattr(bar, quantity) for bar in found]
            bounds = [bar.bound for bar in found] if quantity == "rate" else []
            end = 1.3 * max(filter(None, [*values, *bounds]))
            for place, (bar, value) in enumerate(zip(found, values)):
                if value is None:
                    axes.text(0.02 * end, place, "not measured", va="center", style="italic")
                    continue
                axes.barh(place, value, height=0.58, color=ours if bar.ours else others)
                beside = f"{value:.3g}"
                if quantity == "rate" and bar.bound:
                    axes.plot([bar.bound] * 2, [place - 0.36, place + 0.36], color=bound, linewidth=2.2)
                    beside += f" ({value / bar.bound:.0%})"
                    value = max(value, bar.bound)
                axes.text(value + 0.02 * end, place, beside, va="center", weight="bold" if bar.ours else "normal")
            axes.set_xlim(0, end)
            axes.set_title(heading, fontsize=10.5, loc="left")
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(left=False, bottom=False, labelbottom=False, colors=text)
        panels[0].set_yticks(range(len(found)), [bar.label for bar in found])
        panels[0].invert_yaxis()
        figure.suptitle(title, x=0.005, ha="left", fontsize=11.5, weight="bold")
        figure.get_layout_engine().set(wspace=0.06)
        panels[1].plot([], [], color=bound, linewidth=2.2, label="bound by the rates of link, CPU and memory")
        panels[1].legend(loc="upper left", bbox_to_anchor=(0, -0.01), frameon=False, fontsize=9.5, handlelength=0.8)
        figure.savefig(path, dpi=200, transparent=True, metadata={"Software": None})
        pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, metavar="FOLDER")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images", metavar="FOLDER")
    args = parser.parse_args()
    draw(args.results, args.to)
