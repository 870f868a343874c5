"""Run and time the loops: greedy generations of equal length. Knows no engine, only a model to call.

A step is timed by an event recorded after the selection of its token (a clock on a CPU), through transformers' stopping criteria, so
that timing adds no synchronization to the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from zero_inference.engines.base import LoadedModel
from zero_inference.measure.correctness import LogitsCheck
from zero_inference.measure.steadiness import relative_spread
from zero_inference.models.prompts import disable_cudnn_attention, greedy_config
from zero_inference.records.schema import ExpertUse, Loop, MovedPerStep
from zero_inference.utils.garbage import freeze_existing_objects
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import ExpertCounts

SETTLED_LOOPS = 3
MAX_SETTLING = 4  # generations after the warm-up, one for each decision that the stream engine may still have to make


@dataclass
class Measurement:
    """The loops of a run.

    Attributes:
        output_ids: generated ids int64 [global batch, gen_len] of the last loop, on the host.
        warmup_s: total time of each warm-up loop.
        warmed_up: whether the warm-up ended because its loops took equal times; None without `warmup_spread`.
        settling_s: total time of each generation after the warm-up until the engine had settled.
    """

    loops: list[Loop] = field(default_factory=list)
    warmup_s: list[float] = field(default_factory=list)
    warmed_up: bool | None = None
    settling_s: list[float] = field(default_factory=list)
    output_ids: torch.Tensor | None = None

    @property
    def cold_total_s(self) -> float | None:
        """Total time of the first warm-up loop; None without one."""
        return self.warmup_s[0] if self.warmup_s else None

    def median(self, name: str) -> float:
        return statistics.median(getattr(loop, name) for loop in self.loops)


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
    progress: Callable[[str, float | None], None] = lambda words, left_s: None,
    warmup_spread: float | None = None,
) -> Measurement:
    """Run `warmup` and then `loops` greedy generations of exactly `gen_len` tokens.

    After a warm-up, up to `MAX_SETTLING` more generations follow until the engine has settled; the last of them ends early.

    Args:
        ids: this rank's prompts, int64 [batch / ranks, prompt_len].
        make_cache: returns the KV cache of a loop; None leaves it to transformers.
        forced_tokens: int64 [batch / ranks, gen_len], fed instead of the selected tokens, which are still computed, timed and
            returned; None feeds the selected ones.
        between_loops: called before each measured loop and after the last one.
        progress: called after each token with what is under way, and the seconds left, if known.
        warmup_spread: ends the warm-up as soon as its latest loops are `is_steady` within this share; `warmup` is then the maximum.

    Raises:
        RunError: logits of the first generation are not finite.
    """
    disable_cudnn_attention()
    measurement, logits, remaining = Measurement(), LogitsCheck(loaded.model), Remaining(warmup + loops, gen_len)

    def generate(label: str, ends_early: Callable[[], bool] | None = None) -> tuple[Loop, torch.Tensor]:
        def report(step: int) -> None:
            progress(f"{label}, token {step} of {gen_len}", remaining.token(step))

        remaining.begin(extra=ends_early is not None)
        found = _one_loop(loaded, ids, gen_len, ranks, make_cache, forced_tokens, report, ends_early)
        remaining.end()
        logits.require_finite(
            loaded.dtype,
            ranks,
            lambda tokens: _one_loop(loaded, ids, tokens, ranks, make_cache, forced_tokens, lambda step: None),
        )
        return found

    for number in range(warmup):
        measurement.warmup_s.append(generate(f"warm-up {number + 1} of {warmup}")[0].total_s)
        if warmup_spread is not None:  # the times are those of all ranks, so all end together
            measurement.warmed_up = is_steady(measurement.warmup_s, warmup_spread)
            if measurement.warmed_up:
                remaining.skip(warmup - number - 1)
                break
    for number in range(MAX_SETTLING if warmup else 0):  # alike on all ranks
        if not 0 < loaded.steps_to_settle() < gen_len:
            break
        settling, _ = generate(f"settling, generation {number + 1}", ends_early=lambda: not loaded.steps_to_settle())
        measurement.settling_s.append(settling.total_s)
    for number in range(loops):
        between_loops()
        loop, measurement.output_ids = generate(f"loop {number + 1} of {loops}")
        measurement.loops.append(loop)
    between_loops()
    measurement.output_ids = ranks.gather_rows(measurement.output_ids)
    return measurement


def is_steady(times_s: list[float], share: float) -> bool:
    """Return whether the latest `SETTLED_LOOPS` times lie within `share` of their median."""
    latest = times_s[-SETTLED_LOOPS:]
    return len(latest) == SETTLED_LOOPS and relative_spread(latest) <= share


def _one_loop(
    loaded: LoadedModel,
    ids: torch.Tensor,
    gen_len: int,
    ranks: Ranks,
    make_cache,
    forced_tokens: torch.Tensor | None,
    progress,
    ends_early: Callable[[], bool] | None = None,
) -> tuple[Loop, torch.Tensor]:
    """Return (times and bytes of one generation, its ids int64 [batch / ranks, gen_len], fewer if it ended early)."""
    clock = _StepClock(loaded, ids.shape[0], progress, ends_early or (lambda: False))
    inputs = ids.to(loaded.device)
    feeding = [ForcedTokens(forced_tokens.to(loaded.device), ids.shape[1])] if forced_tokens is not None else []
    extra = {"past_key_values": make_cache()} if make_cache else {}
    ranks.barrier()
    clock.start()
    if loaded.timeline is not None:
        loaded.timeline.restart()
    output = loaded.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=greedy_config(gen_len),
        stopping_criteria=StoppingCriteriaList([clock, *feeding]),
        **extra,
    )
    token_s = ranks.maximum(clock.token_times_s())
    step_s = [after - before for before, after in zip(token_s, token_s[1:])]
    loop = Loop(
        prefill_s=token_s[0],
        decode_s=token_s[-1] - token_s[0],
        total_s=token_s[-1],
        step_s=step_s,
        moved=clock.moved_per_decode_step(),
        experts=clock.experts_of_decode(),
    )
    return loop, feeding[0].selected[:, : len(token_s)] if feeding else output[:, ids.shape[1] :]


class ForcedTokens(StoppingCriteria):
    """Feeds given tokens instead of those that `generate` selects: called after each selection, it stores and replaces it.

    Attributes:
        selected: int64 [B, G], the tokens that `generate` selected.
    """

    def __init__(self, tokens: torch.Tensor, prompt_len: int):
        self.tokens, self.prompt_len = tokens, prompt_len
        self.selected = torch.zeros_like(tokens)
        self.go_on = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        step = input_ids.shape[1] - self.prompt_len - 1
        self.selected[:, step] = input_ids[:, -1]
        input_ids[:, -1] = self.tokens[:, step]  # `generate` makes the next step's input from this tensor
        return self.go_on


class _StepClock(StoppingCriteria):
    """Called by `generate` after the selection of each token; stops it once `ends_early` returns True.

    Attributes:
        marks: a CUDA event for each token, on a CPU the clock's seconds.
        moved: counters of transfers at each token.
        prefill_busy_s: busy seconds of the CPU backend up to the first token.
        experts: counters of the expert cache at each token.
    """

    def __init__(
        self, loaded: LoadedModel, batch_size: int, progress: Callable[[int], None], ends_early: Callable[[], bool]
    ):
        self.loaded, self.progress, self.ends_early = loaded, progress, ends_early
        self.on_device = loaded.device.type == "cuda"
        self.go_on = torch.zeros(batch_size, dtype=torch.bool, device=loaded.device)
        self.marks: list[Any] = []
        self.moved: list[tuple[int, ...]] = []
        self.prefill_busy_s = 0.0
        self.experts: list[ExpertCounts] = []

    def start(self) -> None:
        if self.on_device:
            torch.cuda.synchronize(self.loaded.device)
        self.first = self._mark()

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.marks.append(self._mark())
        transfers = self.loaded.transfers
        self.moved.append(transfers.snapshot())
        if len(self.moved) == 1 and transfers.cores_busy_s is not None:
            if self.on_device:
                self.marks[0].synchronize()  # the CPU computes a share of a short prompt
            self.prefill_busy_s = transfers.cores_busy_s()
        if transfers.expert_counts is not None:
            self.experts.append(transfers.expert_counts())
        self.progress(len(self.marks))
        return ~self.go_on if self.ends_early() else self.go_on

    def _mark(self):
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def token_times_s(self) -> list[float]:
        """Return the seconds from the start to each token."""
        if not self.on_device:
            return [mark - self.first for mark in self.marks]
        self.marks[-1].synchronize()
        return [self.first.elapsed_time(mark) / 1e3 for mark in self.marks]

    def moved_per_decode_step(self) -> MovedPerStep:
        """Return averages over the decode steps, unknown without any. Call it after `token_times_s`, when the CPU has finished."""
        steps = len(self.moved) - 1
        if steps < 1:
            return MovedPerStep.unknown()
        to_device, to_host, disk, cores = ((last - first) / steps for first, last in zip(self.moved[0], self.moved[-1]))
        busy_s = self.loaded.transfers.cores_busy_s
        busy_per_step = None if busy_s is None else (busy_s() - self.prefill_busy_s) / steps
        return MovedPerStep(
            host_to_device_bytes_per_step=to_device,
            device_to_host_bytes_per_step=to_host,
            disk_read_bytes_per_step=disk,
            cores_bytes_per_step=cores,
            cores_busy_s_per_step=busy_per_step,
        )

    def experts_of_decode(self) -> ExpertUse | None:
        """Return the use of the expert cache; None without one, and if tokens chose no experts."""
        steps = len(self.experts) - 1
        if steps < 1:
            return None
        choices, hits, saved, fetched = (last - first for first, last in zip(self.experts[0], self.experts[-1]))
        if not choices:
            return None
        return ExpertUse(
            hit_rate=hits / choices, saved_bytes_per_step=saved / steps, fetched_bytes_per_step=fetched / steps
        )


class Remaining:
    """Predicts the seconds left of a series of equal generations, from finished ones and the steps of the current one.

    Args:
        generations: their number; one beyond it can be begun with `extra`.
        gen_len: tokens of each.
        clock: seconds, as time.monotonic.
    """

    def __init__(self, generations: int, gen_len: int, clock: Callable[[], float] = time.monotonic):
        self._to_come, self._gen_len, self._clock = generations, gen_len, clock
        self._latest_s: float | None = None  # of a whole generation; the first ones are cold
        self._start = self._first = 0.0
        self._token = 0

    def begin(self, extra: bool = False) -> None:
        self._to_come -= not extra
        self._start, self._token = self._clock(), 0

    def token(self, number: int) -> float | None:
        """Return the seconds to the end of all, when token `number` (from 1) is generated; None if unknown yet."""
        now, self._token = self._clock(), number
        if number == 1:
            self._first = now
        whole_s = self._latest_s
        if whole_s is None:
            if number < min(3, self._gen_len):  # the second step is often one more cold one
                return None
            step_s = (now - self._first) / max(1, number - 1)
            whole_s = self._first - self._start + step_s * (self._gen_len - 1)
        return max(0.0, whole_s - (now - self._start)) + whole_s * max(0, self._to_come)

    def end(self) -> None:
        """End a generation; one that ended early predicts nothing."""
        if self._token == self._gen_len:
            self._latest_s = self._clock() - self._start

    def skip(self, generations: int) -> None:
        """Remove `generations` of those to come."""
        self._to_come -= generations
