// Which kernels and which form of the input a product takes.

#include "product.h"

#include "product_layout.h"

namespace zero_inference::cpu {

namespace {

// From so many rows of x on tiles are faster than vectors, which do one row's work at a time; and with vectors, dequantizing
// codes once for all rows is faster than scaling each row's sums.
constexpr int64_t kRowsForTiles = 5;
// With AVX2, dequantizing codes as float32 is as fast from about 16 rows on, of narrow weights from fewer.
constexpr int64_t kRowsForDequantizedFloats = 9;
// And with codes in fixed-point products: int4 and one row take 27.4 GB/s a core from the caches in vectors, 13.3 in tiles,
// four rows 9.0 and 13.8. Others can be tried (benchmarks/cores_products.py --flags).
#if !defined(ZERO_INFERENCE_ROWS_FOR_FIXED_TILES)
#define ZERO_INFERENCE_ROWS_FOR_FIXED_TILES 2
#endif

// From so many on the codes of bfloat16 scales are dequantized strip by strip, so that sums stay in their tiles: those of each
// x group need not be stored and scaled. With 32 and 64 rows of int4 both are as fast; of int8 this is the
// faster with 64 rows and the slower with 32. Others can be
// tried (benchmarks/cores_products.py --flags); 1000 keeps to fixed-point products.
// int4 in groups of 32 has a number of its own: its fixed-point products take 8 rows at once and go through the codes again for
// the next 8. 15 threads give 88 GB/s with 8 rows, 49 with 9 and 43 with 16, and dequantized codes 75 and 76
// (docs/performance.md).
#if defined(ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES)
constexpr int64_t kRowsForDequantizedTiles = ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES;
constexpr int64_t kRowsForDequantizedGroupsOf32 = ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES;
#else
constexpr int64_t kRowsForDequantizedTiles = 17;
constexpr int64_t kRowsForDequantizedGroupsOf32 = 9;
#endif

// Whether groups fill vectors of bfloat16: then one look-up serves whole groups.
bool groups_fill(const Matrix& matrix) {
  return matrix.bits == 8 ? matrix.group % 32 == 0 : matrix.group == 32 || matrix.group % 64 == 0;
}

// Whether codes are multiplied with fixed-point x in tiles. Not in large groups, as below.
bool fixed_in_tiles(const Matrix& matrix) { return matrix.bits != 0 && matrix.group % 32 == 0 && matrix.group <= 256; }

// Whether codes can be dequantized strip by strip (product_dequantized_tiles.h).
bool codes_in_strips(const Matrix& matrix) {
  return matrix.bits != 0 && matrix.dtype == Dtype::bfloat16 && matrix.group % 32 == 0;
}

// The least rows of x for which codes are dequantized.
int64_t rows_for_strips(const Matrix& matrix) {
  if (!fixed_in_tiles(matrix)) return kRowsForTiles;
  return matrix.bits == 4 && matrix.group == 32 ? kRowsForDequantizedGroupsOf32 : kRowsForDequantizedTiles;
}

// Whether a few rows of x are multiplied with codes in vectors, so that what they stand for is not rounded. Not in large
// groups: of their 16 values each is there often, and the sum over its errors of rounding, which a device has, is not: with
// 4096 in a group and an x whose mean is half its deviation, bfloat16's results differ by 0.7 %, with 64 by 0.2 %.
bool fixed_in_vectors(const Matrix& matrix) {
  const int64_t group = matrix.group;
  return matrix.bits != 0 && (group == 32 || group == 64 || group == 128 || group == 256);
}

Form form_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  if (instructions == Instructions::portable || matrix.dtype == Dtype::float32) return Form::float32;
  if (instructions == Instructions::avx2) {
    return count < kRowsForDequantizedFloats && fixed_in_vectors(matrix) ? Form::fixed : Form::float32;
  }
  const bool bfloat16 = matrix.dtype == Dtype::bfloat16;
  const bool amx = instructions == Instructions::amx;
  const bool fixed = fixed_in_tiles(matrix);
  if (amx && codes_in_strips(matrix) && count >= rows_for_strips(matrix)) return Form::dequantized_tiles;
  if (amx && fixed && count >= ZERO_INFERENCE_ROWS_FOR_FIXED_TILES) return Form::fixed_tiles;
  if (amx && count >= kRowsForTiles) return bfloat16 ? Form::tiles : Form::split_tiles;
  if (count < kRowsForTiles && fixed_in_vectors(matrix)) return Form::fixed;
  return bfloat16 ? Form::bfloat16 : Form::float32;
}

// Into how few tiles of x `count` rows go.
void share_columns(Layout& layout, int64_t count) {
  const int64_t room = kTileRows / 2 / layout.x_groups;  // rows of x whose terms and x groups are beside each other
  layout.inputs = count <= room ? 1 : 2;
  layout.pack = layout.inputs == 2 || 2 * count > room ? 1 : 4 * count > room ? 2 : 4;
  layout.width = layout.inputs == 2 ? 2 * room : room / layout.pack;
}

Layout layout_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  Layout layout = {
      form_of(matrix, count, instructions), false, 0, round_up(matrix.columns, kStep), matrix.bits, matrix.group, 1, 1, 1, 1};
  if (layout.form == Form::fixed || layout.form == Form::fixed_tiles) {
    layout.x_groups = matrix.group % 64 == 0 ? 1 : 2;
    if (layout.form == Form::fixed) return layout;
    layout.columns = round_up(matrix.columns, 2 * kStep);  // whole packs
    share_columns(layout, count);
    return layout;
  }
  if (layout.form == Form::dequantized_tiles) {
    const bool x_groups = matrix.group == 64 || matrix.group % kStep == 0;  // of 64 columns; else each 32 have their scale
    layout.pairs = matrix.bits == 8 ? 0 : x_groups ? 64 : 32;
    return layout;
  }
  if (matrix.bits == 0) {
    layout.pairs = layout.form == Form::split_tiles ? 32 : 0;
    return layout;
  }
  if (layout.form == Form::float32) {
    const int64_t lanes = instructions == Instructions::portable ? 4 : instructions == Instructions::avx2 ? 8 : 16;
    const int64_t vector = matrix.bits == 4 ? 2 * lanes : lanes;
    layout.vectors = matrix.group % vector == 0;
    layout.pairs = matrix.bits == 4 && layout.vectors ? vector : 0;
  } else {
    layout.vectors = groups_fill(matrix);
    layout.pairs = matrix.bits == 4 && layout.vectors ? 64 : 0;
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

int64_t input_step(const Matrix& matrix, Instructions) {
  // whole groups, of which sums are prepared, and packs; there are 256 columns in one at most
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

#if defined(__x86_64__)
#define ZERO_INFERENCE_CHOOSE(function, ...)  \
  switch (instructions) {                     \
    case Instructions::portable:              \
      return portable::function(__VA_ARGS__); \
    case Instructions::avx2:                  \
      return avx2::function(__VA_ARGS__);     \
    case Instructions::avx512:                \
      return avx512::function(__VA_ARGS__);   \
    case Instructions::amx:                   \
      break;                                  \
  }                                           \
  return amx::function(__VA_ARGS__);
#else
#define ZERO_INFERENCE_CHOOSE(function, ...) \
  (void)instructions;                        \
  return portable::function(__VA_ARGS__);
#endif

void prepare_input(const Matrix& matrix, int64_t count, Instructions instructions, const void* x, Dtype x_dtype, int64_t stride,
                   int64_t first, int64_t last, void* input) {
  const Layout layout = layout_of(matrix, count, instructions);
  ZERO_INFERENCE_CHOOSE(prepare_input, layout, count, x, x_dtype, stride, first, last, matrix.columns, input)
}

void product(const Matrix& matrix, int64_t count, Instructions instructions, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch) {
  const Layout layout = layout_of(matrix, count, instructions);
  ZERO_INFERENCE_CHOOSE(product, matrix, layout, count, input, first, last, out, stride, scratch)
}

uint64_t read_bytes_sum(const void* data, int64_t bytes, Instructions instructions) {
  ZERO_INFERENCE_CHOOSE(read_bytes_sum, data, bytes)
}

}  // namespace zero_inference::cpu
