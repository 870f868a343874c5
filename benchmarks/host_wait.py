"""Generations of the stream engine whose host waits for the layers or not, on one stream or another: what slows the copies.

    torchrun --nproc-per-node 2 benchmarks/host_wait.py --model facebook/opt-6.7b --dummy --engine stream --gpu-memory 0 \\
        --batch-size 8 --prompt-len 128 --gen-len 17 --loops 4

Takes the options of run_model.py; --loops is how often the turn goes around, in one process. Prints the link's rate as the engine
measures it, and for each way GB/s (1e9 bytes) of weights over all ranks in a decode step: the median and the range, without the first step.
Every second turn goes through the ways backwards. The last lines give each way's rate as a share of the link's.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    from benchmarks.common.engine_run import loaded_by_options
    from zero_inference.engines.stream.prefetch import Prefetcher
    from zero_inference.measure.loops import measure_loops
    from zero_inference.models.prompts import random_ids
    from zero_inference.utils.ranks import stop_process_group

    config, spec, ranks, loaded = loaded_by_options(__doc__.split("\n")[0])
    cells = (cell.cell_contents for cell in loaded.modules_changed.__closure__)
    prefetcher = next(each for each in cells if isinstance(each, Prefetcher))
    ids = random_ids(config.seed, config.batch_size // ranks.world_size, config.prompt_len, spec.text_config.vocab_size)
    step_bytes = ranks.world_size * sum(prefetcher.store.share_bytes(layer) for layer in prefetcher.ring.order)

    def say(line: str) -> None:
        if ranks.is_first:
            print(line, flush=True)

    shares: dict[str, list[float]] = {}
    for turn in range(config.loops):
        measured = []
        before = link_gb_per_s(ranks, loaded)
        for name, changes in reversed(ways(prefetcher)) if turn % 2 else ways(prefetcher):
            kept = {attribute: getattr(prefetcher.compute, attribute) for attribute in changes}
            vars(prefetcher.compute).update(changes)
            (loop,) = measure_loops(loaded, ids, config.gen_len, 1, 0, ranks).loops
            vars(prefetcher.compute).update(kept)
            measured.append((name, sorted(step_bytes / step_s / 1e9 for step_s in loop.step_s[1:])))
        link = (before + link_gb_per_s(ranks, loaded)) / 2
        say(f"link {link:.1f} GB/s")
        for name, rates in measured:
            shares.setdefault(name, []).append(100 * statistics.median(rates) / link)
            say(f"  {name:40s} median {statistics.median(rates):6.2f} GB/s, {rates[0]:6.2f} to {rates[-1]:6.2f}")
    for name, percent in shares.items():
        say(f"{name:42s} {statistics.median(percent):5.1f}% of the link, {min(percent):.1f} to {max(percent):.1f}%")
    loaded.close()
    stop_process_group()
    return 0


def link_gb_per_s(ranks, loaded) -> float:
    from zero_inference.measure.rates import LinkRate

    link = LinkRate(ranks, loaded.pinned_memory)
    link.measure(seconds=0.3)
    return link.of_all().gb_per_s


def ways(prefetcher) -> list[tuple[str, dict]]:
    """(name, attributes of the engine's ComputeStream that make it so)."""
    own, callers, waits = (
        prefetcher.compute.stream,
        prefetcher.timeline.streams.current(),
        prefetcher.timeline.streams.blocking_event(),
    )
    return [
        ("own stream, the host waits", {"stream": own, "done": waits}),
        ("own stream, the host reads at once", {"stream": own, "done": None}),
        ("caller's stream, the host waits", {"stream": callers, "done": waits}),
        ("caller's stream, the host reads at once", {"stream": callers, "done": None}),
    ]


if __name__ == "__main__":
    sys.exit(main())
