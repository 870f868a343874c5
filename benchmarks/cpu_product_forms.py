"""Measure what each product form of csrc/cpu gains over the form that takes over without it.

    python benchmarks/cpu_product_forms.py [--out FILE.tsv] [--threads N] [--seconds 340] [--formats ...] [--rows ...] [--shapes ...]

One build (-DZERO_INFERENCE_MEASURE_FORMS) can leave out each of `VARIANTS` at run time. A cell is a weight format and a number of
rows of x; all instruction sets and all variants that change something there take turns in it, for --rounds rounds. A figure is GB/s
(1e9 bytes) of stored weight bytes, the median. A gain is the median over rounds of the ratio with / without. Weights are copies of the
shapes of one layer, more than --set-mb in all.

With --side-by-side formats take turns instead, with all forms: their rates, and these over the rate of the first format.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pandas import DataFrame

from benchmarks.common.cpu_backend import Format, build_library, cpu_model
from benchmarks.common.shapes import shape_of
from zero_inference.cpu.library import DTYPES, INSTRUCTIONS
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.formats import Codes, WeightFormat
from zero_inference.utils.host_memory import host_empty

DTYPE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# int4-g64-fp16: codes of 4 bits in groups of 64, float16 scales.
FORMATS = ["bf16", "fp16", "fp32"]
FORMATS += [
    f"{codes}-{dtype}" for dtype in ("bf16", "fp16") for codes in ("int8-g64", "int4-g32", "int4-g64", "int4-g128")
]
FORMATS += ["int4-g64-fp32"]
# Of published checkpoints, in bfloat16 models.
PUBLISHED = {
    "mxfp4": WeightFormat(Codes.E2M1, 32, scale_dtype=torch.float8_e8m0fnu),
    "nvfp4": WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True),
    "symmetric4-g32": WeightFormat(Codes.INT4, 32, scale_dtype=torch.bfloat16),
    "symmetric4-g128": WeightFormat(Codes.INT4, 128, scale_dtype=torch.bfloat16),
    "zeros4-g128": WeightFormat(Codes.INT4, 128, scale_dtype=torch.float16, zero_points=True),
    "symmetric8-g128": WeightFormat(Codes.INT8, 128, scale_dtype=torch.bfloat16),
    "fp8-blocks": WeightFormat(Codes.E4M3, 128, group_rows=128),
    "fp8-rows": WeightFormat(Codes.E4M3, row_scales=True),
}
SHAPES = [(5120, 5120), (13824, 5120), (5120, 13824)]  # of a layer of Llama-2-13B

# Bits of Optional in csrc/cpu/product_layout.h.
OPTIONAL = (
    "narrow fixed_vectors fixed_tiles packs two_inputs dequantized_tiles wide_tables four_input_tiles strip_prefetch "
    "tiles split_tiles direct in_place prefetch_in_steps e4m3_bfloat16 narrow_tiles"
).split()
BIT = {name: 1 << index for index, name in enumerate(OPTIONAL)}
TILE_FORMS = BIT["fixed_tiles"] | BIT["dequantized_tiles"] | BIT["tiles"] | BIT["split_tiles"]
# What is left out: each form alone, and two together.
VARIANTS: list[tuple[str, ...]] = [(name,) for name in OPTIONAL]
VARIANTS.append(("fixed_tiles", "dequantized_tiles"))
WINS = 1.05  # a gain that counts
COLUMNS = "weight rows instructions without gb_per_s least most with_over_without all_over_lower_set".split()
MAX_ERROR = 0.02  # of the result's norm: bfloat16 values and x


def format_of(name: str) -> Format:
    if name in PUBLISHED:
        return Format(torch.bfloat16, PUBLISHED[name])
    *codes, dtype = name.split("-")
    if not codes:
        return Format(DTYPE_NAMES[dtype])
    return Format.own(DTYPE_NAMES[dtype], int(codes[0][3:]), int(codes[1][1:]))


class Weights:
    """Random weights of `shapes`, [rows, columns], one after the other, as many times as exceed `set_mb`."""

    def __init__(self, stored: Format, shapes: list[tuple[int, int]], set_mb: int) -> None:
        self.stored = stored
        sizes = [stored.weight_bytes(*shape) for shape in shapes]
        copies = int(set_mb * 1e6 // sum(sizes)) + 1
        nbytes = sum(-(-size // 4096) * 4096 for size in sizes)
        self.memory = host_empty((copies, nbytes), torch.uint8, pinned=False)  # in huge pages, as an engine's weights
        self.matrices = (Matrix * (copies * len(shapes)))()
        at = 0
        for index, ((height, width), size) in enumerate(zip(shapes, sizes)):
            stored.fill(self.memory[0, at : at + size], height, width)
            for copy in range(copies):
                matrix = stored.matrix(self.memory[copy, at : at + size], height, width)
                self.matrices[copy * len(shapes) + index] = matrix
            at += -(-size // 4096) * 4096
        self.memory[1:] = self.memory[0]

    def dequantize_first(self, height: int, width: int) -> torch.Tensor:
        """Return the first weight [height, width] in float64."""
        return self.stored.values(self.memory[0, : self.stored.weight_bytes(height, width)], height, width)


@dataclass
class Figure:
    """Rates of a cell with one instruction set: with all forms (`without` is empty), or without those of `bits`."""

    weight: str
    rows: int
    instructions: str
    without: str  # names of the forms that are left out, joined by "+"
    bits: int  # of OPTIONAL, for `without`
    rates: list[float] = field(default_factory=list)  # GB/s

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.weight, self.rows, self.instructions, self.without


class Forms:
    """The library that can leave out forms."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.library = build_library(args.flags + " -DZERO_INFERENCE_MEASURE_FORMS")
        self.library.zero_inference_leave_out.restype = ctypes.c_uint32
        self.library.zero_inference_leave_out.argtypes = [ctypes.c_uint32]
        best = self.library.zero_inference_best_instructions()
        self.sets = [name for name in INSTRUCTIONS[1 : best + 1] if name in args.instructions]
        cpus = sorted(os.sched_getaffinity(0))
        self.cpus = [cpus[-1 - index % len(cpus)] for index in range(args.threads)]
        self.weights: Weights | None = None

    def find_variants(self, weight: str, rows: int, instructions: str) -> Iterator[tuple[str, int]]:
        """Yield names and bits of the variants that change something, that with all forms first; each is checked against float64."""
        seen = set()  # bits that made a difference
        height, width = 48, 1280
        probe = Weights(format_of(weight), [(height, width)], 0)
        x = torch.randn(rows, width).to(probe.stored.dtype)
        exact = x.double() @ probe.dequantize_first(height, width).T
        out = torch.empty(rows, height)
        for names in [(), *VARIANTS]:
            bits = sum(BIT[name] for name in names)
            self.library.zero_inference_leave_out(bits)
            failed = self.library.zero_inference_product(
                ctypes.byref(probe.matrices[0]), rows, INSTRUCTIONS.index(instructions), x.data_ptr(), DTYPES[x.dtype], width,
                0, height, out.data_ptr(), height, 1,
            )  # fmt: skip
            asked = self.library.zero_inference_leave_out(0)  # forms that this product could use
            error = float((out - exact).norm() / exact.norm())
            if failed or not error <= MAX_ERROR:
                raise SystemExit(
                    f"{weight}, {rows} rows, {instructions}, without {names}: code {failed}, error {error:.1e}"
                )
            if bits & asked in seen or (instructions == "amx" and not asked & TILE_FORMS and "avx512" in self.sets):
                continue  # the path of another variant, or of AVX-512
            seen.add(bits & asked)
            yield "+".join(name for name in names if BIT[name] & asked), bits

    def rate(self, weights: Weights, rows: int, instructions: str, bits: int, seconds: float) -> float:
        """Return GB/s of products with `weights`."""
        width = max(matrix.columns for matrix in weights.matrices)
        x = torch.randn(rows, width).to(weights.stored.dtype)
        done = ctypes.c_int64()
        self.library.zero_inference_leave_out(bits)
        cpus = (ctypes.c_int32 * len(self.cpus))(*self.cpus)
        taken = self.library.zero_inference_measure_products(
            weights.matrices, len(weights.matrices), rows, INSTRUCTIONS.index(instructions), x.data_ptr(), DTYPES[x.dtype],
            self.args.threads, cpus, seconds, ctypes.byref(done),
        )  # fmt: skip
        if taken <= 0:
            raise SystemExit(f"{instructions}, {self.args.threads} threads: the library returned {taken}")
        return done.value / taken / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("cpu_product_forms.tsv"), metavar="FILE")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=[*FORMATS, *PUBLISHED])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of x")
    parser.add_argument("--instructions", nargs="+", default=INSTRUCTIONS[1:], choices=INSTRUCTIONS[1:])
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--set-mb", type=int, default=420, help="least bytes of a format's weights, in 1e6")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--seconds", type=float, default=340, help="of everything, compiling included; about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side-by-side", action="store_true", help="compare formats, not forms")
    parser.add_argument("--flags", default="", help="for the compiler, after the usual ones")
    args = parser.parse_args()
    begin = time.monotonic()
    torch.set_num_threads(args.threads)
    forms = Forms(args)
    print(f"{cpu_model()}, {args.threads} threads, torch {torch.__version__}, {', '.join(forms.sets)}", flush=True)
    if args.side_by_side:
        compare_formats(args, forms)
        return 0
    cells = list(find_cells(args, forms))
    count = sum(map(len, cells))
    print(f"{count} figures in {len(cells)} cells, found in {time.monotonic() - begin:.0f} s", flush=True)
    figures = measure(args, forms, cells, begin)
    show(table_of(figures))
    print(f"{time.monotonic() - begin:.0f} s; all figures are in {args.out}")
    return 0


