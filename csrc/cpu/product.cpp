// Chooses the kernel and the layout of the input; README.md has the table.

#include "product.h"

#include "kernels.h"

namespace zero_inference::cpu {

#if defined(ZERO_INFERENCE_MEASURE_FORMS)
uint32_t left_out = 0, asked = 0;

// Leaves out these parts from now on; returns those that mattered since the last call.
extern "C" uint32_t zero_inference_leave_out(uint32_t parts) {
  left_out = parts;
  return __atomic_exchange_n(&asked, 0, __ATOMIC_RELAXED);
}
#endif

namespace {

// Rows of x (M) up to which vectors are faster than tiles.
constexpr int64_t kRowsForVectors = 4;
// The same for fixed-point x and float32, in groups of 16 or 32 to 256.
constexpr int64_t kRowsForFixedVectors = 64;
constexpr int64_t kRowsForNarrow = 8;  // AVX2
constexpr int64_t kRowsForFixedVectorsBesideTiles = 2;
constexpr int64_t kRowsForE4m3Vectors = 1;  // beside tiles

// Fixed-point x does not round dequantized values. A device does, and in large groups these errors add up: with groups of 4096
// and an x whose mean is half its deviation bfloat16 results differ by 0.7 %, with 64 by 0.2 %.
bool has_integer_codes(const Matrix& matrix) {
  const bool integers = matrix.codes == Codes::int4 || matrix.codes == Codes::int8 || matrix.codes == Codes::e2m1;
  return integers && matrix.group <= 256 && matrix.columns % matrix.group == 0;
}

bool fixed_in_tiles(const Matrix& matrix) { return has_integer_codes(matrix) && matrix.group % 32 == 0; }

bool fixed_in_vectors(const Matrix& matrix) {
  const int64_t least = matrix.codes == Codes::e2m1 ? 16 : 32;
  return has_integer_codes(matrix) && matrix.group >= least && (matrix.group & (matrix.group - 1)) == 0;
}

bool e4m3_in_bfloat16(const Matrix& matrix) {
  return matrix.codes == Codes::e4m3 && matrix.dtype == Dtype::bfloat16 &&
         (matrix.group % 64 == 0 || matrix.group >= matrix.columns);
}

// Whether codes can be dequantized to bfloat16, 32 columns at a time, 64 of E4M3.
bool in_strips(const Matrix& matrix) {
  if (matrix.dtype != Dtype::bfloat16 || matrix.columns % 32 != 0) return false;
  if (matrix.codes == Codes::e4m3) {
    return matrix.columns % 64 == 0 && (matrix.group % kStep == 0 || matrix.group >= matrix.columns);
  }
  if (matrix.codes == Codes::e2m1) {  // with 8-bit scales, which index tables
    const bool nvfp4 = matrix.group == 16 && matrix.scale_dtype == Dtype::e4m3 && matrix.row_scales != nullptr;
    const bool mxfp4 = matrix.group == 32 && matrix.scale_dtype == Dtype::e8m0 && matrix.row_scales == nullptr;
    return (nvfp4 || mxfp4) && matrix.group_rows == 1 && matrix.offset_kind == Offsets::none;
  }
  return matrix.codes != Codes::plain && matrix.group % 32 == 0;
}

// Up to this M vectors or fixed-point tiles are faster than codes of bfloat16 models that are dequantized once for all rows of
// x.
int64_t rows_before_dequantized_tiles(const Matrix& matrix) {
  if (matrix.codes == Codes::e4m3) return kRowsForE4m3Vectors;
  if (matrix.codes == Codes::e2m1) return kRowsForFixedVectorsBesideTiles;
  if (!fixed_in_tiles(matrix) || without(kFixedTiles)) return kRowsForVectors;
  return matrix.codes == Codes::int8 ? 16 : 8;
}

Form form_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  if (instructions == Instructions::portable || matrix.dtype == Dtype::float32) return Form::float32;
  if (instructions == Instructions::avx2) {
    const bool fixed = count <= kRowsForNarrow && fixed_in_vectors(matrix) && matrix.columns % 32 == 0;
    return fixed && !without(kNarrow) ? Form::fixed : Form::float32;
  }
  const bool bfloat16 = matrix.dtype == Dtype::bfloat16;
  if (instructions == Instructions::amx) {
    if (matrix.codes == Codes::plain && count > kRowsForVectors && !without(bfloat16 ? kTiles : kSplitTiles)) {
      return bfloat16 ? Form::tiles : Form::split_tiles;
    }
    if (in_strips(matrix) && count > rows_before_dequantized_tiles(matrix) && !without(kDequantizedTiles)) {
      return Form::dequantized_tiles;
    }
    if (fixed_in_tiles(matrix) && count > kRowsForFixedVectorsBesideTiles && !without(kFixedTiles)) return Form::fixed_tiles;
  }
  if (count <= kRowsForFixedVectors && fixed_in_vectors(matrix) && !without(kFixedVectors)) return Form::fixed;
  if (count <= kRowsForVectors && e4m3_in_bfloat16(matrix) && !without(kE4m3Bfloat16)) return Form::bfloat16;
  return Form::float32;
}

Layout layout_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  const int64_t bits = bits_of(matrix.codes);
  Layout layout = {
      form_of(matrix, count, instructions), false, 0, round_up(matrix.columns, kStep), bits, matrix.group, 1, 1, 1, kTileRows};
  if (layout.form == Form::fixed || layout.form == Form::fixed_tiles) {
    layout.x_groups = matrix.group % 64 == 0 ? 1 : matrix.group % 32 == 0 ? 2 : 4;
    if (layout.form == Form::fixed) return layout;
    const int64_t room = kTileRows / 2 / layout.x_groups;  // rows of x whose terms and x groups are beside each other
    layout.inputs = count <= room || without(kTwoInputs) ? 1 : 2;
    layout.pack = layout.x_groups == 1 && 2 * count <= room && !without(kPacks) ? 2 : 1;
    layout.width = layout.inputs == 2 ? 2 * room : room / layout.pack;
  } else if (layout.form == Form::dequantized_tiles) {
    const bool x_groups = matrix.group == 64 || matrix.group % kStep == 0;  // of 64 columns; else each 32 have their scale
    layout.pairs = matrix.codes == Codes::e4m3 ? 16 : bits == 8 ? 0 : x_groups && !without(kWideTables) ? 64 : 32;
    const bool scales_steps = matrix.codes == Codes::e4m3 && row_groups(matrix) > 1;
    const int64_t width = count <= 4 ? 4 : count <= 8 ? 8 : kTileRows;
    if (scales_steps && width < kTileRows && !without(kPacks)) {
      layout.pack = kTileRows / width;
      layout.width = width;
    } else if (width < kTileRows && !without(kNarrowTiles)) {
      layout.width = width;
    }
  } else if (layout.form == Form::split_tiles) {
    layout.pairs = 32;
  } else if (layout.form == Form::float32 && bits != 0) {
    const int64_t lanes = instructions == Instructions::portable ? 4 : instructions == Instructions::avx2 ? 8 : 16;
    const int64_t vector = matrix.codes == Codes::int8 ? lanes : 2 * lanes;
    const bool whole = matrix.columns % vector == 0 || matrix.codes == Codes::e4m3;
    layout.vectors = whole && matrix.group % vector == 0;
    if (matrix.codes == Codes::e2m1 && matrix.group == lanes) layout.vectors = true;
    layout.pairs = vector > lanes && layout.vectors ? vector : 0;
  }
  return layout;
}

}  // namespace

