"""Decode steps as CUDA graphs: when one is captured (`why_no_graph`), how (`capture_cuda_graphs`), and its replay (`StepGraph`).

With few sequences a step's kernels take the device a few milliseconds, and Python several times that to launch one by one. A graph
repeats the same kernels on the same memory. So a streamed block has to come into the same slot each time, and what changes from step to
step is in tensors (`StepInputs`). Before a graph is used, one step is computed both ways, and logits, keys and values are compared.

A step that streams weights is a sequence of graphs. The host acquires a slot before a block and releases it afterwards; both order
streams by events, and releasing also queues copies, which a graph cannot hold because they run into the next step. So the capture ends
there, the host does its work, and the next graph begins; the replay does the same. A graph is on one device, so the capture also ends where
the next layer is on another one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from zero_inference.cpu.hand_off import CapturedCalls
from zero_inference.engines.base import Job
from zero_inference.engines.stream.prefetch import BetweenGraphs, Prefetcher
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.decode_attention import attention_of, using_decode_attention
from zero_inference.kv_cache.device import DeviceKVCache, StepMasks, windows_of_layers
from zero_inference.models.layers import MAX_DIFFERENCE
from zero_inference.records.schema import DecodeGraph
from zero_inference.utils.format import first_line
from zero_inference.utils.patching import Patches

# Few steps of each kind are timed, which is noisy, and other work of the host slows down later steps of Python, but not those of a graph
MAX_SLOWDOWN = 1.1
# A graph of several tokens takes the same time for fewer, which are padded. Where it takes at most this share of an eager step, that step
# waits for Python, which takes as long to launch a step of fewer tokens.
MAX_PADDED_SHARE = 0.8
REPLAYS = 3  # the first one takes longer
# Layers up to which `MAX_DIFFERENCE` holds for a whole step; roundings of more add up: Llama-3.1-70B, with random weights, differs by 0.084
# to 0.100 in bfloat16 (h100-readme, h200-x2-one-process), and was refused at 0.1.
ROUNDED_LAYERS = 40
# A mixture in 16 bits may differ this many times as much: rounding decides between experts that a router finds nearly equal, and each layer
# that takes another expert adds several percent (cpu/router_ties.txt). Steps of gpt-oss-20b and gpt-oss-120b, with random weights, differ
# by 0.097 and by 0.12 to 0.15 (h200-formats).
MIXTURE_FACTOR = 2
KEYS_IN_HOST = "keys and values are in host memory"
TRACED = "--trace shows each layer"
NOT_REPLACED = "its attention is its own, and not one with sinks"
OTHER_MASKS = "its layers attend neither to all positions nor to a window that a mask can give"
TRIAL_DIFFERS = "in a trial, steps with given masks gave other results than its own"
REMEDIES = {  # by reason; "use --decode-graph off" for the others
    KEYS_IN_HOST: "drop one of --kv-offload and --decode-graph",
    TRACED: "drop one of the two",
}
# Arguments of a decode step that the graph reads from tensors, and values that other arguments must have
IN_TENSORS = {"input_ids", "position_ids", "cache_position", "attention_mask", "past_key_values"}
EXPECTED = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}

Step = Callable[[], torch.Tensor]


def why_no_graph(job: Job, in_groups: bool = False, on_disk: bool = False, experts_on_disk: bool = False) -> str | None:
    """Return why decode steps of this run are not captured, in a few words; None where they may be.

    Raises:
        UsageError: `--decode-graph on` is impossible.
    """
    config = job.config
    if config.decode_graph == "off":
        return "--decode-graph off"
    attention = attention_of(job.empty_model.model)
    reasons = {
        KEYS_IN_HOST: config.kv_offload,
        TRACED: config.trace is not None,
        NOT_REPLACED: attention not in ("sdpa", "eager"),
        OTHER_MASKS: job.window_only_in_cache or windows_of_layers(job.spec.config, job.length) is None,
        "it dequantizes experts in groups, whose sizes the host reads": in_groups,
        "the host reads which experts tokens choose, to read these from disk": experts_on_disk,
        "there is no GPU": not job.on_gpu and config.decode_graph == "auto",
        "steps wait for the disk, and not for Python": on_disk and config.decode_graph == "auto",
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    if reason is None and not job.takes_step_masks:
        reason = TRIAL_DIFFERS if attention == "sdpa" else NOT_REPLACED
    if reason and config.decode_graph == "on":
        raise UsageError(f"--decode-graph on: {reason}; {REMEDIES.get(reason, 'use --decode-graph off')}.")
    return reason


class StepGraph:
    """Replaces `model.forward`: captures a decode step, verifies it, and replays it for calls like the captured one.

    With one cache and batch size: an eager step, a capture before the next one, one step both ways (`_verify`), then replays. After
    rebalancing all of that happens again. `report` gets the outcome once it is known.

    Args:
        tokens: tokens per sequence of the calls that it replays. It captures a step with the most of them; calls with fewer are padded.

    Attributes:
        settling_steps: eager steps before a capture, and those in which a graph was captured or verified.
    """

    def __init__(self, job: Job, prefetcher: Prefetcher, tokens: range, report: Callable[[DecodeGraph], None]):
        self.dtype, self.always = job.spec.dtype, job.config.decode_graph == "on"  # even if it is slower
        self.config, self.length, self.tokens = job.spec.config, job.length, tokens
        self.windows = windows_of_layers(self.config, self.length)
        assert self.windows is not None, "why_no_graph checks it"
        layers = max(ROUNDED_LAYERS, prefetcher.placement.layers)
        self.max_difference = MAX_DIFFERENCE[self.dtype] * math.sqrt(layers / ROUNDED_LAYERS)
        if job.spec.experts[0] and self.dtype != torch.float32:
            self.max_difference *= MIXTURE_FACTOR
        self.capture = capture_cuda_graphs if job.on_gpu else capture_calls
        self.prefetcher, self.report = prefetcher, report
        self.calls = None if prefetcher.cpu is None else prefetcher.cpu.calls
        self.model = model = job.empty_model.model
        self.original_forward = model.forward
        self.cache: DeviceKVCache | None = None  # of the captured step
        self.batch = 0  # sequences of that step
        self.placement = prefetcher.placement  # during that step
        self.given_up = False
        self.settling_steps = 0
        self.free_slots: Callable[[], None] = contextlib.ExitStack().close
        self.inputs: StepInputs | None = None
        self.captured: CapturedStep | None = None
        self.captured_calls: CapturedCalls | None = None
        self.verified = False

        @functools.wraps(self.original_forward)  # generate inspects its arguments
        def forward(*args: Any, **call: Any) -> Any:
            return self._forward(*args, **call)

        self.patches = Patches()
        self.patches.set_attr(model, "forward", forward)

    def close(self) -> None:
        self.patches.close()
        self._release()
        self.cache, self.given_up = None, True

    def modules_changed(self) -> None:
        """Compute each step eagerly from now on: an adapter may be switched on or off between two steps, and hooks have to be called."""
        if not self.given_up:
            self._give_up("modules were wrapped, replaced or hooked")

    @property
    def is_settled(self) -> bool:
        """Return whether no capture or verification is due; true before the first step."""
        is_current = self.verified and self.placement is self.prefetcher.placement
        return self.given_up or self.cache is None or is_current

    def _forward(self, *args: Any, **call: Any) -> Any:
        config = self.model.config
        recorded = getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False)
        if self.given_up or args or recorded or not is_decode_step(call, self.tokens):
            return self.original_forward(*args, **call)
        batch, cache = len(call["input_ids"]), call["past_key_values"]
        is_other = cache is not self.cache or batch != self.batch
        if self.verified and not is_other:
            self._begin_pass()
        if is_other or self.placement is not self.prefetcher.placement:  # another block is streamed, or one less
            self._release()
            self.cache, self.batch, self.placement = cache, batch, self.prefetcher.placement
            self.settling_steps += 1
            return self.original_forward(**call)  # cuBLAS and others allocate workspaces, which a capture cannot
        if self.verified:
            return self._replay(call)
        self.settling_steps += 1
        if self.captured is not None:
            return self._verify(call)
        self._capture(call)
        return self.original_forward(**call)

    def _verify(self, call: dict[str, Any]) -> Any:
        """Compute a step in three ways: by the graph, a few times; eagerly with its masks, to compare results; and eagerly as usual.
        The fastest of each kind counts. Return the output of the last one."""
        cache, start = call["past_key_values"], call["past_key_values"].get_seq_length()
        written = slice(start, start + call["input_ids"].shape[1])
        streams = [device.streams for device in self.prefetcher.timeline.devices]

        def replay() -> Any:
            self._begin_pass()
            return self._replay(call)

        def timed(work: Callable[[], Any]) -> tuple[float, Any]:
            cache.advance(start - cache.get_seq_length())
            self.prefetcher.rebalancer.passes = 0  # later steps take other times
            return _timed(work, streams)

        try:
            graph_s = math.inf
            for _ in range(REPLAYS):
                replay_s, output = timed(replay)
                graph_s = min(graph_s, replay_s)
            of_graph = [output.logits.clone(), *cache.at(written)]
            cache.advance(start - cache.get_seq_length())
            with_mask = call | {"attention_mask": visible_positions(call, self.dtype, self.windows)}
            masked_s, output = timed(lambda: self.original_forward(**with_mask))
            eager = [output.logits, *cache.at(written)]
            differences = [_difference(one, other).to(call["input_ids"].device) for one, other in zip(of_graph, eager)]
        except (torch.OutOfMemoryError, RunError) as error:
            cache.advance(start - cache.get_seq_length())
            self._give_up(f"it could not be verified ({first_line(error)})")
            return self.original_forward(**call)
        del output, of_graph, eager  # logits of all tokens
        eager_s, output = timed(lambda: self.original_forward(**call))
        self.prefetcher.rebalancer.passes = 0
        eager_s = min(eager_s, masked_s)
        difference = float(torch.stack(differences).max())  # NaN, if one of them is
        measured: dict[str, Any] = {"difference": difference, "graph_s": graph_s, "launched_s": eager_s}
        one_token = self.tokens[-1] == 1
        if not difference <= self.max_difference:
            self._give_up(f"a graph's results differ by {difference:.1e}", **measured)
        elif graph_s > eager_s * (MAX_SLOWDOWN if one_token else MAX_PADDED_SHARE) and not self.always:
            padded = (
                f"a padded graph takes {graph_s / eager_s:.0%} of an eager pass, the limit is {MAX_PADDED_SHARE:.0%}"
            )
            self._give_up("a graph is slower" if one_token else padded, **measured)
        else:
            self.verified = True
            self.report(DecodeGraph(unused_because=None, graphs=self.captured.graphs, tried=True, **measured))
        return output

    def _begin_pass(self) -> None:
        self.prefetcher.begin_pass(self.batch * self.tokens[-1])

    def _capture(self, call: dict[str, Any]) -> None:
        cache = call["past_key_values"]
        # a cache for more sequences than planned may be shorter, which needs no other masks
        if windows_of_layers(self.config, max(self.length, cache.max_length)) != self.windows:
            self._give_up("the cache is longer than planned, and than a window")
            return
        inputs = StepInputs.like(call, self.tokens[-1], self.dtype, self.windows, self.prefetcher.devices)
        inputs.fill(call)
        arguments = inputs.arguments_for(call)

        def step() -> torch.Tensor:
            with self.prefetcher.timeline.paused(), cache.writing_at(inputs.cache_positions):
                with using_decode_attention(self.model):
                    return self.original_forward(**arguments).logits

        self._begin_pass()
        self.placement = self.prefetcher.placement  # blocks that turned out not to suit the CPU are streamed
        self.free_slots = self.prefetcher.fix_slots()
        try:
            with contextlib.nullcontext() if self.calls is None else self.calls.capturing() as self.captured_calls:
                self.captured = self.capture(step, self.prefetcher)
            self.inputs = inputs
        except Exception as error:  # anything in the model's code that a graph cannot hold
            self._give_up(f"the capture failed ({first_line(error)})")

    def _replay(self, call: dict[str, Any]) -> CausalLMOutputWithPast:
        assert self.inputs is not None and self.captured is not None
        self.inputs.fill(call)
        with contextlib.nullcontext() if self.calls is None else self.calls.replay(self.captured_calls):
            self.captured.replay()
        cache, tokens = call["past_key_values"], call["input_ids"].shape[1]
        cache.advance(tokens)
        return CausalLMOutputWithPast(logits=self.captured.output[:, :tokens], past_key_values=cache)

    def _give_up(self, reason: str, **measured: Any) -> None:
        self.given_up = True
        self.prefetcher.rebalancer.passes = 0
        self._release()
        self.report(DecodeGraph(unused_because=reason, tried=True, **measured))

    def _release(self) -> None:
        """Release the graph and its memory, which the results of captured CPU calls are a part of."""
        self.inputs = self.captured = self.captured_calls = None
        self.verified = False
        self.free_slots()


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference, relative to that of `other`, on the device."""
    return (one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30)


