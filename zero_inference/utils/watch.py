"""Heartbeats between ranks: a rank that dies or stops must not leave the others waiting.

A rank that waits for another is inside a collective or a device call, where Python runs no signal handler. The store for heartbeats is
in a process that may itself stop: a request then blocks, whatever its timeout. So one thread sends and reads heartbeats, and may get
stuck; the other checks how old the last ones are, and ends the process when a rank was silent too long or a stop signal came.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zero_inference.utils.format import first_line
from zero_inference.utils.processes import STOPPING, end_now, launcher_watch
from zero_inference.utils.ranks import Ranks

BEAT_S = 1.0
SILENT_S = 15.0
JOIN_S = 300.0  # until the first beat: processes start at different times, and import from disks of different speed
GRACE_S = 5.0
ANSWER_S = 3.0
DONE, FAILED = b"done", b"failed"  # the last value of a rank, instead of a beat
STORE = -1  # beside the ranks: the process that holds the store


class PeerWatch:
    """Watches the other ranks of a run and its launchers, from `start` to `stop`.

    `report` is called with the reason before the process ends, to write a record and remove files; its result is printed.
    """

    def __init__(self, ranks: Ranks, report: Callable[[str], str]):
        self.ranks, self.report = ranks, report
        self.stopping = threading.Event()
        self.connected = threading.Event()
        self.store: dist.TCPStore | None = None
        self.store_is_gone = False
        self.others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        self.last_beats: dict[int, Any] = {}  # by rank; at STORE the last beat of this rank that the store has answered
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. Call it before the ranks first wait for each other."""
        launcher_watch.on_end = self._give_up
        launcher_watch.start()
        if self.ranks.world_size > 1:
            self.signals, write_end = os.pipe()  # a signal's number arrives here even while the main thread is stuck
            for end in (self.signals, write_end):
                os.set_blocking(end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            self.threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._check)]
            for thread in self.threads:
                thread.start()

    def stop(self, failed: bool = False) -> None:
        """Stop, and set this rank's last value: silence is ignored from here on, and failure ends the others too."""
        launcher_watch.on_end = end_now
        first = not self.stopping.is_set()
        self.stopping.set()
        if self.threads and first:
            for thread in self.threads:
                thread.join(2 * BEAT_S)
            signal.set_wakeup_fd(-1)
            self._request(lambda store: store.set(store_key(self.ranks.rank), (FAILED if failed else DONE).decode()))

    def claims_failure(self) -> bool:
        """Return True for the first rank that calls it, so that a run that fails on several leaves one record. Without an answer of the
        store, True: two records are better than none."""
        return not self.threads or self._request(lambda store: store.add(store_key("failure"), 1)) in (None, 1)

    def _request(self, request: Callable[[dist.TCPStore], Any]) -> Any:
        """Return the store's answer; None if there is none within ANSWER_S."""
        answers = []

        def send() -> None:
            with contextlib.suppress(Exception):  # RuntimeError or DistNetworkError: the others are gone already
                if self.connected.wait(ANSWER_S):
                    answers.append(request(self.store))

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        return answers[0] if answers else None

    def _beat(self) -> None:
        """Write a rising number to the store each second as this rank's beat, and read the others' into `last_beats`. May get stuck."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = datetime.timedelta(seconds=JOIN_S)
        try:  # a connection that is not shared with the collectives
            self.store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
            self.connected.set()
            for beat in itertools.count(1):
                if self.stopping.is_set():
                    return
                self.store.set(store_key(self.ranks.rank), str(beat))
                for rank in self.others:
                    if self.store.check([store_key(rank)]):
                        self.last_beats[rank] = self.store.get(store_key(rank))
                self.last_beats[STORE] = beat
                self.stopping.wait(BEAT_S)
        except Exception:
            self.store_is_gone = True

    def _check(self) -> None:
        """Count silence in this thread's own seconds: while the whole process is stopped, no rank is silent."""
        last: dict[int, Any] = {}
        silent_s = dict.fromkeys([STORE, *self.others], 0.0)
        while not self.stopping.wait(BEAT_S):
            for source in silent_s:
                beat = self.last_beats.get(source)
                silent_s[source] = 0.0 if beat != last.get(source) or beat == DONE else silent_s[source] + BEAT_S
                last[source] = beat
            if lost := self._lost(last, silent_s):
                self._give_up(f"{lost}; the output of that rank says why, if anything does")
            received = b""
            with contextlib.suppress(BlockingIOError):  # no signal
                received = os.read(self.signals, 64)
            if number := next((number for number in STOPPING if number in received), None):
                self._give_up(stopped_by(number, self.ranks))

    def _lost(self, last: dict[int, Any], silent_s: dict[int, float]) -> str | None:
        if self.store_is_gone:
            return "the first rank or the launcher is gone"
        for source, seconds in silent_s.items():
            who = "the first rank or the launcher" if source == STORE else f"rank {source}"
            if last[source] == FAILED:
                return f"{who} failed"
            limit_s = JOIN_S if last[source] is None else SILENT_S
            if seconds > limit_s:
                return f"{who} has said nothing for {limit_s:.0f} s"
        return None

    def _give_up(self, reason: str) -> None:
        """End the process, unless the main thread does it first."""
        if self.stopping.wait(GRACE_S):
            return
        try:
            reason = self.report(reason)
            if self.threads and self.ranks.is_first:  # it may keep the store, which the others still ask
                time.sleep(2 * BEAT_S)
        finally:
            end_now(reason)


def stopped_by(number: int, ranks: Ranks) -> str:
    """Return the error of a run that signal `number` ended."""
    why = " (the launcher stops all ranks when one ends: the output of that one says why)" * (ranks.world_size > 1)
    return f"stopped by {signal.Signals(number).name}{why}"


def lost_connection(error: BaseException, ranks: Ranks) -> str | None:
    """Return the message for an `error` of a collective that another rank left; None for any other error."""
    text = first_line(error)
    if ranks.world_size > 1 and re.search("Connection (reset by peer|closed by peer|refused)|NCCL", text):
        return f"another rank ended or cannot be reached; its output says why ({text[:120]})"
    return None


def store_key(rank: int | str) -> str:
    """Return the key in the store of a rank's beat, or of another value, for this attempt of an elastic launcher."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"zero_inference/{attempt}/{rank}"