size_t input_bytes(const Matrix& matrix, int64_t count, Instructions instructions) {
  const Layout layout = layout_of(matrix, count, instructions);
  if (!in_tiles(layout)) return static_cast<size_t>(count * input_stride(layout));
  if (layout.form == Form::fixed_tiles) {
    return static_cast<size_t>(round_up(count, tokens_at_once(layout)) / tokens_at_once(layout) * fixed_input_bytes(layout));
  }
  return static_cast<size_t>(round_up(count, kTileRows) * layout.columns * 2 * (layout.form == Form::split_tiles ? 2 : 1));
}

int64_t input_step(const Matrix& matrix) {
  // whole groups, of which sums are prepared; there are 256 columns in one at most
  return fixed_in_tiles(matrix) ? 2 * kStep : kStep;
}

size_t scratch_bytes(const Matrix& matrix, int64_t count, Instructions instructions) {
  const Layout layout = layout_of(matrix, count, instructions);
  if (layout.form == Form::fixed_tiles) return static_cast<size_t>(kFixedScratchBytes + kPageBytes);
  if (layout.form == Form::dequantized_tiles) return static_cast<size_t>(kDequantizedScratchBytes);
  // two panels, and sums in pairs of two tiles; or 4 rows, and of each row of x and the weight a vector
  if (in_tiles(layout)) return static_cast<size_t>(2 * kPanelBytes + (count + 31) / 32 * 4 * kTileBytes);
  return static_cast<size_t>(4 * (kBlockBytes + kRowGap) + count * 4 * 64);
}

void prepare_input(const Matrix& matrix, int64_t count, Instructions instructions, const void* x, Dtype x_dtype, int64_t stride,
                   int64_t first, int64_t last, void* input) {
  const Layout layout = layout_of(matrix, count, instructions);
  PrepareInput* prepare = kernels_of(instructions).prepare_input;
#if defined(__x86_64__)
  if (in_tiles(layout)) prepare = prepare_input_in_tiles;
#endif
  prepare(layout, count, static_cast<const char*>(x), x_dtype, stride, first, last, matrix.columns, static_cast<char*>(input));
}

void product(const Matrix& matrix, int64_t count, Instructions instructions, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch) {
  const Layout layout = layout_of(matrix, count, instructions);
  Product* multiply = kernels_of(instructions).product;
#if defined(__x86_64__)
  if (in_tiles(layout)) multiply = product_in_tiles;
#endif
  multiply(matrix, layout, count, static_cast<const char*>(input), first, last, out, stride, static_cast<char*>(scratch));
}

uint64_t read_bytes_sum(const void* data, int64_t bytes, Instructions instructions) {
  return kernels_of(instructions).read_sum(static_cast<const char*>(data), bytes);
}

}  // namespace zero_inference::cpu
