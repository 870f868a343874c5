// What the kernels behind product.h have in common: the form of the prepared input, and a set of kernels per instruction set.
//
// Each set has its own .cpp, compiled for its own instructions, so nothing here may end up as one function that several of them
// share: `static`, no templates of the standard library.

#pragma once

#include "product.h"

namespace zero_inference::cpu {

enum class Form : int32_t {
  float32,   // [count][columns]; products in float32
  fixed,     // [count], each row in fixed-point numbers, their steps, and sums over groups (product_fixed_vectors.h, _narrow.h)
  bfloat16,  // [count][columns]; products of bfloat16 pairs, summed up in float32
  tiles,     // [blocks of 16 rows of x][blocks of 32 columns], 1 KiB each: 16 pairs of columns, of each row one pair
  split_tiles,       // likewise, and each value in two bfloat16 terms
  fixed_tiles,       // tiles of fixed-point numbers, their steps, and sums over x groups (product_fixed_tiles.h)
  dequantized_tiles  // tiles, and int4 in the order of nibbles; products with codes that are dequantized strip by strip
};

struct Layout {
  Form form;
  bool vectors;  // groups are whole vectors of codes; else codes are dequantized one by one
  // Order of the columns. int4 in vectors: so many are a block, in which those of low nibbles come before those of high ones.
  // Plain in two terms: 32, with column i of a block beside i + 16. int4 in dequantized_tiles: so many, 64 or 32, are in the
  // order of product_dequantized_rows.h. Else 0, as they are.
  int64_t pairs;
  int64_t columns;  // with padding of zeros, a multiple of kStep
  int64_t bits;     // of the weight's codes
  int64_t group;    // of the weight
  // Fixed-point x: x groups of 64 columns, 1 or 2.
  int64_t x_groups;
  // In tiles: `inputs` tiles for 64 columns and as many rows of x as there is room for. One has the terms beside each other,
  // and the x groups of `pack` blocks of 64 columns, each in columns of its own, where tiles of others are zero; of two, each
  // has a term. A x group and a term have `width` columns, one for each row of x.
  int64_t inputs, pack, width;
};

constexpr int64_t kStep = 128;  // columns that are prepared and multiplied together
// Bytes of one dequantized row that are multiplied at a time: 4 rows of it and the input stay in L1.
constexpr int64_t kBlockBytes = 4096;
// Bytes between rows that would else lie a power of two apart, and share lines of the cache.
constexpr int64_t kRowGap = 64;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kPanelRows = 2 * kTileRows;  // rows of the weight that are dequantized and multiplied together in tiles
// Columns of a panel of them in one term: two panels take two thirds of the L1 cache of 48 KiB. Others can be tried
// (benchmarks/cores_products.py --flags): multiples of 256.
#if !defined(ZERO_INFERENCE_PANEL_COLUMNS)
#define ZERO_INFERENCE_PANEL_COLUMNS 256
#endif
constexpr int64_t kPanelColumns = ZERO_INFERENCE_PANEL_COLUMNS;
constexpr int64_t kPanelBytes = kPanelRows * kPanelColumns * 2;

// Rows of the weight that are multiplied together with codes in tiles: for each 512 columns, x comes from L2 once. With more
// rows x is read less often, but memory is read in pieces of 256 bytes of more rows, which is slower: with 128 rows, 13824
// columns of int4 took 41 GB/s with 32 tokens, with 32 rows 58 (15 cores beside a busy link). Codes of 8 bits go through half
// as many rows, which is faster: 69 GB/s in place of 57 with 32 tokens. Others can be tried
// (benchmarks/cores_blocks.py --flags): multiples of 32.
#if !defined(ZERO_INFERENCE_CODE_ROWS)
#define ZERO_INFERENCE_CODE_ROWS 32
#endif
constexpr int64_t kCodeRows = ZERO_INFERENCE_CODE_ROWS;
static_assert(kCodeRows > 0 && kCodeRows % (2 * kTileRows) == 0, "whole tiles of rows, and of half of them");

static inline int64_t code_rows(const Matrix& matrix) { return matrix.bits == 8 ? kCodeRows / 2 : kCodeRows; }

// Of a thread's scratch for fixed-point products in tiles: unpacked codes, sums, copied codes, scales and minima, the totals of
// kCodeRows rows, the groups of x groups, and what brings it to the input's place in a page.
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kFixedScratchBytes = (4 + 4 + 4 + 2) * kTileBytes + kCodeRows / kTileRows * kTileBytes + 8 * 64;

// Columns of a piece of up to 32 rows of x where codes are dequantized in tiles, whose tiles of x are then 32 KiB; half of them
// for up to 64 rows. Others can be tried (benchmarks/cores_products.py --flags): 256 or 512.
#if !defined(ZERO_INFERENCE_RESTORED_COLUMNS)
#define ZERO_INFERENCE_RESTORED_COLUMNS 512
#endif
constexpr int64_t kDequantizedColumns = ZERO_INFERENCE_RESTORED_COLUMNS;
static_assert(kDequantizedColumns == 256 || kDequantizedColumns == 512, "scales are converted for 512 columns");

// Of a thread's scratch for them: two panels, and of each strip of kCodeRows rows scales, minima, and totals with 64 rows of x.
constexpr int64_t kDequantizedStrips = (kCodeRows + kPanelRows - 1) / kPanelRows;
constexpr int64_t kDequantizedScratchBytes = (16 + kDequantizedStrips * (4 + 8)) * kTileBytes;

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Whole groups in so many columns. A division takes up to 18 cycles, and a row is visited every 256 columns; sizes are powers
// of two nearly always.
static inline int64_t groups_in(const Matrix& matrix, int64_t columns) {
  const int64_t group = matrix.group;
  return (group & (group - 1)) == 0 ? columns >> __builtin_ctzll(static_cast<unsigned long long>(group)) : columns / group;
}

// Columns from `column` to the end of its group.
static inline int64_t left_in_group(const Matrix& matrix, int64_t column) {
  return matrix.group - (column - groups_in(matrix, column) * matrix.group);
}

static inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// Bytes of a row of the prepared input where that is not tiles.
static inline int64_t input_stride(const Layout& layout) {
  if (layout.form != Form::fixed) return layout.columns * (layout.form == Form::float32 ? 4 : 2) + kRowGap;
  const int64_t sums = round_up(layout.columns / layout.group + 1, 16) * 4;
  return layout.columns * 2 + layout.columns * layout.bits / 8 + sums + kRowGap;
}

// Of such a row where x is in fixed-point numbers: where their steps begin, and where the sums over groups.
static inline int64_t steps_at(const Layout& layout) { return layout.columns * 2; }
static inline int64_t sums_at(const Layout& layout) { return steps_at(layout) + layout.columns * layout.bits / 8; }

// The power of two that 16 bits of numbers up to `most`, the bits of a float32 without its sign, are counted in, and its
// inverse.
static inline void find_step(uint32_t most, float& step, float& inverse) {
  constexpr float kOver = 32768.0f / 32639;  // 127 * 256 + 127 is the greatest number
  float value;
  __builtin_memcpy(&value, &most, 4);
  value *= kOver;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t exponent = bits >> 23;                 // 255 where the product is too large for float32
  const uint32_t from = exponent < 15 ? 15 : exponent;  // below, the step would be no normal number
  const uint32_t step_bits = most >= 0x7f800000u ? 0x7fc00000u : (from - 14) << 23, inverse_bits = (268 - from) << 23;
  __builtin_memcpy(&step, &step_bits, 4);
  __builtin_memcpy(&inverse, &inverse_bits, 4);
}

static inline bool in_tiles(const Layout& layout) {
  return layout.form == Form::tiles || layout.form == Form::split_tiles || layout.form == Form::dequantized_tiles ||
         layout.form == Form::fixed_tiles;
}

// Rows of x that are multiplied together by fixed-point products in tiles.
static inline int64_t tokens_at_once(const Layout& layout) { return layout.width; }

// Bytes of their prepared input: tiles, and behind them for each pack its steps and sums, a vector each.
static inline int64_t fixed_tile_bytes(const Layout& layout) { return layout.columns / 64 * layout.inputs * kTileBytes; }

static inline int64_t fixed_input_bytes(const Layout& layout) {
  return fixed_tile_bytes(layout) + layout.columns / (64 * layout.pack) * 128;
}

// Where column `column` (a multiple of what a byte holds) of a row of values begins.
static inline const char* values_at(const Matrix& matrix, int64_t row, int64_t column) {
  const int64_t element = row * matrix.columns + column;
  return static_cast<const char*>(matrix.values) + (matrix.bits ? element * matrix.bits / 8 : element * bytes_of(matrix.dtype));
}

#define ZERO_INFERENCE_KERNELS(name)                                                                                      \
  namespace name {                                                                                                        \
  void prepare_input(const Layout& layout, int64_t count, const void* x, Dtype x_dtype, int64_t stride, int64_t first,    \
                     int64_t last, int64_t columns, void* input);                                                         \
  void product(const Matrix& matrix, const Layout& layout, int64_t count, const void* input, int64_t first, int64_t last, \
               float* out, int64_t stride, void* scratch);                                                                \
  uint64_t read_bytes_sum(const void* data, int64_t bytes);                                                               \
  }
ZERO_INFERENCE_KERNELS(portable)
#if defined(__x86_64__)
ZERO_INFERENCE_KERNELS(avx2)
ZERO_INFERENCE_KERNELS(avx512)
ZERO_INFERENCE_KERNELS(amx)  // the tile forms; the others are avx512's, and so is read_bytes_sum
#endif
#undef ZERO_INFERENCE_KERNELS

// The sum of words of 8 bytes, the last one filled with zeros.
static inline uint64_t words_sum(const char* p, int64_t bytes) {
  uint64_t total = 0;
  for (int64_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, p + at, static_cast<size_t>(bytes - at < 8 ? bytes - at : 8));
    total += word;
  }
  return total;
}

