// Products in AMX tiles, 16 rows of the weight with 16 rows of x at once; here of plain weights in bfloat16, or float16 in two
// bfloat16 terms whose sum is exact; of codes in product_fixed_tiles.h and product_dequantized_tiles.h.
//
// Panels of 32 rows are copied one block of columns at a time, to tiles of 16 rows and 32 columns. x is in tiles of 16 column
// pairs by 16 rows (fewer in product_dequantized_tiles.h), missing rows zero. Two tiles of the weight and two of x give four
// tiles of sums. With two terms the product of the second ones (at most 2^-16 of the sum) is left out.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni")

#include "simd_avx512.h"

#include "kernels.h"
#include "product_dequantized_tiles.h"
#include "product_fixed_tiles.h"
#include "product_tiles.h"
#include "product_vectors.h"

namespace zero_inference::cpu {

namespace {

constexpr int64_t kTermBytes = kPanelRows * 64;  // of a panel's rows in one block of 32 columns
// The other panel lies between, so that addresses of stores to one and loads from the other differ in their low 12 bits: else a
// load waits for the store (4K aliasing).
constexpr int64_t kTermStride = 2 * kTermBytes;

// Destination of a row of a panel: bytes from one block of 32 columns to the next.
struct PanelRow {
  char* out;
  int64_t block;
};

// Columns [0, count) of a row, padded with zeros to a block.
inline void copy_bfloat16(const char* p, int64_t count, PanelRow to, const char* next) {
  for (int64_t i = 0; i < count; i += 32) {
    prefetch(next + i * 2);
    const int64_t left = count - i;
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
    _mm512_storeu_si512(to.out + i / 32 * to.block, _mm512_maskz_loadu_epi16(mask, p + i * 2));
  }
}

// 32 float16 as two terms of 8 and 3 bits, both exact. Column i is beside i + 16, so a shift and one logical operation join two
// vectors.
inline void split_float16_block(__m256i one, __m256i two, char* out) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  constexpr int kAndOr = 0xea;  // (a & b) | c
  const __m512 values[2] = {_mm512_cvtph_ps(one), _mm512_cvtph_ps(two)};
  const __m512i bits[2] = {_mm512_castps_si512(values[0]), _mm512_castps_si512(values[1])};
  __m512i left[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    left[i] = _mm512_castps_si512(_mm512_sub_ps(values[i], _mm512_castsi512_ps(_mm512_and_si512(bits[i], upper))));
  }
  _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(bits[1], upper, _mm512_srli_epi32(bits[0], 16), kAndOr));
  _mm512_storeu_si512(out + kTermStride, _mm512_or_si512(left[1], _mm512_srli_epi32(left[0], 16)));
}

inline void split_float16(const char* p, int64_t count, PanelRow to, const char* next) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    prefetch(next + i * 2);
    split_float16_block(load_32_bytes(p + i * 2), load_32_bytes(p + i * 2 + 32), to.out + i / 32 * to.block);
  }
  if (i < count) {
    const __m512i halves = _mm512_maskz_loadu_epi16((1u << (count - i)) - 1, p + i * 2);
    split_float16_block(_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64(halves, 1), to.out + i / 32 * to.block);
  }
}

template <int kRowTiles, int kInputTiles, bool kLoadInput>
inline void multiply_block(const char* rows, const char* input, int64_t input_stride) {
  multiply_part<kInputTiles, 0, kLoadInput>(kRowTiles == 2, rows, input, input_stride);
  multiply_part<kInputTiles, 1, kLoadInput>(kRowTiles == 2, rows, input, input_stride);
  multiply_part<kInputTiles, 2, kLoadInput>(kRowTiles == 2, rows, input, input_stride);
  multiply_part<kInputTiles, 3, kLoadInput>(kRowTiles == 2, rows, input, input_stride);
}

template <int kRowTiles, int kInputTiles, int kTerms>
void multiply_panel(const char* panel, const char* input, int64_t input_stride, int64_t blocks, Begin begin, bool ends,
                    char* sums) {
  begin_sums<kRowTiles, kInputTiles>(begin, sums);
  for (int64_t block = 0; block < blocks; ++block) {
    const char* const rows = panel + block * kTerms * kTermStride;
    const char* const x = input + block * kTerms * kTileBytes;
    if constexpr (kTerms == 1) {
      multiply_block<kRowTiles, kInputTiles, true>(rows, x, input_stride);
    } else {
      multiply_block<kRowTiles, kInputTiles, true>(rows, x + kTileBytes, input_stride);
      multiply_block<kRowTiles, kInputTiles, true>(rows, x, input_stride);
      multiply_block<kRowTiles, kInputTiles, false>(rows + kTermStride, x, input_stride);
    }
  }
  if (ends) store_sums<kRowTiles, kInputTiles>(sums);
}

// The part of the weight in a panel.
struct Part {
  int64_t row, rows, k, columns;
  char* panel;
};

