// Products of up to four rows of x with the weight in registers, for any instruction set (simd.h).
//
// With a panel, memory waits while the panel is multiplied: M = 1, bfloat16, one core of a Zen 5 that reads 38 GB/s: 18 with a
// panel, 35 without.
//
// A Format unpacks kBytes to kColumns values in kVectors of Weight and multiplies them with x; kGrouped: codes, with a Group of
// scale and minimum.

#pragma once

#include "kernels.h"
#include "product_panel.h"
#include "product_vectors.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

constexpr int64_t kDirectCount = 4;
constexpr int64_t kScaleColumns = 2048;  // whose scales are converted at a time

template <Dtype kDtype>
struct PlainFloat32 {
  using Weight = Vector;
  static constexpr bool kGrouped = false;
  static constexpr int kVectors = 1;
  static constexpr int64_t kColumns = kLanes, kBytes = kLanes * (kDtype == Dtype::float32 ? 4 : 2), kInputBytes = 4;
  static void unpack(const char* p, const Group*, Weight* weight) { weight[0] = from<kDtype>(p); }
  static Vector multiply(Vector total, Weight weight, const char* x) {
    return multiply_add(weight, load(reinterpret_cast<const float*>(x)), total);
  }
};

template <Dtype kDtype>
struct Int8Float32 : PlainFloat32<kDtype> {
  static constexpr bool kGrouped = true, kScalesSums = false;
  static constexpr int64_t kBytes = kLanes;
  static Group group(float scale, float minimum) { return group_of<Codes::int8, kDtype>(scale, minimum); }
  static void unpack(const char* p, const Group* group, Vector* weight) {
    weight[0] = dequantize_int8<kDtype>(reinterpret_cast<const uint8_t*>(p), *group);
  }
};

template <Codes kCodes, Dtype kDtype>
struct NibblesFloat32 : PlainFloat32<kDtype> {
  static constexpr bool kGrouped = true, kScalesSums = false;
  static constexpr int kVectors = 2;
  static constexpr int64_t kColumns = 2 * kLanes, kBytes = kLanes;
  static Group group(float scale, float minimum) { return group_of<kCodes, kDtype>(scale, minimum); }
  static void unpack(const char* p, const Group* group, Vector* weight) {
    dequantize_nibbles<kCodes, kDtype>(reinterpret_cast<const uint8_t*>(p), *group, weight[0], weight[1]);
  }
};

// Pointers of one call: kRowsHere rows of the weight, kCount rows of x.
template <int kCount, int kRowsHere>
struct Direct {
  const char* values[kRowsHere];
  int64_t ahead[kRowsHere];  // bytes to the prefetched line
  const char* x[kCount];
  Vector total[kCount][kRowsHere];
};

// `columns`: whole chunks of one group.
template <class Format, int kCount, int kRowsHere>
inline void multiply_direct(Direct<kCount, kRowsHere>& work, int64_t columns, const Group* groups) {
  for (int64_t i = 0; i < columns; i += Format::kColumns) {
    typename Format::Weight weights[kRowsHere][Format::kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsHere; ++r) {
      prefetch(work.values[r] + work.ahead[r]);
      Format::unpack(work.values[r], groups + r, weights[r]);
      work.values[r] += Format::kBytes;
    }
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < Format::kVectors; ++v) {
#pragma GCC unroll 4
        for (int r = 0; r < kRowsHere; ++r) {
          work.total[m][r] = Format::multiply(work.total[m][r], weights[r][v], work.x[m] + v * kVectorBytes);
        }
      }
      work.x[m] += Format::kColumns * Format::kInputBytes;
    }
  }
}

// E4M3: sums of a group are scaled, so values are not rounded to the model's dtype. A format adds products of kColumns codes.
struct E4m3Float32 {
  static constexpr bool kGrouped = true, kScalesSums = true;
  static constexpr int64_t kColumns = 2 * kLanes, kBytes = kColumns;
  static Group group(float scale, float) { return group_of<Codes::int8, Dtype::float32>(scale, 0); }

