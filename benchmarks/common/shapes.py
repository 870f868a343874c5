"""Shapes of weights on a command line."""

from __future__ import annotations


def shape_of(text: str) -> tuple[int, int]:
    """Rows and columns of "5120x13824"."""
    rows, columns = map(int, text.split("x"))
    return rows, columns