// Tiles multiply the previous panel while the next is filled.
template <int kTerms>
struct Tiles {
  static constexpr int64_t kBlock = kPanelColumns / kTerms;

  const Matrix& matrix;
  const Layout& layout;
  int64_t count;
  const char* input;
  char* panels;
  char* sums;

  bool ends(const Part& part) const { return part.k + part.columns == matrix.columns; }

  void copy_row(const Part& part, int64_t r, int64_t last) const {
    const int64_t next_row = part.row + r + (ends(part) ? kPanelRows : 0);
    const int64_t next_k = ends(part) ? 0 : part.k + part.columns;
    const char* const next = next_row < last ? values_at(matrix, next_row, next_k) : values_at(matrix, part.row, part.k);
    const PanelRow to = {part.panel + r * 64, kTerms * kTermStride};
    const char* const values = values_at(matrix, part.row + r, part.k);
    constexpr auto copy = kTerms == 1 ? copy_bfloat16 : split_float16;
    if (part.columns == kBlock) return copy(values, kBlock, to, next);  // the common case, decided once
    copy(values, part.columns, to, next);
    for (int64_t i = round_up(part.columns, 32); i < round_up(part.columns, kStep); i += 32) {
      for (int term = 0; term < kTerms; ++term) {
        _mm512_storeu_si512(to.out + i / 32 * to.block + term * kTermStride, _mm512_setzero_si512());
      }
    }
  }

  int64_t blocks(const Part& part) const { return round_up(part.columns, kStep) / 32; }

  // A step: a block of 32 columns of the panel times one or two tiles of x.
  int64_t steps(const Part& part) const { return blocks(part) * ((count + 2 * kTileRows - 1) / (2 * kTileRows)); }

  // Steps [from, to): blocks of columns of the first tiles of x, then of the next.
  void multiply(const Part& part, int64_t from, int64_t to) const {
    const bool alone = count <= 2 * kTileRows;  // sums stay in their tiles
    const int64_t stride = layout.columns / 32 * kTerms * kTileBytes;
    while (from < to) {
      const int64_t pair = alone ? 0 : from / blocks(part);
      const int64_t block = from - pair * blocks(part);
      const int64_t some = to - from < blocks(part) - block ? to - from : blocks(part) - block;
      const bool two = count - pair * 2 * kTileRows > kTileRows;
      const auto kernel = part.rows > kTileRows ? (two ? multiply_panel<2, 2, kTerms> : multiply_panel<2, 1, kTerms>)
                                                : (two ? multiply_panel<1, 2, kTerms> : multiply_panel<1, 1, kTerms>);
      const Begin begin = block > 0 ? Begin::keep : part.k == 0 ? Begin::zero : alone ? Begin::keep : Begin::load;
      const bool store = block + some == blocks(part) && (!alone || ends(part));
      const char* const x = input + 2 * pair * stride + (part.k / 32 + block) * kTerms * kTileBytes;
      kernel(part.panel + block * kTerms * kTermStride, x, stride, some, begin, store, sums + pair * kSumsBytes);
      from += some;
    }
  }

  // The remaining steps, and the output of complete rows.
  void finish(const Part& part, int64_t from, int64_t first, float* out, int64_t stride) const {
    multiply(part, from, steps(part));
    if (!ends(part)) return;
    for (int64_t m = 0; m < count; m += 2 * kTileRows) {
      const int64_t some = count - m < 2 * kTileRows ? count - m : 2 * kTileRows;
      write_out(sums + m / (2 * kTileRows) * kSumsBytes, 2, part.rows, some, out + m * stride + part.row - first, stride);
    }
  }

  void product(int64_t first, int64_t last, float* out, int64_t stride) const {
    tiles_begin();
    Part before = {first, 0, 0, 0, panels + kTermBytes};
    for (int64_t row = first; row < last; row += kPanelRows) {
      const int64_t rows = last - row < kPanelRows ? last - row : kPanelRows;
      for (int64_t k = 0; k < matrix.columns; k += kBlock) {
        const int64_t columns = matrix.columns - k < kBlock ? matrix.columns - k : kBlock;
        const Part part = {row, rows, k, columns, before.panel == panels ? panels + kTermBytes : panels};
        const int64_t all = steps(before);
        int64_t done = 0;
        for (int64_t r = 0; r < rows; ++r) {
          copy_row(part, r, last);
          const int64_t due = all * (r + 1) / kPanelRows;
          multiply(before, done, due);
          done = due;
        }
        finish(before, done, first, out, stride);
        before = part;
      }
    }
    finish(before, 0, first, out, stride);
    tiles_end();
  }
};

template <int kTerms>
void product_of_tiles(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* scratch) {
  Tiles<kTerms>{matrix, layout, count, input, scratch, scratch + 2 * kPanelBytes}.product(first, last, out, stride);
}

