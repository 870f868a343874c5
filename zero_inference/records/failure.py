"""However a run fails, it leaves a record with the reason in one or two lines, and none of its temporary files."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.errors import RunError, UsageError, is_out_of_memory
from zero_inference.records.write import RunLog
from zero_inference.utils import processes
from zero_inference.utils.format import printable
from zero_inference.utils.processes import STOPPING
from zero_inference.utils.ranks import Ranks, stop_process_group
from zero_inference.utils.watch import PeerWatch, lost_connection, stopped_by


@contextlib.contextmanager
def record_failures(config: RunConfig, ranks: Ranks, files: RunLog, release: Callable[[], None]) -> Iterator[PeerWatch]:
    """Record a failure, a stop signal or the end of another rank within the context as a record of status 'failed'.

    Args:
        release: removes this process's files; called if the main thread cannot.

    Raises:
        RunError: replaces whatever ended the run, with the reason in the record.
        UsageError, KeyboardInterrupt, SystemExit: unchanged; a UsageError leaves no record.
    """

    def record_failure(reason: str) -> str:
        reason += f" (rank {ranks.rank} of {ranks.world_size})" if ranks.world_size > 1 else ""
        if watch.claims_failure():
            files.write_failure(reason)
        return "; ".join([reason, *files.unwritten])

    def record_and_release(reason: str) -> str:
        try:
            return record_failure(reason)
        finally:
            release()

    watch = PeerWatch(ranks, record_and_release)
    watch.start()
    processes.exit_on_stop()  # a stopped run leaves its record, and no files
    try:
        yield watch
    except UsageError:
        watch.stop(failed=True)
        leave_process_group(ranks)
        raise
    except BaseException as error:
        if ranks.world_size > 1:
            processes.ignore_stop()  # the launcher sends one meanwhile
        with processes.defer_signals():
            reason = watch.report(explain_failure(error, config, ranks))
            watch.stop(failed=True)
        leave_process_group(ranks)
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, SystemExit):
            print(printable(f"error: {reason}."), file=sys.stderr, flush=True)
            raise
        raise RunError(reason) from error


def leave_process_group(ranks: Ranks) -> None:
    """Leave the process group after a failure; with several ranks its end could wait for one that is gone."""
    if ranks.world_size == 1:
        stop_process_group()


def explain_failure(error: BaseException, config: RunConfig, ranks: Ranks) -> str:
    """Return what went wrong, in one or two lines."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, KeyboardInterrupt):
        return "stopped by the user"
    if isinstance(error, SystemExit):  # of processes.exit_on_stop, or of a program that calls this package
        number = error.code - 128 if isinstance(error.code, int) else 0
        return stopped_by(number, ranks) if number in STOPPING else f"the process exited early ({error.code})"
    if isinstance(error, torch.OutOfMemoryError):
        unused = re.search(r"([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated", text)
        held = f" PyTorch held {unused[1]} more that it could not use for this." if unused else ""
        return (
            f"the device is out of memory ({text.partition(' Including')[0][:160]}{held}); lower --batch-size or --prompt-len, "
            "add --kv-offload, or see what fits with --dry-run."
        )
    if is_out_of_memory(error):
        return (
            f"out of memory at {config.batch_size} x ({config.prompt_len} + {config.gen_len}) tokens ({text[:120]}); "
            "lower --batch-size, or see what fits with --dry-run."
        )
    if lost := lost_connection(error, ranks):
        return lost
    return text[:400] if isinstance(error, RunError) else f"{type(error).__name__}: {text[:400]}"
