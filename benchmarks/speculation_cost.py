"""Measure what speculative decoding costs and gains at an assumed acceptance, beside the same run without it.

    python benchmarks/speculation_cost.py [--acceptance 0.5 0.76 0.9] [--draft-lens 8 16] [--device-memory GIB] -- RUN OPTIONS
    python benchmarks/speculation_cost.py --device-memory 12 -- llama-2-13b --dummy --engine stream --speculate self --gen-len 64

Drafts and passes are those of a run, and so are their times; how many proposals count as accepted is assumed: the given share of each
pass's proposals, on average. So the tokens are not the model's. The acceptance of real text is in the record of a run with a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pandas import DataFrame

from zero_inference.config.run_config import RunConfig, parse_options
from zero_inference.hardware.machine import Machine, resolve_machine
from zero_inference.measure.loops import Measurement, measure_loops
from zero_inference.measure.session import loaded_model
from zero_inference.measure.speculation import Speculation, make_draft
from zero_inference.models.prompts import prompt_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.plan import build_job, make_plan
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import detect_ranks, start_process_group


@dataclass
class AssumedAcceptance(Speculation):
    """Accepts `share` of the proposals of a pass, on average."""

    share: float = 0.0
    offered: int = 0

    def accept(self, proposals: Sequence[int], predicted: Sequence[int]) -> list[int]:
        before = int(self.offered * self.share)
        self.offered += len(proposals)
        accepted = min(len(proposals), int(self.offered * self.share) - before)
        for position in range(len(proposals)):
            self.proposed[position] += 1
            self.accepted[position] += position < accepted
        return [*proposals[:accepted], predicted[accepted]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.76, 0.9])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="plan for a device with this much free memory")
    parser.add_argument("options", nargs="+", help="of run_model.py, with --speculate")
    args = parser.parse_args()
    config = parse_options(args.options)
    if args.device_memory is not None:
        free = Machine.free_device_bytes
        limit = int(args.device_memory * 2**30)
        Machine.free_device_bytes = lambda *given: tuple(min(limit, each) for each in free(*given))
    begin = time.monotonic()
    ranks = detect_ranks()
    start_process_group(ranks)
    rows = []
    for speculates in (False, True):
        own = config if speculates else replace(config, speculate=None, draft_len=8, draft_bits=4)
        spec = resolve_model(own, ranks.device.type)
        plan = make_plan(build_job(own, spec, ranks, machine=resolve_machine(None, None)))
        print(f"{plan.describe(work=True)}, draft: {plan.draft and plan.draft.describe()}", flush=True)
        with loaded_model(plan, Progress(enabled=False), compared=False) as (loaded, load_s, _):
            print(f"loaded in {load_s:.0f} s ({time.monotonic() - begin:.0f} s)", flush=True)
            ids = prompt_ids(own, spec)[0]
            make_cache = loaded.cache_factory(own)

            def measure(speculation: Speculation | None) -> Measurement:
                return measure_loops(
                    loaded, ids, own.gen_len, own.loops, own.warmup, ranks, make_cache, speculation=speculation
                )

            cases = [(n, share) for n in args.draft_lens for share in args.acceptance] if speculates else [(0, 0.0)]
            for draft_len, share in cases:
                draft = make_draft(loaded, own) if speculates else None
                rows.append(row_of(own, measure(draft and AssumedAcceptance(draft, draft_len, share=share)), draft_len))
                rows[-1]["gain"] = rows[-1]["token/s"] / rows[0]["token/s"]
                print(f"{rows[-1]} ({time.monotonic() - begin:.0f} s)", flush=True)
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            print(f"peak device memory {peak:.2f} GiB", flush=True)
    print(DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    return 0


def row_of(config: RunConfig, measurement: Measurement, draft_len: int) -> dict[str, float]:
    loop = sorted(measurement.loops, key=lambda each: each.decode_s)[len(measurement.loops) // 2]
    use, tokens = loop.speculation, config.gen_len - 1
    row = {"draft_len": draft_len, "token/s": config.batch_size * tokens / loop.decode_s, "passes": len(loop.step_s)}
    if use is None:
        return row | {"pass_s": loop.decode_s / tokens}
    proposed = use.passes * draft_len
    accepted = sum(each or 0 for each in use.acceptance) / draft_len
    times = {"pass_s": use.verify_s / use.passes, "draft_s": use.draft_s / use.passes, "draft_token_s": use.draft_s / proposed}
    return row | {"acceptance": accepted, "tokens_per_pass": use.tokens_per_pass or 0.0} | times


if __name__ == "__main__":
    sys.exit(main())
