"""Generations of the stream engine with layers computing on one stream or another, in turn, in one process: what slows the copies.

    torchrun --nproc-per-node 2 benchmarks/compute_stream.py --model facebook/opt-6.7b --dummy --engine stream --gpu-memory 0 \\
        --batch-size 8 --prompt-len 128 --gen-len 13 --loops 4

Takes the options of run_model.py; --loops is how often the turn goes around. Prints the link's rate as the engine measures it, and
for each way GB/s (1e9 bytes) of weights over all ranks in a decode step: the median and the range, without the first step.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    from benchmarks.common.engine_run import loaded_by_options
    from zero_inference import generation
    from zero_inference.distributed import stop_process_group
    from zero_inference.limits import LinkRate
    from zero_inference.models.prompts import random_ids

    config, spec, ranks, loaded = loaded_by_options(__doc__.split("\n")[0])
    feeder = loaded.close.__self__
    ids = random_ids(config.seed, config.batch_size // ranks.world_size, config.prompt_len, spec.text_config.vocab_size)
    step_bytes = ranks.world_size * sum(feeder.store.share_bytes(layer) for layer in feeder.ring.order)

    def say(line: str) -> None:
        if ranks.is_first:
            print(line, flush=True)

    for _ in range(config.loops):
        link = LinkRate(ranks, loaded.page_locked)
        link.measure(seconds=0.3)
        say(f"link {link.of_all().gb_per_s:.1f} GB/s")
        for name, prepare in ways(feeder, loaded.model, ranks.device):
            undo = prepare()
            (loop,) = generation.measure(loaded, ids, config.gen_len, 1, 0, ranks).loops
            undo()
            rates = sorted(step_bytes / step_s / 1e9 for step_s in loop.step_s[1:])
            say(f"  {name:34s} median {statistics.median(rates):6.2f} GB/s, {rates[0]:6.2f} to {rates[-1]:6.2f}")
    loaded.close()
    stop_process_group()
    return 0


def ways(feeder, model, device):
    """(name, what prepares it and returns what undoes that)."""
    import torch

    from zero_inference.offload.streams import ComputeStream

    def on(stream):
        def prepare():
            before = feeder.compute.stream
            feeder.compute.stream = stream
            return lambda: setattr(feeder.compute, "stream", before)

        return prepare

    def on_the_callers():
        own = feeder.compute.stream
        feeder.compute.close()

        def undo():
            feeder.compute = ComputeStream(model, feeder.timeline.streams)
            feeder.compute.stream = own  # and not the next one of torch's pool

        return undo

    def untimed():
        streams = feeder.timeline.streams
        recorded, between = streams.recorded, feeder.timeline._between
        streams.recorded = lambda stream: stream.record_event(torch.cuda.Event())
        feeder.timeline._between = lambda earlier, later: 0.0

        def undo():
            streams.recorded, feeder.timeline._between = recorded, between

        return undo

    yield "own stream", lambda: lambda: None
    yield "the caller's stream", on_the_callers
    if device.type == "cuda":
        yield "own stream of high priority", on(torch.cuda.Stream(device, priority=-1))
        yield "another own stream", on(torch.cuda.Stream(device))
        yield "own stream, events without time", untimed


if __name__ == "__main__":
    sys.exit(main())
