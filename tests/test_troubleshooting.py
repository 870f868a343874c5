"""docs/troubleshooting.md quotes messages that the package has, word for word."""

import ast
import re

from conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def texts_of(source: str) -> list[str]:
    """Its string constants, and the constant parts of its f-strings; adjacent strings are one, as Python reads them."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_quoted_messages_are_in_the_code():
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(quoted) > 10
    texts = "\n".join(
        text for path in (ROOT / "zero_inference").rglob("*.py") for text in texts_of(path.read_text(encoding="utf-8"))
    )
    assert [message for message in quoted if message not in texts] == []