  // `at` columns from where x begins.
  template <int kCount, int kRowsHere>
  [[gnu::always_inline]] static inline void add(const Direct<kCount, kRowsHere>& work, const char* const* codes, int64_t at,
                                                Vector (*sums)[kRowsHere]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRowsHere; ++r) {
      Vector weights[2];
      dequantize_e4m3(reinterpret_cast<const uint8_t*>(codes[r]), weights[0], weights[1]);
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const Vector x = load(reinterpret_cast<const float*>(work.x[m]) + at + v * kLanes);
          sums[m][r] = multiply_add(weights[v], x, sums[m][r]);
        }
      }
    }
  }
};

// Columns [first, end) of one group; of a row's last one they may end within kColumns.
template <class Format, int kCount, int kRowsHere>
[[gnu::always_inline]] inline void add_scaled_sums(Direct<kCount, kRowsHere>& work, int64_t first, int64_t end,
                                                   const Group* groups) {
  constexpr int64_t kColumns = Format::kColumns;
  Vector sums[kCount][kRowsHere];
#pragma GCC unroll 16
  for (int i = 0; i < kCount * kRowsHere; ++i) sums[i / kRowsHere][i % kRowsHere] = zero();
  const char* codes[kRowsHere];
  int64_t i = first;
  for (; i + kColumns <= end; i += kColumns) {
#pragma GCC unroll 4
    for (int r = 0; r < kRowsHere; ++r) {
      codes[r] = work.values[r] + i;
      prefetch(codes[r] + work.ahead[r]);
    }
    Format::template add<kCount, kRowsHere>(work, codes, i, sums);
  }
  if (i < end) {
    char tails[kRowsHere][kColumns] = {};
    for (int r = 0; r < kRowsHere; ++r) {
      __builtin_memcpy(tails[r], work.values[r] + i, static_cast<size_t>(end - i));
      codes[r] = tails[r];
    }
    Format::template add<kCount, kRowsHere>(work, codes, i, sums);
  }
#pragma GCC unroll 16
  for (int j = 0; j < kCount * kRowsHere; ++j) {
    Vector& total = work.total[j / kRowsHere][j % kRowsHere];
    total = multiply_add(sums[j / kRowsHere][j % kRowsHere], groups[j % kRowsHere].scale, total);
  }
}

template <class Format, int kCount, int kRowsHere>
inline void direct_groups(const Matrix& matrix, const int64_t* rows, Direct<kCount, kRowsHere>& work) {
  int64_t left = matrix.group;
  for (int64_t k = 0; k < matrix.columns; k += kScaleColumns) {
    const int64_t count = matrix.columns - k < kScaleColumns ? matrix.columns - k : kScaleColumns;
    Scales<kScaleColumns / kLanes + 2> scales[kRowsHere];
    for (int r = 0; r < kRowsHere; ++r) scales[r].convert(matrix, rows[r], k, count);
    int64_t index = 0;
    for (int64_t i = 0; i < count;) {
      const int64_t some = left < count - i ? left : count - i;
      Group groups[kRowsHere];
#pragma GCC unroll 4
      for (int r = 0; r < kRowsHere; ++r) groups[r] = Format::group(scales[r].scale[index], scales[r].minimum[index]);
      if constexpr (Format::kScalesSums) {
        add_scaled_sums<Format, kCount, kRowsHere>(work, k + i, k + i + some, groups);
      } else {
        multiply_direct<Format>(work, some, groups);
      }
      i += some;
      left -= some;
      if (left == 0) {
        ++index;
        left = matrix.group;
      }
    }
  }
}

template <class Format, int kCount, int kRowsHere>
inline void direct_plain(const Matrix& matrix, Direct<kCount, kRowsHere>& work) {
  const int64_t whole = matrix.columns / Format::kColumns * Format::kColumns;
  multiply_direct<Format>(work, whole, nullptr);
  if (whole == matrix.columns) return;
  char tails[kRowsHere][Format::kBytes] = {};
  for (int r = 0; r < kRowsHere; ++r) {
    const int64_t bytes = (matrix.columns - whole) * bytes_of(matrix.dtype);
    __builtin_memcpy(tails[r], work.values[r], static_cast<size_t>(bytes));
    work.values[r] = tails[r];
    work.ahead[r] = 0;
  }
  multiply_direct<Format>(work, Format::kColumns, nullptr);
}

