"""Time products of a few tokens with codes on a CUDA device: our fused operator, its alternatives and its launch sizes.

    python benchmarks/quantized_products.py [--save FILE] [--dtype float16] [--sweep | --experts]
        [--shapes 5120x5120 ...] [--tokens 1 ...] [--formats int4 ...]    (exit code 2 without device or kernel)

Microseconds are those of one product, median of replays of a CUDA graph of many products with different weights, more than the L2 cache
holds. GB/s are 10^9 stored bytes of the weight (codes and all scales) a second; the share is that of a copy inside the device, whose
bytes read and written both count. `--sweep` times every launch size of the fused operator instead, from which those of
csrc/launch_sizes.cuh are chosen. `--experts` times what a layer of Qwen3-30B-A3B does with cached experts, and a hand-off to the CPU
that is answered at once.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.shapes import shape_of  # noqa: E402

SHAPES = (  # rows, columns: Llama 13B, then 70B
    (5120, 5120),
    (13824, 5120),
    (5120, 13824),
    (8192, 8192),
    (28672, 8192),
    (8192, 28672),
    (1024, 8192),
)
TOKENS = (1, 2, 4, 8, 16, 32)
CACHES = 4  # times the L2 cache that the weights of one measurement fill at least
LAUNCHES = 24  # of a graph, at least
SECONDS = 0.05  # of replays
COLUMN_WARPS, SPLITS, CHUNK_STEPS = (1, 2, 4, 8), (1, 2, 4, 8), (2, 4)  # swept; see csrc/launch_sizes.cuh
HIDDEN, INNER, EXPERTS_PER_TOKEN, SLOTS = 2048, 768, 8, 16  # Qwen3-30B-A3B; SLOTS: cached experts
# "int4" and "int8" are our own; "sym" and "zero" have no minima, but zero points of 8 or of a byte
FORMATS = ("int4", "int8", "int4sym", "int4zero", "int8sym", "mxfp4", "nvfp4", "fp8blocks", "fp8rows")
FIELDS = ("rows", "columns", "format", "tokens", "what", "launch", "us", "gb_per_s", "share_of_copy")


class Timing(NamedTuple):
    """Time of a product by `what` with a number of tokens; `launch` is "table", or the launch size."""

    tokens: int
    what: str
    launch: str
    us: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", type=Path, metavar="FILE", help="write every measurement, tab-separated")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sweep", action="store_true", help="time every launch of the fused operator")
    kind.add_argument("--experts", action="store_true", help="time a mixture's experts and the hand-off instead")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS", help="of weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="experts: of int4 and int8")
    parser.add_argument("--group-size", type=int, default=32, help="of integers; default: 32, as runs have with 4 bits")
    args = parser.parse_args()
    import torch

    from zero_inference.kernels import products
    from zero_inference.kernels.extension import load_extension, why_unavailable

    if not load_extension():
        print(f"no fused product: {why_unavailable()}", file=sys.stderr)
        return 2
    dtype = getattr(torch, args.dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}, groups of {args.group_size}")
    if args.experts:
        own = [int(name[3:]) for name in args.formats if name in ("int4", "int8")]
        rows = [row for bits in own for row in time_experts(bits, dtype, args.group_size, args.tokens)]
        if args.save:
            args.save.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
        return 0
    copy = copy_gb_per_s()
    print(f"a copy inside the device: {copy:.0f} GB/s\n")
    rows = []
    for (height, width), name in itertools.product(args.shapes, args.formats):
        form = format_of(name, dtype, args.group_size)
        if not products.format_can_fuse(form, dtype) or height % form.group_rows:
            print(f"note: {name} of {height} x {width} in {args.dtype} is left out: no fused product", file=sys.stderr)
            continue
        weights = Weights(height, width, name, form, dtype)
        timed = (sweep if args.sweep else compare)(weights, args.tokens)
        for *names, us in timed:
            rate = weights.stored_bytes / us / 1e3
            rows.append((height, width, name, *names, f"{us:.2f}", f"{rate:.0f}", f"{rate / copy:.3f}"))
        show(weights, timed, copy)
        del weights
    if args.save:
        args.save.write_text("".join("\t".join(map(str, row)) + "\n" for row in (FIELDS, *rows)))
    return 0


def format_of(name: str, dtype, group_size: int):
    """Return the `WeightFormat` of one of `FORMATS`; scales of integers are in `dtype`."""
    import torch

    from zero_inference.kernels.formats import Codes, WeightFormat

    if name.startswith("int"):
        codes, kind = (Codes.INT4 if name[3] == "4" else Codes.INT8), name[4:]
        return WeightFormat(codes, group_size, scale_dtype=dtype, minima=kind == "", zero_points=kind == "zero")
    return {
        "mxfp4": WeightFormat(Codes.E2M1, 32, scale_dtype=torch.float8_e8m0fnu),
        "nvfp4": WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True, divides=True),
        "fp8blocks": WeightFormat(Codes.E4M3, 128, 128),
        "fp8rows": WeightFormat(Codes.E4M3, row_scales=True),
    }[name]


def draw_weight(form, rows: int, columns: int):
    """Return a random weight without NaN."""
    import torch

    from zero_inference.kernels.formats import Codes, QuantizedWeight

    def draw(name: str, shape: tuple[int, ...], dtype):
        if name == "codes":  # of e4m3 below 2
            return torch.randint(0, 64 if form.codes == Codes.E4M3 else 256, shape, dtype=dtype, device="cuda")
        if dtype in (torch.uint8, torch.float8_e8m0fnu):
            zero = dtype == torch.uint8
            return torch.randint(*((0, 16) if zero else (118, 124)), shape, dtype=torch.uint8, device="cuda").view(
                dtype
            )
        if name == "offsets":
            return (0.05 * torch.randn(shape, device="cuda") - 0.1).to(dtype)
        large = dtype == torch.float8_e4m3fn or (name == "row_scales" and form.divides)
        return ((100 if large else 0.01) * (1 + torch.rand(shape, device="cuda"))).to(dtype)

    tensors = {name: draw(name, *each) for name, each in form.tensors((rows, columns)).items()}
    return QuantizedWeight(form, **tensors)


class Weights:
    """Random weights of one shape, more than the L2 cache holds: `packed` as codes, `plain` (up to eight) dequantized."""

    def __init__(self, rows: int, columns: int, name: str, form, dtype):
        import torch

        from zero_inference.kernels.quantization import dequantize

        self.rows, self.columns, self.name, self.form, self.dtype = rows, columns, name, form, dtype
        self.stored_bytes = form.stored_bytes((rows, columns))
        cache = torch.cuda.get_device_properties("cuda").L2_cache_size
        count = max(2, -(-CACHES * cache // self.stored_bytes))
        self.packed = [draw_weight(form, rows, columns) for _ in range(count)]
        self.plain = [torch.empty(rows, columns, dtype=dtype, device="cuda") for _ in self.packed[:8]]
        for packed, plain in zip(self.packed, self.plain):
            dequantize(packed, plain)
        self.workspace = torch.empty_like(self.plain[0])
        self.tinygemm = self._for_tinygemm()

    def _for_tinygemm(self) -> list:
        """Return (codes, scales) in the layout of torch's own int4 product, for each weight; none where it does not run."""
        import torch

        if self.name != "int4" or self.dtype != torch.bfloat16:
            return []
        groups = torch.rand(self.columns // self.form.group_size, self.rows, 2, dtype=self.dtype, device="cuda")
        try:
            return [(torch._convert_weight_to_int4pack(each.codes, 8), groups) for each in self.packed]
        except RuntimeError as error:
            print(f"note: torch's int4 product is left out: {str(error).splitlines()[0]}", file=sys.stderr)
            return []

    def draw_input(self, tokens: int):
        import torch

        return torch.randn(tokens, self.columns, device="cuda").to(self.dtype)

    def fused(self, x, packed, launch: tuple[int, ...] = ()):
        import torch

        from zero_inference.kernels.products import no_bias
        from zero_inference.kernels.quantization import operands

        none = no_bias(x.device, x.dtype)
        return torch.ops.zero_inference.linear_groups(x, *operands(packed), self.rows, none, *launch)

    def dequantized(self, x, packed):
        from torch.nn import functional

        from zero_inference.kernels.quantization import dequantize

        dequantize(packed, self.workspace)
        return functional.linear(x, self.workspace)


def compare(weights: Weights, counts: Sequence[int]) -> list[Timing]:
    """Time the fused operator, twice, and its alternatives."""
    import torch
    from torch.nn import functional

    timed = []
    for tokens in counts:
        x = weights.draw_input(tokens)
        ways: list[tuple[str, Callable, list]] = [
            ("fused", lambda packed, x=x: weights.fused(x, packed), weights.packed),
            ("fused again", lambda packed, x=x: weights.fused(x, packed), weights.packed),
            ("dequantize + linear", lambda packed, x=x: weights.dequantized(x, packed), weights.packed),
            ("16-bit linear", lambda plain, x=x: functional.linear(x, plain), weights.plain),
        ]
        if weights.tinygemm:
            torch_int4 = torch._weight_int4pack_mm
            ways.append(
                (
                    "torch int4",
                    lambda each, x=x: torch_int4(x, each[0], weights.form.group_size, each[1]),
                    weights.tinygemm,
                )
            )
        timed += [Timing(tokens, what, "table", microseconds(work, inputs)) for what, work, inputs in ways]
    return timed


def sweep(weights: Weights, counts: Sequence[int]) -> list[Timing]:
    """Time the fused operator with the launch size that the table chooses, and with all that fit the device."""
    import torch

    clusters = torch.cuda.get_device_capability()[0] >= 9
    launches = [launch for launch in itertools.product(COLUMN_WARPS, SPLITS, CHUNK_STEPS) if clusters or launch[1] == 1]
    timed = []
    for tokens in counts:
        x = weights.draw_input(tokens)
        timed.append(Timing(tokens, "fused", "table", microseconds(lambda p, x=x: weights.fused(x, p), weights.packed)))
        for launch in launches:
            try:
                weights.fused(x, weights.packed[0], launch)
            except RuntimeError:  # more shared memory than a block may have
                continue
            us = microseconds(lambda p, x=x, launch=launch: weights.fused(x, p, launch), weights.packed)
            timed.append(Timing(tokens, "fused", "x".join(map(str, launch)), us))
    return timed


def time_experts(bits: int, dtype, group_size: int, counts: Sequence[int]) -> list[tuple]:
    """Print and return (tokens, hits of a token, bits, part, microseconds), over the experts of more layers than the L2 cache holds."""
    import ctypes

    import torch

    from zero_inference.cpu.experts import WeightedRows
    from zero_inference.cpu.hand_off import StreamSide, allocate_buffers
    from zero_inference.cpu.pool import ARRIVED, DONE, FLAG_BYTES, STOP
    from zero_inference.engines.stream.products import epilogue_of
    from zero_inference.kernels.products import quantized_expert_linear
    from zero_inference.kernels.quantization import GroupQuantization
    from zero_inference.models.mlp import FusedExperts

    epilogue = epilogue_of(FusedExperts("first", "last", "silu", SLOTS, True))

    scheme = GroupQuantization(bits, group_size)

    def packed(rows: int, columns: int) -> tuple:
        groups = rows * columns // group_size
        codes = torch.randint(0, 256, (SLOTS, rows * columns * bits // 8), dtype=torch.uint8, device="cuda")
        scale, minimum = (0.01 * torch.randn(SLOTS, groups, device="cuda").to(dtype) for _ in range(2))
        return scheme.as_weight(codes, scale, minimum), rows

    layers, timed = [(packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER)) for _ in range(5)], []
    k, side = EXPERTS_PER_TOKEN, StreamSide(torch.device("cuda"))
    flags, (buffers,) = allocate_buffers(1 << 20, 1 << 20, pinned=True)
    done, stop, arrived = (flags.data_ptr() + FLAG_BYTES * flag for flag in (DONE, STOP, ARRIVED))
    ctypes.c_uint32.from_address(done).value = 1 << 30  # the CPU is done with every call
    source, target = buffers.output.data_ptr(), buffers.input.data_ptr()
    for tokens, hits in ((tokens, hits) for tokens in counts for hits in (1, 4, 8)):
        x, weights = (torch.rand(tokens, n, device="cuda").to(dtype) for n in (HIDDEN, k))
        chosen = torch.stack([torch.randperm(SLOTS, device="cuda")[:k] for _ in range(tokens)])
        slot = torch.where(torch.arange(k, device="cuda") < hits, chosen, -1).view(-1)
        out, pushed = torch.empty(tokens * HIDDEN, dtype=dtype, device="cuda"), [x, chosen, weights]
        targets = [target + offset for offset in (0, x.nbytes, x.nbytes + chosen.nbytes)]

        def first(layer, x=x, slot=slot):
            return quantized_expert_linear(x, *layer[0], slot, None, epilogue)

        def last(layer, hidden, slot=slot, tokens=tokens):
            return quantized_expert_linear(hidden, *layer[1], slot, tokens=tokens)

        def pull(rows, weights=weights, out=out):
            side.pull(out, source, done, stop, WeightedRows(weights, rows))

        hidden = first(layers[0])
        rows = last(layers[0], hidden)
        parts = {
            "first product": first,
            "last product": lambda layer, last=last, hidden=hidden: last(layer, hidden),
            "weighted sum": lambda _, rows=rows, weights=weights: WeightedRows(weights, rows).total(),
            "push": lambda _, pushed=pushed, targets=targets: side.push(pushed, targets, arrived),
            "sum and pull": lambda _, pull=pull, rows=rows: pull(rows),
            "products, sum and pull": lambda layer, pull=pull, last=last, first=first: pull(last(layer, first(layer))),
        }
        print(f"{tokens} tokens, {hits} of {k} experts of each here, int{bits}; us:")
        for name, work in parts.items():
            us = microseconds(work, layers)
            print(f"  {name:24} {us:6.1f}")
            timed.append((tokens, hits, bits, name, f"{us:.2f}"))
    return timed


def microseconds(work: Callable, inputs: list) -> float:
    """Return the time of one `work(input)` among many in a CUDA graph, with the inputs in turn; median of replays."""
    import torch

    from zero_inference.utils.timing import capture_graph, measure_median_s

    device, turns = torch.device("cuda"), -(-LAUNCHES // len(inputs)) * len(inputs)
    graph = capture_graph(device, lambda: [work(inputs[turn % len(inputs)]) for turn in range(turns)])
    return 1e6 * measure_median_s(device, graph, SECONDS) / turns


def copy_gb_per_s() -> float:
    """Return the rate of a copy of 1 GiB inside the device, with bytes read and written."""
    import torch

    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda _: target.copy_(source), [None]) / 1e3


def show(weights: Weights, timed: list[Timing], copy: float) -> None:
    """Print, for each number of tokens, all times; of a sweep those of the table and of the best launch sizes."""
    swept = any(each.launch != "table" for each in timed)
    launches = " (column warps x splits x steps of a chunk)" * swept
    print(f"{weights.rows} x {weights.columns}, {weights.name}, {weights.stored_bytes / 1e6:.1f} MB{launches}")
    for tokens in dict.fromkeys(each.tokens for each in timed):
        of_tokens = [each for each in timed if each.tokens == tokens]
        times = {each.what if each.launch == "table" else each.launch: each.us for each in of_tokens}
        listed = sorted(times, key=times.__getitem__)[:4] if swept else list(times)
        rate = weights.stored_bytes / times[listed[0]] / 1e3
        shown = ", ".join(f"{name} {times[name]:.1f}" for name in dict.fromkeys(["fused", *listed]))
        print(f"  {tokens:2d} tokens: {rate:4.0f} GB/s, {rate / copy:4.0%} of a copy; us: {shown}")


if __name__ == "__main__":
    sys.exit(main())
