"""Products on the CPU backend, against float64 for every format and instruction set."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess

import pytest
import torch
from kernel_cases import quantized as packed
from kernel_cases import random_weight, relative_error, skip_without

from zero_inference.cpu import library
from zero_inference.cpu.library import INSTRUCTIONS
from zero_inference.cpu.products import PLAIN, Matrix, linear_groups, multiply_rows
from zero_inference.kernels.formats import Codes, WeightFormat, dequantize_reference
from zero_inference.kernels.quantization import GroupQuantization

# Rows of x: around what vectors, tiles and pairs of tiles take at once.
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65)
# Of the result's norm, whatever the dtype: codes count as the values that are restored elsewhere, and sums are float32. Tiles hold
# 16 bits of a float16 number's 11, and leave out 2^-16 of a product.
ERROR = 1e-5
# Where x becomes fixed-point numbers, of the dtype of x: float16 has 11 bits, of which small numbers beside a great one keep fewer;
# products of two rows with five had 3.2e-5.
FIXED_ERROR = {torch.float16: 4e-5, torch.bfloat16: 2e-5}
# Where codes are multiplied as they are, their values are not rounded to the dtype of the scale, as it is elsewhere:
# the difference between those two.
UNROUNDED = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EMULATED = "amx emulated"
EMULATED_TILES = "-DZERO_INFERENCE_EMULATED_TILES"
SETS = (*INSTRUCTIONS, EMULATED)
LIBC = ctypes.CDLL(None, use_errno=True)
# Formats of published checkpoints, with shapes: neither blocks, pieces nor vectors are whole in most.
PUBLISHED = {
    "symmetric int4": (WeightFormat(Codes.INT4, 32, scale_dtype=torch.bfloat16), (37, 288), (16, 640)),
    "symmetric int8": (WeightFormat(Codes.INT8, 128, scale_dtype=torch.float16), (19, 384)),
    "int4 with zero points": (WeightFormat(Codes.INT4, 128, scale_dtype=torch.float16, zero_points=True), (37, 640)),
    "int8 with zero points": (WeightFormat(Codes.INT8, 32, scale_dtype=torch.bfloat16, zero_points=True), (19, 672)),
    "MXFP4": (WeightFormat(Codes.E2M1, 32, scale_dtype=torch.float8_e8m0fnu), (37, 352), (16, 1088)),
    "NVFP4": (WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True), (37, 336), (19, 1088)),
    "NVFP4 that divides": (
        WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True, divides=True),
        (35, 512),
    ),
    "FP8 blocks": (WeightFormat(Codes.E4M3, 128, group_rows=128), (256, 576), (200, 331)),
    "FP8 groups": (WeightFormat(Codes.E4M3, 128), (37, 1088)),
    "FP8 blocks of 48 rows": (WeightFormat(Codes.E4M3, 128, group_rows=48), (144, 1088)),
    "FP8 blocks and rows": (WeightFormat(Codes.E4M3, 128, group_rows=64, row_scales=True, divides=True), (128, 640)),
    "E2M1 in groups of 8": (WeightFormat(Codes.E2M1, 8, scale_dtype=torch.float8_e8m0fnu), (19, 352)),
    "E2M1 with E4M3 scales": (
        WeightFormat(Codes.E2M1, 32, scale_dtype=torch.float8_e4m3fn, row_scales=True),
        (37, 352),
    ),
    "FP8 rows": (WeightFormat(Codes.E4M3, row_scales=True), (37, 331), (35, 416), (19, 2368)),
}


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory) -> ctypes.CDLL:
    """The same sources, with the tile instructions in plain C++: two objects of their own, the others from the usual build."""
    folder = tmp_path_factory.mktemp("emulated")
    usual = library.find_or_build(print).parent
    objects = [file for file in usual.glob("*.o") if file.stem not in ("amx", "instructions")]
    sources = [file for file in library.sources() if file.stem in ("amx", "instructions")]
    parts = [*library.FLAGS, EMULATED_TILES, "-shared", *sources, *objects, "-o", folder / "emulated.so"]
    subprocess.run([*library.find_compiler(), *parts], check=True)
    return library.open_library(folder / "emulated.so")


@pytest.fixture
def use(request, monkeypatch):
    """A function that gives the name to ask for a set's kernels by, and skips the test where the processor lacks it."""

    def use(instructions: str) -> str:
        skip_without("avx512" if instructions == EMULATED else instructions)
        if instructions == EMULATED:
            monkeypatch.setattr(library, "_library", request.getfixturevalue("emulated_library"))
            return "amx"
        return instructions

    return use


