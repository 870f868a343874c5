"""The hand-off between a device's stream and the CPU pool, with a simulated device whose kernels copy and raise flags when called."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from kernel_cases import on_gpu
from kernel_cases import relative_error as error
from test_cpu_experts import HIDDEN, Mixture, a_choice
from test_cpu_pool import plain, random
from test_kv_cache import prompts, small_model
from transformers import DynamicCache

from zero_inference.cpu.experts import CHOICES, COUNTS, HITS, ExpertActivation, WeightedRows, add_experts
from zero_inference.cpu.hand_off import HandOff, Lane, StreamSide, allocate_buffers
from zero_inference.cpu.pool import FLAG_BYTES, CpuPool, Routing, Stage
from zero_inference.errors import RunError
from zero_inference.kv_cache.attention_patch import patch_attention
from zero_inference.kv_cache.cpu_attention import CpuAttention, CpuAttentionCache
from zero_inference.utils.timing import Transfers

COLUMNS, ROWS = 64, 48


def word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class HostSide:
    """`StreamSide` with a CPU as the device: operations are done when they return."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.number = 0  # of the current call

    def push(self, tensors: Sequence[torch.Tensor], targets: Sequence[int], flag: int) -> None:
        for tensor, target in zip(tensors, targets):
            ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
        self.number = (self.number + 1) & 0xFFFFFFFF
        word(flag).value = self.number

    def pull(self, out: torch.Tensor, source: int, flag: int, stop: int, of_device: WeightedRows | None) -> None:
        limit = time.monotonic() + 60
        while ctypes.c_int32(word(flag).value - self.number).value < 0:
            if word(stop).value:
                raise Stopped
            assert time.monotonic() < limit, "the pool did not answer"
            time.sleep(2e-5)
        ctypes.memmove(out.data_ptr(), source, out.nbytes)
        if of_device is not None:
            out.copy_(of_device.added_to(out.view(len(of_device.weights), -1)).view(out.shape))

    def wait(self) -> None:
        pass

    end = wait


class Stopped(Exception):
    """A device that waits for the pool was released."""


@pytest.fixture
def make_hand_off():
    """make_hand_off(input_bytes, output_bytes, devices) -> a HandOff of two threads, and its counters."""
    made = []

    def make(input_bytes: int, output_bytes: int, devices: int = 1) -> tuple[HandOff, Transfers]:
        flags, buffers = allocate_buffers(input_bytes, output_bytes, pinned=False, devices=devices)
        pool, transfers = CpuPool([-1, -1], 1000, flags), Transfers()
        made.append(pool)
        return HandOff(pool, [Lane(HostSide(), each) for each in buffers], transfers), transfers

    yield make
    for pool in made:
        pool.close()


