"""Draws the tables that run_cases.py wrote: speedups over naive at batch 1 over the sequence, at the largest hidden size.

    python benchmarks/draw_plots.py RESULT_DIR [OUT_DIR]        (default: benchmarks/plots; needs no GPU)

Reads RESULT_DIR/{case}/{dtype}/*-perf.csv and writes {case}-{dtype}-{fwd|bwd}.png. Exit code 2 where there is no table.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

OTHER_TIMES = ("SpeedUp (us)", " graph (us)", " p20 (us)", " p80 (us)")


def main(argv: list[str]) -> int:
    from common.bench_framework import draw_speedups

    if not 1 <= len(argv) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    tables = sorted(Path(argv[0]).glob("*/*/*-perf.csv"))
    if not tables:
        print(f"error: {argv[0]}: no table of run_cases.py there.", file=sys.stderr)
        return 2
    folder = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        name = table.stem.removesuffix("-perf")
        draw_speedups(*read_speedups(table), name.replace("-", ", "), folder / f"{name}.png")
    return 0


def read_speedups(table: Path) -> tuple[list[int], dict[str, list[float]]]:
    """Lengths, and speedups over naive by provider; a provider that lacks a time is left out."""
    import pandas

    frame = pandas.read_csv(table)
    frame = frame[(frame["batch_size"] == 1) & (frame["dim"] == frame["dim"].max())].sort_values("seq_len")
    names = [column.removesuffix(" (us)") for column in frame if column.endswith(" (us)") and not column.endswith(OTHER_TIMES)]
    speedups = {name: (frame["Naive (us)"] / frame[f"{name} (us)"]).tolist() for name in names
                if name != "Naive" and frame[f"{name} (us)"].notna().all()}
    return frame["seq_len"].tolist(), speedups


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
