"""Copies from host memory on every GPU while the GPUs give each other their shares: what slows the copies, and by how much.

    torchrun --nproc-per-node 2 benchmarks/gather_speed.py [--share-mb 88 315] [--host-gb 1 12] [--seconds 1.0] [--out FILE]

The stream engine over several GPUs: each rank copies its share of a layer over its own link into its place in a slot, and an
all-gather brings the others' shares. Every variant runs the same loop over a ring of slots. Columns: the slowest rank's GB/s
(1e9 bytes) while it copies, that over the copies alone, all ranks' GB/s over wall time, and milliseconds of one gather.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from zero_inference.utils.host_memory import host_empty

SLOTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--share-mb",
        type=int,
        nargs="+",
        default=[88, 315],
        metavar="MB",
        help="bytes a rank copies of a layer, in 1e6",
    )
    parser.add_argument(
        "--host-gb",
        type=float,
        nargs="+",
        default=[1, 12],
        metavar="GB",
        help="host memory of a rank that the copies go around, in 1e9 bytes",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurements as JSON")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = measure_all(args, rank, device)
    if args.out and rank == 0:
        found = {
            "device": torch.cuda.get_device_name(),
            "world_size": dist.get_world_size(),
            "nccl": torch.cuda.nccl.version(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def measure_all(args: argparse.Namespace, rank: int, device: torch.device) -> list[dict]:
    """A row a size of the share, a size of the host memory and a variant, printed by the first rank as it comes."""
    rows = []
    for megabytes, gigabytes in itertools.product(args.share_mb, args.host_gb):
        share = megabytes * 1_000_000 // 4096 * 4096
        copies = Copies(device, rank, dist.get_world_size(), share, max(2, int(gigabytes * 1e9 / share)))
        alone = None
        for name, gather in variants(copies):
            row = copies.measure(gather, args.seconds)
            alone = alone or row["gb_per_s"]
            row = {
                "share_mb": megabytes,
                "host_gb": gigabytes,
                "variant": name,
                **row,
                "of_alone": row["gb_per_s"] / alone,
            }
            rows.append(row)
            if rank == 0:
                print(
                    f"{megabytes:5d} MB of {gigabytes:4g} GB  {name:30s} {row['gb_per_s']:6.2f} GB/s a rank ({row['of_alone']:.1%}), all "
                    f"{row['all_gb_per_s']:6.1f} GB/s, gather {row['gather_ms']:.2f} ms",
                    flush=True,
                )
        del copies
        torch.cuda.empty_cache()
    return rows


def variants(copies: Copies):
    """(name, what gives the others this rank's share of a slot; None for nothing), each made when it is measured."""
    yield "copies alone", None
    yield "all-gather, default", copies.nccl(dist.group.WORLD)
    for channels in (4, 8):
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = channels
        yield f"all-gather, {channels} channels", copies.nccl(dist.new_group(pg_options=options))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    yield "all-gather, high priority", copies.nccl(dist.new_group(pg_options=options))
    yield "all-gather in 4 pieces", copies.nccl(dist.group.WORLD, pieces=4)
    pushed = copies.pushed()
    if pushed is not None:
        yield "copy engines push to the peers", pushed
    yield "copies alone, again", None


class Copies:
    """The loop of one rank: copy a share, then gather, around a ring of slots."""

    def __init__(self, device: torch.device, rank: int, ranks: int, share: int, buffers: int):
        self.device, self.rank, self.ranks, self.share = device, rank, ranks, share
        self.host = [host_empty((share,), torch.uint8, True).fill_(index) for index in range(buffers)]
        self.slots = [torch.empty(share * ranks, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.copy_stream, self.gather_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mine(self, slot: torch.Tensor) -> torch.Tensor:
        return slot[self.rank * self.share :][: self.share]

    def nccl(self, group, pieces: int = 1):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def run(slot: torch.Tensor) -> None:
            if pieces == 1:
                gather(slot, self.mine(slot), group=group)
                return
            length = self.share // pieces  # gathered apart: the time is what counts here, not where the bytes lie
            for index in range(pieces):
                whole = slot[index * length * self.ranks :][: length * self.ranks]
                gather(whole, whole[self.rank * length :][:length], group=group)

        return run

    def pushed(self):
        """Peers' slots mapped by symmetric memory, written by the copy engines; None where that cannot be had."""
        try:
            import torch.distributed._symmetric_memory as symmetric

            slots = [
                symmetric.empty(self.share * self.ranks, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)
            ]
            handles = [symmetric.rendezvous(slot, dist.group.WORLD) for slot in slots]
            views = [
                [handle.get_buffer(peer, (self.share * self.ranks,), torch.uint8) for peer in range(self.ranks)]
                for handle in handles
            ]
        except Exception as error:
            if self.rank == 0:
                print(f"no symmetric memory: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            return None

        def run(slot: torch.Tensor) -> None:
            index = next(i for i, one in enumerate(self.slots) if one is slot)
            for step in range(1, self.ranks):
                peer = (self.rank + step) % self.ranks
                self.mine(views[index][peer]).copy_(self.mine(slot), non_blocking=True)
            handles[index].barrier(channel=0)

        return run

    def measure(self, gather, seconds: float) -> dict[str, float]:
        """Medians over copies of this rank, then of the slowest rank."""
        self.loop(gather, 2 * SLOTS)
        dist.barrier()
        torch.cuda.synchronize()
        estimate = self.share / 50e9
        count = max(3 * SLOTS, int(seconds / estimate))
        begin = time.perf_counter()
        copies, gathers = self.loop(gather, count)
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
        rates = [self.share / start.elapsed_time(end) / 1e6 for start, end in copies[SLOTS:]]
        mine = torch.tensor(
            [
                statistics.median(rates),
                count * self.share / wall / 1e9,
                -statistics.median(start.elapsed_time(end) for start, end in gathers[SLOTS:]) if gathers else 0.0,
            ],
            device=self.device,
        )
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        return {"gb_per_s": float(mine[0]), "all_gb_per_s": float(mine[1]) * self.ranks, "gather_ms": -float(mine[2])}

    def loop(self, gather, count: int):
        copies, gathers, free = [], [], [None] * SLOTS
        for index in range(count):
            slot = self.slots[index % SLOTS]
            if free[index % SLOTS] is not None:
                self.copy_stream.wait_event(free[index % SLOTS])
            start, copied = event(self.copy_stream), None
            with torch.cuda.stream(self.copy_stream):
                self.mine(slot).copy_(self.host[index % len(self.host)], non_blocking=True)
            copied = event(self.copy_stream)
            copies.append((start, copied))
            if gather is None:
                continue
            self.gather_stream.wait_event(copied)
            begun = event(self.gather_stream)
            with torch.cuda.stream(self.gather_stream):
                gather(slot)
            free[index % SLOTS] = event(self.gather_stream)
            gathers.append((begun, free[index % SLOTS]))
        torch.cuda.synchronize()
        return copies, gathers


def event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    made = torch.cuda.Event(enable_timing=True)
    made.record(stream)
    return made


if __name__ == "__main__":
    sys.exit(main())
