"""A step of a model as CUDA graphs: one, or where weights are fetched, one up to each time that the host has to do something between.

The host asks the ring for a block before it is used, and gives its slot back behind that. Both order streams by events, and asking for a
block also queues copies, which a graph cannot hold because each step's copies run into the next step. So a recording ends
there, the ring is asked, and another recording begins; the same happens when the graphs are launched.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from zero_inference.cpu.hand_off import CapturedCalls, DirectCalls, HandOff
from zero_inference.engines.base import Job
from zero_inference.engines.stream.prefetch import BetweenGraphs, Prefetcher
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.decode_attention import using_decode_attention
from zero_inference.kv_cache.device import DeviceKVCache, sees_all_positions
from zero_inference.records.schema import DecodeGraph

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class CapturedStep:
    """A step that can be repeated.

    Attributes:
        output: of the step; each repetition overwrites it.
        repeat: does the step once more.
        graphs: that it is made of.
    """

    output: torch.Tensor
    repeat: Callable[[], None]
    graphs: int


Capture = Callable[[Step, Prefetcher], CapturedStep]


def capture_cuda_graphs(step: Step, prefetcher: Prefetcher) -> CapturedStep:
    """Record `step` without running it; the ring does its part, as it would in the step.

    Raises:
        RuntimeError: it does something that cannot be recorded, such as waiting for the device. The next step can be computed as usual.
    """
    recorder = _GraphSequence()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the memory of graphs is not taken from there
    with prefetcher.compute.entered(), _asking(prefetcher, recorder.between):
        recorder.begin()
        try:
            output = step()
            recorder.end()
        except BaseException:
            recorder.abandon()
            raise
    parts = recorder.parts

    def repeat() -> None:
        with prefetcher.compute.entered():
            for part in parts:
                part()

    return CapturedStep(output, repeat, recorder.graphs)


def capture_calls(step: Step, prefetcher: Prefetcher) -> CapturedStep:
    """What stands for graphs on a CPU: the same step, called again, with blocks in the same slots."""
    recorder = _Calls()
    with _asking(prefetcher, recorder.between):
        output = step()

    def repeat() -> None:
        recorder.place = 0
        with _asking(prefetcher, recorder.between):
            output.copy_(step())

    return CapturedStep(output, repeat, len(recorder.found) + 1)


class _Calls:
    """What the ring answered in the first call of a step, and has to answer in all others."""

    def __init__(self) -> None:
        self.found: list[int | None] = []
        self.place = 0

    def between(self, call: Callable[[], Any]) -> Any:
        slot = call()
        if self.place == len(self.found):
            self.found.append(slot)
        _as_before(slot, self.found[self.place])
        self.place += 1
        return slot


class _GraphSequence:
    """Graphs one behind the other, which share their memory, and what the host does between them."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.graph: torch.cuda.CUDAGraph | None = None  # that is recorded
        self.parts: list[Callable[[], Any]] = []
        self.graphs = 0

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        assert self.graph is not None
        graph, self.graph = self.graph, None
        with warnings.catch_warnings():  # where the ring is asked twice in a row, there is nothing between
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self.parts.append(graph.replay)
        self.graphs += 1

    def abandon(self) -> None:
        """After an error. PyTorch, before 2.12, goes on to take a recording to be under way: `empty_cache` and random numbers fail then."""
        device, ended = torch.cuda.current_device(), self.graph is None
        with contextlib.suppress(RuntimeError):  # it is invalid
            if self.graph is not None:
                self.graph.capture_end()
                ended = True
        with contextlib.suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(device, self.pool)
        if not ended:
            with contextlib.suppress(RuntimeError):  # else its part of the pool is never given back
                torch._C._cuda_releasePool(device, self.pool)
        with contextlib.suppress(RuntimeError):
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(generator.clone_state())  # a copy is not in a recording

    def between(self, call: Callable[[], Any]) -> Any:
        self.end()
        found = call()
        self.parts.append(lambda: _as_before(call(), found))
        self.begin()
        return found


@contextlib.contextmanager
def _asking(prefetcher: Prefetcher, between: BetweenGraphs) -> Iterator[None]:
    """Within it what the prefetcher asks of its ring is done by `between`."""
    prefetcher.between = between
    try:
        yield
    finally:
        prefetcher.between = None


