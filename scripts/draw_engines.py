#!/usr/bin/env python3
"""Draws docs/images/engines.png and engines-dark.png: time to first token and token/s by engine, from committed records.

    python scripts/draw_engines.py [FOLDER]

All runs are of one host (benchmarks/results/h100-big-models): Llama-3.1-70B in 4 bits on 24 GiB of GPU memory, one sequence. The mark
beside a bar is what the link, CPU and memory rates that the same run measured allow.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_table import RESULTS, last_record  # noqa: E402

FOLDER = RESULTS / "h100-big-models"
TITLE = "Llama-3.1-70B in 4 bits, 24 GiB of an H100, one sequence, prompt of 512 tokens"
STREAM, LLAMA_CPP = "llama-3.1-70b-24gib-bs1", "llamacpp-llama-3.1-70b-24gib"
LLAMA_CPP_OPTIONS = {"-lm none --no-host 0": "weights page-locked", "--no-host 1": "weights repacked for the CPU"}
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


def bars() -> list[Bar]:
    """Return the engines from the top of the picture to its bottom."""
    record = last_record(FOLDER / f"{STREAM}.jsonl")
    bound = record["batch_size"] * (record["gen_len"] - 1) / record["limit"]["floor_decode_s"]
    ours = Bar(
        "stream engine\nGPU, link and CPU", record["prefill_latency_s"], record["decode_throughput"], bound, True
    )
    return [*(llama_cpp(options, words) for options, words in LLAMA_CPP_OPTIONS.items()), ours]


def llama_cpp(options: str, words: str) -> Bar:
    """Return the best of all numbers of threads with these options."""
    results = json.loads((FOLDER / f"{LLAMA_CPP}.json").read_text())
    rows = [row for row in results["rows"] if options in row["options"]]
    prompt = results["prompt_len"]
    rates = [row["prefill_tokens_per_s"][str(prompt)] for row in rows if row["prefill_tokens_per_s"]]
    first_token_s = prompt / max(rates) if rates else None
    return Bar(f"llama.cpp -ngl 50\n{words}", first_token_s, max(row["tokens_per_s"] for row in rows), None, False)


def draw(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name, colours in COLOURS.items():
        draw_one(folder / name, bars(), *colours)


def draw_one(path: Path, found: list[Bar], text: str, ours: str, others: str, bound: str) -> None:
    from matplotlib import pyplot

    with pyplot.rc_context({"text.color": text, "axes.labelcolor": text, "axes.edgecolor": text, "font.size": 10.5}):
        figure, both = pyplot.subplots(1, 2, figsize=(9.4, 2.8), sharey=True, layout="constrained")
        for axes, (quantity, title) in zip(both, PANELS):
            values = [getattr(bar, quantity) for bar in found]
            end = 1.3 * max(value for value in values if value)
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
            axes.set_title(title, fontsize=10.5, loc="left")
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(left=False, bottom=False, labelbottom=False, colors=text)
        both[0].set_yticks(range(len(found)), [bar.label for bar in found])
        both[0].invert_yaxis()
        figure.suptitle(TITLE, x=0.005, ha="left", fontsize=11.5, weight="bold")
        figure.get_layout_engine().set(wspace=0.06)
        both[1].plot([], [], color=bound, linewidth=2.2, label="bound by the rates of link, CPU and memory")
        both[1].legend(loc="upper left", bbox_to_anchor=(0, -0.01), frameon=False, fontsize=9.5, handlelength=0.8)
        figure.savefig(path, dpi=200, transparent=True, metadata={"Software": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
