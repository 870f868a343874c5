"""What a meeting of the device and the host's cores costs while the link is busy."""

from __future__ import annotations

import statistics

import torch

from zero_inference.cpu.hand_off import HandOff
from zero_inference.cpu.pool import CpuPool, Stage, Task, Weight
from zero_inference.cpu.products import Matrix
from zero_inference.hardware.copies import Copies

MEETINGS, MEETING_WIDTH = 200, 16  # of a feed-forward so narrow that it costs little but the meeting
MEETING_ROUNDS = 3
MEETING_COPIES = 4  # rounds of copies beside each, 156 ms at 55 GB/s; half of them before it begins: 0.4 ms a meeting


def crossed_bytes(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of a rank's input and output where it has `rows` rows in `crossing_s`."""
    return (rows * columns * dtype.itemsize,) * 2


def crossing_s(
    crossing: HandOff, link: Copies, dtype: torch.dtype, rows: int, columns: int, rounds: int = MEETING_ROUNDS
) -> float:
    """Seconds of a meeting with `rows` rows of each rank, as `BesideLink` says; all ranks call it together.

    The meetings begin behind half of the copies, when Python has asked for all of them: its time is not what is measured. A kernel that
    waits for a number of cycles instead may wait until all copies have ended, where the device's clock is low.
    """
    task, weights = narrow_feed_forward(crossing.pool, dtype, columns)
    crossing.pool.reserve(task, rows)
    x = torch.zeros(rows, columns, dtype=dtype, device=link.device)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copies = [link.begin() for _ in range(MEETING_COPIES)]
        torch.cuda.current_stream(link.device).wait_event(copies[MEETING_COPIES // 2 - 1][1])
        (x,) = crossing(task, x)  # the ranks come together, and the cores' threads wake up
        start.record()
        for _ in range(MEETINGS):
            (x,) = crossing(task, x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / MEETINGS)
        copies[-1][1].synchronize()
    del weights  # the cores have read them
    return statistics.median(times)


def narrow_feed_forward(cores: CpuPool, dtype: torch.dtype, columns: int) -> tuple[Task, tuple[torch.Tensor, ...]]:
    """From `columns` to as many, and its weights, which are to be kept."""
    weights = torch.randn(MEETING_WIDTH, columns).to(dtype), torch.randn(columns, MEETING_WIDTH).to(dtype)
    first, last = (Weight(Matrix.plain(weight), None, 0) for weight in weights)
    return cores.add_block([Stage([first], "activation", "relu"), Stage([last])], dtype), weights
