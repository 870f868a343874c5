"""Compare direct reads of a disk by threads (`utils.direct_io`, as the stream engine reads) with DeepSpeed's handle of libaio.

    python benchmarks/disk_reads.py /tmp --file-gib 8

For each size of a request and each number of requests at once it prints the GB/s of reading a part of a new file into page-locked memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import torch

from zero_inference.hardware.bench_copies import random_bytes
from zero_inference.utils.direct_io import DirectIO, open_direct
from zero_inference.utils.host_memory import host_empty

MIB = 1 << 20
REQUESTS_MIB, DEPTHS = (1, 2, 4, 8, 16), (4, 8, 16, 32, 64)
PART_BYTES = 1 << 30  # of a measurement


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file-gib", type=int, default=8)
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
