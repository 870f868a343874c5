"""A rank that dies must not leave the others waiting: each tells the others that it lives, and ends when one falls silent.

A rank that waits for another sits inside a collective or a device call, where Python runs no signal handler and raises no
error. So this is a thread of its own. It ends the process in two cases, after a few seconds in which the main thread may do so
itself: another rank was silent for too long, or the launcher asked this process to stop.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from typing import Callable

import torch.distributed as dist

from zero_inference.distributed import Ranks
from zero_inference.errors import RunError
from zero_inference.signals import STOPPING

BEAT_S = 1.0
SILENT_S = 15.0
GRACE_S = 5.0
STOPPED = "stopped by a signal (of several ranks, the launcher stops all when one ends: its output says why)"
DONE, FAILED = "done", "failed"  # instead of a beat: the last word of a rank


class PeerWatch:
    """Watches the other ranks of a run from a thread, between `start` and `stop`. With one rank it does nothing.

    Args:
        report: called with the reason before the process ends, to leave a record and no files.

    Attributes:
        store: this run's key-value store, None with one rank.
    """

    def __init__(self, ranks: Ranks, report: Callable[[str], None]):
        self.ranks, self.report = ranks, report
        self.stopping = threading.Event()
        self.store: dist.TCPStore | None = None
        self.thread = threading.Thread(target=self._run, name="peer watch", daemon=True)

    def start(self) -> None:
        """Raises RunError where the run's store cannot be reached."""
        if self.ranks.world_size > 1:
            self.store = _own_connection()
            self.signals, write_end = os.pipe()  # a signal's number arrives here even while the main thread is stuck
            for end in (self.signals, write_end):
                os.set_blocking(end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            self.ranks.barrier()  # all get here, or the launcher ends the run: silence counts from now
            self.thread.start()

    def stop(self, failed: bool = False) -> None:
        """Say the last word to the others: silence means nothing from here on, and failure ends them too."""
        if self.store is not None and not self.stopping.is_set():
            self.stopping.set()
            self.thread.join(2 * BEAT_S)
            signal.set_wakeup_fd(-1)
            with contextlib.suppress(Exception):  # the others are gone already
                self.store.set(_key(self.ranks.rank), FAILED if failed else DONE)

    def claims_failure(self) -> bool:
        """True for the one rank that asks first, so that a run that fails on several leaves one record."""
        if self.store is None:
            return True
        try:
            return self.store.add(_key("failure"), 1) == 1
        except Exception:  # the store went down with the rank that kept it: better said twice than never
            return True

    def _run(self) -> None:
        beats: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self.stopping.wait(BEAT_S):
            count += 1
            try:
                self.store.set(_key(self.ranks.rank), str(count))
                lost = self._lost_peer(beats)
            except Exception:  # RuntimeError or DistNetworkError
                lost = "the first rank or the launcher is gone"
            if lost:
                self._give_up(f"{lost}; the output of that rank says why, if anything does")
            if self._told_to_stop():
                self._give_up(STOPPED)

    def _lost_peer(self, beats: dict[int, tuple[bytes, float]]) -> str | None:
        now = time.monotonic()
        for rank in range(self.ranks.world_size):
            if rank == self.ranks.rank:
                continue
            beat = self.store.get(_key(rank)) if self.store.check([_key(rank)]) else b""
            if beat == DONE.encode():
                continue
            if beat == FAILED.encode():
                return f"rank {rank} failed"
            if rank not in beats or beats[rank][0] != beat:
                beats[rank] = beat, now
            elif now - beats[rank][1] > SILENT_S:
                return f"rank {rank} has said nothing for {SILENT_S:.0f} s"
        return None

    def _told_to_stop(self) -> bool:
        try:
            numbers = os.read(self.signals, 64)
        except BlockingIOError:
            return False
        return any(number in numbers for number in STOPPING)

    def _give_up(self, reason: str) -> None:
        """End the process, unless the main thread does it first."""
        if self.stopping.wait(GRACE_S):
            return
        try:
            self.report(reason)
        finally:  # also where the record cannot be written
            print(f"error: rank {self.ranks.rank} of {self.ranks.world_size}: {reason}.", file=sys.stderr, flush=True)
            os._exit(1)


def _key(rank: int | str) -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"zero_inference/{attempt}/{rank}"


def _own_connection():
    """A connection to the run's store that this thread need not share with the collectives."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=SILENT_S))
    except Exception as error:  # DistNetworkError, or RuntimeError by version
        raise RunError(f"the store of this run at {address}:{port} cannot be reached; the first rank or the launcher is gone.") from error
