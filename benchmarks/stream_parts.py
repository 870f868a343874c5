"""A run of the stream engine with parts left out or changed, to see what they cost its copies; the ids are wrong then.

    torchrun --nproc-per-node 2 benchmarks/stream_parts.py PART[,PART] OPTIONS_OF_RUN_MODEL

PART: none, nogather (each rank computes on its own share and whatever lies beside it), nocompute (the layers give back what they get;
quantized ones are still dequantized), nowatch (nobody looks for lost ranks), pin (each rank on cores of its own).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(parts: set[str], argv: list[str]) -> int:
    from zero_inference import runner
    from zero_inference.cli import main as run_model
    from zero_inference.engines import stream
    from zero_inference.engines.stream import ring
    from zero_inference.models.layers import decoder_layers
    from zero_inference.utils.watch import PeerWatch

    if unknown := parts - {"none", "nogather", "nocompute", "nowatch", "pin"}:
        print(f"error: no part {', '.join(sorted(unknown))}; see the first lines of this file.", file=sys.stderr)
        return 2
    if "nogather" in parts:
        ring._all_gather = lambda whole, mine, group=None: None
    if "nocompute" in parts:
        load = stream.load

        def load_without_layers(*args):
            loaded = load(*args)
            for layer in decoder_layers(loaded.model)[1]:
                layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
            return loaded

        stream.load = load_without_layers
    if "nowatch" in parts:

        class NoWatch(PeerWatch):
            def start(self) -> None:
                pass

        runner.PeerWatch = NoWatch
    if "pin" in parts:
        cores, ranks = sorted(os.sched_getaffinity(0)), int(os.environ["LOCAL_WORLD_SIZE"])
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"]) :: ranks])
    return run_model(["run_model.py", *argv])


if __name__ == "__main__":
    code = main(set(sys.argv[1].split(",")) if len(sys.argv) > 1 else {""}, sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)  # as run_model.py does
