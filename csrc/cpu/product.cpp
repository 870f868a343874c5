// Chooses the kernel and the layout of the input; README.md has the table.

#include "product.h"

#include "product_layout.h"

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

// M from which tiles are faster than vectors, which multiply one row at a time; and from which vectors gain from dequantizing
// once for all rows.
constexpr int64_t kRowsForTiles = 5;
// AVX2: dequantizing to float32 is as fast from about M = 16, for narrow weights from fewer.
constexpr int64_t kRowsForDequantizedFloats = 9;
// M for codes with fixed-point x in tiles: int4 from the caches gives 27.4 GB/s a core in vectors and 13.3 in tiles with M = 1,
// 9.0 and 13.8 with M = 4. Others: benchmarks/cores_products.py --flags.
#if !defined(ZERO_INFERENCE_ROWS_FOR_FIXED_TILES)
#define ZERO_INFERENCE_ROWS_FOR_FIXED_TILES 2
#endif

// M from which codes with bfloat16 scales are dequantized, so that sums stay in their tiles. int4 is as fast either way with 32
// and 64 rows; int8 is faster with 64 and slower with 32. int4 in groups of 32: fixed-point products read the codes again every
// 8 rows (15 threads: 88 GB/s with 8 rows, 49 with 9, 43 with 16; dequantized 75 and 76; benchmarks/LOG.md). Others:
// benchmarks/cores_products.py --flags; 1000 disables it.
#if defined(ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES)
constexpr int64_t kRowsForDequantizedTiles = ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES;
constexpr int64_t kRowsForDequantizedGroupsOf32 = ZERO_INFERENCE_ROWS_FOR_RESTORED_TILES;
#else
constexpr int64_t kRowsForDequantizedTiles = 17;
constexpr int64_t kRowsForDequantizedGroupsOf32 = 9;
#endif

// Whether one table look-up serves whole vectors of bfloat16.
bool groups_fill(const Matrix& matrix) {
  return matrix.bits == 8 ? matrix.group % 32 == 0 : matrix.group == 32 || matrix.group % 64 == 0;
}

// Fixed-point x in tiles; large groups as in fixed_in_vectors.
bool fixed_in_tiles(const Matrix& matrix) { return matrix.bits != 0 && matrix.group % 32 == 0 && matrix.group <= 256; }

bool codes_in_strips(const Matrix& matrix) {
  return matrix.bits != 0 && matrix.dtype == Dtype::bfloat16 && matrix.group % 32 == 0;
}

// Least M for dequantized tiles.
int64_t rows_for_strips(const Matrix& matrix) {
  if (!fixed_in_tiles(matrix)) return kRowsForTiles;
  return matrix.bits == 4 && matrix.group == 32 ? kRowsForDequantizedGroupsOf32 : kRowsForDequantizedTiles;
}

// Fixed-point x in vectors, which does not round dequantized values. A device does, and in large groups these errors add up:
// with groups of 4096 and an x whose mean is half its deviation bfloat16 results differ by 0.7 %, with 64 by 0.2 %.
bool fixed_in_vectors(const Matrix& matrix) {
  const int64_t group = matrix.group;
  return matrix.bits != 0 && (group == 32 || group == 64 || group == 128 || group == 256);
}

Form form_of(const Matrix& matrix, int64_t count, Instructions instructions) {
  if (instructions == Instructions::portable || matrix.dtype == Dtype::float32) return Form::float32;
  if (instructions == Instructions::avx2) {
    return count < kRowsForDequantizedFloats && fixed_in_vectors(matrix) && !without(kNarrow) ? Form::fixed : Form::float32;
  }
  const bool bfloat16 = matrix.dtype == Dtype::bfloat16;
  const bool amx = instructions == Instructions::amx;
  const bool fixed = fixed_in_tiles(matrix);
  const bool strips = amx && codes_in_strips(matrix);
  if (strips && count >= rows_for_strips(matrix) && !without(kDequantizedTiles)) return Form::dequantized_tiles;
  if (amx && fixed && count >= ZERO_INFERENCE_ROWS_FOR_FIXED_TILES) {
    if (!without(kFixedTiles)) return Form::fixed_tiles;
    if (strips && count >= kRowsForTiles && !without(kDequantizedTiles)) return Form::dequantized_tiles;
  }
  if (count < kRowsForTiles && fixed_in_vectors(matrix)) {
    if (!without(kFixedVectors)) return Form::fixed;
    if (amx && !without(kFixedTiles)) return Form::fixed_tiles;
    if (strips && !without(kDequantizedTiles)) return Form::dequantized_tiles;
  }
  if (amx && count >= kRowsForTiles && !without(bfloat16 ? kTiles : kSplitTiles)) {
    return bfloat16 ? Form::tiles : Form::split_tiles;
  }
  return bfloat16 && !without(kBfloat16Pairs) ? Form::bfloat16 : Form::float32;
}

void share_columns(Layout& layout, int64_t count) {
  const int64_t room = kTileRows / 2 / layout.x_groups;  // rows of x whose terms and x groups are beside each other
  layout.inputs = count <= room || without(kTwoInputs) ? 1 : 2;
  layout.pack = 1;
  if (2 * count <= room && !without(kPacks)) layout.pack = 4 * count <= room && !without(kPacksOf4) ? 4 : 2;
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
    layout.pairs = matrix.bits == 8 ? 0 : x_groups && !without(kWideTables) ? 64 : 32;
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
