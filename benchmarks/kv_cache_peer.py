"""Our host KV cache beside transformers' own offloaded cache, in one process, under the same engine and prompts.

    python benchmarks/kv_cache_peer.py --model facebook/opt-13b --dummy --cpu-offload --batch-size 64 --prompt-len 512

Takes the options of run_model.py. Prints one JSON line a cache: seconds of the median decode step, and whether the
generated ids agree.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    from transformers.cache_utils import DynamicCache

    from benchmarks.common.engine_run import loaded_by_options
    from zero_inference.kv_cache.host import HostKVCache
    from zero_inference.measure.loops import measure_loops
    from zero_inference.models.prompts import random_ids
    from zero_inference.utils.ranks import stop_process_group

    config, spec, ranks, loaded = loaded_by_options(__doc__.split("\n")[0])
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