// To nearest, ties away from zero.
inline Vector round_to_bfloat16(Vector value) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Two blocks of 32 elements of x from column k, in order or, with `pairs`, in that of codes in
// product_dequantized_tiles.h.
inline void bfloat16_input(const char* x, Dtype dtype, int64_t k, int64_t columns, int64_t pairs, __m512i (*blocks)[1]) {
  Vector one, two, even[2], odd[2];
  for (int block = 0; block < 2; ++block) {
    load_two_vectors(x, dtype, k + block * 32, columns, one, two);
    if (pairs == 64) {
      split_pairs(one, two, even[block], odd[block]);
      continue;
    }
    blocks[block][0] = to_bfloat16(one, two);
    if (pairs == 32) {
      const __m512i low = _mm512_setr_epi32(0x40000, 0xc0008, 0x140010, 0x1c0018, 0x50001, 0xd0009, 0x150011, 0x1d0019, 0x60002,
                                            0xe000a, 0x160012, 0x1e001a, 0x70003, 0xf000b, 0x170013, 0x1f001b);
      blocks[block][0] = _mm512_permutexvar_epi16(low, blocks[block][0]);
    }
  }
  if (pairs == 16) order_as_e4m3(blocks[0][0], blocks[1][0]);
  if (pairs != 64) return;
  Vector place[4];  // in a word
  split_pairs(even[0], even[1], place[0], place[2]);
  split_pairs(odd[0], odd[1], place[1], place[3]);
  blocks[0][0] = to_bfloat16(place[0], place[1]);
  blocks[1][0] = to_bfloat16(place[2], place[3]);
}

// Two blocks of 32 elements in two terms, rounded and the rest, in the order of split_float16_block.
inline void bfloat16_input(const char* x, Dtype dtype, int64_t k, int64_t columns, int64_t, __m512i (*blocks)[2]) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
  for (int block = 0; block < 2; ++block) {
    Vector one, two;
    load_two_vectors(x, dtype, k + block * 32, columns, one, two);
    const Vector upper_one = round_to_bfloat16(one), upper_two = round_to_bfloat16(two);
    blocks[block][0] = _mm512_permutexvar_epi16(places, to_bfloat16(upper_one, upper_two));
    blocks[block][1] =
        _mm512_permutexvar_epi16(places, to_bfloat16(_mm512_sub_ps(one, upper_one), _mm512_sub_ps(two, upper_two)));
  }
}

inline void put_pairs(const char* rows, char* tile, int64_t row_bytes) {
  const __mmask16 columns = static_cast<__mmask16>((1 << row_bytes / 4) - 1);
  for (int64_t pair = 0; pair < 16; ++pair) {
    _mm512_mask_storeu_epi32(tile + pair * row_bytes, columns, _mm512_i32gather_epi32(tile_column(), rows + pair * 4, 4));
  }
}

// Columns [first, last) of the prepared input.
template <int kTerms>
void prepare_tiles(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, char* input) {
  alignas(64) char rows[2][kTerms][kTileBytes];  // by half of 64 columns and term: a row of x after the other
  for (int64_t m = 0; m < count; m += kTileRows) {
    const int64_t row_bytes = tile_row_bytes(layout), tile_bytes = kTileRows * row_bytes;
    char* const tiles = input + m / kTileRows * (layout.columns / 32) * kTerms * tile_bytes;
    for (int64_t k = first; k < last; k += 64) {
      const int64_t place = (k / kStep & (layout.pack - 1)) * layout.width;  // of the first row of x
      for (int64_t i = 0; i < kTileRows; ++i) {
        __m512i terms[2][kTerms] = {};
        const int64_t token = m + i - place;
        if (i >= place && token < count) {
          const char* const row = x + token * stride * bytes_of(x_dtype);
          bfloat16_input(row, x_dtype, k, columns, layout.pairs, terms);
        }
        for (int part = 0; part < 2 * kTerms; ++part) {
          _mm512_store_si512(rows[part / kTerms][part % kTerms] + i * 64, terms[part / kTerms][part % kTerms]);
        }
      }
      char* const out = tiles + k / 32 * kTerms * tile_bytes;
      for (int part = 0; part < 2 * kTerms; ++part) {
        put_pairs(rows[part / kTerms][part % kTerms], out + part * tile_bytes, row_bytes);
      }
    }
  }
}

}  // namespace

void prepare_input_in_tiles(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                            int64_t last, int64_t columns, char* input) {
  last = last == columns ? layout.columns : last;
  const auto prepare = layout.form == Form::fixed_tiles   ? (layout.bits == 4 ? prepare_fixed_tiles<4> : prepare_fixed_tiles<8>)
                       : layout.form == Form::split_tiles ? prepare_tiles<2>
                                                          : prepare_tiles<1>;
  prepare(layout, count, x, x_dtype, stride, first, last, columns, input);
}

void product_in_tiles(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* scratch) {
  const auto multiply = layout.form == Form::tiles         ? product_of_tiles<1>
                        : layout.form == Form::split_tiles ? product_of_tiles<2>
                        : layout.form == Form::fixed_tiles ? product_of_fixed
                                                           : product_of_dequantized;
  multiply(matrix, layout, count, input, first, last, out, stride, scratch);
}

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
