"""Signals that ask a process to end. They become exceptions, so that what it holds is released and a record is left."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_stop() -> None:
    """SIGTERM and SIGHUP raise SystemExit(128 + number), as SIGINT raises KeyboardInterrupt. What is ignored (nohup) stays so.

    Only the main thread can say so; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, frame: sys.exit(128 + received))


def ignore_stop() -> None:
    """From here on nothing but SIGKILL interrupts this process: it is ending, and says why."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def restored() -> Iterator[None]:
    """At the end signals do what they did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be set from here either
                signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Signals that arrive inside take effect at its end. A launcher sends a second one right behind the first.

    Only the main thread runs signal handlers; in another one there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: dict[int, None] = {}  # each once, in order
    before = {
        number: signal.signal(number, lambda received, frame: arrived.setdefault(received)) for number in STOPPING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for received in arrived:
            signal.raise_signal(received)
