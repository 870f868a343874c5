"""The thread pool: blocks against float64, calls that wait for a flag, threads that rest and end."""

from __future__ import annotations

import time

import pytest
import torch
from kernel_cases import quantized
from kernel_cases import relative_error as error
from torch.nn import functional

from zero_inference.cpu.hand_off import DirectCalls
from zero_inference.cpu.pool import (
    ACTIVATION_NUMBERS,
    ARRIVED,
    DEVICE_FLAG_BYTES,
    DONE,
    FLAG_BYTES,
    STOP,
    CpuPool,
    Stage,
    Weight,
)
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models.mlp import ACTIVATIONS
from zero_inference.utils.timing import Transfers

HIDDEN, FFN = 96, 208


@pytest.fixture
def pool():
    made = CpuPool([-1, -1, -1], spin_us=0)
    yield made
    made.close()


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Weight:
    return Weight(Matrix.plain(weight), bias, weight.nbytes)


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)


def test_every_activation_has_a_number_and_is_the_function_of_its_name(pool):
    assert ACTIVATION_NUMBERS.keys() == ACTIVATIONS.keys()
    one = torch.eye(64)
    x = torch.linspace(-12, 12, 9 * 64).view(9, 64)
    calls = DirectCalls(pool, Transfers())
    for name, function in ACTIVATIONS.items():
        task = pool.add_block([Stage([plain(one)], "activation", name), Stage([plain(one)])], torch.float32)
        (out,) = calls(task, x)
        torch.testing.assert_close(out, function(x), atol=2e-6, rtol=2e-6, msg=name)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_a_gated_block_with_biases(dtype, bound, pool):
    torch.manual_seed(0)
    gate, up, down = random(FFN, HIDDEN, dtype=dtype), random(FFN, HIDDEN, dtype=dtype), random(70, FFN, dtype=dtype)
    of_gate, of_down = random(FFN, dtype=dtype), random(70, dtype=dtype)
    stages = [Stage([plain(gate, of_gate), plain(up)], "gated", "silu"), Stage([plain(down, of_down)])]
    task = pool.add_block(stages, dtype)
    transfers = Transfers()
    for rows in (1, 2, 17, 40):
        x = torch.randn(rows, HIDDEN).to(dtype)
        (out,) = DirectCalls(pool, transfers)(task, x)
        hidden = functional.silu(x.double() @ gate.double().T + of_gate.double()) * (x.double() @ up.double().T)
        assert error(out, hidden @ down.double().T + of_down.double()) < bound
    assert transfers.cpu_bytes == 4 * (gate.nbytes + up.nbytes + down.nbytes)


@pytest.mark.parametrize("bits", [8, 4])
def test_products_of_one_input_side_by_side_from_codes(bits, pool):
    torch.manual_seed(0)
    weights, kept, restored = [], [], []
    for rows in (33, 16, 5):
        parts, plain_weight = quantized(random(rows, HIDDEN), bits, 32)
        kept.append(parts)
        restored.append(plain_weight)
        weights.append(
            Weight(
                Matrix.quantized(GroupQuantization(bits, 32).as_weight(*parts), rows, HIDDEN, torch.float32), None, 0
            )
        )
    task = pool.add_block([Stage(weights)], torch.float32)
    for rows in (1, 9):
        x = torch.randn(rows, HIDDEN)
        for out, weight in zip(DirectCalls(pool, Transfers())(task, x), restored):
            assert out.is_contiguous()
            assert error(out, x.double() @ weight.double().T) < 1e-5


def test_a_half_of_the_rows_of_a_weight_is_where_it_lies(pool):
    packed, whole = quantized(random(64, HIDDEN), 4, 32)
    matrix = Matrix.quantized(GroupQuantization(4, 32).as_weight(*packed), 64, HIDDEN, torch.float32)
    x = torch.randn(3, HIDDEN)
    for first in (0, 32):
        task = pool.add_block([Stage([Weight(matrix.rows_view(first, 32), None, 0)])], torch.float32)
        (out,) = DirectCalls(pool, Transfers())(task, x)
        assert error(out, x.double() @ whole[first : first + 32].double().T) < 1e-5


class FakeDevices:
    """The flags of hand-offs as devices use them: these raise `ARRIVED` and wait for `DONE`."""

    def __init__(self, devices: int = 1, spin_us: int = 20_000):
        self.flags = torch.zeros(devices * DEVICE_FLAG_BYTES, dtype=torch.uint8)
        self.pool = CpuPool([-1, -1], spin_us, self.flags)
        self.weight = random(48, HIDDEN)
        self.task = self.pool.add_block([Stage([plain(self.weight)])], torch.float32)
        self.pool.reserve(self.task, 4)  # from now on threads know what they read first
        self.x, self.out = torch.randn(devices, 4, HIDDEN), torch.full((devices, 4, 48), float("nan"))

    def word(self, flag: int, device: int = 0) -> torch.Tensor:
        return self.flags[device * DEVICE_FLAG_BYTES + flag * FLAG_BYTES :][:4].view(torch.int32)

    def submit(self, number: int, device: int = 0) -> None:
        x, out = self.x[device], self.out[device]
        self.pool.submit(self.task, 4, x.data_ptr(), out.data_ptr(), number, device=device)

    def wait(self, number: int, device: int = 0) -> None:
        limit = time.monotonic() + 20
        while int(self.word(DONE, device)) != number:
            assert time.monotonic() < limit, "the pool did not answer"
            time.sleep(1e-4)

    def wrong(self, device: int = 0) -> float:
        return error(self.out[device], self.x[device].double() @ self.weight.double().T)


def test_calls_wait_for_their_input_and_are_made_in_order():
    device = FakeDevices()
    for number in (1, 2, 3):
        device.submit(number)
    time.sleep(0.05)
    assert int(device.word(DONE)) == 0 and device.out.isnan().all(), "no input has arrived"
    for number in (1, 2, 3):
        device.x.normal_()
        device.word(ARRIVED).fill_(number)
        device.wait(number)
        assert device.wrong() < 1e-6
    assert device.pool.busy_s() > 0
    device.pool.close()


@pytest.mark.parametrize("devices", [2, 4])
def test_a_call_waits_for_its_own_device_and_for_the_calls_before_it(devices):
    fake = FakeDevices(devices)
    for number in (1, 2):
        for device in range(devices):
            fake.submit(number, device)
    for number in (1, 2):
        fake.out.fill_(float("nan"))
        for device in range(devices - 1, 0, -1):  # the first device's input comes last
            fake.word(ARRIVED, device).fill_(number)
        time.sleep(0.02)
        assert [int(fake.word(DONE, device)) for device in range(devices)] == [number - 1] * devices
        assert fake.out.isnan().all()
        fake.word(ARRIVED).fill_(number)
        for device in range(devices):
            fake.wait(number, device)
            assert fake.wrong(device) < 1e-6
    fake.pool.close()


@pytest.mark.parametrize("submitted", [0, 3])
@pytest.mark.parametrize("devices", [1, 2])
def test_threads_end_though_an_input_never_comes(devices, submitted):
    fake = FakeDevices(devices)
    for number in range(submitted):
        fake.submit(number + 1, devices - 1)
    start = time.monotonic()
    fake.pool.close()
    fake.pool.close()
    assert time.monotonic() - start < 5
    assert all(int(fake.word(STOP, device)) == 1 for device in range(devices)), "devices that wait are released"