def find_cells(args: argparse.Namespace, forms: Forms) -> Iterator[list[Figure]]:
    for weight in args.formats:
        for rows in args.rows:
            yield [
                Figure(weight, rows, instructions, name, bits)
                for instructions in forms.sets
                for name, bits in forms.find_variants(weight, rows, instructions)
            ]


def compare_formats(args: argparse.Namespace, forms: Forms) -> None:
    """Print GB/s of each format by rows of x with each instruction set, and the median ratio to the first format."""
    weights = {name: Weights(format_of(name), args.shapes, args.set_mb) for name in args.formats}
    for instructions in forms.sets:
        found: dict[str, dict[str, str]] = {name: {} for name in weights}
        for rows in args.rows:
            rates: dict[str, list[float]] = {name: [] for name in weights}
            for _ in range(args.rounds):
                for name, each in weights.items():
                    rates[name].append(forms.rate(each, rows, instructions, 0, 0.2))
            first = rates[args.formats[0]]
            for name, each in rates.items():
                ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
                found[name][str(rows)] = f"{statistics.median(each):.1f} ({ratio:.2f})"
        print(f"\n{instructions}: GB/s by rows of x\n{DataFrame(found).T.to_string()}", flush=True)


def read_rate(args: argparse.Namespace, forms: Forms) -> float:
    """Return the GB/s at which the threads read memory."""
    assert forms.weights is not None
    memory, done = forms.weights.memory, ctypes.c_int64()
    cpus = (ctypes.c_int32 * len(forms.cpus))(*forms.cpus)
    best = INSTRUCTIONS.index(forms.sets[-1])
    taken = forms.library.zero_inference_measure_reads(
        memory.data_ptr(), memory.numel(), best, args.threads, cpus, 0.3, ctypes.byref(done)
    )
    return done.value / taken / 1e9


