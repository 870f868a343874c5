"""How far the weights of a hub model are fetched, told while huggingface_hub fetches them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_inference.utils.format import format_bytes
from zero_inference.utils.progress import TICK_S, ByteProgress, Progress, current_progress, is_reporting

PARTIAL = ".incomplete"  # how a file's name ends while it is fetched


@contextmanager
def showing_fetched(name: str, folder: Path, patterns: list[str]) -> Iterator[None]:
    """While the block fetches the files of `patterns` into the snapshot `folder`, show how many bytes of them are there.

    The bytes are those in the cache, which holds for every way in which the client fetches, and for what an earlier run began.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    progress = current_progress()
    drawn = is_reporting() and not are_progress_bars_disabled()
    if drawn:
        disable_progress_bars()  # it would draw bars of its own into the live line
    ended, watch = threading.Event(), None
    try:
        if progress.enabled:
            files = snapshot_download(name, revision=folder.name, allow_patterns=patterns, dry_run=True)
            total = sum(file.file_size for file in files)
            there = sum(file.file_size for file in files if file.is_cached)
            if there < total:
                cache = folder.parent.parent / "blobs"
                watch = threading.Thread(target=_watch, args=(progress, name, cache, total, there, ended), daemon=True)
                watch.start()
        yield
    finally:
        ended.set()
        if watch is not None:
            watch.join()
        if drawn:
            enable_progress_bars()
        progress.clear()


def _watch(progress: Progress, name: str, blobs: Path, total: int, there: int, ended: threading.Event) -> None:
    there = min(total, there + _bytes(blobs, f"*{PARTIAL}"))
    moved, before = ByteProgress(progress, "fetching weights", total, there), _bytes(blobs)
    if ended.wait(TICK_S):
        return
    progress.say(f"fetching the weights of {name}, {format_bytes(total - there)} ...")
    while not ended.wait(TICK_S):
        moved.at(min(total, there + max(0, _bytes(blobs) - before)))


def _bytes(blobs: Path, pattern: str = "*") -> int:
    found = 0
    for path in blobs.glob(pattern):
        try:
            status = path.stat()
        except OSError:  # renamed meanwhile
            continue
        found += min(status.st_size, 512 * status.st_blocks)  # a file may have holes where parts arrive in any order
    return found
