// Products of codes with fixed-point x in int16 (AVX2).
//
// x groups and steps as in product_fixed_input.h, but n stays int16: one instruction multiplies 16 codes and adds pairs,
// exactly. Blocks of 32 columns; int4: even columns before odd ones. A row of the prepared input: n, steps of x groups, sums of
// x over groups.

#pragma once

#include "simd_avx2.h"

#include "product_fixed_rows.h"
#include "product_layout.h"
#include "product_vectors.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

constexpr int64_t kUnit = 32;  // columns
constexpr int64_t kMaxXGroupColumns = 64;

inline int64_t x_group_columns(const Layout& layout) { return kMaxXGroupColumns / layout.x_groups; }

inline void put_words(__m256i one, __m256i two, int16_t* to) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(one, two), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}

template <int kBits>
inline void put_unit(const __m256i* whole, int16_t* to) {
  if constexpr (kBits == 8) {
    put_words(whole[0], whole[1], to);
    put_words(whole[2], whole[3], to + 16);
  } else {
    Vector even[2], odd[2];
    for (int i = 0; i < 2; ++i) {
      split_pairs(_mm256_castsi256_ps(whole[2 * i]), _mm256_castsi256_ps(whole[2 * i + 1]), even[i], odd[i]);
    }
    put_words(_mm256_castps_si256(even[0]), _mm256_castps_si256(even[1]), to);
    put_words(_mm256_castps_si256(odd[0]), _mm256_castps_si256(odd[1]), to + 16);
  }
}

// Columns [k, k + size), zeros from `columns` on. Returns the sum of their values.
template <int kBits>
inline float fix_x_group(const char* x, Dtype dtype, int64_t k, int64_t size, int64_t columns, int16_t* numbers, float* step) {
  constexpr int64_t kMaxVectors = kMaxXGroupColumns / kLanes;
  Vector values[kMaxVectors];
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < size / kLanes; i += 2) {
    load_two_vectors(x, dtype, k + i * kLanes, columns, values[i], values[i + 1]);
    for (int64_t j = i; j < i + 2; ++j) {
      const __m256i magnitudes = _mm256_and_si256(_mm256_castps_si256(values[j]), _mm256_set1_epi32(0x7fffffff));
      most = _mm256_max_epu32(most, magnitudes);
    }
  }
  uint32_t each[kLanes], greatest = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), most);
  for (const uint32_t one : each) greatest = one > greatest ? one : greatest;
  float inverse;
  find_step(greatest, *step, inverse);
  if (greatest == 0) *step = 0;  // else its product with a scale would be no normal number, which is slow
  __m256i total = _mm256_setzero_si256();
  for (int64_t i = 0; i < size / kLanes; i += 4) {
    __m256i whole[4];
    for (int64_t j = 0; j < 4; ++j) {
      whole[j] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i + j], broadcast(inverse)));
      total = _mm256_add_epi32(total, whole[j]);
    }
    put_unit<kBits>(whole, numbers + i * kLanes);
  }
  return sum(_mm256_cvtepi32_ps(total)) * *step;  // whole numbers of 22 bits: no sum is rounded
}

template <int kBits>
void prepare_fixed(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, char* input) {
  const int64_t size = x_group_columns(layout);
  for (int64_t m = 0; m < count; ++m) {
    char* const out = input + m * input_stride(layout);
    const char* const row = x + m * stride * bytes_of(x_dtype);
    float* const steps = reinterpret_cast<float*>(out + steps_at(layout));
    float* const sums = reinterpret_cast<float*>(out + sums_at(layout));
    const int64_t groups = last == columns ? round_up(columns / layout.group, kLanes) : last / layout.group;
    for (int64_t g = first / layout.group; g < groups; ++g) sums[g] = 0;
    for (int64_t k = first; k < last; k += size) {
      int16_t* const numbers = reinterpret_cast<int16_t*>(out) + k;
      sums[k / layout.group] += fix_x_group<kBits>(row, x_dtype, k, size, columns, numbers, steps + k / size);
    }
  }
}

// Unpacks 32 codes.
template <int kBits>
[[gnu::always_inline]] inline void unpack_codes(const char* p, __m256i* codes) {
  if constexpr (kBits == 8) {
    codes[0] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    codes[1] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  } else {
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    codes[0] = _mm256_and_si256(both, _mm256_set1_epi16(15));
    codes[1] = _mm256_srli_epi16(both, 4);
  }
}