def _timed(work: Callable[[], Any], devices: Sequence[DeviceStreams]) -> tuple[float, Any]:
    for streams in devices:
        streams.synchronize()
    start = time.perf_counter()
    result = work()
    for streams in devices:
        streams.synchronize()
    return time.perf_counter() - start, result


@dataclass(frozen=True)
class CapturedStep:
    output: torch.Tensor  # of the step; each replay overwrites it
    replay: Callable[[], None]
    graphs: int  # of a step


def capture_cuda_graphs(step: Step, prefetcher: Prefetcher) -> CapturedStep:
    """Capture `step` without running it; the ring buffer does its part, as it would in the step.

    Raises:
        RuntimeError: it does something that cannot be captured, such as waiting for the device. The next step can be computed as usual.
    """
    sequence = _GraphSequence()
    for streams in prefetcher.timeline.devices:
        streams.streams.synchronize()
    torch.cuda.empty_cache()  # graphs do not take their memory from there
    with prefetcher.compute.entered(), _between_graphs(prefetcher, sequence.between):
        sequence.begin()
        try:
            output = step()
            sequence.end()
        except BaseException:
            sequence.abandon()
            raise
    parts = sequence.parts

    def replay() -> None:
        with prefetcher.compute.entered():
            for part in parts:
                part()

    return CapturedStep(output, replay, sequence.graphs)


