"""Runs the decoder layers of a model on several devices, one layer after the other: `LayerDevices` copies hidden states between them.

In a long pass of several sequences the batch is divided into micro-batches, one a device. Each layer computes them one after the other, and
the next layer's device begins with the first one while the second one still computes here, so that all devices compute at the same time.
Passes that fill a cache of transformers' own are not divided, nor those whose layers get tensors of an unknown form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import Job
from zero_inference.engines.stream.streams import ComputeStreams, DeviceStreams
from zero_inference.kv_cache.device import DeviceKVCache, MicroBatch, supports_preallocated
from zero_inference.models.layers import decoder_layers
from zero_inference.models.tracing import tensors_in
from zero_inference.utils.model_sizes import text_config
from zero_inference.utils.patching import Patches

# Operations of a layer for a micro-batch, which take an H200 4 ms: Python launches a layer in 1 to 3 ms, once for each micro-batch. 2048
# tokens of Llama-2-13B took 0.13 s on one GPU and 0.14 to 0.22 s in two micro-batches (h200-x2-one-process).
MIN_MICRO_BATCH_FLOPS, MIN_MICRO_BATCH_S = 2e12, 4e-3
# Time of a hop, by which hidden states change devices: from the last kernel before it to the first one after it, if the host launches both
# early enough, and of the host to launch its copy and events (h200-x2-one-process/traced_host.txt).
HOP_S, HOP_HOST_S = 21e-6, 50e-6
# Arguments of a model for which it records outputs of its layers, so that they have to be those of the whole batch
RECORDED = "output_hidden_states", "output_attentions", "output_router_logits"


def count_micro_batches(batch: int, length: int, devices: int, layer_parameters: float) -> int:
    """Return the micro-batches of a pass of `batch` sequences, `length` tokens each; 1 where it is not divided.

    Args:
        layer_parameters: that a token uses in a decoder layer, on average.
    """
    worthwhile = int(2 * layer_parameters * batch * length / MIN_MICRO_BATCH_FLOPS)
    return max(1, min(devices, batch, worthwhile)) if 1 < length != batch else 1


def count_hops(layer_devices: Sequence[int]) -> int:
    """Return how often hidden states change devices in a pass, which begins and ends on the first one."""
    return sum(one != other for one, other in pairwise((0, *layer_devices, 0)))


def alternates(layer_devices: Sequence[int], devices: int) -> bool:
    """Return whether layers alternate between devices, which so compute micro-batches at the same time. Contiguous layers hardly do: the
    first device has computed nearly all when the next one gets the first micro-batch."""
    return sum(one != other for one, other in pairwise(layer_devices)) >= max(2, devices)


def cache_has_rows(job: Job) -> bool:
    """Return whether the run's KV cache can be a `DeviceKVCache`, of which a micro-batch fills some rows."""
    return not job.window_only_in_cache and supports_preallocated(job.empty_model.model)


def prefill_micro_batches(job: Job, layer_devices: Sequence[int]) -> int:
    """Return the micro-batches of a run's prefill, if its engine divides any."""
    return _micro_batches_if_alternating(job) if alternates(layer_devices, len(job.devices)) else 1


def _micro_batches_if_alternating(job: Job) -> int:
    if len(job.devices) == 1 or job.config.kv_offload or not cache_has_rows(job):
        return 1
    return count_micro_batches(job.rank_batch, job.config.prompt_len, len(job.devices), job.layer_parameters)


def should_alternate(job: Job) -> bool:
    """Return whether layers that are all resident should alternate between devices: the prefill in micro-batches saves more time than the
    added hops of all passes take."""
    config, micro_batches = job.config, _micro_batches_if_alternating(job)
    # `load` of the Python API plans for one new token, whatever is generated
    passes = config.gen_len if config.gen_len > 1 else config.prompt_len
    layer_flops = 2 * job.layer_parameters * job.rank_batch * config.prompt_len
    return (1 - 1 / micro_batches) * layer_flops / MIN_MICRO_BATCH_FLOPS * MIN_MICRO_BATCH_S > passes * HOP_HOST_S