template <class Format, int kCount, int kRowsHere>
void direct_rows(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                 float* out, int64_t stride) {
  const int64_t row_bytes = matrix.columns / Format::kColumns * Format::kBytes;  // nearly
  for (int64_t row = first; row < last; row += kRowsHere) {
    Direct<kCount, kRowsHere> work;
    int64_t rows[kRowsHere];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsHere; ++r) {
      rows[r] = row + r < last ? row + r : row;  // repeated after the last
      work.values[r] = values_at(matrix, rows[r], 0);
      work.ahead[r] = rows[r] + kRowsHere < last ? kRowsHere * row_bytes : 0;
    }
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      work.x[m] = input + (m < count ? m : 0) * input_stride(layout);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsHere; ++r) work.total[m][r] = zero();
    }
    if constexpr (Format::kGrouped) {
      direct_groups<Format>(matrix, rows, work);
    } else {
      direct_plain<Format>(matrix, work);
    }
    for (int m = 0; m < kCount && m < count; ++m) {
      for (int r = 0; r < kRowsHere && row + r < last; ++r) out[m * stride + row + r - first] = sum(work.total[m][r]);
    }
  }
}

// Three rows of x are multiplied as four (one repeated), and two likewise where registers are few: saves compile time.
template <class Format>
inline void direct(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                   float* out, int64_t stride) {
  if (count == 1) return direct_rows<Format, 1, 4>(matrix, layout, count, input, first, last, out, stride);
  if constexpr (kTokens == 4) {
    if (count == 2) return direct_rows<Format, 2, 4>(matrix, layout, count, input, first, last, out, stride);
    direct_rows<Format, 4, 4>(matrix, layout, count, input, first, last, out, stride);
  } else {
    direct_rows<Format, 4, 2>(matrix, layout, count, input, first, last, out, stride);
  }
}

void product_float32(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                     float* out, int64_t stride, char* scratch) {
  const int64_t columns = matrix.codes == Codes::int8 ? kLanes : 2 * kLanes;  // of a chunk of codes
  const bool fits = matrix.codes == Codes::plain || (layout.vectors && matrix.group % columns == 0);
  if (count > kDirectCount || !fits || without(kDirect)) {
    return product_in_vectors(matrix, layout, count, input, first, last, out, stride, scratch);
  }
  with_dtype(matrix.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = dtype.value;
    const auto multiply = matrix.codes == Codes::plain  ? direct<PlainFloat32<kDtype>>
                          : matrix.codes == Codes::int8 ? direct<Int8Float32<kDtype>>
                          : matrix.codes == Codes::int4 ? direct<NibblesFloat32<Codes::int4, kDtype>>
                          : matrix.codes == Codes::e2m1 ? direct<NibblesFloat32<Codes::e2m1, kDtype>>
                                                        : direct<E4m3Float32>;
    multiply(matrix, layout, count, input, first, last, out, stride);
  });
}

// Prepares x in fixed point where the layout says so, else in float32.
template <PrepareInput* kFixed4, PrepareInput* kFixed8>
void prepare_by_form(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                     int64_t last, int64_t columns, char* input) {
  const auto prepare = layout.form == Form::float32 ? prepare_float32 : layout.bits == 4 ? kFixed4 : kFixed8;
  prepare(layout, count, x, x_dtype, stride, first, last, columns, input);
}

template <Product* kFixed>
void product_by_form(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                     float* out, int64_t stride, char* scratch) {
  const auto multiply = layout.form == Form::fixed ? kFixed : product_float32;
  multiply(matrix, layout, count, input, first, last, out, stride, scratch);
}

}  // namespace
}  // namespace zero_inference::cpu