// Into the L2 cache: L1 holds the panel and x. Other places can be tried (benchmarks/cores_products.py --flags): 3 is L1, 0
// past the caches, -1 does not ask.
#if !defined(ZERO_INFERENCE_PREFETCH)
#define ZERO_INFERENCE_PREFETCH 2
#endif
static inline void prefetch(const char* p) {
  if (ZERO_INFERENCE_PREFETCH >= 0) __builtin_prefetch(p, 0, ZERO_INFERENCE_PREFETCH & 3);
}

// Scalar conversions, for what does not fill a vector.
static inline float bfloat16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}

static inline float float16_value(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  uint32_t word = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00u) {  // an infinity or NaN
    word |= 0x7f800000u;
    __builtin_memcpy(&value, &word, 4);
  } else {
    __builtin_memcpy(&value, &word, 4);
    value *= 0x1p112f;  // the difference of the exponents' biases; right for subnormal numbers too
  }
  return bits & 0x8000u ? -value : value;
}

static inline float element(const void* values, Dtype dtype, int64_t index) {
  const char* const p = static_cast<const char*>(values) + index * bytes_of(dtype);
  float value;
  uint16_t bits;
  if (dtype == Dtype::float32) {
    __builtin_memcpy(&value, p, 4);
    return value;
  }
  __builtin_memcpy(&bits, p, 2);
  return dtype == Dtype::float16 ? float16_value(bits) : bfloat16_value(bits);
}

}  // namespace zero_inference::cpu
