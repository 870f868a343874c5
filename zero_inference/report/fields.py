"""`zero-inference report --fields`: every key of a record with its unit and its meaning, as the record's own types declare them."""

from __future__ import annotations

from zero_inference.records.fields import described
from zero_inference.utils.tables import Column, print_rows

COLUMNS = (
    Column("key", "key", dtype="string"),
    Column("unit", "unit", dtype="string"),
    Column("meaning", "meaning", dtype="string"),
)


def rows() -> list[dict[str, str]]:
    """In the order in which the keys are declared; the options that a key needs stand after its meaning."""
    return [
        {
            "key": one.key,
            "unit": one.unit,
            "meaning": "; ".join(filter(None, (one.meaning, one.only_with and f"only with {one.only_with}"))),
        }
        for one in described()
    ]


def print_fields(format: str) -> None:
    """On stdout, in a format of `runtime.tables`."""
    print_rows(rows(), COLUMNS, format)
