// Products of more than four rows of x, for any instruction set (simd.h).
//
// Four rows of the weight are multiplied with all rows of x, one block of columns at a time. Weights of another dtype are
// converted to a panel in L1, while the next block is prefetched: hardware prefetchers stop at a page of 4 KiB. Others are
// multiplied in place, prefetched line by line: M = 8, bfloat16, two Zen 4 cores: 27.2 GB/s, through a panel 17.6
// (benchmarks/results/cpu/avx512_products.txt).

#pragma once

#include "product_layout.h"
#include "product_vectors.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

constexpr int kRows = 4;  // of the weight
constexpr int64_t kBlockColumns = kBlockBytes / 4;

// Not inlined: between other code its loops took products with AVX2 up to 13% longer.
template <Codes kCodes, Dtype kDtype>
[[gnu::noinline]] void dequantize_groups(const Matrix& matrix, int64_t row, int64_t k, int64_t count, float* out,
                                         const char* next) {
  const Scales<kBlockColumns / kLanes + 2> scales(matrix, row, k, count);
  const uint8_t* const codes = reinterpret_cast<const uint8_t*>(values_at(matrix, row, k));
  constexpr bool kBytes = bits_of(kCodes) == 8;
  constexpr int64_t kColumns = kCodes == Codes::int8 ? kLanes : 2 * kLanes;
  const int64_t group_columns = matrix.group;  // read once: stores to `out` might change `matrix`
  if (kCodes == Codes::e2m1 && group_columns < kColumns) {
    const Group numbers = group_of<kCodes, Dtype::float32>(1, 0);
    for (int64_t i = 0; i < count; i += kColumns) {
      prefetch(next + i / 2);
      alignas(64) uint8_t part[kLanes] = {};
      const bool whole = i + kColumns <= count;
      if (!whole) __builtin_memcpy(part, codes + i / 2, kLanes / 2);
      Vector even, odd;
      dequantize_nibbles<Codes::e2m1, Dtype::float32>(whole ? codes + i / 2 : part, numbers, even, odd);
      const float* const scale = scales.scale + i / kLanes;
      const Vector both = halves(scale[0], whole ? scale[1] : 0);
      store(out + i, even * both);  // not rounded, which would take as long again
      store(out + i + kLanes, odd * both);
    }
    return;
  }
  int64_t left = left_in_group(matrix, k);
  int64_t index = 0;
  Group group = group_of<kCodes, kDtype>(scales.scale[0], scales.minimum[0]);
  for (int64_t i = 0; i < count; i += kColumns, left -= kColumns) {
    if (left == 0) {
      ++index;
      left = group_columns;
      group = group_of<kCodes, kDtype>(scales.scale[index], scales.minimum[index]);
    }
    prefetch(next + (kBytes ? i : i / 2));
    if constexpr (kCodes == Codes::int8) {
      store(out + i, dequantize_int8<kDtype>(codes + i, group));
    } else if constexpr (kCodes == Codes::e4m3) {
      const uint8_t* from_codes = codes + i;
      uint8_t tail[kColumns] = {};
      if (count - i < kColumns) {  // a row may end within a vector
        __builtin_memcpy(tail, from_codes, static_cast<size_t>(count - i));
        from_codes = tail;
      }
      Vector even, odd;
      dequantize_e4m3(from_codes, even, odd);
      store(out + i, even * group.scale);
      store(out + i + kLanes, odd * group.scale);
    } else {
      Vector even, odd;
      dequantize_nibbles<kCodes, kDtype>(codes + i / 2, group, even, odd);
      store(out + i, even);
      store(out + i + kLanes, odd);
    }
  }
}

inline void dequantize_groups(const Matrix& matrix, int64_t row, int64_t k, int64_t count, float* out, const char* next) {
  with_dtype(matrix.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = dtype.value;
    const auto dequantize = matrix.codes == Codes::int8   ? dequantize_groups<Codes::int8, kDtype>
                            : matrix.codes == Codes::int4 ? dequantize_groups<Codes::int4, kDtype>
                            : matrix.codes == Codes::e2m1 ? dequantize_groups<Codes::e2m1, kDtype>
                                                          : dequantize_groups<Codes::e4m3, Dtype::float32>;
    dequantize(matrix, row, k, count, out, next);
  });
}

// Columns [k, k + count) of a row to a panel, padded with zeros.
inline void fill_panel(const Matrix& matrix, const Layout& layout, int64_t row, int64_t k, int64_t count, int64_t padded,
                       float* out, const char* next) {
  if (matrix.codes == Codes::plain) return widen(matrix.dtype, values_at(matrix, row, k), count, padded, out, next);
  if (!layout.vectors) return dequantize_one_by_one<kBlockColumns>(matrix, row, k, count, padded, out);
  dequantize_groups(matrix, row, k, count, out, next);
  const int64_t of_vectors = matrix.codes == Codes::int8 ? kLanes : 2 * kLanes;
  for (int64_t i = round_up(count, of_vectors); i < padded; i += kLanes) store(out + i, zero());
}

// A block of a weight; no rows after the last one.
struct Part {
  int64_t row, rows, k, columns;

  static Part of(const Matrix& matrix, int64_t row, int64_t last, int64_t k, int64_t block) {
    return {row, last - row < kRows ? last - row : kRows, k, matrix.columns - k < block ? matrix.columns - k : block};
  }

  bool ends_rows(const Matrix& matrix) const { return k + columns == matrix.columns; }

  Part next(const Matrix& matrix, int64_t last, int64_t block) const {
    return ends_rows(matrix) ? of(matrix, row + kRows, last, 0, block) : of(matrix, row, last, k + columns, block);
  }
};

