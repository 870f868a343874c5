"""The hand-off between a device's stream and the CPU pool, with a simulated device whose kernels copy and raise flags when called."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest
import torch
from kernel_cases import on_gpu
from kernel_cases import relative_error as error
from test_cpu_experts import HIDDEN, Mixture, a_choice
from test_cpu_pool import plain, random
from test_kv_cache import prompts, small_model
from transformers import DynamicCache

from zero_inference.cpu.experts import CHOICES, COUNTS, HITS, Expert, ExpertActivation, WeightedRows, add_experts
from zero_inference.cpu.hand_off import HandOff, HostSide, RankExchange, StreamSide, allocate_local_buffers
from zero_inference.cpu.library import require_library
from zero_inference.cpu.pool import FLAG_BYTES, STOP, CpuPool, CpuPoolProxy, Routing, Stage
from zero_inference.errors import RunError
from zero_inference.kv_cache.attention_patch import patch_attention
from zero_inference.kv_cache.cpu_attention import CpuAttention, CpuAttentionCache
from zero_inference.utils.timing import Transfers

COLUMNS, ROWS = 64, 48


def word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


@pytest.fixture
def make_hand_off():
    """make_hand_off(input_bytes, output_bytes) -> a HandOff of two threads, and its counters."""
    made = []

    def make(input_bytes: int, output_bytes: int) -> tuple[HandOff, Transfers]:
        buffers, transfers = allocate_local_buffers(input_bytes, output_bytes, pinned=False), Transfers()
        pool = CpuPool([-1, -1], 1000, buffers.flags)
        made.append(pool)
        return HandOff(pool, HostSide(), buffers, transfers), transfers

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
    for start in (2**31 - 2, 2**32 - 2):
        calls.number = start
        calls.side.number = start
        for flag in (calls.arrived, calls.done):
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
            kernel = getattr(calls.side, name)
            recorder.setattr(calls.side, name, lambda *args, kernel=kernel: graph.append(lambda: kernel(*args)))
        outs = [calls(task, x)[0] for _ in range(3)]
    assert transfers.snapshot() == one and len(captured.submits) == 3
    for launches in (1, 2):
        x.normal_()
        calls.replay(captured)
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
def gpu_side():
    """(page-locked buffers, the stream of a GPU)."""
    return allocate_local_buffers(1 << 20, 1 << 20, pinned=True), StreamSide(torch.device("cuda"))


@on_gpu
def test_a_kernel_brings_several_tensors_and_raises_the_flag_once(gpu_side):
    buffers, side = gpu_side
    flag = buffers.flags.data_ptr()
    tensors = (
        [torch.randn(1, 2048).bfloat16(), torch.arange(8), torch.rand(1, 8)],
        [torch.randn(33, 4099).half(), torch.arange(99).view(33, 3), torch.rand(33, 3).bfloat16()],
        [torch.randn(5, 2880).bfloat16(), torch.arange(4), torch.rand(5).half(), torch.arange(7, dtype=torch.uint8)],
        [torch.arange(3, dtype=torch.uint8)],
    )
    for number, inputs in enumerate(tensors * 3, 1):
        buffers.input.fill_(0xAB)
        ends = [0]
        for tensor in inputs:
            ends.append(ends[-1] + -(-tensor.nbytes // FLAG_BYTES) * FLAG_BYTES)
        side.push([tensor.cuda() for tensor in inputs], [buffers.input.data_ptr() + end for end in ends[:-1]], flag)
        side.wait()
        assert word(flag).value == number
        for tensor, begin, end in zip(inputs, ends, ends[1:]):
            assert buffers.input[begin : begin + tensor.nbytes].tolist() == tensor.flatten().view(torch.uint8).tolist()
            assert bool((buffers.input[begin + tensor.nbytes : end] == 0xAB).all())


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernel_adds_the_rows_of_the_device_to_what_the_cores_wrote(dtype, gpu_side):
    """One block and several, rows of whole vectors and not, against float64; nothing is read before the flag is raised."""
    buffers, side = gpu_side
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    number, (arrived, done, stop) = 0, (buffers.flags.data_ptr() + i * FLAG_BYTES for i in range(3))
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
            side.push([weights], [buffers.input.data_ptr()], arrived)
            buffers.output.fill_(0xFF)  # not numbers
            side.pull(out, buffers.output.data_ptr(), done, stop, of_device)
            buffers.output[: from_cpu.nbytes] = from_cpu.flatten().view(torch.uint8)
            require_library().zero_inference_raise_flag(done, number)
            side.wait()
            assert error(out.view(tokens, width), exact + from_cpu.double().cuda()) < bound
            again = torch.empty_like(out)
            side.pull(again, buffers.output.data_ptr(), done, stop, of_device)
            assert torch.equal(again, out)
            side.pull(again, buffers.output.data_ptr(), done, stop, None)
            assert torch.equal(again.view(tokens, width).cpu(), from_cpu)


RANKS = 3


class Host:
    """Ranks that are threads of this process, each with its own end of the hand-off."""

    def __init__(self, input_bytes: int, output_bytes: int, first_number: int = 0):
        self.buffers = allocate_local_buffers(input_bytes, output_bytes, False, RANKS)
        self.pools = [CpuPool([-1, -1], 0, self.buffers.flags, ranks=RANKS)]
        self.pools += [CpuPoolProxy(RANKS) for _ in range(RANKS - 1)]
        self.transfers = [Transfers() for _ in range(RANKS)]
        self.calls = [
            HandOff(pool, HostSide(), self.buffers, transfers, rank)
            for rank, (pool, transfers) in enumerate(zip(self.pools, self.transfers))
        ]

    def run(self, work: Callable[[int], None]) -> list[BaseException | None]:
        """Run `work` of all ranks at once; return what each raised."""
        raised: list[BaseException | None] = [None] * RANKS

        def catching(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                raised[rank] = error

        threads = [threading.Thread(target=catching, args=(rank,), daemon=True) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        return raised

    def close(self) -> None:
        for calls in reversed(self.calls):
            calls.close()


def choice_of(rows: int, experts: int, seed: int) -> Routing:
    random_of = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(experts, generator=random_of)[:2] for _ in range(rows)])
    return Routing(chosen, torch.rand(rows, 2, generator=random_of))


@pytest.mark.parametrize("first_number", [0, 2**32 - 3])
def test_ranks_make_one_call_of_their_rows_and_each_takes_its_own(first_number):
    """Calls of other sizes follow each other, with one output, three, and experts; more rows than there is memory for go in parts."""
    torch.manual_seed(0)
    weights = [random(ROWS, COLUMNS), random(5, COLUMNS), random(17, COLUMNS)]
    gates, downs = ([random(*shape) for _ in range(4)] for shape in ((24, COLUMNS), (COLUMNS, 24)))
    host = Host(4 * COLUMNS * 4 + 256, 4 * (ROWS + 5 + 17) * 4)
    single, several, mixture = [], [], []
    for pool in host.pools:
        single.append(pool.add_block([Stage([plain(weights[0])])], torch.float32))
        several.append(pool.add_block([Stage([plain(weight) for weight in weights])], torch.float32))
        experts = [Expert(plain(gate).matrix, None, plain(down).matrix) for gate, down in zip(gates, downs)]
        mixture.append(add_experts(pool, experts, ExpertActivation("relu"), torch.float32))
        pool.reserve(mixture[-1], 4, 2)
    for flag in {*range(2 + RANKS)} - {STOP}:
        word(host.buffers.flags.data_ptr() + flag * FLAG_BYTES).value = first_number
    xs = {(rank, turn): torch.randn(1 + turn % 4, COLUMNS) for rank in range(RANKS) for turn in range(12)}
    xs |= {(rank, turn): torch.randn(7, COLUMNS) for rank in range(RANKS) for turn in (12, 13)}

    def work(rank: int) -> None:
        host.calls[rank].number = host.calls[rank].side.number = first_number
        for turn in range(14):
            x = xs[rank, turn]
            if turn % 3 == 2:
                choice = choice_of(len(x), 4, 100 * rank + turn)
                (out,) = host.calls[rank](mixture[rank], x, choice)
                expected = torch.zeros(len(x), COLUMNS, dtype=torch.float64)
                for row, (chosen, shares) in enumerate(zip(*choice)):
                    for expert, share in zip(chosen.tolist(), shares.tolist()):
                        hidden = torch.relu(gates[expert].double() @ x[row].double())
                        expected[row] += share * (downs[expert].double() @ hidden)
                assert error(out, expected) < 1e-5
                continue
            of = weights if turn % 3 else weights[:1]
            for out, weight in zip(host.calls[rank]((several if turn % 3 else single)[rank], x), of, strict=True):
                assert error(out, x.double() @ weight.double().T) < 1e-5

    assert host.run(work) == [None] * RANKS
    host.close()
    reads = [transfers.cpu_bytes for transfers in host.transfers]
    assert reads[0] > 0 and reads[1:] == [0] * (RANKS - 1), "what the CPU reads is counted once"
    sent = [(transfers.device_to_host_bytes, transfers.host_to_device_bytes) for transfers in host.transfers]
    assert len(set(sent)) == 1 and min(sent[0]) > 0


def test_a_rank_that_ends_lets_the_others_go():
    weight = random(ROWS, COLUMNS)
    host = Host(4 * COLUMNS * 4, 4 * ROWS * 4)
    tasks = [pool.add_block([Stage([plain(weight)])], torch.float32) for pool in host.pools]

    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(0.2)
            host.calls[rank].close()
            return
        host.calls[rank](tasks[rank], torch.randn(2, COLUMNS))

    raised = host.run(work)
    assert raised[1] is None and all(isinstance(raised[rank], RunError) for rank in (0, 2))
    assert "another rank ended" in str(raised[0])
    host.close()


def test_what_all_ranks_have_done_is_there_though_one_has_ended():
    """A rank that is done leaves while the last to be told has not yet looked."""
    host = Host(64, 64)
    exchanges = [RankExchange(rank, RANKS, host.buffers) for rank in range(RANKS)]

    def work(rank: int) -> None:
        for turn in range(200):
            found = exchanges[rank].all_gather(turn * (rank - 1) - 2**40)
            assert found == [turn * (other - 1) - 2**40 for other in range(RANKS)]
        host.calls[rank].close() if rank else None

    assert host.run(work) == [None] * RANKS
    host.close()
