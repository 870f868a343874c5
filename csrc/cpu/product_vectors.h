// Conversions to float32 vectors that all products share, for any instruction set (simd.h). Dequantized values are rounded to
// the dtype of the scale, so they are those that a device computes.

#pragma once

#include "product_layout.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

// `count` elements, unaligned, to float32, padded with zeros.
template <Dtype kDtype>
inline void widen(const char* p, int64_t count, int64_t padded, float* out, const char* next) {
  constexpr int64_t kBytes = kDtype == Dtype::float32 ? 4 : 2;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    prefetch(next + i * kBytes);
    store(out + i, from<kDtype>(p + i * kBytes));
  }
  if (i < count) {
    store(out + i, from_part<kDtype>(p + i * kBytes, count - i));
    i += kLanes;
  }
  for (; i < padded; i += kLanes) store(out + i, zero());
}

inline void widen(Dtype dtype, const char* p, int64_t count, int64_t padded, float* out, const char* next) {
  with_dtype(dtype, [&](auto of) { widen<of.value>(p, count, padded, out, next); });
}

// Scales and minima in float32 of the groups of columns [k, k + count) of a row.
template <int64_t kMax>
struct Scales {
  float scale[kMax + 2 * kLanes];  // padded with zeros
  float minimum[kMax + 2 * kLanes];

  Scales() {}
  Scales(const Matrix& matrix, int64_t row, int64_t k, int64_t count) { convert(matrix, row, k, count); }

  void convert(const Matrix& matrix, int64_t row, int64_t k, int64_t count) {
    const int64_t first = row * groups_in(matrix, matrix.columns) + groups_in(matrix, k);
    const int64_t groups = groups_in(matrix, k + count - 1) - groups_in(matrix, k) + 1;
    const int64_t at = first * bytes_of(matrix.dtype);
    const char* const scales = static_cast<const char*>(matrix.scales) + at;
    const char* const minima = static_cast<const char*>(matrix.minima) + at;
    widen(matrix.dtype, scales, groups, groups + kLanes, scale, scales);
    widen(matrix.dtype, minima, groups, groups + kLanes, minimum, minima);
  }
};

inline Vector rounded(Dtype dtype, Vector value) {
  return with_dtype(dtype, [&](auto to) { return rounded<to.value>(value); });
}

// For any group size, columns in order.
inline void dequantize_one_by_one(const Matrix& matrix, int64_t row, int64_t k, int64_t count, int64_t padded, float* out) {
  const uint8_t* const codes = reinterpret_cast<const uint8_t*>(values_at(matrix, row, k));
  int64_t group = row * groups_in(matrix, matrix.columns) + groups_in(matrix, k);
  int64_t left = left_in_group(matrix, k);
  float scale = element(matrix.scales, matrix.dtype, group);
  float minimum = element(matrix.minima, matrix.dtype, group);
  for (int64_t i = 0; i < count; ++i, --left) {
    if (left == 0) {
      ++group;
      left = matrix.group;
      scale = element(matrix.scales, matrix.dtype, group);
      minimum = element(matrix.minima, matrix.dtype, group);
    }
    const int code = matrix.bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
    out[i] = static_cast<float>(code) * scale + minimum;
  }
  for (int64_t i = count; i < padded; ++i) out[i] = 0;
  for (int64_t i = 0; i < padded; i += kLanes) store(out + i, rounded(matrix.dtype, load(out + i)));
}

// 2 * kLanes elements of x from column k, zeros from `columns` on.
inline void load_two_vectors(const char* x, Dtype dtype, int64_t k, int64_t columns, Vector& one, Vector& two) {
  const int64_t bytes = bytes_of(dtype);
  const char* p = x + k * bytes;
  char tail[2 * kVectorBytes] = {};
  if (k + 2 * kLanes > columns) {
    if (k < columns) __builtin_memcpy(tail, p, static_cast<size_t>((columns - k) * bytes));
    p = tail;
  }
  one = from(dtype, p);
  two = from(dtype, p + kLanes * bytes);
}

inline void prepare_float32(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                            int64_t last, int64_t columns, char* input) {
  for (int64_t m = 0; m < count; ++m) {
    float* const out = reinterpret_cast<float*>(input + m * input_stride(layout));
    for (int64_t k = first; k < (last == columns ? layout.columns : last); k += 2 * kLanes) {
      Vector one, two;
      load_two_vectors(x + m * stride * bytes_of(x_dtype), x_dtype, k, columns, one, two);
      if (layout.pairs) {
        Vector even, odd;
        split_pairs(one, two, even, odd);
        one = even;
        two = odd;
      }
      store(out + k, one);
      store(out + k + kLanes, two);
    }
  }
}

// Sum of all 8-byte words, the last one padded with zeros.
inline uint64_t read_sum(const char* p, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
  Words total[4] = {};
  int64_t at = 0;
  for (; at + 4 * kVectorBytes <= bytes; at += 4 * kVectorBytes) {
#pragma GCC unroll 4
    for (int64_t line = at; line < at + 4 * kVectorBytes; line += 64) prefetch(p + (line + 4096 < bytes ? line + 4096 : at));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Words words;
      __builtin_memcpy(&words, p + at + i * kVectorBytes, sizeof(words));
      total[i] += words;
    }
  }
  uint64_t result = 0;
  for (int64_t i = 0; i < 4 * kVectorBytes / 8; ++i) result += total[i / (kVectorBytes / 8)][i % (kVectorBytes / 8)];
  for (; at < bytes; at += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, p + at, static_cast<size_t>(bytes - at < 8 ? bytes - at : 8));
    result += word;
  }
  return result;
}

}  // namespace
}  // namespace zero_inference::cpu
