"""Relative error of the logits of int8 and int4 weights, against the same weights in float32.

python benchmarks/quantization_error.py [MODEL]        (default smollm2-135m; four prompts of 64 tokens)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import torch

    from zero_inference.config.run_config import RunConfig
    from zero_inference.models.prompts import encode_prompts, read_prompts
    from zero_inference.models.spec import load_tokenizer, resolve_model
    from zero_inference.planning.plan import plan_run
    from zero_inference.utils.ranks import detect_ranks, start_process_group

    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    ranks = detect_ranks()
    start_process_group(ranks)

    def logits(config: RunConfig) -> torch.Tensor:
        spec = resolve_model(config, ranks.device.type)
        ids = encode_prompts(load_tokenizer(spec), read_prompts(None, 4), 64).to(ranks.device)
        loaded = plan_run(config.validate(), spec, ranks).load()
        try:
            with torch.no_grad():
                return loaded.model(ids).logits.double().cpu()
        finally:
            loaded.close()

    exact = logits(RunConfig(model=name, engine="resident", dtype="float32"))
    print("bits\tgroup\trelative error")
    for bits in (8, 4):
        for group in (32, 64):
            found = logits(
                RunConfig(model=name, dtype="float32", cpu_offload=True, quant_bits=bits, quant_group_size=group)
            )
            print(f"{bits}\t{group}\t{float((found - exact).norm() / exact.norm()):.4f}")


if __name__ == "__main__":
    main()
