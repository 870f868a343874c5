"""Keys and values in host memory pass through device slots: copies on several streams of one or several devices, run here in any order
that their events allow."""

from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from zero_inference.kv_cache import host
from zero_inference.utils.timing import Transfers

BATCH, HEADS, DIM, LENGTH = 2, 1, 3, 9


class Machine:
    """Streams that do queued work at some time, each in its own order and after the events it waits for."""

    def __init__(self, seed: int, devices: int):
        self.random, self.streams = random.Random(seed), []
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.compute = {device: self.stream(device) for device in self.devices}
        self.current = self.compute[self.devices[0]]

    def stream(self, device):
        machine = self

        class Stream:
            def __init__(self):
                self.device = device
                self.work = deque()
                machine.streams.append(self)

            def wait_event(self, event):
                self.work.append(event.wait())

            def wait_stream(self, other):
                event = machine.event()
                event.record(other)
                self.wait_event(event)

            def synchronize(self):
                machine.run(lambda: not self.work)

        return Stream()

    def event(self):
        class Event:
            count = seen = 0  # recordings that were queued, and done
            device = None  # of the stream that recorded it first

            def record(self, stream):
                self.device = self.device or stream.device
                assert stream.device == self.device, "an event of another device"
                self.count += 1
                stream.work.append(lambda count=self.count: setattr(self, "seen", count) or True)

            def wait(self):
                return lambda count=self.count: self.seen >= count

        return Event()

    def queue(self, action):
        self.current.work.append(lambda: action() or True)

    def run(self, until):
        while not until():
            able = [stream for stream in self.streams if stream.work]
            assert able, "no stream has work that would end the wait"
            stream = self.random.choice(able)
            if stream.work[0]():
                stream.work.popleft()

    def run_some(self):
        """Run some or none of the queued work, as a device does while Python goes on."""
        for _ in range(self.random.choice((0, 0, 3, 30))):
            able = [stream for stream in self.streams if stream.work]
            if able and (stream := self.random.choice(able)).work[0]():
                stream.work.popleft()


