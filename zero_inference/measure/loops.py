"""Run and time the loops: generations of equal length. Knows no engine, only a model to call.

A step is timed by an event recorded after the selection of its token (a clock on a CPU), through transformers' stopping criteria, so
that timing adds no synchronization to the step. With speculation a step is a pass that verifies several tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from zero_inference.engines.base import LoadedModel
from zero_inference.measure.correctness import LogitsCheck
from zero_inference.measure.sampling import Sampler
from zero_inference.measure.speculation import Speculation, generate_speculatively
from zero_inference.measure.steadiness import relative_spread
from zero_inference.models.prompts import disable_cudnn_attention, greedy_config
from zero_inference.records.schema import ExpertUse, Loop, MovedPerStep
from zero_inference.utils.interpreter import freeze_existing_objects
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.timing import ExpertCounts, synchronize

STEADY_LOOPS = 3  # latest warm-up loops that `is_steady` compares
MAX_SETTLING = 4  # generations after the warm-up, for rebalancing, captures and draft lengths to try


@dataclass
class Measurement:
    """The loops of a run."""

    loops: list[Loop] = field(default_factory=list)
    warmup_s: list[float] = field(default_factory=list)  # total time of each warm-up loop
    warmed_up: bool | None = None  # the warm-up's last loops took equal times; None without `warmup_spread`
    settling_s: list[float] = field(default_factory=list)  # total time of each generation until the engine had settled
    output_ids: torch.Tensor | None = None  # generated ids int64 [global batch, gen_len] of the last loop, on the host


@freeze_existing_objects()
def measure_loops(
    loaded: LoadedModel,
    ids: torch.Tensor,
    gen_len: int,
    loops: int,
    warmup: int,
    ranks: Ranks,
    make_cache: Callable[[], Any] | None = None,
    forced_tokens: torch.Tensor | None = None,
    between_loops: Callable[[], None] = lambda: None,
    progress: Callable[[str, float], None] = lambda words, done: None,
    warmup_spread: float | None = None,
    speculation: Speculation | None = None,
    sampler: Sampler | None = None,
) -> Measurement:
    """Run `warmup` and then `loops` generations of exactly `gen_len` tokens.

    After a warm-up, up to `MAX_SETTLING` more generations follow until the engine has settled; the last of them ends early.

    Args:
        ids: this rank's prompts, int64 [batch / ranks, prompt_len].
        make_cache: returns the KV cache of a loop; None leaves it to transformers.
        forced_tokens: int64 [batch / ranks, gen_len], fed instead of the selected tokens, which are still computed, timed and
            returned; None feeds the selected ones.
        between_loops: called before each measured loop and after the last one.
        progress: called after each token with what is under way, and the tokens that are done.
        warmup_spread: ends the warm-up as soon as its latest loops are `is_steady` within this share; `warmup` is then the maximum.
        speculation: drafts that passes of several tokens verify; it needs `make_cache`, and no `forced_tokens`.
        sampler: selects the tokens, alike in each generation; None: greedily.

    Raises RunError: logits of the first generation are not finite.
    """
    disable_cudnn_attention()
    measurement, logits = Measurement(), LogitsCheck(loaded.model)

    def generate(label: str, number: int, ends_early: Callable[[], bool] = lambda: False) -> tuple[Loop, torch.Tensor]:
        def report(step: int) -> None:
            progress(f"{label}, token {step} of {gen_len}", number * gen_len + step)

        clock = _StepClock(loaded, len(ids), report, ends_early)

        def begin() -> None:
            ranks.barrier()
            clock.start()
            if loaded.timeline is not None:
                loaded.timeline.restart()

        if speculation is None:
            generated = generate_ids(loaded, ids, gen_len, make_cache, forced_tokens, [clock], begin, sampler)
        else:
            cache = make_cache()
            generated = generate_speculatively(
                loaded, ids, gen_len, cache, speculation, ranks, clock.mark, begin, sampler
            )
        loop = clock.loop(ranks)
        if speculation is not None:
            loop = loop.model_copy(update={"speculation": speculation.use(ranks, generated.shape[1] - 1)})
        logits.require_finite(
            loaded.dtype,
            ranks,
            # a pass of several tokens may be the first with such logits
            lambda tokens: generate_ids(
                loaded, ids, gen_len if speculation else tokens, make_cache, forced_tokens, sampler=sampler
            ),
        )
        return loop, generated

    def unsettled() -> tuple[int, int]:
        """Return steps until the engine has settled, and lengths of proposals to try; alike on all ranks."""
        length = None if speculation is None else speculation.length
        untried = 0 if length is None else int(ranks.maximum([float(len(length.untried))])[0])
        return loaded.steps_to_settle(), untried

    for number in range(warmup):
        measurement.warmup_s.append(generate(f"warm-up {number + 1} of {warmup}", number)[0].total_s)
        if warmup_spread is not None:  # the times are those of all ranks, so all end together
            measurement.warmed_up = is_steady(measurement.warmup_s, warmup_spread)
            if measurement.warmed_up:
                break
    for number in range(MAX_SETTLING if warmup else 0):
        before, settling_steps = unsettled(), loaded.settling_steps()
        if before == (0, 0) or before[0] >= gen_len:
            break
        settling, _ = generate(f"settling, generation {number + 1}", warmup, lambda: unsettled() == (0, 0))
        measurement.settling_s.append(settling.total_s)
        if (unsettled(), loaded.settling_steps()) == (before, settling_steps):
            break  # generations lack the steps that it takes
    for number in range(loops):
        between_loops()
        loop, measurement.output_ids = generate(f"loop {number + 1} of {loops}", warmup + number)
        measurement.loops.append(loop)
    between_loops()
    measurement.output_ids = ranks.gather_rows(measurement.output_ids)
    return measurement


def is_steady(times_s: list[float], share: float) -> bool:
    """Return whether the latest `STEADY_LOOPS` times lie within `share` of their median."""
    latest = times_s[-STEADY_LOOPS:]
    return len(latest) == STEADY_LOOPS and relative_spread(latest) <= share


def generate_ids(
    loaded: LoadedModel,
    ids: torch.Tensor,
    gen_len: int,
    make_cache: Callable[[], Any] | None,
    forced_tokens: torch.Tensor | None,
    criteria: Sequence[StoppingCriteria] = (),
    begin: Callable[[], None] = lambda: None,
    sampler: Sampler | None = None,
) -> torch.Tensor:
    """Return the selected ids int64 [B, gen_len] of one generation; fewer if `criteria` end it.

    Args:
        begin: called when inputs and cache are there.
        sampler: selects the tokens; None: greedily.
    """
    inputs = ids.to(loaded.device)
    feeding = [] if forced_tokens is None else [_ForcedTokens(forced_tokens.to(loaded.device), ids.shape[1])]
    extra = {"past_key_values": make_cache()} if make_cache else {}
    begin()
    output = loaded.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=greedy_config(gen_len),
        logits_processor=LogitsProcessorList([] if sampler is None else [sampler]),
        stopping_criteria=StoppingCriteriaList([*criteria, *feeding]),
        **extra,
    )
    generated = output[:, ids.shape[1] :]
    return feeding[0].selected[:, : generated.shape[1]] if feeding else generated


class _ForcedTokens(StoppingCriteria):
    """Feeds given tokens instead of those that `generate` selects: called after each selection, it stores and replaces it.

    Attributes:
        selected: int64 [B, G], the tokens that `generate` selected.
    """

    def __init__(self, tokens: torch.Tensor, prompt_len: int):
        self.tokens, self.prompt_len = tokens, prompt_len
        self.selected = torch.zeros_like(tokens)
        self.not_done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        step = input_ids.shape[1] - self.prompt_len - 1
        self.selected[:, step] = input_ids[:, -1]
        input_ids[:, -1] = self.tokens[:, step]  # `generate` makes the next step's input from this tensor
        return self.not_done


class _StepClock(StoppingCriteria):
    """Called by `generate` after the selection of each token, or `mark` after each pass; ends it once `ends_early` returns True.

    Attributes:
        marks: at the start and at each token a CUDA event, on a CPU the clock's seconds.
        moved, experts: counters of transfers and of the expert cache at each token.
        prefill_busy_s: busy seconds of the CPU backend up to the first token.
    """

    def __init__(
        self, loaded: LoadedModel, batch_size: int, report: Callable[[int], None], ends_early: Callable[[], bool]
    ):
        self.transfers, self.devices = loaded.transfers, loaded.devices
        self.report, self.ends_early = report, ends_early
        self.on_gpu = loaded.device.type == "cuda"
        self.not_done = torch.zeros(batch_size, dtype=torch.bool, device=loaded.device)
        self.marks: list[Any] = []
        self.moved: list[tuple[int, ...]] = []
        self.experts: list[tuple[int, ...]] = []
        self.prefill_busy_s = 0.0

    def start(self) -> None:
        synchronize(self.devices)
        self._mark()

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        return ~self.not_done if self.mark(len(self.moved) + 1) else self.not_done

    def mark(self, tokens: int) -> bool:
        """Note the time at which there are `tokens` of each sequence; return whether the generation ends early."""
        self._mark()
        self.moved.append(self.transfers.snapshot())
        if len(self.moved) == 1 and self.transfers.cpu_busy_s is not None:
            if self.on_gpu:
                self.marks[1].synchronize()  # until the CPU has computed its share of a short prompt
            self.prefill_busy_s = self.transfers.cpu_busy_s()
        if self.transfers.expert_counts is not None:
            self.experts.append(self.transfers.expert_counts())
        self.report(tokens)
        return self.ends_early()

    def _mark(self) -> None:
        mark: Any = time.perf_counter()
        if self.on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self.devices[0]))  # whichever GPU is current
        self.marks.append(mark)

    def loop(self, ranks: Ranks) -> Loop:
        """Return the times, over all ranks, and averages of what this rank moved in the decode steps. Call it after the generation, on all
        ranks."""
        first, *marks = self.marks
        if self.on_gpu:
            marks[-1].synchronize()
            token_s = [first.elapsed_time(mark) / 1e3 for mark in marks]
        else:
            token_s = [mark - first for mark in marks]
        token_s = ranks.maximum(token_s)
        steps, moved, experts = len(token_s) - 1, MovedPerStep.unknown(), None
        if steps:
            to_device, to_host, disk, cores = _per_step(self.moved)
            busy_s = self.transfers.cpu_busy_s
            moved = MovedPerStep(
                host_to_device_bytes_per_step=to_device,
                device_to_host_bytes_per_step=to_host,
                disk_read_bytes_per_step=disk,
                cores_bytes_per_step=cores,
                cores_busy_s_per_step=None if busy_s is None else (busy_s() - self.prefill_busy_s) / steps,
            )
        if steps and self.experts:
            each = ExpertCounts(*_per_step(self.experts))  # type: ignore[arg-type]  # averages
            if each.choices:
                experts = ExpertUse(
                    hit_rate=each.hits / each.choices,
                    saved_bytes_per_step=each.saved_bytes,
                    fetched_bytes_per_step=each.fetched_bytes,
                    host_hit_rate=each.host_hits / each.host_choices if each.host_choices else None,
                )
        return Loop(
            prefill_s=token_s[0],
            decode_s=token_s[-1] - token_s[0],
            total_s=token_s[-1],
            step_s=[after - before for before, after in zip(token_s, token_s[1:])],
            moved=moved,
            experts=experts,
            speculation=None,
        )


def _per_step(counts: list[tuple[int, ...]]) -> list[float]:
    """Return the average increase of each counter between tokens."""
    return [(last - first) / (len(counts) - 1) for first, last in zip(counts[0], counts[-1])]
