// Iterates over the rows of a weight of codes two at a time, with prefetch, for fixed-point x in vectors.

#pragma once

#include "product_layout.h"
#include "product_vectors.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

constexpr int64_t kAhead = 4096;  // bytes, at least, of prefetch distance

struct TwoRows {
  const char* codes[2];
  RowScales scales[2];
  float factors[2];             // of the rows' E4M3 scales
  int64_t ahead, groups_ahead;  // of what is prefetched: bytes of codes, and groups
};

// Calls work(rows, row) for rows [first, last), two at a time; an odd last one twice.
template <Codes kCodes, ScaleForm kForm, typename Function>
[[gnu::always_inline]] inline void for_two_rows(const Matrix& matrix, int64_t first, int64_t last, const Function& work) {
  const int64_t row_bytes = matrix.columns * bits_of(kCodes) / 8;
  const int64_t rows_ahead = round_up((kAhead + row_bytes - 1) / row_bytes, 2), groups = row_groups(matrix);
  const char *const scales = static_cast<const char*>(matrix.scales), *const offsets = static_cast<const char*>(matrix.offsets);
  for (int64_t row = first; row < last; row += 2) {
    TwoRows rows;
    for (int r = 0; r < 2; ++r) {
      const int64_t here = row + r < last ? row + r : row;
      rows.codes[r] = values_at(matrix, here, 0);
      if constexpr (kForm == ScaleForm::any) {
        rows.scales[r] = RowScales(matrix, here, 0);
      } else {
        rows.scales[r].scales = scales + here * groups * scale_bytes<kForm>();
        if constexpr (has_minima<kForm>()) rows.scales[r].offsets = offsets + here * groups * scale_bytes<kForm>();
      }
      if constexpr (kForm == ScaleForm::e4m3) {
        rows.factors[r] = row_factor(matrix, here);
      }
    }
    const bool more = row + 1 + rows_ahead < last;
    rows.ahead = more ? rows_ahead * row_bytes : 0;
    rows.groups_ahead = more ? rows_ahead * groups : 0;
    work(rows, row);
  }
}

// Scales of the next `some` groups, from group g on; adds the products of minima and `sums`, of x over these groups.
template <int kCount, ScaleForm kForm>
[[gnu::always_inline]] inline void take_groups(const Matrix& matrix, const TwoRows& rows, int64_t g, int64_t some,
                                               const char* sums, int64_t x_stride, Vector* scales, Vector (*total)[kCount]) {
  int64_t of_scale = scale_bytes<kForm>(), of_offset = of_scale;
  if constexpr (kForm == ScaleForm::any) {
    of_scale = bytes_of(matrix.scale_dtype);
    of_offset = matrix.offset_kind == Offsets::zero_points ? 1 : of_scale;
  }
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    RowScales from_row = rows.scales[r];
    from_row.scales += g * of_scale;
    prefetch(from_row.scales + rows.groups_ahead * of_scale);
    if constexpr (kForm == ScaleForm::any || has_minima<kForm>()) {
      from_row.offsets += g * of_offset;
      prefetch(from_row.offsets + rows.groups_ahead * of_offset);
    }
    Vector minima;
    if constexpr (kForm == ScaleForm::e4m3) {  // as convert_scales, rounded otherwise
      scales[r] = some_of<Dtype::e4m3>(from_row.scales, some) * broadcast(rows.factors[r] * 0.5f);
      minima = scales[r] * broadcast(-12);
    } else {
      load_scales<kForm, true>(matrix, from_row, some, scales[r], minima);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kCount; ++m) {
      total[r][m] = multiply_add(minima, load(reinterpret_cast<const float*>(sums + m * x_stride)), total[r][m]);
    }
  }
}

}  // namespace
}  // namespace zero_inference::cpu