// Adds the products of an x group.
template <int kCount, int kBits, int kUnits>
[[gnu::always_inline]] inline void add_x_group(const TwoRows& rows, int64_t k, const float* scales, const char* x,
                                               const char* step, int64_t x_stride, Vector (*total)[kCount]) {
  __m256i sums[2][kCount];
#pragma GCC unroll 2
  for (int unit = 0; unit < kUnits; ++unit) {
    __m256i codes[2][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const char* const p = rows.codes[r] + (k + unit * kUnit) * kBits / 8;
      if (unit == 0) prefetch(p + rows.ahead);
      unpack_codes<kBits>(p, codes[r]);
    }
#pragma GCC unroll 2
    for (int m = 0; m < kCount; ++m) {
      const __m256i* const numbers = reinterpret_cast<const __m256i*>(x + m * x_stride + (k + unit * kUnit) * 2);
      const __m256i one = _mm256_loadu_si256(numbers), two = _mm256_loadu_si256(numbers + 1);
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(codes[r][0], one), _mm256_madd_epi16(codes[r][1], two));
        sums[r][m] = unit == 0 ? both : _mm256_add_epi32(sums[r][m], both);
      }
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < kCount; ++m) {
    const Vector of_x = _mm256_broadcast_ss(reinterpret_cast<const float*>(step + m * x_stride));
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const Vector factor = _mm256_mul_ps(of_x, _mm256_broadcast_ss(scales + r * kLanes));
      total[r][m] = multiply_add(_mm256_cvtepi32_ps(sums[r][m]), factor, total[r][m]);
    }
  }
}

template <int kCount, int kBits, int kUnits, Dtype kDtype>
[[gnu::always_inline]] inline void multiply_fixed(const Matrix& matrix, const Layout& layout, const TwoRows& rows,
                                                  const char* input, Vector (*total)[kCount]) {
  const int64_t x_stride = input_stride(layout), groups = groups_in(matrix, matrix.columns);
  const char* const steps = input + steps_at(layout);
  const char* const sums = input + sums_at(layout);
  int64_t k = 0;
  for (int64_t g = 0; g < groups; g += kLanes) {
    const int64_t some = groups - g < kLanes ? groups - g : kLanes;
    Vector both[2];
    take_groups<kCount, kDtype>(rows, g, some, sums + g * 4, x_stride, both, total);
    float scales[2 * kLanes];
    store(scales, both[0]);
    store(scales + kLanes, both[1]);
    for (int64_t i = 0; i < some; ++i) {
      for (const int64_t end = k + matrix.group; k < end; k += kUnits * kUnit) {
        const char* const step = steps + k / (kUnits * kUnit) * 4;
        add_x_group<kCount, kBits, kUnits>(rows, k, scales + i, input, step, x_stride, total);
      }
    }
  }
}

template <int kCount, int kBits, int kUnits, Dtype kDtype>
[[gnu::noinline]] void multiply_rows(const Matrix& matrix, const Layout& layout, const TwoRows& rows, const char* input,
                                     float* out, int64_t stride, int64_t rows_left) {
  Vector total[2][kCount];
#pragma GCC unroll 4
  for (int i = 0; i < 2 * kCount; ++i) total[i / kCount][i % kCount] = zero();
  multiply_fixed<kCount, kBits, kUnits, kDtype>(matrix, layout, rows, input, total);
#pragma GCC unroll 2
  for (int m = 0; m < kCount; ++m) {
    out[m * stride] = sum(total[0][m]);
    if (rows_left > 1) out[m * stride + 1] = sum(total[1][m]);
  }
}

// Two rows of the weight and one or two of x at a time: all sums stay in registers.
template <int kBits, int kUnits, Dtype kDtype>
void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride) {
  const int64_t x_stride = input_stride(layout);
  for_two_rows<kBits>(matrix, first, last, [&](const TwoRows& rows, int64_t row) {
    const int64_t left = last - row;
    float* const to = out + row - first;
    int64_t m = 0;
    for (; m + 2 <= count; m += 2) {
      multiply_rows<2, kBits, kUnits, kDtype>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, left);
    }
    if (m < count) {
      multiply_rows<1, kBits, kUnits, kDtype>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, left);
    }
  });
}

inline void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                             int64_t last, float* out, int64_t stride, char*) {
  with_codes(matrix, [&](auto bits, auto dtype) {
    constexpr int kBits = bits.value;  // an x group has one or two units
    const auto multiply =
        layout.x_groups == 1 ? product_of_fixed<kBits, 2, dtype.value> : product_of_fixed<kBits, 1, dtype.value>;
    multiply(matrix, layout, count, input, first, last, out, stride);
  });
}

}  // namespace
}  // namespace zero_inference::cpu
