"""Measure speculative decoding: what it costs and gains at an assumed acceptance, and the acceptance of real text.

    python benchmarks/speculation.py cost [--acceptance 0.5 0.76 0.9] [--draft-lens 8 16] [--device-memory GIB] -- RUN OPTIONS
    python benchmarks/speculation.py acceptance [--drafts ngram self:4 self:4:6] [--draft-lens 4 8 16] -- RUN OPTIONS

cost: the run of these options, and the same without --speculate. Drafts and passes are those of a run, and so are their times; how many
proposals count as accepted is assumed: this share of each pass's proposals, on average. So the tokens are not the model's. With the draft
length `auto` each proposal is accepted with this probability, if those before it were.

Drafts are named as `ngram`, `self:BITS` or `self:BITS:GIB` (--draft-memory).

acceptance: tokens per pass and the share of proposals that are accepted, for each kind of text in `benchmarks/prompts`, one file a kind
and one prompt a line, a sequence at a time. Ids are compared with those without a draft.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pandas import DataFrame

from zero_inference.config.option import AUTO
from zero_inference.config.options import MAX_AUTO_DRAFT_LEN, WITHOUT_SPECULATION
from zero_inference.config.run_config import RunConfig, parse_options
from zero_inference.engines.base import LoadedModel
from zero_inference.hardware.machine import Machine
from zero_inference.measure.loops import measure_loops
from zero_inference.measure.session import loaded_model
from zero_inference.measure.speculation import DraftLength, Speculation, make_draft
from zero_inference.models.prompts import encode_prompts, prompt_ids
from zero_inference.models.spec import load_tokenizer, resolve_model
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import build_job
from zero_inference.records.schema import Loop
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import Ranks, detect_ranks, start_process_group, stop_process_group

PROMPTS = Path(__file__).parent / "prompts"
GIB = 1 << 30
SHOWN = (1, 2, 4, 8, 16)  # positions of proposals


@dataclass
class AssumedAcceptance(Speculation):
    """Accepts `share` of the proposals of a pass, on average; if the length adapts itself, each with this probability."""

    share: float = 0.0
    offered: int = 0
    random: Random = field(default_factory=lambda: Random(0))

    def count_accepted(self, proposals: Sequence[int], predicted: Sequence[int]) -> int:
        before = int(self.offered * self.share)
        self.offered += len(proposals)
        if self.length is None:
            return min(len(proposals), int(self.offered * self.share) - before)
        draws = (self.random.random() for _ in proposals)
        return next((count for count, draw in enumerate(draws) if draw >= self.share), len(proposals))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("cost", "acceptance"))
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.76, 0.9])
    parser.add_argument("--drafts", nargs="+", default=["ngram", "self:4", "self:8"])
    parser.add_argument("--draft-lens", nargs="+", default=["8", "16"], help="numbers, or auto")
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="plan for a device with this much free memory"
    )
    parser.add_argument("options", nargs="+", help="of run_model.py")
    args = parser.parse_args()
    config, ranks = parse_options(args.options), detect_ranks()
    machine = Machine(device_limit_bytes=args.device_memory and int(args.device_memory * GIB))
    start_process_group(ranks)
    measure = measure_cost if args.what == "cost" else measure_acceptance
    rows = list(measure(args, config, ranks, machine))
    print(DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    stop_process_group()
    return 0


@contextmanager
def loaded(config: RunConfig, ranks: Ranks, machine: Machine) -> Iterator[LoadedModel]:
    """Load the model and its draft, and free all of it afterwards."""
    plan = make_plan(build_job(config, resolve_model(config, ranks.device.type), ranks, machine=machine))
    draft = "" if plan.draft is None else f"; draft: {plan.draft.describe()}"
    if plan.times is not None:
        draft += f"; predicted: {(plan.speculation or plan.times).in_words()}"
    with loaded_model(plan, Progress(enabled=False), compared=False) as (model, load_s, _):
        print(f"{plan.describe(work=True)}{draft}; loaded in {load_s:.0f} s", flush=True)
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield model
        if ranks.device.type == "cuda":
            print(f"peak device memory {torch.cuda.max_memory_allocated() / GIB:.2f} GiB", flush=True)


def without_speculation(config: RunConfig) -> RunConfig:
    return replace(config, **WITHOUT_SPECULATION)


def decode(
    config: RunConfig, ranks: Ranks, model: LoadedModel, ids: torch.Tensor, speculation: Speculation | None
) -> tuple[Loop, torch.Tensor]:
    """Return the loop of median decode time, and the ids of the last one."""
    make_cache = model.cache_factory(config)
    found = measure_loops(
        model, ids, config.gen_len, config.loops, config.warmup, ranks, make_cache, speculation=speculation
    )
    loop = sorted(found.loops, key=lambda each: each.decode_s)[len(found.loops) // 2]
    assert found.output_ids is not None
    return loop, found.output_ids


def measure_cost(
    args: argparse.Namespace, config: RunConfig, ranks: Ranks, machine: Machine
) -> Iterator[dict[str, Any]]:
    begin, alone = time.monotonic(), 0.0
    for own in (without_speculation(config), config):
        with loaded(own, ranks, machine) as model:
            ids = prompt_ids(own, resolve_model(own, ranks.device.type))[0]
            cases = [(n, share) for n in args.draft_lens for share in args.acceptance] if own.speculate else [(0, 0.0)]
            for draft_len, share in cases:
                assumed = None
                if own.speculate:
                    most, length = length_of(draft_len)
                    assumed = AssumedAcceptance(make_draft(model, own), most, length, share=share)
                loop, _ = decode(own, ranks, model, ids, assumed)
                tokens_per_s = own.batch_size * (own.gen_len - 1) / loop.decode_s
                alone = alone or tokens_per_s
                row = {"draft_len": draft_len, "token/s": tokens_per_s, "gain": tokens_per_s / alone}
                yield row | of_loop(loop)
                print(f"{row} ({time.monotonic() - begin:.0f} s)", flush=True)
        del model
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def length_of(draft_len: str) -> tuple[int, DraftLength | None]:
    if draft_len == AUTO:
        return MAX_AUTO_DRAFT_LEN, DraftLength(MAX_AUTO_DRAFT_LEN)
    return int(draft_len), None


def of_loop(loop: Loop) -> dict[str, Any]:
    passes, use = len(loop.step_s), loop.speculation
    if use is None:
        return {"passes": passes, "pass (s)": loop.decode_s / passes}
    proposals = use.proposals_per_pass or 0.0
    return {
        "passes": passes,
        "pass (s)": use.verify_s / passes,
        "token/pass": use.tokens_per_pass,
        "proposals/pass": proposals,
        "draft (s)": use.draft_s / passes,
        "draft/token (s)": use.draft_s / passes / proposals if proposals else None,
    }


def measure_acceptance(
    args: argparse.Namespace, config: RunConfig, ranks: Ranks, machine: Machine
) -> Iterator[dict[str, Any]]:
    tokenizer = load_tokenizer(resolve_model(config, ranks.device.type))
    texts = {file.stem: file.read_text().splitlines() for file in sorted(PROMPTS.glob("*.txt"))}
    ids = {
        kind: [encode_prompts(tokenizer, [line], config.prompt_len) for line in lines] for kind, lines in texts.items()
    }
    plain: dict[tuple[str, int], torch.Tensor] = {}
    for draft in (None, *args.drafts):
        name, bits, memory = ((draft or "") + "::").split(":")[:3]
        given = {"draft_bits": int(bits or 4), "draft_memory": float(memory) if memory else None} if name else {}
        own = replace(config, speculate=name or None, **given).validate()
        with loaded(own, ranks, machine) as model:
            for draft_len in args.draft_lens if draft else ("1",):
                for kind, prompts in ids.items():
                    most, length = length_of(draft_len)
                    passes, proposed, accepted, same = 0, [0] * most, [0] * most, 0.0
                    for index, prompt in enumerate(prompts):
                        speculation = Speculation(make_draft(model, own), most, length) if draft else None
                        _, found = decode(own, ranks, model, prompt, speculation)
                        expected = plain.setdefault((kind, index), found)
                        if speculation is None:
                            continue
                        same += float((found == expected).float().mean()) / len(prompts)
                        passes += speculation.passes
                        for position in range(most):
                            proposed[position] += speculation.proposed[position]
                            accepted[position] += speculation.accepted[position]
                    if draft:
                        shown = [at for at in SHOWN if at <= most]
                        shares = [f"{accepted[at - 1] / max(1, proposed[at - 1]):.2f}" for at in shown]
                        yield {
                            "draft": draft,
                            "draft_len": draft_len,
                            "text": kind,
                            "token/pass": len(prompts) * (config.gen_len - 1) / passes,
                            f"accepted at {', '.join(map(str, SHOWN))}": " ".join(shares),
                            "same ids": same,
                        }


if __name__ == "__main__":
    sys.exit(main())
