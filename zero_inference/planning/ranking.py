"""Which of several configurations is best, and for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_inference.planning.candidates import Candidate

# By goal what is to be least. A bound that leaves out an engine's overhead shows nothing about its speed, so it comes behind those that do.
GOALS: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
    "throughput": lambda each: (each.lacks_overhead, -each.best_tokens_per_s, each.best_step_s),
    "latency": lambda each: (each.lacks_overhead, each.best_step_s, -each.best_tokens_per_s),
    "memory": lambda each: (float(each.memory_bytes), -each.best_tokens_per_s),
}


def ranked(candidates: Sequence[Candidate], goal: str) -> list[Candidate]:
    """The best first, those that failed last; of equals those with more bits, then those that need less memory."""
    return sorted(
        candidates, key=lambda each: (each.failed, *GOALS[goal](each), -each.config.quant_bits, each.memory_bytes)
    )


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats in both the time of a step and tokens a second, from the shortest step up. Bounds that leave out an
    overhead are not compared with others."""
    good = [each for each in candidates if not each.failed]
    known = [each for each in good if not each.lacks_overhead] or good
    front: list[Candidate] = []
    for each in ranked(known, "latency"):
        if not front or each.best_tokens_per_s > front[-1].best_tokens_per_s:
            front.append(each)
    return front