class LayerDevices:
    """Hooks the decoder layers of `model`, which begins and ends on the first device.

    Args:
        layer_devices: index of the device of each layer; no operator may be between the calls of two of them.
        layer_parameters: of `count_micro_batches`; 0: no pass is divided, nor is one where layers do not alternate between devices.
        outside_graphs: calls host work that CUDA graphs cannot contain.
        leave_layer: called with the index of a device, as part of such work, when the device has computed a layer.

    Attributes:
        decoder: the module that calls the layers.
        micro_batch: index of the micro-batch that computes.
        micro_batches: rows of each micro-batch; one slice of all rows where the pass is not divided.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_devices: Sequence[int],
        streams: Sequence[DeviceStreams],
        layer_parameters: float = 0.0,
        outside_graphs: Callable[[Callable[[], Any]], Any] = lambda work: work(),
        leave_layer: Callable[[int], Any] = lambda device: None,
    ):
        prefix, layers = decoder_layers(model)
        self.decoder = model.get_submodule(prefix.rpartition(".")[0])
        self.streams, self.layer_devices = streams, layer_devices
        self.layer_parameters = layer_parameters if alternates(layer_devices, len(streams)) else 0.0
        self.outside_graphs, self.leave_layer = outside_graphs, leave_layer
        self.compute = ComputeStreams(model, streams)
        self.patches = Patches()
        self.micro_batches: Sequence[slice] = (slice(None),)
        self.micro_batch = 0
        self.may_divide_pass = False
        self.cache_micro_batch = MicroBatch()  # of the KV cache of a pass that may be divided
        self.batch = self.length = 0  # sequences of a pass that is divided, and tokens of each
        self.heads: int = getattr(text_config(getattr(model, "config", None)), "num_attention_heads", 0)
        # by id of a tensor and device: the tensor, which keeps its id, and its copy there
        self.moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self.sent: torch.Tensor | None = None  # hidden states of all micro-batches for the next layer, on its device
        self.arrived: list[Any] = []  # by micro-batch: the event after its copy into `sent`
        self.inputs: tuple[tuple, dict[str, Any]] = (), {}  # of the layer that computes, of the whole batch
        if len(streams) == 1:
            return
        self.copy_streams = [each.stream() for each in streams]
        # a call that failed releases its tensors, too
        self.patches.add_hooks(self.decoder.register_forward_hook(lambda *_: self.end_pass(), always_call=True))
        for index, layer in enumerate(layers):
            self.patches.add_hooks(
                layer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True),
                layer.register_forward_hook(partial(self._after, index)),
            )

    def close(self) -> None:
        self.patches.close()
        self.compute.close()

    def divide_passes(self) -> None:
        """Call `begin_pass` before each pass, for an engine that does not."""

        def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self.begin_pass(kwargs)

        self.patches.add_hooks(self.decoder.register_forward_pre_hook(begin, with_kwargs=True))

    def stop_dividing(self) -> None:
        """Compute all passes undivided from now on, because hooks or other code may see what a layer gets."""
        self.layer_parameters = 0.0

    @property
    def is_last_micro_batch(self) -> bool:
        return self.micro_batch == len(self.micro_batches) - 1

    def begin_pass(self, arguments: Mapping[str, Any]) -> None:
        """Allow the pass that begins to be divided if the `arguments` of the decoder's call do."""
        cache = arguments.get("past_key_values")
        fills_no_other_cache = isinstance(cache, DeviceKVCache) or (
            cache is None and arguments.get("use_cache") is False
        )
        self.may_divide_pass = fills_no_other_cache and not _records_layers(self.decoder, arguments)
        if self.may_divide_pass:
            self.cache_micro_batch = MicroBatch() if cache is None else cache.micro_batch

    def end_pass(self) -> None:
        """Release the tensors of a pass, perhaps one that failed, whose copies may still be under way."""
        for stream in self.compute.streams:
            for event in self.arrived:
                stream.wait_event(event)
        self.moved.clear()
        self.inputs = (), {}  # with the KV cache
        self.sent, self.arrived, self.micro_batch, self.micro_batches = None, [], 0, (slice(None),)
        self.may_divide_pass, self.cache_micro_batch.rows = False, None

    def _divide(self, hidden: Any) -> None:
        """Choose the micro-batches for the first layer's `inputs`, among them the hidden states [B, T, H]."""
        if not self.may_divide_pass or not torch.is_tensor(hidden) or hidden.dim() != 3:
            return
        self.batch, length = hidden.shape[:2]
        count = count_micro_batches(self.batch, length, len(self.streams), self.layer_parameters)
        counts = (count_rows(each, self.batch, length, self.heads) for each in tensors_in(self.inputs))
        if count > 1 and None not in counts:
            self.length = length
            ends = [self.batch * micro_batch // count for micro_batch in range(count + 1)]
            self.micro_batches = [slice(begin, end) for begin, end in zip(ends, ends[1:])]

    def _before(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Let a layer compute on its device, of a pass that is divided the first micro-batch."""
        device, hidden = self.layer_devices[index], args[0] if args else kwargs.get("hidden_states")
        self.inputs = self._enter(device, (args, kwargs), hidden)
        if index == 0:
            self._divide(hidden)
        if len(self.micro_batches) == 1:
            return self.inputs
        if hidden is not self.sent:
            self._await_micro_batches(device)
        return self._inputs_of(0, device)

    def _after(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        """Let a layer compute the other micro-batches, and send each to the device of the next layer."""
        is_last_layer = index + 1 == len(self.layer_devices)
        if len(self.micro_batches) > 1:
            output = self._finish_micro_batches(
                module, output, index, 0 if is_last_layer else self.layer_devices[index + 1]
            )
        if is_last_layer:
            self._await_micro_batches(0)
            if self.compute.device == 0:  # `_enter` leaves another device
                self.outside_graphs(lambda: self.leave_layer(0))
            output = self._enter(0, output, output)
        return output

    def _enter(self, device: int, values: Any, once: Any) -> Any:
        """Make `device` current, and return `values` with all tensors in them copied there, in the order of both devices' streams.

        Copies are kept until the pass ends, because masks and rotary embeddings are the same tensors in all layers; but not those of
        `once`, which are the hidden states.
        """
        target = self.streams[device].device
        found = {id(each): each for each in tensors_in(values) if each.device != target}
        sources = [each for key, each in found.items() if (key, target) not in self.moved]
        left = self.compute.device
        if sources or device != left:
            copies: list[torch.Tensor] = []

            def move() -> None:
                if not copies:  # a graph reads the same memory in each replay
                    copies.extend(torch.empty_like(each, device=target) for each in sources)
                for copy, source in zip(copies, sources):
                    copy.copy_(source, non_blocking=True)
                self.leave_layer(left)
                self.compute.enter(device)

            self.outside_graphs(move)
            self.moved |= {(id(each), target): (each, copy) for each, copy in zip(sources, copies)}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return self.moved.get((id(tensor), target), (None, tensor))[1]

        values = replace_tensors(values, moved)
        for tensor in tensors_in(once):
            self.moved.pop((id(tensor), target), None)
        return values

    def _inputs_of(self, micro_batch: int, device: int) -> tuple[tuple, dict[str, Any]]:
        """Return the inputs of a micro-batch once it has arrived."""
        self.micro_batch, rows = micro_batch, self.micro_batches[micro_batch]
        if self.arrived:
            self.compute.streams[device].wait_event(self.arrived[micro_batch])
        in_cache = self.cache_micro_batch
        in_cache.rows, in_cache.batch, in_cache.is_last = rows, self.batch, self.is_last_micro_batch

        def rows_of(tensor: torch.Tensor) -> torch.Tensor:
            count = count_rows(tensor, self.batch, self.length, self.heads)
            return tensor[rows.start * count : rows.stop * count] if count else tensor

        return replace_tensors(self.inputs, rows_of)

    def _finish_micro_batches(self, layer: nn.Module, output: Any, index: int, next_device: int) -> Any:
        """Return the output of the whole batch, given that of the first micro-batch; its hidden states are on `next_device`."""
        device = self.layer_devices[index]
        sent: torch.Tensor | None = None
        outputs, arrived = [], []
        for micro_batch, rows in enumerate(self.micro_batches):
            if micro_batch > 0:
                args, kwargs = self._inputs_of(micro_batch, device)
                output = layer.forward(*args, **kwargs)
            hidden, *others = output if isinstance(output, (tuple, list)) else (output,)
            if sent is None:
                target = self.streams[next_device].device
                sent = hidden.new_empty((self.batch, *hidden.shape[1:]), device=target)
            arrived.append(self._send(hidden, sent[rows], device, next_device))
            outputs.append(others)
        self.cache_micro_batch.rows = None
        self.sent, self.arrived, self.micro_batch, self.inputs = sent, arrived, 0, ((), {})
        if torch.is_tensor(output):
            return sent
        joined = (torch.cat(each) if torch.is_tensor(each[0]) else each[0] for each in zip(*outputs))
        return type(output)([sent, *joined])

    def _send(self, source: torch.Tensor, target: torch.Tensor, device: int, next_device: int) -> Any:
        """Copy hidden states of a micro-batch to the device of the next layer; return the event after it.

        The copy waits for work that was queued on that device, whose memory it may reuse, but no later work there waits for it.
        """
        compute, copies = self.compute.streams, self.copy_streams[next_device]
        if next_device == device:
            target.copy_(source, non_blocking=True)
            return self.streams[device].record_event(compute[device])
        compute[device].wait_event(self.streams[next_device].record_event(compute[next_device]))
        with self.streams[next_device].on(copies):  # which PyTorch lets wait for the copy, on the stream of the source
            target.copy_(source, non_blocking=True)
        return self.streams[next_device].record_event(copies)

    def _await_micro_batches(self, device: int) -> None:
        """Let `device` wait for all micro-batches that were sent."""
        for event in self.arrived:
            self.compute.streams[device].wait_event(event)
        self.arrived = []


def _records_layers(decoder: nn.Module, arguments: Mapping[str, Any]) -> bool:
    config = getattr(decoder, "config", None)
    given = {name: arguments.get(name) for name in RECORDED}
    return any(getattr(config, name, False) if value is None else value for name, value in given.items())


def count_rows(tensor: torch.Tensor, batch: int, length: int, heads: int) -> int | None:
    """Return how many rows an input of a layer has for each of `batch` sequences of `length` tokens; 0 if it is the same for all, None if
    its form is unknown.

    One: hidden states [B, T, H], positions [B, T], masks [B, heads or 1, T, past + T]. None of its own: rotary embeddings [1, T, D], [T, D]
    and [T, 1, D], biases [heads, 1, T] of MPT. As many as heads: biases [B * heads, 1, past + T] of BLOOM and Falcon.
    """
    if tensor.dim() < 2 or tensor.shape[0] == 1:
        return 0
    if tensor.dim() == 3 and tensor.shape[1] == 1:
        known = {length: 0, heads: 0, batch * heads: heads}
        is_ambiguous = tensor.shape[0] in {heads, batch * heads} & {batch, length}
        return None if is_ambiguous else known.get(tensor.shape[0])
    if tensor.shape[0] == length:
        return 0
    positions = tensor.shape[-2:] if tensor.dim() == 4 else tensor.shape[1:2]
    return 1 if tensor.shape[0] == batch and all(each >= length for each in positions) else None


def replace_tensors(value: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor replaced, in tuples, lists and dicts too; a KV cache stays the object that it is."""
    if torch.is_tensor(value):
        return replacement(value)
    if isinstance(value, (tuple, list)):
        replaced = [replace_tensors(each, replacement) for each in value]
        return type(value)(*replaced) if hasattr(value, "_fields") else type(value)(replaced)
    if type(value) is dict:
        return {name: replace_tensors(each, replacement) for name, each in value.items()}
    return value


def device_by_name(
    prefix: str, layer_devices: Sequence[torch.device], others: torch.device
) -> Callable[[str], torch.device]:
    """Return a function from the full name of a parameter or buffer to its device: that of its decoder layer, whose list is named `prefix`,
    or `others`."""
    devices = {f"{prefix}.{index}": device for index, device in enumerate(layer_devices)}

    def device_of(name: str) -> torch.device:
        layer = name.removeprefix(f"{prefix}.").partition(".")[0]
        return devices.get(f"{prefix}.{layer}", others) if name.startswith(f"{prefix}.") else others

    return device_of


def move_buffers(model: nn.Module, device_of: Callable[[str], torch.device]) -> None:
    """Move all buffers of `model` to their devices."""
    for name, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            module._buffers[own] = buffer.to(device_of(f"{name}.{own}".lstrip(".")))