def a_weight(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def an_input(count: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows with a mean, which a product of codes and minima has to cancel."""
    return (torch.randn(count, columns, generator=torch.Generator().manual_seed(count)) + 0.5).to(dtype)


def restored_from(bits: int) -> int:
    """Return from how many rows of x on codes with bfloat16 scales are restored in tiles (csrc/cpu/product.cpp)."""
    return 9 if bits == 4 else 17


def multiplies_codes(matrix: Matrix, dtype: torch.dtype, count: int, instructions: str) -> bool:
    """Return whether the kernels multiply codes as they are, not their values (csrc/cpu/product.cpp)."""
    if dtype not in UNROUNDED or matrix.codes == PLAIN:
        return False
    if matrix.codes == Codes.E4M3 or (matrix.group == 16 and instructions in ("avx512", "amx")):
        return True
    if matrix.group > 256 or (instructions == "avx2" and matrix.columns % 32):
        return False
    if instructions == "amx" and count >= 3 and matrix.group % 32 == 0:
        restored = count >= restored_from(Codes(matrix.codes).bits) and dtype == torch.bfloat16
        return not restored or matrix.codes == Codes.E2M1  # MXFP4's values are exact in bfloat16
    in_vectors = count <= (8 if instructions == "avx2" else 64 if instructions in ("avx512", "amx") else 0)
    return in_vectors and matrix.group in (16 if matrix.codes == Codes.E2M1 else 32, 32, 64, 128, 256)


def matrix_of(weight: torch.Tensor, bits: int, group_size: int) -> tuple[Matrix, tuple, torch.Tensor]:
    """Return the matrix, its tensors and their values, which `matrix.exact` has without rounding; 0 bits: a plain matrix."""
    if not bits:
        return Matrix.plain(weight), (weight,), weight
    parts, restored = packed(weight, bits, group_size)
    matrix = Matrix.quantized(GroupQuantization(bits, group_size).as_weight(*parts), *weight.shape, weight.dtype)
    codes, scale, minimum = parts
    codes = torch.stack([codes & 15, codes >> 4], 1) if bits == 4 else codes
    matrix.exact = (codes.view(-1, group_size) * scale.double()[:, None] + minimum.double()[:, None]).view_as(weight)
    return matrix, parts, restored


def check(
    matrix: Matrix, restored: torch.Tensor, x: torch.Tensor, instructions: str, rows=(0, None), threads=1
) -> None:
    first, last = rows[0], matrix.rows if rows[1] is None else rows[1]
    out = torch.full((len(x), last - first + 3), float("nan"))  # rows with a gap between them
    multiply_rows(matrix, x, first, last, out[:, : last - first], instructions, threads)
    values = {ERROR: restored}
    if multiplies_codes(matrix, restored.dtype, len(x), instructions):
        values = {FIXED_ERROR[x.dtype]: matrix.exact, UNROUNDED[restored.dtype]: restored}
    for most, weight in values.items():
        error = relative_error(out[:, : last - first], x.double() @ weight[first:last].double().T)
        assert error <= most, (instructions, list(x.shape), matrix.format, error)
    assert out[:, last - first :].isnan().all(), "written beside the rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("instructions", SETS)
def test_products_agree_with_float64(instructions, dtype, use):
    name = use(instructions)
    weight = a_weight(37, 331, dtype)  # neither rows nor columns fill a vector
    for count in COUNTS:
        check(Matrix.plain(weight), weight, an_input(count, 331, dtype), name)
    for bits in (8, 4):
        # 37 x 64: a block of columns and a part; 11 x 64: half a turn is left over; 9 x 32: half a step is
        for group_size, columns, counts in (
            (64, 2368, COUNTS),
            (64, 704, (2, 4, 8)),
            (32, 288, (1, 3, 6, 33)),
            (128, 640, (2, 8, 17, 64)),
        ):
            matrix, tensors, restored = matrix_of(a_weight(37, columns, dtype), bits, group_size)
            for count in counts:
                check(matrix, restored, an_input(count, columns, dtype), name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instructions", SETS)
def test_any_group_size(instructions, dtype, use):
    name = use(instructions)
    sizes = {8: (3, 8, 48, 96, 224, 256, 512), 4: (2, 8, 48, 96, 160, 192, 256, 4096)}
    for bits, group_size in [(bits, size) for bits, all_sizes in sizes.items() for size in all_sizes]:
        columns = group_size * (1 if group_size > 1000 else 13)
        matrix, tensors, restored = matrix_of(a_weight(19, columns, dtype), bits, group_size)
        for count in (1, 3, 6, 35):
            check(matrix, restored, an_input(count, columns, dtype), name)


def published(
    form: WeightFormat, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Matrix, dict[str, torch.Tensor], torch.Tensor]:
    """Return as `matrix_of` does, with the tensors by their names."""
    weight = random_weight(form, *shape)
    matrix, exact, restored = (
        Matrix.quantized(weight, *shape, dtype),
        torch.empty(shape),
        torch.empty(shape, dtype=dtype),
    )
    for values in (exact, restored):
        dequantize_reference(weight, values)
    matrix.exact = exact.double()
    return matrix, weight.tensors, restored


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("instructions", SETS)
def test_formats_of_checkpoints_agree_with_float64(instructions, name, use):
    instructions = use(instructions)
    form, *shapes = PUBLISHED[name]
    for dtype in DTYPES:
        for shape in shapes:
            matrix, tensors, restored = published(form, shape, dtype)
            for count in (1, 2, 3, 5, 8, 16, 20, 40, 66):
                x = an_input(count, shape[1], dtype)
                check(matrix, restored, x, instructions)
            first = form.group_rows % shape[0]  # a view is the same as rows of the whole
            view, rows = matrix.rows_view(first, shape[0] - first), torch.empty(2, len(x), shape[0] - first)
            multiply_rows(matrix, x, first, shape[0], rows[0], instructions)
            multiply_rows(view, x, 0, view.rows, rows[1], instructions)
            assert torch.equal(*rows)


@pytest.mark.parametrize("instructions", SETS)
def test_scales_beyond_the_greatest_power_are_no_number(instructions, use):
    instructions = use(instructions)
    weight = random_weight(PUBLISHED["MXFP4"][0], 19, 256)
    scales = weight.scales.view(torch.uint8).view(19, 8)
    scales[3, 5], scales[4], scales[5] = 255, 0, 1
    matrix = Matrix.quantized(weight, 19, 256, torch.bfloat16)
    for count in (1, 5, 16):
        out = torch.empty(count, 19)
        multiply_rows(matrix, torch.ones(count, 256, dtype=torch.bfloat16), 0, 19, out, instructions)
        assert (out.isfinite().all(0) == (torch.arange(19) != 3)).all()
        assert (out[:, 4:6].abs() < 1e-30).all()


@pytest.mark.parametrize("instructions", SETS)
def test_row_ranges_strides_and_threads(instructions, use):
    name = use(instructions)
    wide = an_input(18, 1500, torch.bfloat16)[:, 3:1283]  # a view: rows further apart than they are long
    for bits in (0, 4):
        matrix, tensors, restored = matrix_of(a_weight(133, 1280, torch.bfloat16), bits, 64)
        for x in (wide[:1], wide[:3], wide):
            for rows in ((0, 1), (5, 38), (16, 32), (131, 133), (7, 7), (0, None)):
                if rows[0] != rows[1]:
                    check(matrix, restored, x, name, rows)
            outs = [torch.full((len(x), 133), float("nan")) for _ in range(2)]
            for out, threads in zip(outs, (1, 3), strict=True):
                multiply_rows(matrix, x, 0, 133, out, name, threads)
            assert torch.equal(*outs), "threads change nothing"


@pytest.mark.parametrize("group_size, columns", [(32, 1120), (64, 832), (256, 768)])
@pytest.mark.parametrize("instructions", SETS)
def test_an_input_that_several_threads_prepare(instructions, group_size, columns, use):
    """Rows enough for several tasks, of which each thread prepares its part of the columns."""
    name = use(instructions)
    for bits in (8, 4):
        matrix, tensors, restored = matrix_of(a_weight(1203, columns, torch.bfloat16), bits, group_size)
        for count in (1, 6):
            x = an_input(count, columns, torch.float32)
            outs = [torch.full((count, 1203), float("nan")) for _ in range(2)]
            for out, threads in zip(outs, (1, 3), strict=True):
                multiply_rows(matrix, x, 0, 1203, out, name, threads)
            assert torch.equal(*outs) and outs[0].isfinite().all()
            check(matrix, restored, x.bfloat16(), name, threads=3)
    matrix, tensors, restored = published(PUBLISHED["FP8 blocks"][0], (640, columns), torch.bfloat16)
    for count in (3, 6):
        check(matrix, restored, an_input(count, columns, torch.bfloat16), name, threads=3)


@pytest.mark.parametrize("instructions", SETS)
def test_unaligned_weights(instructions, use):
    name = use(instructions)
    for dtype in (torch.float16, torch.bfloat16):
        for bits in (0, 8, 4):
            matrix, tensors, restored = matrix_of(a_weight(21, 320, dtype), bits, 32)
            moved = [torch.zeros(part.nbytes + 1, dtype=torch.uint8) for part in tensors]
            for place, part in zip(moved, tensors, strict=True):
                place[1:] = part.view(torch.uint8).view(-1)
            for field, place in zip(("values", "scales", "offsets"), moved):
                setattr(matrix, field, place.data_ptr() + 1)
            for count in (1, 4, 8, 19, 35):
                check(matrix, restored, an_input(count, 320, dtype), name)


@pytest.fixture
def at_the_end():
    """A function that copies a tensor to the end of memory of its own, after which nothing may be read, and returns its address."""
    held = []

    def at_the_end(tensor: torch.Tensor) -> int:
        size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        held.append((memory, view))
        begin = ctypes.addressof(view)
        assert LIBC.mprotect(ctypes.c_void_p(begin + size), mmap.PAGESIZE, 0) == 0
        address = begin + size - tensor.nbytes
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        return address

    yield at_the_end
    for memory, view in held:
        LIBC.mprotect(ctypes.c_void_p(ctypes.addressof(view)), len(memory), 3)


@pytest.mark.parametrize("instructions", SETS)
def test_nothing_is_read_behind_the_end(instructions, use, at_the_end):
    name = use(instructions)
    for dtype in DTYPES:
        for bits, group_size, columns in (
            (0, 0, 331),
            (8, 32, 288),
            (4, 32, 288),
            (4, 64, 192),
            (4, 128, 128),
            (4, 6, 66),
        ):
            matrix, tensors, restored = matrix_of(a_weight(5, columns, dtype), bits, group_size)
            for field, part in zip(("values", "scales", "offsets"), tensors):
                setattr(matrix, field, at_the_end(part))
            for count in (1, 2, 4, 6, 9, 33):
                x = an_input(count, columns, dtype)
                moved = torch.frombuffer((ctypes.c_char * x.nbytes).from_address(at_the_end(x)), dtype=dtype)
                check(matrix, restored, moved.view(count, columns), name)
    for form, *shapes in PUBLISHED.values():
        for shape in shapes:
            matrix, tensors, restored = published(form, shape, torch.bfloat16)
            for field, part in tensors.items():
                setattr(matrix, "values" if field == "codes" else field, at_the_end(part))
            for count in (1, 4, 6, 33):
                check(matrix, restored, an_input(count, shape[1], torch.bfloat16), name)


@pytest.mark.parametrize("bits, group_size", [(4, 64), (4, 32), (8, 32), (4, 12), (8, 40), (4, 512), (8, 512)])
@pytest.mark.parametrize("instructions", ["avx2", "avx512", "amx", EMULATED])
def test_bfloat16_codes_count_as_the_values_that_a_device_restores(instructions, bits, group_size, use):
    name = use(instructions)
    columns = group_size * 3
    matrix, tensors, restored = matrix_of(a_weight(35, columns, torch.bfloat16), bits, group_size)
    for rows in (torch.eye(columns), torch.eye(columns)[-6:]):
        out = torch.full((len(rows), 35), float("nan"))
        multiply_rows(matrix, rows.bfloat16(), 0, 35, out, name)
        if multiplies_codes(matrix, torch.bfloat16, len(rows), name):  # every code, exactly where it belongs
            torch.testing.assert_close(out.double(), rows.double() @ matrix.exact.T, rtol=0, atol=1e-7)
        else:
            assert torch.equal(out, (rows @ restored.float().T))


# Of columns: pieces have 128, 256 or 512, of which most of these are no multiples, and some fill no step of 128.
@pytest.mark.parametrize(
    "group_size, columns", [(32, 544), (64, 448), (128, 640), (256, 768), (512, 1024), (96, 672), (192, 960)]
)
@pytest.mark.parametrize("instructions", ["amx", EMULATED])
def test_bfloat16_codes_in_strips_of_rows(instructions, group_size, columns, use):
    """More rows of x than 8, which int8 takes as codes up to 16: one to four tiles of x and more; ranges with whole strips and parts."""
    name = use(instructions)
    for bits in (8, 4):
        matrix, tensors, restored = matrix_of(a_weight(163, columns, torch.bfloat16), bits, group_size)
        for count in (9, 16, 17, 32, 33, 48, 49, 64, 65, 100):
            rows = (0, None) if count in (9, 32, 49) else (130, 163) if count % 2 else (3, 67)
            check(matrix, restored, an_input(count, columns, torch.bfloat16), name, rows)


@pytest.mark.parametrize("bits, group_size", [(4, 32), (4, 64), (4, 128), (8, 32), (8, 256)])
@pytest.mark.parametrize("instructions", ["amx", EMULATED])
def test_restored_codes_in_strips_are_exact(instructions, bits, group_size, use):
    name = use(instructions)
    columns = group_size * (11 if group_size < 256 else 3)
    matrix, tensors, restored = matrix_of(a_weight(67, columns, torch.bfloat16), bits, group_size)
    least = restored_from(bits)
    for count in (least, 40):
        for rows in torch.eye(columns).split(count):
            if len(rows) >= least:
                out = torch.full((len(rows), 67), float("nan"))
                multiply_rows(matrix, rows.bfloat16(), 0, 67, out, name)
                assert torch.equal(out, rows @ restored.float().T)


@pytest.mark.parametrize("instructions", SETS)
def test_great_numbers_and_what_is_no_number(instructions, use):
    name = use(instructions)
    for bits in (8, 4):
        matrix, tensors, restored = matrix_of(a_weight(19, 128, torch.bfloat16), bits, 64)
        for count in (1, 3, 6, 12):
            x = torch.zeros(count, 128, dtype=torch.bfloat16)
            x[0, 5] = 1e34
            check(matrix, restored, x[:1].repeat(count, 1), name)
            for odd in (float("nan"), float("inf")):
                x[0, 5], x[1:] = odd, 1
                out = torch.zeros(count, 19)
                multiply_rows(matrix, x, 0, 19, out, name)
                assert not out[0].isfinite().any() and out[1:].isfinite().all(), (bits, count, odd)


@pytest.mark.parametrize("instructions", SETS)
def test_float16_keeps_its_range_and_precision(instructions, use):
    name = use(instructions)
    weight = torch.tensor([[65504.0, 2.0**-24, 1.0009765625, -(2.0**-14), -0.0]], dtype=torch.float16).repeat(17, 13)
    for count in (1, 6):
        x = torch.eye(65, dtype=torch.float16)[:count]
        x[0, 0] = 1.0009765625
        out = torch.full((count, 17), float("nan"))
        multiply_rows(Matrix.plain(weight), x, 0, 17, out, name)
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(out.double(), expected, rtol=2**-16, atol=0)


def test_linear_adds_a_bias_rounds_once_and_keeps_shapes():
    weight = a_weight(11, 96, torch.float32)
    parts, restored = packed(weight, 8, 32)
    quantized = GroupQuantization(8, 32).as_weight(*parts)
    for x_dtype in DTYPES:
        x = an_input(6, 96, x_dtype).view(2, 3, 96).transpose(0, 1)
        bias = a_weight(1, 11, torch.float32)[0]
        out = linear_groups(x, quantized, 11, bias)
        assert out.dtype == x_dtype and out.shape == (3, 2, 11)
        torch.testing.assert_close(out, (x.float() @ restored.T + bias).to(x_dtype))
    assert linear_groups(torch.ones(0, 96), quantized, 11).shape == (0, 11)


def test_what_does_not_fit_is_refused():
    x, weight = torch.ones(2, 64), torch.ones(5, 64)
    codes, scale, minimum = packed(weight, 4, 32)[0]
    with pytest.raises(ValueError, match="contiguous"):
        Matrix.plain(weight.t())
    for parts, group_size, message in (
        ((codes[1:], scale, minimum), 32, "codes must be torch.uint8, 160 elements"),
        ((codes, scale, minimum[1:]), 32, "offsets must be torch.float32, 10 elements"),
        ((codes, scale, minimum), 31, "even for 4 bits"),
        ((codes, scale, minimum), 24, "no whole groups"),
    ):
        with pytest.raises(ValueError, match=message):
            Matrix.quantized(GroupQuantization(4, group_size).as_weight(*parts), 5, 64, torch.float32)
    best = library.best_instructions()
    if best != INSTRUCTIONS[-1]:
        with pytest.raises(ValueError, match=f"'amx': this processor has '{best}' at best"):
            multiply_rows(Matrix.plain(weight), x, 0, 5, torch.empty(2, 5), "amx")


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_reading_loop_reads_every_byte_once(instructions, use):
    which = INSTRUCTIONS.index(use(instructions))
    data = torch.randint(0, 256, (4999,), dtype=torch.uint8)
    for size in (0, 1, 7, 8, 63, 300, 4999 - 3):
        words = bytes(data[3 : 3 + size].tolist()) + bytes(-size % 8)
        expected = sum(int.from_bytes(words[at : at + 8], "little") for at in range(0, len(words), 8)) % 2**64
        found = library.require_library().zero_inference_read_bytes_sum(data.data_ptr() + 3, size, which)
        assert found == expected


@pytest.mark.parametrize("compiler", [name for name in ("g++", "clang++") if shutil.which(name)])
def test_the_kernels_of_each_compiler_that_is_here(compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(library, "_library", library.open_library(library.find_or_build(print)))
    for dtype in DTYPES:
        weight = a_weight(37, 256, dtype)
        matrix, _parts, restored = matrix_of(weight, 4, 32)
        for count in (1, 5):
            x = an_input(count, 256, dtype)
            check(Matrix.plain(weight), weight, x, library.best_instructions())
            check(matrix, restored, x, library.best_instructions())
