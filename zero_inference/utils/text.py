"""Text of unknown origin (names, paths, errors, what a model wrote), made fit to be printed."""

from __future__ import annotations

import re

# Controls could move the cursor or recolour a terminal; halves of surrogate pairs and non-characters are in no encoding; marks of
# text direction would let a name turn the text around it. Tabs and line breaks stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """`text` with U+FFFD in place of each character that a terminal or a page must not get."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\ufffd"))


def file_stem(text: str) -> str:
    """`text` as a name that any file system takes, with room for a number and a suffix."""
    return re.sub(r"[^\w.-]+", "_", text).encode(errors="replace")[:200].decode(errors="ignore")


def first_line(error: BaseException) -> str:
    """The first line of its message, cut at 200 characters; its class where it has none."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
