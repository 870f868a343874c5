"""Draw the tables that run_cases.py wrote: GB/s of every provider at each case's largest size, an image for each dtype and direction.

    python benchmarks/draw_plots.py RESULT_DIR [OUT_DIR]        (default: benchmarks/plots; needs no GPU)

Reads RESULT_DIR/{case}/{dtype}/*-perf.csv and writes norms-{dtype}-{fwd|bwd}.png. At the largest size the kernel takes longer than the
host needs to launch it. Exit code 2 where there is no table.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    tables = sorted(Path(argv[0]).glob("*/*/*-perf.csv"))
    if not tables:
        print(f"error: {argv[0]}: no table of run_cases.py there.", file=sys.stderr)
        return 2
    folder = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    images: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for table in tables:
        case, dtype, direction, _ = table.stem.rsplit("-", 3)
        images[f"{dtype}-{direction}"][case] = largest_rates(table)
    for name, rates in images.items():
        draw(rates, f"norms, {name.replace('-', ', ')}: largest size of each case", folder / f"norms-{name}.png")
    return 0


def largest_rates(table: Path) -> dict[str, float]:
    """Return GB/s by provider in the row of the most elements, without providers that have no time there."""
    import pandas

    frame = pandas.read_csv(table)
    last = frame.loc[(frame["dim"] * frame["batch_size"] * frame["seq_len"]).idxmax()]
    rates = {column.removesuffix(" (GB/s)"): float(last[column]) for column in frame if column.endswith(" (GB/s)")}
    return {provider: rate for provider, rate in rates.items() if not math.isnan(rate)}


def draw(rates: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """Draw `rates` (case -> provider -> GB/s) as bars, grouped by case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    providers = list(dict.fromkeys(provider for case in rates.values() for provider in case))
    width = 0.8 / len(providers)
    figure, axes = pyplot.subplots(figsize=(11, 5))
    for number, provider in enumerate(providers):
        timed = [(place, case[provider]) for place, case in enumerate(rates.values()) if provider in case]
        bars = axes.bar(
            [place + number * width for place, _ in timed],
            [rate for _, rate in timed],
            width,
            label="Cuda (ours)" if provider == "Cuda" else provider,
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=6, rotation=90, padding=2)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rates))], list(rates))
    axes.set(ylabel="GB/s over the bytes that have to move", title=title)
    axes.margins(y=0.2)
    axes.legend(ncols=len(providers), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
