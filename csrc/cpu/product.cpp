// Which kernels and which form of the input a product takes.

#include "product.h"

#include "product_layout.h"

namespace zero_inference::cpu {

namespace {

// From so many rows of x on tiles are faster than vectors, which do one row's work at a time; and with vectors, restoring codes
// once for all rows is faster than scaling each row's sums.
constexpr int64_t kRowsForTiles = 5;
// And with codes themselves. With bfloat16 scales one row of x is faster in vectors: 10.5 GB/s a core from the L2 cache, in
// tiles 8.2; two rows are as fast in tiles as one in vectors. One row with float16 scales was not measured both ways. Others
// can be tried (benchmarks/cores_products.py --flags); 1000 restores the codes instead.
#if !defined(ZERO_INFERENCE_ROWS_FOR_CODE_TILES)
#define ZERO_INFERENCE_ROWS_FOR_CODE_TILES 2
#endif
#if !defined(ZERO_INFERENCE_ROWS_FOR_SPLIT_CODE_TILES)
#define ZERO_INFERENCE_ROWS_FOR_SPLIT_CODE_TILES 2
#endif

// From so many on the codes of bfloat16 scales are restored strip by strip, so that sums stay in their tiles: those of each
// group need not be stored and scaled. With int4 and 32 rows that gains 15% from the L2 cache and nothing that shows from
// memory, with int8, whose codes fill two tiles each, a third. Others can be tried (benchmarks/cores_products.py --flags);
// 1000 keeps to the codes themselves.
#if !defined(ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES)
#define ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES 17
#endif
#if !defined(ZERO_INFERENCE_ROWS_FOR_RESTORED_BYTES)
#define ZERO_INFERENCE_ROWS_FOR_RESTORED_BYTES 9
#endif

// Whether groups fill vectors of bfloat16: then one look-up serves whole groups.
bool groups_fill(const Matrix& matrix) {
  return matrix.bits == 8 ? matrix.group % 32 == 0 : matrix.group == 32 || matrix.group % 64 == 0;
}

// Whether the codes themselves are multiplied in tiles. Not in large groups, as below.
bool codes_for_tiles(const Matrix& matrix) { return matrix.bits != 0 && matrix.group % 32 == 0 && matrix.group <= 256; }

// Whether codes can be restored strip by strip (product_restored_tiles.h).
bool codes_in_strips(const Matrix& matrix) {
  return matrix.bits != 0 && matrix.dtype == Dtype::bfloat16 && matrix.group % 32 == 0;
}

// Whether few rows of x are multiplied with the codes themselves, so that what they stand for is not rounded. Not in large
// groups: of their 16 values each is there often, and the sum over its errors of rounding, which a device has, is not: with
// 4096 in a group and an x whose mean is half its deviation, bfloat16's results differ by 0.7 %, with 64 by 0.2 %.
bool codes_themselves(const Matrix& matrix) {
  const int64_t group = matrix.group;
  return matrix.bits == 4 && (group == 32 || group == 64 || group == 128 || group == 256);
}

Form form_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  if (instructions < Instructions::avx512 || matrix.dtype == Dtype::float32) return Form::float32;
  const bool brain = matrix.dtype == Dtype::bfloat16;
  const bool amx = instructions == Instructions::amx;
  const int64_t restored = matrix.bits == 8 ? ZERO_INFERENCE_ROWS_FOR_RESTORED_BYTES : ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES;
  const bool codes = codes_for_tiles(matrix);
  if (amx && codes_in_strips(matrix) && count >= (codes ? restored : kRowsForTiles)) return Form::restored_tiles;
  const int64_t rows = brain ? ZERO_INFERENCE_ROWS_FOR_CODE_TILES : ZERO_INFERENCE_ROWS_FOR_SPLIT_CODE_TILES;
  if (amx && count >= rows && codes) return brain ? Form::code_tiles : Form::split_code_tiles;
  if (amx && count >= kRowsForTiles) return brain ? Form::tiles : Form::split_tiles;
  if (count < kRowsForTiles && codes_themselves(matrix)) {
    return brain ? Form::codes : Form::split_codes;
  }
  return brain ? Form::bfloat16 : Form::float32;
}

// How many sections share the columns of a tile of x, and where its terms do too. A row of x and a term need a column.
void share_columns(Layout& layout, int64_t count) {
  const int64_t rows = count * layout.terms;
  const int64_t beside = rows <= kTileRows ? layout.terms : 1;
  layout.terms /= beside;
  const int64_t room = rows <= kTileRows / 4 ? 4 : rows <= kTileRows / 2 ? 2 : 1;
  layout.pack = room < kMostPack ? room : kMostPack;
  layout.width = kTileRows / (layout.pack * beside);
}

Layout layout_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  Layout layout = {form_of(matrix, count, instructions), false, 0, round_up(matrix.columns, kStep), matrix.group, 1, 1, 1, 0};
  layout.terms = is_split(layout.form) ? 2 : 1;
  if (codes_in_tiles(layout.form)) {
    layout.nibbles = matrix.bits / 4;
    layout.group = matrix.group * layout.nibbles;
    share_columns(layout, count);
    layout.columns = round_up(matrix.columns * layout.nibbles, 2 * kStep);  // whole packs, and as much for fewer rows of x
    return layout;
  }
  if (layout.form == Form::restored_tiles) {
    const bool sections = matrix.group == 64 || matrix.group % kStep == 0;  // of 64 columns; else each 32 have their scale
    layout.pairs = matrix.bits == 8 ? 0 : sections ? 64 : 32;
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
  const int64_t sums =
      codes_in_tiles(layout.form) ? round_up(count, kTileRows) * 4 * (layout.columns / pack_columns(layout)) : 0;
  return static_cast<size_t>(sections_at(layout, count) + sums);
}

int64_t input_step(const Matrix& matrix, Instructions) {
  // whole groups and packs of sections, of which sums are prepared; there are 256 columns in one at most
  return codes_for_tiles(matrix) ? 2 * kStep : kStep;
}

size_t scratch_bytes(const Matrix& matrix, int64_t count, Instructions instructions) {
  const Layout layout = layout_of(matrix, count, instructions);
  if (codes_in_tiles(layout.form)) return static_cast<size_t>(kCodeScratchBytes + kPageBytes);
  if (layout.form == Form::restored_tiles) return static_cast<size_t>(kRestoredScratchBytes);
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
