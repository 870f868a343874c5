"""The meeting of a device's stream with the cores, by a device made of Python: its kernels copy and raise flags when they are called."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from test_attended_cache import prompts, small_model
from test_cores import error, plain, random
from test_cores_experts import EXPERTS, HIDDEN, Mixture, a_choice
from transformers import DynamicCache

from zero_inference.cores import crossing
from zero_inference.cores.choice import Choice
from zero_inference.cores.cores import FLAG_BYTES, FLAGS, Cores, Stage
from zero_inference.cores.crossing import Crossing
from zero_inference.cores.experts import CHOICES, FIRST_USE, HITS, add_experts, elsewhere
from zero_inference.kv_cache.attended import AttendedCache
from zero_inference.kv_cache.diverted import divert_attention
from zero_inference.kv_cache.meetings import CoresMeeting
from zero_inference.runtime.transfers import Transfers

COLUMNS, ROWS = 64, 48


def word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def push(tensor, target, flag, scratch) -> None:
    ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
    if flag:
        scratch[2] += 1
        word(flag).value = int(scratch[2])


def pull(out, source, flag, stop, scratch) -> None:
    limit = time.monotonic() + 20
    while word(flag).value != int(scratch[2]) & 0xFFFFFFFF:
        assert time.monotonic() < limit, "the cores did not answer"
        time.sleep(1e-4)
    ctypes.memmove(out.data_ptr(), source, out.nbytes)


@pytest.fixture
def meet(monkeypatch):
    """meet(input_bytes, output_bytes) -> a Crossing of two threads, and its counters."""
    monkeypatch.setattr(torch.ops.zero_inference, "crossing_push", push, raising=False)
    monkeypatch.setattr(torch.ops.zero_inference, "crossing_pull", pull, raising=False)
    monkeypatch.setattr(crossing, "host_empty", lambda shape, dtype, pinned: torch.empty(shape, dtype=dtype))
    made = []

    def make(input_bytes: int, output_bytes: int) -> tuple[Crossing, Transfers]:
        cores, transfers = Cores([-1, -1], 1000, torch.zeros(FLAGS * FLAG_BYTES, dtype=torch.uint8)), Transfers()
        made.append(cores)
        return Crossing(cores, torch.device("cpu"), input_bytes, output_bytes, transfers), transfers

    yield make
    for cores in made:
        cores.close()


@pytest.mark.parametrize("rows", [1, 4, 5, 19])
def test_more_rows_than_there_is_memory_for_go_in_parts(rows, meet):
    weight, other = random(ROWS, COLUMNS), random(5, COLUMNS)
    calls, transfers = meet(4 * COLUMNS * 4, 4 * (ROWS + 5) * 4)  # for 4 rows of float32
    task = calls.cores.add_block([Stage([plain(weight), plain(other)])], torch.float32)
    calls.cores.reserve(task, 4)
    for _ in range(2):
        x = torch.randn(rows, COLUMNS)
        for out, of in zip(calls(task, x), (weight, other)):
            assert error(out, x.double() @ of.double().T) < 1e-6
    assert transfers.device_to_host_bytes == 2 * x.nbytes
    assert transfers.host_to_device_bytes == 2 * rows * (ROWS + 5) * 4
    assert transfers.cores_bytes == 2 * -(-rows // 4) * task.nbytes


def test_numbers_go_on_behind_32_bits(meet):
    weight = random(ROWS, COLUMNS)
    calls, _ = meet(4 * COLUMNS, 4 * ROWS)
    task = calls.cores.add_block([Stage([plain(weight)])], torch.float32)
    for start in (2**31 - 2, 2**32 - 2):
        calls.number = start
        calls.scratch[2] = ctypes.c_int32(start).value
        for flag in (calls.arrived, calls.done):
            word(flag).value = start & 0xFFFFFFFF
        for _ in range(4):
            x = torch.randn(1, COLUMNS)
            (out,) = calls(task, x)
            assert error(out, x.double() @ weight.double().T) < 1e-6


def test_several_inputs_lie_one_behind_the_other_and_the_last_one_raises_the_flag(meet):
    calls, _ = meet(4096, 4096)
    inputs = [torch.randn(3), torch.arange(5), torch.randn(2, 2)]
    seen: list[list[bytes]] = []

    def submit(addresses, number):
        assert word(calls.arrived).value == number
        seen.append([ctypes.string_at(address, tensor.nbytes) for address, tensor in zip(addresses, inputs)])
        assert all(address % FLAG_BYTES == addresses[0] % FLAG_BYTES for address in addresses)
        word(calls.done).value = number

    calls.meet(inputs, torch.empty(4), submit)
    assert seen == [[tensor.numpy().tobytes() for tensor in inputs]]
    with pytest.raises(ValueError, match="an input of 8192 bytes"):
        calls.meet([torch.empty(2048)], torch.empty(4), submit)


def test_the_device_works_between_input_and_output(meet):
    calls, _ = meet(4096, 4096)

    def meanwhile():
        assert word(calls.arrived).value == calls.number == 1, "behind the input"
        word(calls.done).value = calls.number  # and before the output, which nothing else lets through

    calls.meet([torch.randn(3)], torch.empty(4), lambda addresses, number: None, meanwhile)
    assert word(calls.done).value == calls.number == 1


def test_experts_of_the_device_are_added_while_the_cores_multiply_the_others(meet):
    """As an expert block calls them: what was chosen is where it was said to be, and the sum is that of all experts."""
    mixture, use = Mixture.random(torch.float32, 8), torch.zeros(FIRST_USE + EXPERTS, dtype=torch.int64)
    calls, _ = meet(1 << 14, 1 << 14)
    task = add_experts(calls.cores, mixture.experts, "silu", torch.float32, use)
    calls.cores.reserve(task, 5, 3)
    for rows in (1, 5):
        x, choice = torch.randn(rows, HIDDEN), a_choice(rows, 3)
        there, of_device = choice.experts < 2, []
        numbers = torch.where(there, elsewhere(choice.experts), choice.experts)
        on_device = Choice(choice.experts, choice.weights.masked_fill(~there, 0))
        (out,) = calls(
            task, x, Choice(numbers, choice.weights), lambda: of_device.append(mixture.expected(x, on_device))
        )
        assert error(out + of_device[0], mixture.expected(x, choice)) < 1e-5
    assert use[CHOICES] == 3 * 6 and use[HITS] == use[FIRST_USE : FIRST_USE + 2].sum()


def test_calls_of_a_graph_are_asked_for_whenever_it_is_launched(meet, monkeypatch):
    weight, graph = random(ROWS, COLUMNS), []
    calls, transfers = meet(4 * COLUMNS, 4 * ROWS)
    task = calls.cores.add_block([Stage([plain(weight)])], torch.float32)
    calls.cores.reserve(task, 1)
    x = torch.randn(1, COLUMNS)
    (expected,) = calls(task, x)
    one = transfers.snapshot()
    with monkeypatch.context() as recorder, calls.recording() as recorded:  # a graph's kernels do not run yet
        for name, kernel in (("crossing_push", push), ("crossing_pull", pull)):
            recorder.setattr(
                torch.ops.zero_inference, name, lambda *args, kernel=kernel: graph.append(lambda: kernel(*args))
            )
        outs = [calls(task, x)[0] for _ in range(3)]
    assert transfers.snapshot() == one and len(recorded.submits) == 3
    for launches in (1, 2):
        x.normal_()
        calls.ask_again(recorded)
        for kernel in graph:
            kernel()
        assert all(error(out, x.double() @ weight.double().T) < 1e-6 for out in outs)
        assert transfers.snapshot() == tuple((1 + 3 * launches) * counted for counted in one)
        (found,) = calls(task, x)  # and others go on in between
        assert torch.equal(found, outs[0])
        transfers.host_to_device_bytes -= found.nbytes
        transfers.device_to_host_bytes -= x.nbytes
        transfers.cores_bytes -= task.nbytes
    assert not torch.equal(expected, outs[0])


def test_attention_and_products_share_one_meeting(meet):
    """Over a cache in host memory the logits are those of transformers, with products of the same threads in between."""
    model, ids = small_model("llama"), prompts(3, 40)
    divert_attention(model)
    calls, transfers = meet(1 << 16, 1 << 16)
    weight, x = random(ROWS, COLUMNS), torch.randn(2, COLUMNS)
    task = calls.cores.add_block([Stage([plain(weight)])], torch.float32)
    cache = AttendedCache(model.config, 40, False, False, transfers, CoresMeeting(calls))
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in ((0, 30), *((i, i + 1) for i in range(30, 36)), (36, 39)):
            found = model(ids[:, start:end], past_key_values=cache).logits
            expected = model(ids[:, start:end], past_key_values=theirs).logits
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            (out,) = calls(task, x)
            assert error(out, x.double() @ weight.double().T) < 1e-6
