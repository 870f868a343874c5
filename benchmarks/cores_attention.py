"""Time attention of one new token on the CPU backend: GB/s of keys and values read, with the link idle or busy.

    python benchmarks/cores_attention.py [--busy-link] [--threads 4 8 15] [--batches 1 16 64]

Layers have OPT-13B's shape by default and fill --gigabytes, so that no cache holds them. Each line is a case, timed for --seconds. With
--layouts position-major memory is timed too, where a head's rows are not contiguous.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common.cpu_backend import busy_link
from zero_inference.cpu.attention import LogitOptions, add_attention, run_attention
from zero_inference.cpu.pool import CpuPool, choose_cpus
from zero_inference.kv_cache.cpu_attention import blocks_for
from zero_inference.utils.host_memory import host_empty

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SPIN_US = 2000
WARM_UP_CALLS = 2


def parse_args() -> argparse.Namespace:
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
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of keys and values (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of each case")
    parser.add_argument("--layouts", action="store_true", help="time position-major memory too")
    parser.add_argument("--busy-link", action="store_true", help="time each case again during copies to the GPU")
    return parser.parse_args()


def filled_memory(nbytes: int) -> torch.Tensor:
    """Return host memory, uint8 [nbytes], of random numbers that are finite and small in any of DTYPES."""
    flat = host_empty((nbytes,), torch.uint8, pinned=False)
    pattern = torch.randn(1 << 22).to(torch.float16).view(torch.uint8)
    for start in range(0, nbytes, pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return flat


def layers_in(
    flat: torch.Tensor, args: argparse.Namespace, batch: int, position_major: bool
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield keys and values [blocks, batch, kv_heads, positions, head_dim] of as many layers as `flat` holds."""
    dtype, (blocks, positions) = DTYPES[args.dtype], blocks_for(args.positions)
    shape = (blocks, batch, args.kv_heads, positions, args.head_dim)
    numel = math.prod(shape)
    values = flat.view(dtype)
    for start in range(0, values.numel() - 2 * numel + 1, 2 * numel):
        pair = values[start : start + 2 * numel].view(2, *shape)
        if position_major:  # [positions, batch, kv_heads, head_dim]
            rows = pair.view(2, 1, blocks * positions, batch, args.kv_heads, args.head_dim)
            pair = rows.permute(0, 1, 3, 4, 2, 5)
        yield pair[0], pair[1]


def attention_gb_per_s(
    flat: torch.Tensor, args: argparse.Namespace, batch: int, threads: int, position_major: bool
) -> float:
    pool = CpuPool(choose_cpus(threads), spin_us=SPIN_US)
    try:
        dtype, logits = DTYPES[args.dtype], LogitOptions(args.head_dim**-0.5)
        layers = layers_in(flat, args, batch, position_major)
        tasks = [add_attention(pool, *keys_and_values, args.heads, logits) for keys_and_values in layers]
        packed = torch.randn(batch * (args.heads + 2 * args.kv_heads) * args.head_dim).to(dtype)
        out = torch.empty((batch, 1, args.heads, args.head_dim), dtype=dtype)

        def attend(call: int) -> None:
            run_attention(pool, tasks[call % len(tasks)], packed, out, 1, args.positions, 0)

        for call in range(WARM_UP_CALLS):
            attend(call)
        calls, start = 0, time.perf_counter()
        while calls < 1 or time.perf_counter() - start < args.seconds:
            attend(WARM_UP_CALLS + calls)
            calls += 1
        seconds = (time.perf_counter() - start) / calls
    finally:
        pool.close()
    return 2 * batch * args.kv_heads * args.positions * args.head_dim * dtype.itemsize / seconds / 1e9


def main() -> None:
    args = parse_args()
    most = len(choose_cpus(None))
    threads = args.threads or sorted({1, max(1, most // 2), most})
    flat = filled_memory(int(args.gigabytes * 1e9) // 4096 * 4096)
    print(f"{args.heads} heads on {args.kv_heads}, {args.head_dim} wide, {args.positions} positions, {args.dtype}")
    print(f"{'batch':>5} {'threads':>7} {'layout':>15} {'GB/s':>7} {'a thread':>8} {'link GB/s':>9}")
    layouts = (False, True) if args.layouts else (False,)
    busy_states = (False, True) if args.busy_link else (False,)
    for batch, count, position_major, busy in itertools.product(args.batches, threads, layouts, busy_states):
        with busy_link() if busy else nullcontext() as link:
            rate = attention_gb_per_s(flat, args, batch, count, position_major)
        name = "position-major" if position_major else f"blocks of {blocks_for(args.positions)[1]}"
        shown = f"{link.gb_per_s:9.1f}" if link else f"{'idle':>9}"
        print(f"{batch:5} {count:7} {name:>15} {rate:7.1f} {rate / count:8.1f} {shown}", flush=True)


if __name__ == "__main__":
    main()