@pytest.mark.parametrize("rows", [1, 4, 5, 19])
def test_more_rows_than_there_is_memory_for_go_in_parts(rows, make_hand_off):
    weight, other = random(ROWS, COLUMNS), random(5, COLUMNS)
    calls, transfers = make_hand_off(4 * COLUMNS * 4, 4 * (ROWS + 5) * 4)  # for 4 rows of float32
    task = calls.pool.add_block([Stage([plain(weight), plain(other)])], torch.float32)
    calls.pool.reserve(task, 4)
    for _ in range(2):
        x = torch.randn(rows, COLUMNS)
        for out, of in zip(calls(task, x), (weight, other)):
            assert error(out, x.double() @ of.double().T) < 1e-6
    assert transfers.device_to_host_bytes == 2 * x.nbytes
    assert transfers.host_to_device_bytes == 2 * rows * (ROWS + 5) * 4
    assert transfers.cpu_bytes == 2 * -(-rows // 4) * task.nbytes


def test_numbers_go_on_after_32_bits(make_hand_off):
    weight = random(ROWS, COLUMNS)
    calls, _ = make_hand_off(4 * COLUMNS, 4 * ROWS)
    task = calls.pool.add_block([Stage([plain(weight)])], torch.float32)
    (lane,) = calls.lanes
    for start in (2**31 - 2, 2**32 - 2):
        lane.number = lane.side.number = start
        for flag in (lane.arrived, lane.done):
            word(flag).value = start & 0xFFFFFFFF
        for _ in range(4):
            x = torch.randn(1, COLUMNS)
            (out,) = calls(task, x)
            assert error(out, x.double() @ weight.double().T) < 1e-6


def test_experts_of_the_device_are_added_while_the_cpu_multiplies_the_others(make_hand_off):
    """As an expert block calls them: what was chosen is where it was said to be, and the sum is that of all experts."""
    mixture, counts = Mixture.random(torch.float32, 8), torch.zeros(COUNTS, dtype=torch.int64)
    calls, _ = make_hand_off(1 << 14, 1 << 14)
    task = add_experts(calls.pool, mixture.experts, ExpertActivation("silu"), torch.float32, counts)
    calls.pool.reserve(task, 5, 3)
    hits = 0
    for rows in (1, 5):
        x, choice = torch.randn(rows, HIDDEN), a_choice(rows, 3)
        there = choice.experts < 2
        hits += int(there.sum())
        numbers = torch.where(there, ~choice.experts, choice.experts)
        ones = torch.ones(rows, 1)
        single = [Routing(choice.experts[:, [i]], ones * there[:, [i]]) for i in range(3)]
        of_device = torch.stack([mixture.expected(x, each) for each in single], 1).float().flatten(0, 1)
        (out,) = calls(
            task, x, Routing(numbers, choice.weights), lambda: WeightedRows(choice.weights, of_device, 0 * of_device)
        )
        assert error(out, mixture.expected(x, choice)) < 1e-5
    assert counts[CHOICES] == 3 * 6 and counts[HITS] == hits


def test_calls_of_a_graph_are_submitted_at_each_replay(make_hand_off, monkeypatch):
    weight, graph = random(ROWS, COLUMNS), []
    calls, transfers = make_hand_off(4 * COLUMNS, 4 * ROWS)
    task = calls.pool.add_block([Stage([plain(weight)])], torch.float32)
    calls.pool.reserve(task, 1)
    x = torch.randn(1, COLUMNS)
    (expected,) = calls(task, x)
    one = transfers.snapshot()
    with monkeypatch.context() as recorder, calls.capturing() as captured:  # a graph's kernels do not run yet
        for name in ("push", "pull"):
            side = calls.lanes[0].side
            kernel = getattr(side, name)
            recorder.setattr(side, name, lambda *args, kernel=kernel: graph.append(lambda: kernel(*args)))
        outs = [calls(task, x)[0] for _ in range(3)]
    assert transfers.snapshot() == one and len(captured.submits) == 3
    for launches in (1, 2):
        x.normal_()
        with calls.replay(captured):
            for kernel in graph:
                kernel()
        assert all(error(out, x.double() @ weight.double().T) < 1e-6 for out in outs)
        assert transfers.snapshot() == tuple((1 + 3 * launches) * counted for counted in one)
        (found,) = calls(task, x)  # and others go on in between
        assert torch.equal(found, outs[0])
        transfers.host_to_device_bytes -= found.nbytes
        transfers.device_to_host_bytes -= x.nbytes
        transfers.cpu_bytes -= task.nbytes
    assert not torch.equal(expected, outs[0])
    with contextlib.suppress(KeyboardInterrupt), calls.replay(captured):
        raise KeyboardInterrupt  # before the graphs are launched
    with pytest.raises(RunError, match="a decode step was interrupted"):
        calls(task, x)


def test_attention_and_products_share_one_hand_off(make_hand_off):
    """Over a cache in host memory the logits are those of transformers, with products of the same threads in between."""
    model, ids = small_model("llama"), prompts(3, 40)
    patch_attention(model)
    calls, transfers = make_hand_off(1 << 16, 1 << 16)
    weight, x = random(ROWS, COLUMNS), torch.randn(2, COLUMNS)
    task = calls.pool.add_block([Stage([plain(weight)])], torch.float32)
    cache = CpuAttentionCache(model.config, 40, False, False, transfers, CpuAttention(calls))
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in ((0, 30), *((i, i + 1) for i in range(30, 36)), (36, 39)):
            found = model(ids[:, start:end], past_key_values=cache).logits
            expected = model(ids[:, start:end], past_key_values=theirs).logits
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            (out,) = calls(task, x)
            assert error(out, x.double() @ weight.double().T) < 1e-6


@pytest.fixture
def two_lanes(make_hand_off, monkeypatch):
    """A HandOff of two devices, which are both the CPU; its counters; and on(device), which names the one that makes the next calls."""
    calls, transfers = make_hand_off(4 * COLUMNS * 4 + 256, 4 * (ROWS + 5) * 4, devices=2)
    current = calls.lanes[:1]

    def on(device: int) -> None:
        nonlocal current
        current = calls.lanes[device:]

    monkeypatch.setattr(calls, "lane_of", lambda x: current[0])
    return calls, transfers, on


def test_each_device_has_its_own_outputs_and_numbers(two_lanes):
    """Calls of two devices in turn, of equal and of different tasks, with experts, and in parts."""
    calls, transfers, on = two_lanes
    weight, other, mixture = random(ROWS, COLUMNS), random(5, COLUMNS), Mixture.random(torch.float32, 8)
    task = calls.pool.add_block([Stage([plain(weight), plain(other)])], torch.float32)
    experts = add_experts(calls.pool, mixture.experts, ExpertActivation("silu"), torch.float32)
    calls.pool.reserve(task, 4)
    calls.pool.reserve(experts, 1, 3)
    made = [0, 0]
    for turn in range(24):
        device = (turn % 5) % 2
        on(device)
        if turn % 4 == 3:
            x, choice = torch.randn(1, HIDDEN), a_choice(1, 3)
            (out,) = calls(experts, x, choice)
            assert error(out, mixture.expected(x, choice)) < 1e-5
            made[device] += 1
            continue
        x = torch.randn(1 + turn % 7, COLUMNS)
        for out, of in zip(calls(task, x), (weight, other)):
            assert error(out, x.double() @ of.double().T) < 1e-6
        made[device] += 1 + (len(x) > 4)
    assert [lane.number for lane in calls.lanes] == [lane.side.number for lane in calls.lanes] == made
    assert [word(lane.done).value for lane in calls.lanes] == made
    assert transfers.cpu_bytes == (sum(made) - 6) * task.nbytes
    assert len({lane.output.data_ptr() for lane in calls.lanes}) == 2


def test_calls_of_two_devices_run_in_the_order_of_submission(two_lanes):
    """An input that is there before its turn waits, as do the calls after it; scratch memory grows after all of them."""
    calls, _, on = two_lanes
    weight = random(ROWS, COLUMNS)
    task = calls.pool.add_block([Stage([plain(weight)])], torch.float32)
    calls.pool.reserve(task, 1)
    first, second = calls.lanes
    x = torch.randn(1, COLUMNS)
    for lane in (first, second, second, first):
        calls.pool.submit(task, 1, lane.input.data_ptr(), lane.output.data_ptr(), lane.next_number(), (), lane.index)
    second.push([x])
    time.sleep(0.02)
    assert word(second.done).value == 0, "the first device's call is before it"
    reserved = threading.Thread(target=calls.pool.reserve, args=(task, 4), daemon=True)
    reserved.start()
    for number, lane in enumerate((first, second, first), 1):
        assert reserved.is_alive()
        if lane is not second or number > 1:
            lane.push([x])
        limit = time.monotonic() + 20
        while word(lane.done).value != lane.side.number:
            assert time.monotonic() < limit
            time.sleep(1e-4)
        found = lane.output[: ROWS * 4].view(torch.float32)
        assert error(found, (x.double() @ weight.double().T)[0]) < 1e-6
    reserved.join(20)
    assert not reserved.is_alive() and [word(lane.done).value for lane in (first, second)] == [2, 2]


def test_calls_of_graphs_on_two_devices_are_replayed_in_their_order(two_lanes, monkeypatch):
    calls, transfers, on = two_lanes
    weight, graph = random(COLUMNS, COLUMNS), []
    task = calls.pool.add_block([Stage([plain(weight)])], torch.float32)
    calls.pool.reserve(task, 1)
    x = torch.randn(1, COLUMNS)
    with monkeypatch.context() as recorder, calls.capturing() as captured:
        for lane in calls.lanes:
            for name in ("push", "pull"):
                kernel = getattr(lane.side, name)
                recorder.setattr(lane.side, name, lambda *args, kernel=kernel: graph.append(lambda: kernel(*args)))
        out = x
        for device in (0, 1, 1, 0, 1):  # the output of one device's call is the input of the next
            on(device)
            (out,) = calls(task, out)
    assert len(captured.submits) == 5 and transfers.cpu_bytes == 0
    expected = x.double()
    for launches in (1, 2):
        x.normal_()
        with calls.replay(captured):
            for kernel in graph:
                kernel()
        expected = x.double()
        for _ in range(5):
            expected = expected @ weight.double().T
        assert error(out, expected) < 1e-5
        assert transfers.cpu_bytes == 5 * launches * task.nbytes
        assert [lane.number for lane in calls.lanes] == [2 * launches, 3 * launches]


def test_the_end_of_the_pool_releases_all_devices(two_lanes):
    calls, _, on = two_lanes
    task = calls.pool.add_block([Stage([plain(random(ROWS, COLUMNS))])], torch.float32)
    calls.pool.reserve(task, 1)
    raised = []

    def wait(lane: Lane) -> None:
        lane.side.number = 1  # of a call that never comes
        try:
            lane.pull(torch.empty(ROWS), None)
        except Stopped as error:
            raised.append(error)

    waiting = [threading.Thread(target=wait, args=(lane,), daemon=True) for lane in calls.lanes]
    for thread in waiting:
        thread.start()
    time.sleep(0.02)
    assert all(thread.is_alive() for thread in waiting)
    calls.close()
    for thread in waiting:
        thread.join(20)
    assert len(raised) == 2


def test_flags_count_the_calls_so_they_are_used_once(make_hand_off):
    calls, transfers = make_hand_off(4 * COLUMNS, 4 * ROWS)
    task = calls.pool.add_block([Stage([plain(random(ROWS, COLUMNS))])], torch.float32)
    calls(task, torch.randn(1, COLUMNS))
    with pytest.raises(ValueError, match="have been used"):
        HandOff(calls.pool, calls.lanes, transfers)
    with pytest.raises(ValueError, match="flags of 1 devices, and 2 lanes"):
        HandOff(calls.pool, 2 * calls.lanes, transfers)


@pytest.fixture
def gpu_lane():
    """Page-locked buffers and flags of a GPU."""
    flags, (buffers,) = allocate_buffers(1 << 20, 1 << 20, pinned=True)
    lane = Lane(StreamSide(torch.device("cuda")), buffers)
    lane.use_flags(flags, 0)
    yield lane  # which has the address of `flags`


@on_gpu
def test_a_kernel_brings_several_tensors_and_raises_the_flag_once(gpu_lane):
    tensors = (
        [torch.randn(1, 2048).bfloat16(), torch.arange(8), torch.rand(1, 8)],
        [torch.randn(33, 4099).half(), torch.arange(99).view(33, 3), torch.rand(33, 3).bfloat16()],
        [torch.randn(5, 2880).bfloat16(), torch.arange(4), torch.rand(5).half(), torch.arange(7, dtype=torch.uint8)],
        [torch.arange(3, dtype=torch.uint8)],
    )
    for number, inputs in enumerate(tensors * 3, 1):
        gpu_lane.input.fill_(0xAB)
        ends = [0]
        for tensor in inputs:
            ends.append(ends[-1] + -(-tensor.nbytes // FLAG_BYTES) * FLAG_BYTES)
        addresses = gpu_lane.push([tensor.cuda() for tensor in inputs])
        assert addresses == [gpu_lane.input.data_ptr() + end for end in ends[:-1]]
        gpu_lane.side.wait()
        assert word(gpu_lane.arrived).value == number
        for tensor, begin, end in zip(inputs, ends, ends[1:]):
            written = gpu_lane.input[begin : begin + tensor.nbytes]
            assert written.tolist() == tensor.flatten().view(torch.uint8).tolist()
            assert bool((gpu_lane.input[begin + tensor.nbytes : end] == 0xAB).all())


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernel_adds_the_rows_of_the_device_to_what_the_cores_wrote(dtype, gpu_lane):
    """One block and several, rows of whole vectors and not, against float64; nothing is read before the flag is raised."""
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    number = 0
    for tokens, k, width in ((1, 8, 2048), (1, 4, 37), (3, 10, 96), (40, 2, 2880), (7, 1, 513)):
        for of_weights, both in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, True)):
            weights = torch.rand(tokens, k, device="cuda").to(of_weights)
            rows, more = (torch.randn(tokens * k, width, device="cuda").to(dtype) for _ in range(2))
            of_device = WeightedRows(weights, rows, more if both else None)
            exact = (rows.double() + both * more.double()).view(tokens, k, width)
            exact = (exact * weights.double().unsqueeze(-1)).sum(1)
            assert error(of_device.total(), exact) < bound and of_device.total().dtype == dtype
            from_cpu = torch.randn(tokens, width).to(dtype)
            out = torch.full((tokens * width,), float("nan"), dtype=dtype, device="cuda")
            number += 1
            gpu_lane.push([weights])
            gpu_lane.output.fill_(0xFF)  # not numbers
            gpu_lane.pull(out, of_device)
            gpu_lane.output[: from_cpu.nbytes] = from_cpu.flatten().view(torch.uint8)
            word(gpu_lane.done).value = number
            gpu_lane.side.wait()
            assert error(out.view(tokens, width), exact + from_cpu.double().cuda()) < bound
            again = torch.empty_like(out)
            gpu_lane.pull(again, of_device)
            assert torch.equal(again, out)
            gpu_lane.pull(again, None)
            assert torch.equal(again.view(tokens, width).cpu(), from_cpu)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("cuda_kernels")
def test_layers_of_several_gpus_share_the_pool():
    """Hidden states go from GPU to GPU and on each to the CPU and back, in launched steps and in graphs, one of each GPU."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    flags, buffers = allocate_buffers(1 << 14, 1 << 14, pinned=True, devices=len(devices))
    pool = CpuPool([-1, -1], 1000, flags)
    calls = HandOff(pool, [Lane(StreamSide(device), each) for device, each in zip(devices, buffers)], Transfers())
    weights = [random(COLUMNS, COLUMNS) for _ in range(2 * len(devices) + 1)]
    tasks = [pool.add_block([Stage([plain(weight)])], torch.float32) for weight in weights]

    def expected(x: torch.Tensor, layers: int) -> torch.Tensor:
        for weight in weights[:layers]:
            x = x.double() @ weight.double().T
        return x

    for rows in (1, 5, 70) * 10:  # 70 rows go in two parts
        x = torch.randn(rows, COLUMNS)
        hidden = x
        for layer, task in enumerate(tasks):
            (hidden,) = calls(task, hidden.to(devices[layer % len(devices)]))
        assert error(hidden.cpu(), expected(x, len(tasks))) < 1e-5
    inputs = [torch.zeros(2, COLUMNS, device=device) for device in devices]
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in devices], []
    with calls.capturing() as captured:
        for device, graph, task, hidden in zip(devices, graphs, tasks, inputs):
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                outputs += calls(task, hidden)
    for _ in range(20):
        x = torch.randn(2, COLUMNS)
        calls.replay(captured)
        for device, graph, hidden, source in zip(devices, graphs, inputs, [x, *outputs]):
            hidden.copy_(source)
            with torch.cuda.device(device):
                graph.replay()
        assert error(outputs[-1].cpu(), expected(x, len(devices))) < 1e-5
    calls.close()