def _as_before(slot: int | None, recorded: int | None) -> None:
    if slot != recorded:
        raise RunError(f"a block is in slot {slot}, but its graph reads slot {recorded}; use --decode-graph off.")


# One behind the other, computed as usual right before: libraries take their memory, and blocks are placed and used as in the step to come.
EAGER_STEPS = 2
# Relative, by dtype, against the model launched with a mask over the positions there are; with no mask attention sums in another order, and
# the roundings of 40 layers add up to 5 % in bfloat16. A position or a mask that is wrong by one makes several times as much.
MAX_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 0.01}
# One step of each is timed, which says so much of the steps to come; and a graph needs no Python, which other work may hold up.
MAX_SLOWDOWN = 1.1
RANKS = "there are several ranks"
KEYS_IN_HOST = "keys and values are in host memory"
TRACED = "--trace shows each layer"
REMEDIES = {  # by reason, where there is something to do about it
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
        getattr(job.spec.text_config, "_attn_implementation", None) or job.empty_model.model.config._attn_implementation
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
        raise UsageError(f"--decode-graph on: {reason}; {REMEDIES.get(reason, 'use --decode-graph off')}.")
    return reason


class StepGraph:
    """Stands before `model.forward`, and repeats a graph where a call is a decode step like the one that was recorded.

    Args:
        model: a transformers model for generation, all of it on the device.
        dtype: of its attention.
        record: `cuda_graphs` or `repeated_call`.
        prefetcher: of the model's blocks.
        calls: those that the model makes of the host's cores; None where it makes none.
        always: use it where it is slower, too.
        report: told what came of it, once it is known.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        record: Capture,
        prefetcher: Prefetcher,
        calls: DirectCalls | HandOff | None,
        always: bool,
        report: Callable[[DecodeGraph], None],
    ):
        self.model, self.dtype, self.record = model, dtype, record
        self.prefetcher, self.calls, self.always, self.report = prefetcher, calls, always, report
        self.own = model.forward
        self.cache: DeviceKVCache | None = None  # of the step that is recorded
        self.usual_steps = 0
        self.placed = prefetcher.placement  # in the steps that are counted
        self.given_up = False
        self.inputs: StepInputs | None = None
        self.recording: CapturedStep | None = None
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
        if self.given_up or self.cache is None or (self.tried and self.placed is self.prefetcher.placement):
            return 0
        return 1 if self.recording is not None else EAGER_STEPS + 2  # those before, one to record and one to try

    def _forward(self, *args: Any, **call: Any) -> Any:
        if self.given_up or args or not is_decode_step(call):
            self.usual_steps = 0
            return self.own(*args, **call)
        if not self._fits(call):
            self._forget()
            self.cache, self.usual_steps, self.tried = call["past_key_values"], 0, False
        if self.tried:
            self.prefetcher.begin_pass(call["input_ids"].numel())
            if self.placed is self.prefetcher.placement:
                return self._repeat(call)
            self.prefetcher.has_begun = True
            self.report(
                DecodeGraph(unused_because="weights were placed anew behind the last step of a graph", tried=True)
            )
        if self.placed is not self.prefetcher.placement:  # another block is fetched, or one less
            self._forget()
            self.placed, self.usual_steps, self.tried = self.prefetcher.placement, 0, False
        if self.recording is not None:
            return self._trial(call)
        self.usual_steps += 1
        if self.usual_steps > EAGER_STEPS:
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
            with self.prefetcher.timeline.paused(), cache.writing_at(inputs.place), using_decode_attention():
                return self.own(**fixed).logits

        self.prefetcher.fix_slots()
        self.prefetcher.begin_again()
        try:
            with contextlib.nullcontext() if self.calls is None else self.calls.capturing() as self.recorded_calls:
                self.recording = self.record(step, self.prefetcher)
            self.inputs = inputs
        except Exception as error:  # whatever the model's code does that a graph cannot hold
            self._give_up(f"a graph could not be recorded ({_first_line(error)})")

    def _repeat(self, call: dict[str, Any]) -> CausalLMOutputWithPast:
        assert self.inputs is not None and self.recording is not None
        self.inputs.fill(call)
        if self.calls is not None and self.recorded_calls is not None:
            self.calls.replay(self.recorded_calls)
        self.recording.repeat()
        cache = call["past_key_values"]
        cache.advance(1)
        return CausalLMOutputWithPast(logits=self.recording.output, past_key_values=cache)

    def _trial(self, call: dict[str, Any]) -> Any:
        """A step as a graph, launched with a mask, which is compared, and launched as usual, which counts."""
        cache, place = call["past_key_values"], call["past_key_values"].get_seq_length()
        streams = self.prefetcher.timeline.streams
        try:
            for _ in range(2):  # the first time takes longer
                self.prefetcher.begin_again()
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
        if not difference <= MAX_DIFFERENCE[self.dtype]:
            self._give_up(f"a graph's results differ by {difference:.1e}", difference, graph_s, usual_s)
        elif graph_s > MAX_SLOWDOWN * usual_s and not self.always:
            self._give_up("a graph is slower", difference, graph_s, usual_s)
        else:
            self.tried = True
            self.report(
                DecodeGraph(
                    unused_because=None,
                    difference=difference,
                    graph_s=graph_s,
                    launched_s=usual_s,
                    graphs=self.recording.graphs,
                    tried=True,
                )
            )
        self.prefetcher.balance.begin_again()
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
        self.report(
            DecodeGraph(
                unused_because=reason, difference=difference, graph_s=graph_s, launched_s=launched_s, tried=True
            )
        )

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


# Of a call of the model: what the graph has in tensors, and what has to be as it is in a plain generation.
IN_TENSORS = {"input_ids", "position_ids", "cache_position", "attention_mask", "past_key_values"}
USUAL = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}


@dataclass
class StepInputs:
    """What changes from step to step, in memory that stays: ids and positions int64 [batch, 1], place int64 [1], mask
    [batch, 1, 1, positions] in the model's dtype."""

    ids: torch.Tensor
    positions: torch.Tensor
    place: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def like(cls, ids: torch.Tensor, length: int, dtype: torch.dtype) -> StepInputs:
        """Empty, for `ids` [batch, 1] and a cache of `length` positions."""
        mask = torch.empty(ids.shape[0], 1, 1, length, dtype=dtype, device=ids.device)
        return cls(torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(1), mask)

    def instead_of(self, call: dict[str, Any]) -> dict[str, Any]:
        """`call` with these tensors in place of its own."""
        known = {"cache_position": self.place} if call.get("cache_position") is not None else {}
        return call | known | {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": self.mask}

    def fill(self, call: dict[str, Any]) -> None:
        """With those of `call`, whose cache has not got its keys and values yet."""
        length = call["past_key_values"].get_seq_length()
        self.ids.copy_(call["input_ids"])
        self.positions.copy_(call["position_ids"])
        self.place.fill_(length)
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        seen, given = self.mask[:, 0, 0, : length + 1], call.get("attention_mask")
        if given is None:
            seen.zero_()
        else:
            seen.masked_fill_(given.bool(), 0)


def visible_positions(call: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """A mask of `dtype`, [batch, 1, 1, positions], to be added, over the positions that a decode step sees: what transformers makes of
    its attention mask, or what none says."""
    ids, length = call["input_ids"], call["past_key_values"].get_seq_length() + 1
    mask = torch.zeros(ids.shape[0], 1, 1, length, dtype=dtype, device=ids.device)
    given = call.get("attention_mask")
    return mask if given is None else mask.masked_fill_(~given.bool()[:, None, None, :], torch.finfo(dtype).min)


def is_decode_step(call: dict[str, Any]) -> bool:
    """Whether a call of a model has one more token for each sequence of a `DeviceKVCache`, and asks for nothing but logits."""
    ids, cache, positions = call.get("input_ids"), call.get("past_key_values"), call.get("position_ids")
    if not (torch.is_tensor(ids) and ids.dim() == 2 and ids.shape[1] == 1 and isinstance(cache, DeviceKVCache)):
        return False
    if (
        not torch.is_tensor(positions)
        or positions.shape != ids.shape
        or not 0 < cache.get_seq_length() < cache.max_length
    ):
        return False
    place, mask = call.get("cache_position"), call.get("attention_mask")
    if place is not None and (not torch.is_tensor(place) or place.shape != (1,)):
        return False
    if mask is not None and (not torch.is_tensor(mask) or mask.shape != (ids.shape[0], cache.get_seq_length() + 1)):
        return False
    return all(_is_usual(name, value) for name, value in call.items() if name not in IN_TENSORS)


def _is_usual(name: str, value: Any) -> bool:
    return not torch.is_tensor(value) and value in USUAL.get(name, (None, False))
