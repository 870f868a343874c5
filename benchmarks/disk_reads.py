"""Compare direct reads of a disk by threads (`utils.direct_io`, as the stream engine reads) with DeepSpeed's handle of libaio.

    python benchmarks/disk_reads.py /tmp --file-gib 8

For each size of a request and each number of requests at once it prints the GB/s of reading a part of a new file into page-locked memory.
With `--spin` it prints instead how fast threads read while all CPUs but one spin, as idle threads of the CPU backend do: 128 MiB after
128 MiB, four requested at once, and 110 MiB (about an expert of Mixtral-8x7B in 4 bits) after pauses.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path

import torch

from zero_inference.engines.stream.disk import PIECE_BYTES
from zero_inference.hardware.bench_copies import random_bytes
from zero_inference.utils.direct_io import DirectIO, open_direct
from zero_inference.utils.host_memory import host_empty

MIB = 1 << 20
REQUESTS_MIB, DEPTHS = (1, 2, 4, 8, 16), (4, 8, 16, 32, 64)
PART_BYTES = 1 << 30  # of a measurement
EXPERT_BYTES = 110 << 20
SPIN_S, PAUSE_S = 1.2, 0.004


def by_threads(path: Path, memory: torch.Tensor, request_bytes: int, depth: int) -> Callable[[int], None]:
    io, file = DirectIO(request_bytes, depth), open_direct(path)

    def read(offset: int) -> None:
        futures = io.read(file, memory, offset)
        wait(futures)
        assert sum(each.result() for each in futures) == memory.numel()

    return read


def by_libaio(path: Path, memory: torch.Tensor, request_bytes: int, depth: int) -> Callable[[int], None]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    threads = 4  # as the plan of the deepspeed engine has it
    handle = (
        AsyncIOBuilder().load(verbose=False).aio_handle(request_bytes, max(1, depth // threads), False, True, threads)
    )

    def read(offset: int) -> None:
        handle.async_pread(memory, str(path), offset)
        handle.wait()

    return read


def sustained_gb_per_s(io: DirectIO, file: int, memory: torch.Tensor, parts: int) -> float:
    slots, starts, queue, done = memory.split(PIECE_BYTES), itertools.count(), deque(), 0
    end = (start := time.perf_counter()) + SPIN_S
    while time.perf_counter() < end:
        while len(queue) < 4:
            number = next(starts)
            queue.append(io.read(file, slots[number % 4], number % parts * PIECE_BYTES))
        done += sum(each.result() for each in queue.popleft())
    seconds = time.perf_counter() - start
    wait(itertools.chain(*queue))
    return done / seconds / 1e9


def single_gb_per_s(io: DirectIO, file: int, memory: torch.Tensor, parts: int) -> float:
    spent, count = 0.0, 0
    while spent < SPIN_S:
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        wait(io.read(file, memory[:EXPERT_BYTES], count % parts * PIECE_BYTES))
        spent, count = spent + time.perf_counter() - start, count + 1
    return count * EXPERT_BYTES / spent / 1e9


def compare_spinning(path: Path, memory: torch.Tensor) -> None:
    all_cpus, file, parts = os.sched_getaffinity(0), open_direct(path), path.stat().st_size // PIECE_BYTES
    first, *others = sorted(all_cpus)
    for cpus, spin in ((all_cpus, False), ({first}, False), ({first}, True), (all_cpus, True)) * 2:
        loop = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
        spinning = [subprocess.Popen([sys.executable, "-c", loop, str(cpu)]) for cpu in others if spin]
        try:
            os.sched_setaffinity(0, cpus)  # which the threads inherit
            with closing(DirectIO()) as io:
                rates = [measure(io, file, memory, parts) for measure in (sustained_gb_per_s, single_gb_per_s)]
        finally:
            os.sched_setaffinity(0, all_cpus)
            for each in spinning:
                each.kill()
                each.wait()
        where = f"{'on one CPU' if len(cpus) == 1 else 'on all CPUs'}{', others spin' * spin}"
        print(f"{where:25} sustained {rates[0]:.2f}, single {rates[1]:.2f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file-gib", type=int, default=8)
    parser.add_argument("--spin", action="store_true")
    args = parser.parse_args()
    memory = host_empty((PART_BYTES,), torch.uint8, pinned=torch.cuda.is_available())
    memory.copy_(random_bytes(PART_BYTES))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "blocks.bin"
        writer = DirectIO()
        start = time.perf_counter()
        file = open_direct(path, os.O_WRONLY | os.O_CREAT)
        for part in range(args.file_gib):
            writer.write(file, memory, part * PART_BYTES)
        os.fsync(file)
        print(f"written: {args.file_gib * PART_BYTES / (time.perf_counter() - start) / 1e9:.2f} GB/s", flush=True)
        if args.spin:
            compare_spinning(path, memory)
            return
        part = 0
        for name, make in (("threads", by_threads), ("libaio", by_libaio)):
            print(f"\n{name}, GB/s\n{'at once':>7}" + "".join(f"{depth:>7}" for depth in DEPTHS))
            for mib in REQUESTS_MIB:
                print(f"{mib:>3} MiB", end="")
                for depth in DEPTHS:
                    read = make(path, memory, mib * MIB, depth)
                    start = time.perf_counter()
                    read(part % args.file_gib * PART_BYTES)
                    print(f"{PART_BYTES / (time.perf_counter() - start) / 1e9:7.2f}", end="", flush=True)
                    part += 1
                print()


if __name__ == "__main__":
    main()