def capture_calls(step: Step, prefetcher: Prefetcher) -> CapturedStep:
    """Stand in for graphs on a CPU: call `step` again for each replay, with blocks in the same slots."""
    slots: list[int | None] = []  # that the ring buffer returns in each call of the step

    def first_between(work: Callable[[], Any]) -> Any:
        slots.append(work())
        return slots[-1]

    with _between_graphs(prefetcher, first_between):
        output = step()

    def replay() -> None:
        expected = iter(slots)

        def between(work: Callable[[], Any]) -> Any:
            slot = work()
            _check_slot(slot, next(expected))
            return slot

        with _between_graphs(prefetcher, between):
            output.copy_(step())

    return CapturedStep(output, replay, len(slots) + 1)


class _GraphSequence:
    """Graphs one after the other, which share the memory of their device, and the host's work between them. A graph is on one device, the
    one that is current when it begins."""

    def __init__(self) -> None:
        self.pools: dict[int, Any] = {}  # by device
        self.graph: torch.cuda.CUDAGraph | None = None  # under capture
        self.parts: list[Callable[[], Any]] = []
        self.graphs = 0

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        pool = self.pools.setdefault(torch.cuda.current_device(), torch.cuda.graph_pool_handle())
        self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> None:
        assert self.graph is not None
        graph, self.graph = self.graph, None
        with warnings.catch_warnings():  # between two requests to the ring in a row there is nothing
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self.parts.append(graph.replay)
        self.graphs += 1

    def between(self, work: Callable[[], Any]) -> Any:
        """Call `work` between two graphs, now and in every replay, where it must return the same slot."""
        self.end()
        slot = work()
        self.parts.append(lambda: _check_slot(work(), slot))
        self.begin()
        return slot

    def abandon(self) -> None:
        """Clean up after an error. PyTorch before 2.12 believes that the capture goes on: `empty_cache` and random numbers fail then."""
        device, ended = torch.cuda.current_device(), self.graph is None
        with contextlib.suppress(RuntimeError):  # it is invalid
            if self.graph is not None:
                self.graph.capture_end()
                ended = True
        pool = self.pools.get(device)
        with contextlib.suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(device, pool)
        if not ended:
            with contextlib.suppress(RuntimeError):  # else its part of the pool is never given back
                torch._C._cuda_releasePool(device, pool)
        with contextlib.suppress(RuntimeError):
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(generator.clone_state())  # a copy is in no capture


