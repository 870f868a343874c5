#!/usr/bin/env python3
"""README's table of models on a card of 24 GB: planned speeds by the size of host memory.

python scripts/planned_table.py            prints it
python scripts/planned_table.py --write    puts it into README.md, between its two marks
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_table import DocsTable, rounded  # noqa: E402
from zero_inference import plan  # noqa: E402
from zero_inference.utils.tables import Column  # noqa: E402

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
PAGE = DocsTable(
    (
        Column("model", "model", dtype="string"),
        *(Column(str(bits), f"{bits} bits", dtype="string") for bits in BITS),
        Column("first_token", "first token, 4 bits (s)", dtype="string"),
    ),
    [ROOT / "README.md"],
    "<!-- planned: scripts/planned_table.py",
    "<!-- end of planned -->",
)


def table(models: tuple[str, ...] = tuple(MODELS)) -> str:
    """Return the table as Markdown, without a line break at its end."""
    return PAGE.text([row_of(model) for model in models])


def row_of(model: str) -> dict[str, str]:
    """Return the cells of one model: each speed with the smallest host memory that gives it."""
    speeds: dict[int, dict[str, int]] = {bits: {} for bits in BITS}  # token/s -> GiB
    first_token = None
    for gib in HOST_GIB:
        assumed = f"host={gib}GiB,cores=60GB/s"
        shape = {"dummy": True, "batch_size": 1, "engine": "stream", "quant_bits": list(BITS)}
        for each in plan(model, machine="rtx4090", assume=assumed, **shape):
            if each.fits:
                speeds[each.bits].setdefault(rounded(each.tokens_per_s), gib)
                first_token = each.first_token_s if each.bits == 4 else first_token
    cells = {
        str(bits): ", ".join(f"{speed} ({gib} GiB)" for speed, gib in found.items()) or "-"
        for bits, found in speeds.items()
    }
    return {"model": MODELS[model], **cells, "first_token": rounded(first_token)}


if __name__ == "__main__":
    sys.exit(PAGE.main(sys.argv[1:], __doc__.split("\n")[0], table))
