"""The best configurations, each run for a few steps in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from zero_inference.errors import RunError
from zero_inference.planning.candidates import Candidate, options_of
from zero_inference.planning.ranking import ranked
from zero_inference.records.read import read_records
from zero_inference.records.schema import STATUS_OK
from zero_inference.utils.child_runs import last_words, run_child
from zero_inference.utils.processes import isolated_ranks
from zero_inference.utils.progress import current

MOST_TOKENS = 17  # of a trial: 16 steps


def verified(best: Sequence[Candidate], count: int, goal: str, say: Callable[[str], None]) -> list[Candidate]:
    """`best` with the first `count` of them run and ranked by their measured rates; those that failed come last.

    Raises:
        RunError: all of them failed.
    """
    tried, failed = [], []
    chosen = best[:count]
    with (
        tempfile.TemporaryDirectory(prefix="zero-inference-plan-") as folder,
        current().task("plan --verify", len(chosen), ticking=True) as task,
    ):
        for number, candidate in enumerate(chosen, 1):
            task.at(f"run {number} of {len(chosen)} ({candidate.command()})", number - 1)
            rate = _measured_tokens_per_s(candidate, Path(folder), number, say)
            if rate is None:
                failed.append(replace(candidate, failed=True))
            else:
                say(
                    f"run {number} of {len(chosen)}: {rate:.3g} token/s, predicted {candidate.tokens_per_s:.3g}: "
                    f"{candidate.command()}"
                )
                tried.append(replace(candidate, measured_tokens_per_s=rate))
    if not tried:
        raise RunError(f"--verify {count}: every run failed; the reasons are above.")
    return ranked(tried, goal) + list(best[count:]) + failed


def _measured_tokens_per_s(candidate: Candidate, folder: Path, number: int, say: Callable[[str], None]) -> float | None:
    """None where the run failed, which `say` is told."""
    config = replace(candidate.config, gen_len=min(candidate.config.gen_len, MOST_TOKENS), dry_run=False, verbose=1)
    log, output = folder / f"{number}.log", folder / f"{number}.out"
    options = [*options_of(config), "--loops", "1", "--log-file", str(log)]
    records = log.with_suffix(".jsonl")
    ended = run_child(
        isolated_ranks("zero_inference", candidate.world_size, "run", *options),
        output,
        records=lambda: read_records(records) if records.exists() else [],
        is_good=lambda record: record.get("status") == STATUS_OK,
    )
    rate = (ended.record or {}).get("decode_throughput")
    if rate is None:
        say(f"run {number} failed: {last_words(ended.said()) or f'exit code {ended.code}'}: {candidate.command()}")
    return rate