@contextlib.contextmanager
def _between_graphs(prefetcher: Prefetcher, between: BetweenGraphs) -> Iterator[None]:
    prefetcher.between_graphs = between
    try:
        yield
    finally:
        prefetcher.between_graphs = None


def _check_slot(slot: int | None, captured: int | None) -> None:
    if slot != captured:
        raise RunError(f"a block is in slot {slot}, but its graph reads slot {captured}; use --decode-graph off.")


@dataclass
class StepInputs:
    """The inputs of a captured step that change from step to step, in tensors at fixed addresses."""

    ids: torch.Tensor  # int64 [B, tokens]
    positions: torch.Tensor  # int64 [B, tokens]
    cache_positions: Mapping[torch.device, torch.Tensor]  # int64 [tokens] on each device, the cache's next positions
    masks: StepMasks

    @classmethod
    def like(
        cls,
        call: dict[str, Any],
        tokens: int,
        dtype: torch.dtype,
        windows: Mapping[str, int],
        devices: Sequence[torch.device] = (),
    ) -> StepInputs:
        """Return the inputs of a step of `tokens` tokens with the sequences and the cache of `call`."""
        ids = call["input_ids"].new_empty(len(call["input_ids"]), tokens)
        positions = {device: ids.new_empty(tokens, device=device) for device in devices or (ids.device,)}
        masks = StepMasks.like(ids, call["past_key_values"].max_length, dtype, windows)
        return cls(ids, torch.empty_like(ids), positions, masks)

    def arguments_for(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `call` with these tensors instead of its own."""
        inputs = {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": self.masks.argument}
        if call.get("cache_position") is not None:
            inputs["cache_position"] = self.cache_positions[self.ids.device]
        return call | inputs

    def fill(self, call: dict[str, Any]) -> None:
        """Copy the inputs of `call`, whose cache does not hold the step's keys and values yet.

        Calls with fewer tokens repeat their last one. Keys and values of this padding follow those of the call; at the end of the cache
        they go to its last position, which `is_decode_step` keeps free.
        """
        cache, tokens = call["past_key_values"], call["input_ids"].shape[1]
        start, most = cache.get_seq_length(), self.ids.shape[1]
        for own, given in ((self.ids, call["input_ids"]), (self.positions, call["position_ids"])):
            own[:, :tokens].copy_(given)
            if tokens < most:
                own[:, tokens:].copy_(given[:, -1:])
        for positions in self.cache_positions.values():
            torch.arange(start, start + most, out=positions)
            if most > 1:
                positions.clamp_(max=cache.max_length - 1)
        self.masks.fill(start, call.get("attention_mask"))


def visible_positions(call: dict[str, Any], dtype: torch.dtype, windows: Mapping[str, int]) -> Any:
    """Return the masks [B, 1, tokens, positions] that transformers would add for the positions that a step sees, as an argument."""
    ids, start = call["input_ids"], call["past_key_values"].get_seq_length()
    masks = StepMasks.like(ids, start + ids.shape[1], dtype, windows)
    masks.fill(start, call.get("attention_mask"))
    return masks.argument


def replayed_tokens(job: Job) -> dict[str, range]:
    """Return the graphs of a run: field of the record -> tokens per sequence of the calls that it replays."""
    one = {"decode_graph": range(1, 2)}
    return one if job.config.speculate is None else one | {"pass_graph": range(2, job.config.most_proposals + 2)}


def is_decode_step(call: dict[str, Any], tokens: range) -> bool:
    """Return whether a call has a token count in `tokens` for each sequence of a `DeviceKVCache`, and asks for nothing but logits."""
    ids, cache, positions = call.get("input_ids"), call.get("past_key_values"), call.get("position_ids")
    if not (torch.is_tensor(ids) and ids.dim() == 2 and ids.shape[1] in tokens and isinstance(cache, DeviceKVCache)):
        return False
    if not torch.is_tensor(positions) or positions.shape != ids.shape:
        return False
    start, end = cache.get_seq_length(), cache.get_seq_length() + ids.shape[1]
    if not start or end > cache.max_length - (ids.shape[1] < tokens[-1]):
        return False
    for name, shape in (("cache_position", ids.shape[1:]), ("attention_mask", (ids.shape[0], end))):
        given = call.get(name)
        if given is not None and (not torch.is_tensor(given) or given.shape != shape):
            return False
    if tokens[-1] > 1 and call.get("logits_to_keep"):  # logits of all tokens are captured
        return False
    others = ((name, value) for name, value in call.items() if name not in IN_TENSORS)
    return all(not torch.is_tensor(value) and value in EXPECTED.get(name, (None, False)) for name, value in others)
