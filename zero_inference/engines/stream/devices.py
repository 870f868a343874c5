"""Runs the decoder layers of a model on several devices, one layer after the other: `LayerDevices` copies hidden states between them.

In a long pass of several sequences the batch is divided into micro-batches, one a device. Each layer computes them one after the other, and
the next layer's device begins with the first one while the second one still computes here, so that all devices compute at the same time.
Passes that fill a cache of transformers' own are not divided, nor those whose layers get tensors of an unknown form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_inference.engines.stream.streams import ComputeStreams, DeviceStreams
from zero_inference.kv_cache.device import BatchPart, DeviceKVCache
from zero_inference.models.tracing import tensors_in
from zero_inference.utils.model_sizes import text_config
from zero_inference.utils.patching import Patches

# Operations of a layer for a micro-batch, which take an H200 4 ms: Python launches a layer in 1 to 3 ms, once for each micro-batch. 2048
# tokens of Llama-2-13B took 0.13 s on one GPU and 0.14 to 0.22 s in two micro-batches (h200-x2-one-process).
MIN_PART_FLOPS = 2e12


def count_parts(batch: int, length: int, devices: int, layer_parameters: float) -> int:
    """Return the micro-batches of a pass of `batch` sequences, `length` tokens each; 1 where it is not divided.

    Args:
        layer_parameters: that a token uses in a decoder layer, on average.
    """
    worthwhile = int(2 * layer_parameters * batch * length / MIN_PART_FLOPS)
    return max(1, min(devices, batch, worthwhile)) if 1 < length != batch else 1


class LayerDevices:
    """Hooks the decoder layers of `model`, which begins and ends on the first device.

    Args:
        layers: all decoder layers; no operator may be between the calls of two of them.
        layer_devices: index of the device of each layer.
        layer_parameters: of `count_parts`; 0: no pass is divided.
        outside_graphs: calls host work that CUDA graphs cannot contain.
        leave_layer: called with the index of a device, as part of such work, when the device has computed a layer.

    Attributes:
        part: index of the micro-batch that computes.
        parts: rows of each micro-batch; one slice of all rows where the pass is not divided.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        layer_devices: Sequence[int],
        streams: Sequence[DeviceStreams],
        layer_parameters: float = 0.0,
        outside_graphs: Callable[[Callable[[], Any]], Any] = lambda work: work(),
        leave_layer: Callable[[int], Any] = lambda device: None,
    ):
        self.streams, self.layer_devices, self.layer_parameters = streams, layer_devices, layer_parameters
        self.outside_graphs, self.leave_layer = outside_graphs, leave_layer
        self.compute = ComputeStreams(model, streams)
        self.patches = Patches()
        self.parts: Sequence[slice] = (slice(None),)
        self.part = 0
        self.may_divide_pass = False
        self.batch_part = BatchPart()  # of the KV cache of a pass that may be divided
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
        self.patches.add_hooks(model.register_forward_hook(lambda *_: self.begin_pass(), always_call=True))
        for index, layer in enumerate(layers):
            self.patches.add_hooks(
                layer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True),
                layer.register_forward_hook(partial(self._after, index)),
            )

    def close(self) -> None:
        self.patches.close()
        self.compute.close()

    @property
    def is_last_part(self) -> bool:
        return self.part == len(self.parts) - 1

    def begin_pass(self, is_long: bool = False, cache: Any = None, use_cache: bool | None = None) -> None:
        """Begin a pass with these arguments of the model; a long one may be divided."""
        for stream in self.compute.streams:  # after a pass that failed its copies may still be under way
            for event in self.arrived:
                stream.wait_event(event)
        self.moved.clear()
        self.inputs = (), {}  # with the KV cache of the pass before
        self.sent, self.arrived, self.part, self.parts = None, [], 0, (slice(None),)
        self.batch_part.rows = None
        fills_no_other_cache = isinstance(cache, DeviceKVCache) or (cache is None and use_cache is False)
        self.may_divide_pass = is_long and fills_no_other_cache
        if self.may_divide_pass:
            self.batch_part = BatchPart() if cache is None else cache.part

    def _divide(self, hidden: Any) -> None:
        """Choose the micro-batches for the first layer's `inputs`, among them the hidden states [B, T, H]."""
        if not self.may_divide_pass or not torch.is_tensor(hidden) or hidden.dim() != 3:
            return
        self.batch, length = hidden.shape[:2]
        count = count_parts(self.batch, length, len(self.streams), self.layer_parameters)
        counts = (count_rows(each, self.batch, length, self.heads) for each in tensors_in(self.inputs))
        if count > 1 and None not in counts:
            self.length = length
            ends = [self.batch * part // count for part in range(count + 1)]
            self.parts = [slice(begin, end) for begin, end in zip(ends, ends[1:])]

    def _before(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Let a layer compute on its device, of a pass that is divided the first micro-batch."""
        device, hidden = self.layer_devices[index], args[0] if args else kwargs.get("hidden_states")
        self.inputs = self._enter(device, (args, kwargs), hidden)
        if index == 0:
            self._divide(hidden)
        if len(self.parts) == 1:
            return self.inputs
        if hidden is not self.sent:
            self._await_parts(device)
        return self._inputs_of(0, device)

    def _after(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        """Let a layer compute the other micro-batches, and send each to the device of the next layer."""
        is_last_layer = index + 1 == len(self.layer_devices)
        if len(self.parts) > 1:
            output = self._finish_parts(module, output, index, 0 if is_last_layer else self.layer_devices[index + 1])
        if is_last_layer:
            self._await_parts(0)
            output = self._enter(0, output, output)
            self.begin_pass()
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

    def _inputs_of(self, part: int, device: int) -> tuple[tuple, dict[str, Any]]:
        """Return the inputs of a micro-batch once it has arrived."""
        self.part, rows = part, self.parts[part]
        if self.arrived:
            self.compute.streams[device].wait_event(self.arrived[part])
        self.batch_part.rows, self.batch_part.batch, self.batch_part.is_last = rows, self.batch, self.is_last_part

        def rows_of(tensor: torch.Tensor) -> torch.Tensor:
            count = count_rows(tensor, self.batch, self.length, self.heads)
            return tensor[rows.start * count : rows.stop * count] if count else tensor

        return replace_tensors(self.inputs, rows_of)

    def _finish_parts(self, layer: nn.Module, output: Any, index: int, next_device: int) -> Any:
        """Return the output of the whole batch, given that of the first micro-batch; its hidden states are on `next_device`."""
        device = self.layer_devices[index]
        sent: torch.Tensor | None = None
        outputs, arrived = [], []
        for part, rows in enumerate(self.parts):
            if part > 0:
                args, kwargs = self._inputs_of(part, device)
                output = layer.forward(*args, **kwargs)
            hidden, *others = output if isinstance(output, (tuple, list)) else (output,)
            if sent is None:
                target = self.streams[next_device].device
                sent = hidden.new_empty((self.batch, *hidden.shape[1:]), device=target)
            arrived.append(self._send(hidden, sent[rows], device, next_device))
            outputs.append(others)
        self.batch_part.rows = None
        self.sent, self.arrived, self.part, self.inputs = sent, arrived, 0, ((), {})
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

    def _await_parts(self, device: int) -> None:
        """Let `device` wait for all micro-batches that were sent."""
        for event in self.arrived:
            self.compute.streams[device].wait_event(event)
        self.arrived = []


def count_rows(tensor: torch.Tensor, batch: int, length: int, heads: int) -> int | None:
    """Return how many rows an input of a layer has for each of `batch` sequences of `length` tokens; 0 if it is the same for all, None if
    its form is unknown.

    One: hidden states [B, T, H], positions [B, T], masks [B, heads or 1, T, past + T]. None of its own: rotary embeddings [1, T, D] and
    [T, D], biases [heads, 1, T] of MPT. As many as heads: biases [B * heads, 1, past + T] of BLOOM and Falcon.
    """
    if tensor.dim() < 2 or tensor.shape[0] in (1, length):
        return 0
    if tensor.dim() == 3 and tensor.shape[1] == 1:
        known = {batch * heads: heads} if heads == batch else {batch * heads: heads, heads: 0}
        return known.get(tensor.shape[0])
    positions = tensor.shape[-2:] if tensor.dim() == 4 else tensor.shape[1:2]
    return 1 if tensor.shape[0] == batch and all(each >= length for each in positions) else None


def replace_tensors(value: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor replaced, in tuples, lists and dicts too; a KV cache stays the object that it is."""
    if torch.is_tensor(value):
        return replacement(value)
    if isinstance(value, (tuple, list)):
        parts = [replace_tensors(each, replacement) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
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
