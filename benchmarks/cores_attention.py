"""Attention of one new token by the host's cores: GB/s of keys and values read, beside an idle and a busy link.

    python benchmarks/cores_attention.py [--busy-link] [--threads 4 8 15] [--batches 1 16 64]

Layers of OPT-13B's shape by default, as many as fill --gigabytes, so that no cache holds them. Every case is timed for --seconds; a
line is one case. With --layouts position-major memory, whose rows of a head are one row apart, is timed too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common.host_cores import busy_link
from zero_inference.cpu.attention import LogitOptions, add_attention, run_attention
from zero_inference.cpu.pool import CpuPool, choose_cpus
from zero_inference.kv_cache.cpu_attention import blocks_for
from zero_inference.utils.host_memory import host_empty

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SPIN_US = 2000
WARM_UP_CALLS = 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--kv-heads", type=int, default=40)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=None, help="default: 1, half of the cores, all but one"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of keys and values that calls go through")
    parser.add_argument("--seconds", type=float, default=0.7, help="each case is timed")
    parser.add_argument("--layouts", action="store_true", help="position-major memory too")
    parser.add_argument("--busy-link", action="store_true", help="once more beside copies to the GPU")
    return parser.parse_args()


def memory(nbytes: int) -> torch.Tensor:
    """Host memory of uint8 whose pages are there, with small numbers in any of the types."""
    flat = host_empty((nbytes,), torch.uint8, pinned=False)
    pattern = torch.randn(1 << 22).to(torch.float16).view(torch.uint8)
    for start in range(0, nbytes, pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return flat


def layers(
    flat: torch.Tensor, asked: argparse.Namespace, batch: int, major: bool
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Keys and values of as many layers as `flat` holds, at least one, as `attention` takes them."""
    dtype, (blocks, positions) = DTYPES[asked.dtype], blocks_for(asked.positions)
    shape = (blocks, batch, asked.kv_heads, positions, asked.head_dim)
    numel = blocks * batch * asked.kv_heads * positions * asked.head_dim
    values = flat.view(dtype)
    for start in range(0, values.numel() - 2 * numel + 1, 2 * numel):
        pair = values[start : start + 2 * numel].view(2, *shape)
        if major:  # [positions, batch, kv_heads, head_dim]
            rows = pair.view(2, 1, blocks * positions, batch, asked.kv_heads, asked.head_dim)
            pair = rows.permute(0, 1, 3, 4, 2, 5)
        yield pair[0], pair[1]


def gb_per_s(flat: torch.Tensor, asked: argparse.Namespace, batch: int, threads: int, major: bool) -> float:
    cores = CpuPool(choose_cpus(threads), spin_us=SPIN_US)
    try:
        dtype = DTYPES[asked.dtype]
        scale = asked.head_dim**-0.5
        numbers = [
            add_attention(cores, *pair, asked.heads, LogitOptions(scale)) for pair in layers(flat, asked, batch, major)
        ]
        packed = torch.randn(batch * (asked.heads + 2 * asked.kv_heads) * asked.head_dim).to(dtype)
        out = torch.empty((batch, 1, asked.heads, asked.head_dim), dtype=dtype)
        calls, start = -WARM_UP_CALLS, time.perf_counter()
        while calls < 1 or time.perf_counter() - start < asked.seconds:
            if calls == 0:
                start = time.perf_counter()
            run_attention(cores, numbers[calls % len(numbers)], packed, out, 1, asked.positions, 0)
            calls += 1
        seconds = (time.perf_counter() - start) / calls
    finally:
        cores.close()
    return 2 * batch * asked.kv_heads * asked.positions * asked.head_dim * dtype.itemsize / seconds / 1e9


def main() -> None:
    asked = parse()
    most = len(choose_cpus(None))
    threads = asked.threads or sorted({1, max(1, most // 2), most})
    flat = memory(int(asked.gigabytes * 1e9) // 4096 * 4096)
    print(f"{asked.heads} heads on {asked.kv_heads}, {asked.head_dim} wide, {asked.positions} positions, {asked.dtype}")
    print(f"{'batch':>5} {'threads':>7} {'layout':>15} {'GB/s':>7} {'a thread':>8} {'link GB/s':>9}")
    for batch in asked.batches:
        for count in threads:
            for major in (False, True) if asked.layouts else (False,):
                for busy in (False, True) if asked.busy_link else (False,):
                    with busy_link() if busy else nullcontext() as link:
                        rate = gb_per_s(flat, asked, batch, count, major)
                    name = "position-major" if major else f"blocks of {blocks_for(asked.positions)[1]}"
                    shown = f"{link.gb_per_s:9.1f}" if link else f"{'idle':>9}"
                    print(f"{batch:5} {count:7} {name:>15} {rate:7.1f} {rate / count:8.1f} {shown}", flush=True)


if __name__ == "__main__":
    main()