def measure(args: argparse.Namespace, forms: Forms, cells: list[list[Figure]], begin: float) -> list[Figure]:
    figures: list[Figure] = []
    left = sum(map(len, cells))
    for cell in cells:
        weight = cell[0].weight
        if forms.weights is None or cell[0].rows == args.rows[0]:
            forms.weights = None  # frees memory first
            forms.weights = Weights(format_of(weight), args.shapes, args.set_mb)
            print(f"{weight}: the threads read {read_rate(args, forms):.1f} GB/s", flush=True)
        remaining = max(0.0, args.seconds - (time.monotonic() - begin))
        seconds = min(0.2, max(0.01, remaining / left / args.rounds - 0.005))
        for _ in range(args.rounds):
            for figure in cell:
                figure.rates.append(forms.rate(forms.weights, figure.rows, figure.instructions, figure.bits, seconds))
        left -= len(cell)
        figures += cell
        if cell[0].rows == args.rows[-1]:
            write(args, figures)  # so far, should the time run out
            print(f"{weight}: {seconds * 1e3:.0f} ms each, {time.monotonic() - begin:.0f} s", flush=True)
    return figures


def write(args: argparse.Namespace, figures: list[Figure]) -> None:
    head = f"# {cpu_model()}, {args.threads} threads, torch {torch.__version__}\n"
    args.out.write_text(head + table_of(figures).to_csv(sep="\t", index=False))


