"""Our host KV cache beside transformers' own offloaded cache, in one process, under the same engine and prompts.

    python benchmarks/kv_cache_peer.py --model facebook/opt-13b --dummy --cpu-offload --batch-size 64 --prompt-len 512

Takes the options of run_model.py. Prints one JSON line a cache: seconds of the median decode step, and whether the
generated ids agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    from transformers.cache_utils import DynamicCache

    from zero_inference.cli import add_run_arguments
    from zero_inference.config.options import FIELD_NAMES
    from zero_inference.config.run_config import RunConfig
    from zero_inference.kv_cache.host import HostKVCache
    from zero_inference.measure.loops import measure_loops
    from zero_inference.models.prompts import random_ids
    from zero_inference.models.spec import resolve_model
    from zero_inference.planning.plan import plan_run
    from zero_inference.utils.ranks import detect_ranks, start_process_group, stop_process_group

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add_run_arguments(parser)
    args = parser.parse_args()
    config = RunConfig(**{name: getattr(args, name) for name in FIELD_NAMES}).validate()
    ranks = detect_ranks(args.local_rank)
    spec = resolve_model(config, ranks.device.type)
    start_process_group(ranks)
    loaded = plan_run(config, spec, ranks).load()
    on_cuda = ranks.device.type == "cuda"
    ours = HostKVCache(spec.config, config.prompt_len + config.gen_len, on_cuda, on_cuda, loaded.transfers)

    def fresh():
        ours.reset()
        return ours

    ids = random_ids(config.seed, config.batch_size, config.prompt_len, spec.text_config.vocab_size)
    outputs = {}
    try:
        for name, make_cache in (
            ("ours", fresh),
            ("transformers", lambda: DynamicCache(config=spec.config, offloading=on_cuda)),
        ):
            measured = measure_loops(loaded, ids, config.gen_len, config.loops, config.warmup, ranks, make_cache)
            steps = [step for loop in measured.loops for step in loop.step_s]
            outputs[name] = measured.output_ids
            print(
                json.dumps(
                    {
                        "cache": name,
                        "model": config.model,
                        "batch_size": config.batch_size,
                        "prompt_len": config.prompt_len,
                        "gen_len": config.gen_len,
                        "step_median_s": statistics.median(steps),
                        "step_min_s": min(steps),
                        "step_max_s": max(steps),
                        "ids_agree": bool((measured.output_ids == outputs["ours"]).all()),
                    }
                ),
                flush=True,
            )
    finally:
        loaded.close()
        stop_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