class Memory(torch.Tensor):
    """Memory of that machine: copies are queued, and done later."""

    machine: Machine

    def record_stream(self, stream) -> None:
        """It is never given back here."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            target, source = (each.as_subclass(torch.Tensor) for each in args[:2])
            cls.machine.queue(lambda: target.copy_(source).numel() and None)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def fake_cuda(monkeypatch, seed: int, devices: int = 1):
    machine = Memory.machine = Machine(seed, devices)

    @contextmanager
    def on(stream):
        before, machine.current = machine.current, stream
        try:
            yield
        finally:
            machine.current = before

    cuda = SimpleNamespace(
        Stream=machine.stream, Event=machine.event, stream=on, current_stream=lambda device: machine.compute[device]
    )

    def empty(numel, dtype, device):
        return torch.full((numel,), float("nan"), dtype=dtype).as_subclass(Memory)

    monkeypatch.setattr(host, "torch", SimpleNamespace(cuda=cuda, empty=empty, Tensor=torch.Tensor))
    monkeypatch.setattr(
        host, "host_empty", lambda shape, dtype, pinned: torch.zeros(shape, dtype=dtype).as_subclass(Memory)
    )
    yield machine


def generations_agree(monkeypatch, layers: int, seed: int, sharing: int = 0, sizes: int = 1, devices: int = 1) -> None:
    """Check what attention reads of each layer in each pass of two generations, when it runs on the computing stream of its device.

    Args:
        sharing: layers after the others, which read the keys and values of the last two of these in turn.
        sizes: number of head sizes, which layers have in turn.
        devices: have layers in turn, each after the computation of the layer before.
    """
    wrong = []

    def states_of(layer: int, start: int, end: int, generation: int = 0) -> tuple[Memory, Memory]:
        """Return keys and values [batch, heads, new, head_dim], other numbers for each generation, layer, position and side."""
        first, shape = 1e5 * generation + 1000.0 * layer, (BATCH, HEADS, DIM * (1 + layer % sizes))
        sides = [[torch.full(shape, first + 10 * at + side) for at in range(start, end)] for side in (1, 2)]
        return tuple(torch.stack(side, 2).as_subclass(Memory) for side in sides)

    with fake_cuda(monkeypatch, seed, devices) as machine:
        rings = {device: host._DeviceSlots(True, Transfers(), device, wraps=not sharing) for device in machine.devices}
        cache = [host._HostLayer(rings.get, LENGTH, True) for _ in range(layers)]

        def attend(cached, layer: int, end: int, generation: int) -> None:
            expected = states_of(layer, 0, end, generation)

            def compare() -> None:
                pairs = zip(cached, expected)
                if not all(torch.equal(*(t.as_subclass(torch.Tensor) for t in pair)) for pair in pairs):
                    wrong.append((generation, layer, end))

            machine.queue(compare)
            machine.run_some()

        for generation in range(2):
            start = 0
            for end in (3, 4, 5, 6, 8, 9):  # a prompt of three, tokens, and two at once
                read = []
                for index, layer in enumerate(cache):
                    layer.device = machine.devices[index % devices]
                    before, machine.current = machine.current, machine.compute[layer.device]
                    if machine.current is not before:
                        machine.current.wait_stream(before)  # for the hidden states
                    if not layer.is_initialized:
                        layer.dtype, layer.is_initialized = torch.float32, True
                        layer.allocate(*states_of(index, 0, 3))
                    read.append(layer.update(*states_of(index, start, end, generation)))
                    attend(read[-1], index, end, generation)
                for number in range(sharing):
                    attend(read[-1 - number % 2], layers - 1 - number % 2, end, generation)
                start = end
            for ring in rings.values():
                ring.wait()
            for layer in cache:
                layer.length = 0
        machine.run(lambda: not any(stream.work for stream in machine.streams))
    assert not wrong, wrong


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_attention_reads_what_was_written_in_any_order_that_streams_allow(layers, monkeypatch):
    for seed in range(30):
        generations_agree(monkeypatch, layers, seed)


@pytest.mark.parametrize("layers, devices", [(2, 2), (3, 2), (7, 2), (7, 3)])
def test_each_device_has_slots_for_its_layers(layers, devices, monkeypatch):
    for seed in range(20):
        generations_agree(monkeypatch, layers, seed, devices=devices)


def test_layers_of_different_sizes_share_the_slots(monkeypatch):
    """These grow when a larger layer comes, in the first prompt, while smaller ones are on their way out of them."""
    for seed in range(30):
        generations_agree(monkeypatch, 7, seed, sizes=3)


def test_layers_that_share_keys_and_values_read_them_before_their_slots_are_filled_again(monkeypatch):
    for seed in range(40):
        generations_agree(monkeypatch, 5, seed, sharing=4)
    with pytest.raises(AssertionError, match=r"\["):  # what would be if the first layers were asked for before
        monkeypatch.setattr(
            host._DeviceSlots, "wraps", property(lambda self: True, lambda self, value: None), raising=False
        )
        for seed in range(60):
            generations_agree(monkeypatch, 5, seed, sharing=4)


@pytest.mark.parametrize(
    "of, forgotten, layers",
    [
        (host._DeviceSlots, "released", 7),
        (host._DeviceSlots, "written", 7),
        (host._DeviceSlots, "written", 1),
        (host._DeviceSlots, "appended", 7),
        (host._Slot, "filled", 7),
        (host._Slot, "written", 7),
    ],
)
def test_the_order_that_is_asked_for_is_needed(of, forgotten, layers, monkeypatch):
    """Without one of the events some order gives other keys or values: the tests above would notice."""
    never = SimpleNamespace(record=lambda stream: None, wait=lambda: lambda: True)
    monkeypatch.setattr(of, forgotten, property(lambda self: never, lambda self, event: None), raising=False)
    with pytest.raises(AssertionError, match=r"\["):
        for seed in range(300):
            generations_agree(monkeypatch, layers, seed)
