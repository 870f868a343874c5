"""What the text behind an option stands for. Each raises ArgumentTypeError with the reason alone; the parser names option and text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from zero_inference.config import AUTO, DEFAULTS, QUANT_BITS
from zero_inference.config.spellings import bits_of, dtype_name
from zero_inference.errors import UsageError
from zero_inference.utils.sizes import gib_of

SIZE = "SIZE"  # metavar of a size in memory
SIZES = "a plain number is in GiB; 10GiB and 10G are 10 x 2^30 bytes, 10GB is 10 x 10^9"


def default(name: str) -> str:
    """The end of a help text."""
    return f"(default: {DEFAULTS[name]})"


def names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError("names nothing")
    return found


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in names(text))
    except ValueError:
        raise argparse.ArgumentTypeError("not a list of whole numbers with commas between them") from None


def number_or_auto(text: str) -> int | str:
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError("not a whole number or auto") from None


def size(text: str) -> float:
    """GiB."""
    try:
        return gib_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> Any:
    return _in_own_words(dtype_name, text)


def bits_or_auto(text: str) -> Any:
    return _in_own_words(bits_of, text)


def bits(text: str) -> Any:
    return _in_own_words(lambda said: bits_of(said, QUANT_BITS), text)


def _in_own_words(read: Callable[[Any], Any], text: str) -> Any:
    """Its errors begin with the option's name, and the parser leaves them so."""
    try:
        return read(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