def table_of(figures: list[Figure]) -> DataFrame:
    """Return a row for each figure: GB/s, and the gains of what was left out, and of an instruction set over the next lower one."""
    by_key = {figure.key: figure for figure in figures}

    def with_all_forms(weight: str, rows: int, instructions: str) -> Figure | None:
        """Of this instruction set, or the next lower one that was measured."""
        lower = INSTRUCTIONS[INSTRUCTIONS.index(instructions) :: -1]
        return next((by_key[key] for name in lower if (key := (weight, rows, name, "")) in by_key), None)

    def gain(one: Figure | None, other: Figure | None) -> float | None:
        if one is None or other is None:
            return None
        return statistics.median(a / b for a, b in zip(one.rates, other.rates, strict=False))

    found = []
    for figure in figures:
        weight, rows, instructions, without = figure.key
        row = dict(weight=weight, rows=rows, instructions=instructions, without=without)
        row |= dict(gb_per_s=statistics.median(figure.rates), least=min(figure.rates), most=max(figure.rates))
        if without:
            row["with_over_without"] = gain(with_all_forms(weight, rows, instructions), figure)
        elif INSTRUCTIONS.index(instructions):
            lower = INSTRUCTIONS[INSTRUCTIONS.index(instructions) - 1]
            row["all_over_lower_set"] = gain(figure, with_all_forms(weight, rows, lower))
        found.append(row)
    return DataFrame(found, columns=COLUMNS).round(3)


def show(table: DataFrame) -> None:
    """Print GB/s by format, instruction set and rows of x, then the gains of each variant and set there."""

    def cells(rows: DataFrame, values: str, digits: int) -> str:
        return (
            rows.pivot(index=["weight", "instructions"], columns="rows", values=values)
            .round(digits)
            .to_string(na_rep="-")
        )

    whole = table[table["without"] == ""]
    print(
        f"\nGB/s\n{cells(whole, 'gb_per_s', 1)}\n\na set over the next lower one\n{cells(whole, 'all_over_lower_set', 2)}"
    )
    for without, rows in table[table["without"] != ""].groupby("without", sort=False):
        gains = rows["with_over_without"]
        print(
            f"\n{without}: {(gains > WINS).sum()} of {len(gains)} cells win by {WINS - 1:.0%}, {(gains < 1 / WINS).sum()} lose"
        )
        print(cells(rows, "with_over_without", 2))


if __name__ == "__main__":
    sys.exit(main())
