"""A decode step as CUDA graphs (graphs.py).

With few sequences a step's kernels take the device a few milliseconds, and Python several times that to launch one by one; a graph is
launched at once. It is recorded in the first generation and repeats the same kernels on the same memory. So a block that is fetched
has to come into the same slot each time, and what changes from step to step lies in tensors: ids, positions, the cache's next place, and a
mask over all positions that the cache has room for. Whether the graph does what the model does is tried before it is used: one step
both as a graph and launched, in logits, keys and values.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from zero_inference.cpu.hand_off import CapturedCalls, DirectCalls, HandOff
from zero_inference.engines.base import Job
from zero_inference.engines.stream.decode_steps import StepInputs, is_decode_step, visible_positions
from zero_inference.engines.stream.feeder import BlockFeeder
from zero_inference.engines.stream.graphs import Record, Recording
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.decode_attention import using_decode_attention
from zero_inference.kv_cache.device import DeviceKVCache, sees_all_positions
from zero_inference.records.schema import DecodeGraph

# One behind the other, computed as usual right before: libraries take their memory, and blocks are placed and used as in the step to come.
USUAL_STEPS = 2
# Relative, by dtype, against the model launched with a mask over the positions there are; with no mask attention sums in another order, and
# the roundings of 40 layers add up to 5 % in bfloat16. A position or a mask that is wrong by one makes several times as much.
MOST_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 0.01}
# One step of each is timed, which says so much of the steps to come; and a graph needs no Python, which other work may hold up.
MOST_TIMES_AS_LONG = 1.1
RANKS = "there are several ranks"
KEYS_IN_HOST = "keys and values are in host memory"
TRACED = "--trace shows each layer"
INSTEAD = {  # by reason, where there is something to do about it
    RANKS: "use one process, or --decode-graph off",
    KEYS_IN_HOST: "drop one of --kv-offload and --decode-graph",
    TRACED: "drop one of the two",
}


def why_no_graph(job: Job, in_groups: bool = False) -> str | None:
    """Why a decode step of this run is not recorded, in a few words; None where it is.

    Args:
        in_groups: it dequantizes experts in several groups, of which the host reads how many rows each has.

    Raises:
        UsageError: it was asked for, and cannot be.
    """
    config, several = job.config, job.ranks.world_size > 1
    if config.decode_graph == "off":
        return "--decode-graph off"
    attention = (
        getattr(job.spec.text_config, "_attn_implementation", None) or job.skeleton.model.config._attn_implementation
    )
    reasons = {
        RANKS: several,
        KEYS_IN_HOST: config.kv_offload,
        TRACED: config.trace is not None,
        "its attention is not PyTorch's": attention != "sdpa",
        "its layers do not all attend to all positions": not sees_all_positions(job.spec.config, job.length),
        "it dequantizes experts in groups, whose sizes the host reads": in_groups,
        "there is no GPU": not job.on_gpu and config.decode_graph == "auto",
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    if reason and config.decode_graph == "on":
        raise UsageError(f"--decode-graph on: {reason}; {INSTEAD.get(reason, 'use --decode-graph off')}.")
    return reason


class StepGraph:
    """Stands before `model.forward`, and repeats a graph where a call is a decode step like the one that was recorded.

    Args:
        model: a transformers model for generation, all of it on the device.
        dtype: of its attention.
        record: `cuda_graphs` or `repeated_call`.
        feeder: of the model's blocks.
        calls: those that the model makes of the host's cores; None where it makes none.
        always: use it where it is slower, too.
        report: told what came of it, once it is known.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        record: Record,
        feeder: BlockFeeder,
        calls: DirectCalls | HandOff | None,
        always: bool,
        report: Callable[[DecodeGraph], None],
    ):
        self.model, self.dtype, self.record = model, dtype, record
        self.feeder, self.calls, self.always, self.report = feeder, calls, always, report
        self.own = model.forward
        self.cache: DeviceKVCache | None = None  # of the step that is recorded
        self.usual_steps = 0
        self.placed = feeder.residency  # in the steps that are counted
        self.given_up = False
        self.inputs: StepInputs | None = None
        self.recording: Recording | None = None
        self.recorded_calls: CapturedCalls | None = None
        self.tried = False

        @functools.wraps(self.own)  # generate looks at its arguments
        def forward(*args: Any, **call: Any) -> Any:
            return self._forward(*args, **call)

        model.forward = forward

    def close(self) -> None:
        """Give the model its own forward back, and let go of the graph."""
        self.model.__dict__.pop("forward", None)
        self._forget()
        self.cache, self.given_up = None, True

    def modules_changed(self) -> None:
        """Launch each step from now on: an adapter may be switched on or off between two, and a hook wants to be called."""
        if not self.given_up:
            self._give_up("modules were wrapped, replaced or hooked")

    def steps_to_settle(self) -> int:
        """Decode steps behind a prefill until a graph has been tried; 0 once it has, where it will not be, and before the first one."""
        if self.given_up or self.cache is None or (self.tried and self.placed is self.feeder.residency):
            return 0
        return 1 if self.recording is not None else USUAL_STEPS + 2  # those before, one to record and one to try

    def _forward(self, *args: Any, **call: Any) -> Any:
        if self.given_up or args or not is_decode_step(call):
            self.usual_steps = 0
            return self.own(*args, **call)
        if not self._fits(call):
            self._forget()
            self.cache, self.usual_steps, self.tried = call["past_key_values"], 0, False
        if self.tried:
            self.feeder.begin_pass(call["input_ids"].numel())
            if self.placed is self.feeder.residency:
                return self._repeat(call)
            self.feeder.has_begun = True
            self.report(DecodeGraph("weights were placed anew behind the last step of a graph", tried=True))
        if self.placed is not self.feeder.residency:  # another block is fetched, or one less
            self._forget()
            self.placed, self.usual_steps, self.tried = self.feeder.residency, 0, False
        if self.recording is not None:
            return self._trial(call)
        self.usual_steps += 1
        if self.usual_steps > USUAL_STEPS:
            self._record(call)  # by now a block that turned out to be no work for the cores is fetched
        return self.own(**call)

    def _fits(self, call: dict[str, Any]) -> bool:
        same_batch = self.inputs is None or self.inputs.ids.shape == call["input_ids"].shape
        return call["past_key_values"] is self.cache and same_batch

    def _record(self, call: dict[str, Any]) -> None:
        cache = call["past_key_values"]
        inputs = StepInputs.like(call["input_ids"], cache.max_length, self.dtype)
        inputs.fill(call)
        fixed = inputs.instead_of(call)

        def step() -> torch.Tensor:
            with self.feeder.timeline.paused(), cache.writing_at(inputs.place), using_decode_attention():
                return self.own(**fixed).logits

        self.feeder.fix_places()
        self.feeder.begin_again()
        try:
            with contextlib.nullcontext() if self.calls is None else self.calls.recording() as self.recorded_calls:
                self.recording = self.record(step, self.feeder)
            self.inputs = inputs
        except Exception as error:  # whatever the model's code does that a graph cannot hold
            self._give_up(f"a graph could not be recorded ({_first_line(error)})")

    def _repeat(self, call: dict[str, Any]) -> CausalLMOutputWithPast:
        assert self.inputs is not None and self.recording is not None
        self.inputs.fill(call)
        if self.calls is not None and self.recorded_calls is not None:
            self.calls.ask_again(self.recorded_calls)
        self.recording.repeat()
        cache = call["past_key_values"]
        cache.advance(1)
        return CausalLMOutputWithPast(logits=self.recording.output, past_key_values=cache)

    def _trial(self, call: dict[str, Any]) -> Any:
        """A step as a graph, launched with a mask, which is compared, and launched as usual, which counts."""
        cache, place = call["past_key_values"], call["past_key_values"].get_seq_length()
        streams = self.feeder.timeline.streams
        try:
            for _ in range(2):  # the first time takes longer
                self.feeder.begin_again()
                graph_s, output = _timed(lambda: self._repeat(call), streams)
                cache.advance(-1)
            of_graph = [output.logits[:, -1].clone(), *cache.at(place)]
            output = self.own(**call | {"attention_mask": visible_positions(call, self.dtype)})
            launched = [output.logits[:, -1].clone(), *cache.at(place)]
            differences = [_difference(one, other) for one, other in zip(of_graph, launched)]
            cache.advance(-1)
        except (torch.OutOfMemoryError, RunError) as error:
            cache.advance(place - cache.get_seq_length())
            self._give_up(f"it could not be tried ({_first_line(error)})")
            return self.own(**call)
        usual_s, output = _timed(lambda: self.own(**call), streams)
        difference = float(torch.stack(differences).max())  # NaN, if one of them is
        if not difference <= MOST_DIFFERENCE[self.dtype]:
            self._give_up(f"a graph's results differ by {difference:.1e}", difference, graph_s, usual_s)
        elif graph_s > MOST_TIMES_AS_LONG * usual_s and not self.always:
            self._give_up("a graph is slower", difference, graph_s, usual_s)
        else:
            self.tried = True
            self.report(DecodeGraph(None, difference, graph_s, usual_s, self.recording.graphs, tried=True))
        self.feeder.balance.begin_again()
        return output

    def _give_up(
        self,
        reason: str,
        difference: float | None = None,
        graph_s: float | None = None,
        launched_s: float | None = None,
    ) -> None:
        self.given_up, self.tried = True, False
        self._forget()
        self.report(DecodeGraph(reason, difference, graph_s, launched_s, tried=True))

    def _forget(self) -> None:
        """Let go of the graph and its memory, which what its calls bring is a part of."""
        self.inputs = self.recording = self.recorded_calls = None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of their norms, relative to that of `other`; on the device."""
    return (one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30)


def _timed(work: Callable[[], Any], streams: DeviceStreams) -> tuple[float, Any]:
    """Seconds until the device has done it, and what it returned."""
    streams.synchronize()
    start = time.perf_counter()
    result = work()
    streams.synchronize()
    return time.perf_counter() - start, result
