// Layout of the prepared input, and scalar helpers.
//
// Source files of several instruction sets include this, so everything is `static` and no template of the standard library is
// used: the linker must not merge functions of different sets.

#pragma once

#include "product.h"

namespace zero_inference::cpu {

enum class Form : int32_t {
  float32,   // [count][columns]; products in float32
  bfloat16,  // [count][columns] in the order of product_e4m3.h
  fixed,     // [count], each row in fixed-point numbers, their steps, and sums over groups (product_fixed_vectors.h, _narrow.h)
  tiles,     // [blocks of 16 rows of x][blocks of 32 columns], 1 KiB each: 16 pairs of columns, of each row one pair
  split_tiles,       // likewise, and each value in two bfloat16 terms
  fixed_tiles,       // tiles of fixed-point numbers, their steps, and sums over x groups (product_fixed_tiles.h)
  dequantized_tiles  // tiles in the order of product_dequantized_tiles.h; products with codes that are dequantized strip by
                     // strip
};

// Parts of the choice that benchmarks/cpu_product_forms.py leaves out in turn, so that the next best form takes over; the usual
// build has them all.
enum Optional : uint32_t {
  kNarrow = 1 << 0,            // AVX2: fixed-point x (product_fixed_narrow.h)
  kFixedVectors = 1 << 1,      // product_fixed_vectors.h
  kFixedTiles = 1 << 2,        // product_fixed_tiles.h
  kPacks = 1 << 3,             // of two blocks of columns, or steps of E4M3, in one tile
  kTwoInputs = 1 << 4,         // a tile for each term
  kDequantizedTiles = 1 << 5,  // product_dequantized_tiles.h
  kWideTables = 1 << 6,        // one for 64 columns or more
  kFourInputTiles = 1 << 7,    // 33 to 64 rows of x at once
  kStripPrefetch = 1 << 8,     // Prefetcher (product_tiles.h)
  kTiles = 1 << 9,             // bfloat16 (amx.cpp)
  kSplitTiles = 1 << 10,       // float16 in two terms (amx.cpp)
  kDirect = 1 << 11,           // from registers (product_direct.h)
  kInPlace = 1 << 12,          // more than 4 rows of x without a panel (product_panel.h)
  kPrefetchInSteps = 1 << 13,  // product_panel.h
  kE4m3Bfloat16 = 1 << 14,     // product_e4m3.h
  kNarrowTiles = 1 << 15,      // of x in product_dequantized_tiles.h
};

#if defined(ZERO_INFERENCE_MEASURE_FORMS)
extern uint32_t left_out, asked;  // bits of Optional

static inline bool without(Optional part) {
  if ((__atomic_load_n(&asked, __ATOMIC_RELAXED) & part) == 0) __atomic_fetch_or(&asked, part, __ATOMIC_RELAXED);
  return (left_out & part) != 0;
}
#else
static constexpr bool without(Optional) { return false; }
#endif

struct Layout {
  Form form;
  bool vectors;  // float32: groups are whole vectors of codes; else codes are dequantized one by one
  // Order of columns within blocks. 4 bits and E4M3 in whole vectors: in blocks of this size, even columns before odd ones. Two
  // terms: 32, column i is beside i + 16. dequantized_tiles: with 4 bits 64 or 32, the order of product_dequantized_tiles.h,
  // with E4M3 16, that of e4m3_words. Else 0: unchanged.
  int64_t pairs;
  int64_t columns;  // with padding of zeros, a multiple of kStep
  int64_t bits;     // of the weight's codes
  int64_t group;    // of the weight
  // Fixed-point x: groups of columns with one step, in each 64 columns (1, 2 or 4).
  int64_t x_groups;
  // fixed_tiles: tiles of x for 64 columns. With one (inputs = 1) both terms and the x groups of `pack` blocks of 64 columns
  // are side by side, zero elsewhere; with two, each has one term. `width`: columns of an x group and a term, one a row of x.
  // dequantized_tiles: a tile has `pack` times `width` columns, `pack` steps of E4M3 side by side.
  int64_t inputs, pack, width;
};

constexpr int64_t kStep = 128;  // columns that are prepared and multiplied together
// Bytes of a dequantized row that are multiplied at a time: 4 rows and the input stay in L1.
constexpr int64_t kBlockBytes = 4096;
// Keeps rows from being a power of two apart, where they would share cache sets.
constexpr int64_t kRowGap = 64;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kPanelRows = 2 * kTileRows;  // rows of the weight that are dequantized and multiplied together in tiles
constexpr int64_t kPanelColumns = 256;         // two panels take two thirds of an L1 cache of 48 KiB
constexpr int64_t kPanelBytes = kPanelRows * kPanelColumns * 2;

// Rows of the weight that are multiplied together in tiles of codes; x comes from L2 once for each 512 columns. With 128 rows x
// is read less often, but memory in pieces of 256 bytes of more rows: 41 GB/s (13824 columns, int4, 32 tokens, 15 cores beside
// a busy link), with 32 rows 58. int8 with half as many rows: 69 instead of 57; E4M3, whose x has twice the bytes, with 32
// rows: 0.77 to 1.16 of int8's rate (M = 8 and 16), with 16: 0.72 to 1.05.
constexpr int64_t kCodeRows = 32;

static inline int64_t code_rows(const Matrix& matrix) { return matrix.codes == Codes::int8 ? kCodeRows / 2 : kCodeRows; }

// FixedScratch (product_fixed_tiles.h) and the page in which it is aligned.
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kFixedScratchBytes = (4 + 4 + 4 + 2) * kTileBytes + kCodeRows / kTileRows * kTileBytes + 8 * 64;

// Columns of x for which tiles of up to 32 rows take 32 KiB; half of it for up to 64 rows. Scales are converted for as many.
constexpr int64_t kDequantizedColumns = 512;

// DequantizedScratch (product_dequantized_tiles.h).
constexpr int64_t kDequantizedScratchBytes = (16 + 4 + 8 + 8) * kTileBytes;

// What E2M1 codes count as in fixed point: twice their number plus 12.
alignas(16) constexpr uint8_t kE2m1Bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Groups in that many columns. A division takes up to 18 cycles; sizes are nearly always powers of two.
static inline int64_t groups_in(const Matrix& matrix, int64_t columns) {
  const int64_t group = matrix.group;
  return (group & (group - 1)) == 0 ? columns >> __builtin_ctzll(static_cast<unsigned long long>(group)) : columns / group;
}

static inline int64_t row_groups(const Matrix& matrix) { return groups_in(matrix, matrix.columns + matrix.group - 1); }

static inline int64_t left_in_group(const Matrix& matrix, int64_t column) {
  return matrix.group - (column - groups_in(matrix, column) * matrix.group);
}

// Bytes of a row of the prepared input; not for tiles.
static inline int64_t input_stride(const Layout& layout) {
  if (layout.form != Form::fixed) return layout.columns * (layout.form == Form::float32 ? 4 : 2) + kRowGap;
  const int64_t sums = round_up(layout.columns / layout.group + 1, 16) * 4;
  return layout.columns * 2 + layout.columns * layout.bits / 8 + sums + kRowGap;
}

// Offsets in a row of fixed-point x.
static inline int64_t steps_at(const Layout& layout) { return layout.columns * 2; }
static inline int64_t sums_at(const Layout& layout) { return steps_at(layout) + layout.columns * layout.bits / 8; }

// Step (a power of two) and its inverse, such that values up to `most` (bits of a float32 without sign) fit 16 bits.
static inline void find_step(uint32_t most, float& step, float& inverse) {
  constexpr float kOver = 32768.0f / 32639;  // 127 * 256 + 127 is the greatest number
  const uint32_t bits = to_bits(from_bits(most) * kOver);
  const uint32_t exponent = bits >> 23;                 // 255 where the product is too large for float32
  const uint32_t from = exponent < 15 ? 15 : exponent;  // below, the step would be no normal number
  const uint32_t step_bits = most >= 0x7f800000u ? 0x7fc00000u : (from - 14) << 23, inverse_bits = (268 - from) << 23;
  step = from_bits(step_bits);
  inverse = from_bits(inverse_bits);
}

// Bytes from row to row of a tile of x; tiles have no gaps.
static inline int64_t tile_row_bytes(const Layout& layout) { return layout.pack * layout.width * 4; }

static inline bool in_tiles(const Layout& layout) {
  return layout.form == Form::tiles || layout.form == Form::split_tiles || layout.form == Form::dequantized_tiles ||
         layout.form == Form::fixed_tiles;
}

// Rows of x that fixed-point tiles multiply together.
static inline int64_t tokens_at_once(const Layout& layout) { return layout.width; }

// Bytes of their prepared input: tiles, then steps and sums of each pack, a vector each.
static inline int64_t fixed_tile_bytes(const Layout& layout) { return layout.columns / 64 * layout.inputs * kTileBytes; }

static inline int64_t fixed_input_bytes(const Layout& layout) {
  return fixed_tile_bytes(layout) + layout.columns / (64 * layout.pack) * 128;
}

// `column` must begin a byte.
static inline const char* values_at(const Matrix& matrix, int64_t row, int64_t column) {
  const int64_t element = row * matrix.columns + column, bits = bits_of(matrix.codes);
  return static_cast<const char*>(matrix.values) + (bits ? element * bits / 8 : element * bytes_of(matrix.dtype));
}

// Into L2: L1 holds the panel and x.
static inline void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace zero_inference::cpu
