// Iterates over the rows of a weight of codes two at a time, with prefetch, for fixed-point x in vectors.

#pragma once

#include "product_layout.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

constexpr int64_t kAhead = 4096;  // bytes, at least, of prefetch distance

struct TwoRows {
  const char* codes[2];
  const char* scales[2];
  const char* minima[2];
  int64_t ahead, scales_ahead;
};

// Calls work(rows, row) for rows [first, last), two at a time; an odd last one twice.
template <int kBits, typename Function>
[[gnu::always_inline]] inline void for_two_rows(const Matrix& matrix, int64_t first, int64_t last, const Function& work) {
  const int64_t row_bytes = matrix.columns * kBits / 8, row_scales = groups_in(matrix, matrix.columns) * 2;
  const int64_t rows_ahead = round_up((kAhead + row_bytes - 1) / row_bytes, 2);
  for (int64_t row = first; row < last; row += 2) {
    TwoRows rows;
    for (int r = 0; r < 2; ++r) {
      const int64_t here = row + r < last ? row + r : row;
      rows.codes[r] = values_at(matrix, here, 0);
      rows.scales[r] = static_cast<const char*>(matrix.scales) + here * row_scales;
      rows.minima[r] = static_cast<const char*>(matrix.minima) + here * row_scales;
    }
    const bool more = row + 1 + rows_ahead < last;
    rows.ahead = more ? rows_ahead * row_bytes : 0;
    rows.scales_ahead = more ? rows_ahead * row_scales : 0;
    work(rows, row);
  }
}

// Scales of the next `some` groups, from group g on; adds the products of minima and `sums`, of x over these groups.
template <int kCount, Dtype kDtype>
[[gnu::always_inline]] inline void take_groups(const TwoRows& rows, int64_t g, int64_t some, const char* sums, int64_t x_stride,
                                               Vector* scales, Vector (*total)[kCount]) {
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    const char *const scale = rows.scales[r] + g * 2, *const minimum = rows.minima[r] + g * 2;
    prefetch(scale + rows.scales_ahead);
    prefetch(minimum + rows.scales_ahead);
    scales[r] = some >= kLanes ? from<kDtype>(scale) : from_part<kDtype>(scale, some);
    const Vector minima = some >= kLanes ? from<kDtype>(minimum) : from_part<kDtype>(minimum, some);
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      total[r][m] = multiply_add(minima, load(reinterpret_cast<const float*>(sums + m * x_stride)), total[r][m]);
    }
  }
}

}  // namespace
}  // namespace zero_inference::cpu
