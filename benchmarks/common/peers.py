"""Peers by import: a library that is not installed is no peer."""

from __future__ import annotations

from collections.abc import Callable


def found(makers: dict[str, Callable[[], Callable]]) -> dict[str, Callable]:
    """Those of `makers` (which import what they need) that can be made here."""
    peers = {}
    for name, make in makers.items():
        try:
            peers[name] = make()
        except ImportError:
            continue
    return peers
