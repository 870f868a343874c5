"""A Markdown table that a script makes from committed records and puts into pages, between two marks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.utils.tables import Column, texts_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class DocsTable:
    """`pages` hold `begin`, whose comment ends in the script's argument, and `end` once each, on lines of their own."""

    columns: Sequence[Column]
    pages: Sequence[Path]
    begin: str
    end: str

    def text(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Markdown, without a line break at its end."""
        heads = [[column.header for column in self.columns], ["---"] * len(self.columns)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [*heads, *texts_of(rows, self.columns)])

    def put_into(self, page: str, text: str, argument: str = "") -> str:
        """`page` with `text` between the marks."""
        before, rest = page.split(self.begin)
        return f"{before}{self.begin}{argument} -->\n{text}\n{self.end}{rest.split(self.end)[1]}"

    def argument_in(self, page: str) -> str:
        """Return the argument in the mark of `page`, as `put_into` takes it."""
        return page.split(self.begin)[1].partition(" -->")[0]

    def main(self, argv: Sequence[str], description: str, make: Callable[..., str], folder_help: str = "") -> int:
        """Prints the text that `make` returns, or writes it into the pages where `argv` says so.

        With `folder_help`, `argv` may name a folder, which `make` is called with.
        """
        names = " and ".join(str(page.relative_to(ROOT)) for page in self.pages)
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--write", action="store_true", help=f"put it into {names}")
        if folder_help:
            parser.add_argument("folder", nargs="?", type=Path, help=folder_help)
        args = parser.parse_args(argv)
        folder = Path(os.path.relpath(args.folder, ROOT)) if folder_help and args.folder else None
        text = make(folder) if folder else make()
        if not args.write:
            print(text)
            return 0
        for page in self.pages:
            made = self.put_into(page.read_text(encoding="utf-8"), text, f" {folder}" if folder else "")
            page.write_text(made, encoding="utf-8")
        return 0


def rounded(number: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def last_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text().splitlines()[-1])