// Prefetches a block of a plain weight, spread evenly over `steps` calls.
struct PrefetchInSteps {
  const char* at;        // the next line
  const char* row_end;   // of the part of this row
  int64_t rows;          // after it
  int64_t bytes, pitch;  // of a row's part, and from row to row
  int64_t lines, steps, due;

  PrefetchInSteps(const Matrix& matrix, const Part& part, int64_t steps) : rows(part.rows - 1), steps(steps), due(0) {
    at = values_at(matrix, part.row, part.k);
    bytes = part.columns * bytes_of(matrix.dtype);
    row_end = at + bytes;
    pitch = matrix.columns * bytes_of(matrix.dtype);
    lines = part.rows > 0 ? part.rows * (bytes + 63) / 64 : 0;
  }

  [[gnu::always_inline]] inline void step() {
    for (due += lines; due >= steps; due -= steps) {
      if (at >= row_end) {
        if (rows-- <= 0) return;
        at = row_end + pitch - bytes;
        row_end += pitch;
      }
      prefetch(at);
      at += 64;
    }
  }
};

struct NoPrefetch {
  void step() {}
};

// kRows rows of the weight times kCount rows of x, added to sums [kCount][kRows] of vectors. kTurns: independent sums, to hide
// latency.
template <int kCount, int kTurns, class Prefetch>
inline void multiply(const char* const* rows, const char* x, int64_t x_stride, int64_t bytes, float* sums, bool first,
                     Prefetch& prefetch) {
  Vector total[kTurns][kCount][kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kTurns * kCount * kRows; ++i) total[i / (kCount * kRows)][i / kRows % kCount][i % kRows] = zero();
  for (int64_t at = 0; at < bytes; at += kTurns * kVectorBytes) {
    prefetch.step();
#pragma GCC unroll 2
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int64_t here = at + turn * kVectorBytes;
          total[turn][m][r] = multiply_add(load(reinterpret_cast<const float*>(rows[r] + here)),
                                           load(reinterpret_cast<const float*>(x + m * x_stride + here)), total[turn][m][r]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount * kRows; ++i) {
    Vector value = total[0][i / kRows][i % kRows];
    if constexpr (kTurns == 2) value = value + total[1][i / kRows][i % kRows];
    if (!first) value = value + load(sums + i * kLanes);
    store(sums + i * kLanes, value);
  }
}

template <class Prefetch>
inline void multiply_all(const char* const* rows, const char* x, int64_t x_stride, int64_t count, int64_t bytes, float* sums,
                         bool first, Prefetch& prefetch) {
  int64_t m = 0;
  if constexpr (kTokens == 4) {
    for (; m + 4 <= count; m += 4) {
      multiply<4, 1>(rows, x + m * x_stride, x_stride, bytes, sums + m * kRows * kLanes, first, prefetch);
    }
  }
  for (; m + 2 <= count; m += 2) {
    multiply<2, kTokens / 2>(rows, x + m * x_stride, x_stride, bytes, sums + m * kRows * kLanes, first, prefetch);
  }
  if (m < count) multiply<1, 2>(rows, x + m * x_stride, x_stride, bytes, sums + m * kRows * kLanes, first, prefetch);
}

// Iterations of multiply_all.
inline int64_t steps_of(int64_t count, int64_t bytes) {
  const int64_t vectors = bytes / kVectorBytes;
  return count / kTokens * vectors + (count % kTokens + 1) / 2 * vectors / 2;
}

inline void product_in_vectors(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                               int64_t last, float* out, int64_t stride, char* scratch) {
  constexpr int64_t kPanelStride = kBlockBytes + kRowGap;
  float* const sums = reinterpret_cast<float*>(scratch + kRows * kPanelStride);
  const int64_t x_stride = input_stride(layout);
  const bool as_it_lies = matrix.codes == Codes::plain && matrix.dtype == Dtype::float32 && !without(kInPlace);
  for (Part part = Part::of(matrix, first, last, 0, kBlockColumns); part.rows > 0;) {
    const Part next = part.next(matrix, last, kBlockColumns);
    const int64_t padded = round_up(part.columns, kStep), bytes = padded * 4;
    const char* const x = input + part.k * 4;
    const char* rows[kRows];
    if (as_it_lies && part.columns == padded) {
      for (int r = 0; r < kRows; ++r) rows[r] = values_at(matrix, part.row + (r < part.rows ? r : 0), part.k);
      if (without(kPrefetchInSteps)) {
        NoPrefetch prefetch;
        multiply_all(rows, x, x_stride, count, bytes, sums, part.k == 0, prefetch);
      } else {
        PrefetchInSteps prefetch(matrix, next, steps_of(count, bytes));
        multiply_all(rows, x, x_stride, count, bytes, sums, part.k == 0, prefetch);
      }
    } else {
      for (int r = 0; r < kRows; ++r) {
        char* const panel = scratch + r * kPanelStride;
        rows[r] = panel;
        if (r >= part.rows) continue;
        const char* const next_values =
            r < next.rows ? values_at(matrix, next.row + r, next.k) : values_at(matrix, part.row, part.k);
        fill_panel(matrix, layout, part.row + r, part.k, part.columns, padded, reinterpret_cast<float*>(panel), next_values);
      }
      NoPrefetch prefetch;
      multiply_all(rows, x, x_stride, count, bytes, sums, part.k == 0, prefetch);
    }
    if (part.ends_rows(matrix)) {
      for (int64_t m = 0; m < count; ++m) {
        for (int r = 0; r < part.rows; ++r) out[m * stride + part.row - first + r] = sum(load(sums + (m * kRows + r) * kLanes));
      }
    }
    part = next;
  }
}

}  // namespace
}  // namespace zero_inference::cpu
