// Products of codes with fixed-point x in int16 (AVX2).
//
// x groups and steps as in product_fixed_input.h, but n stays int16: one instruction multiplies 16 codes and adds pairs,
// exactly. Blocks of 32 columns; 4 bits: even columns before odd ones. A row of the prepared input: n, steps of x groups, sums
// of x over groups.

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

// Groups of 16 columns share the step of 32.
inline int64_t x_group_columns(const Layout& layout) { return layout.x_groups == 1 ? kMaxXGroupColumns : kUnit; }

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

// Columns [k, k + size), zeros from `columns` on. Adds the sum of their values to sums[0]; `kHalves`: 16 columns each to
// sums[0] and sums[1].
template <int kBits, bool kHalves>
inline void fix_x_group(const char* x, Dtype dtype, int64_t k, int64_t size, int64_t columns, int16_t* numbers, float* step,
                        float* sums) {
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
  __m256i totals[2] = {};
  for (int64_t i = 0; i < size / kLanes; i += 4) {
    __m256i whole[4];
    for (int64_t j = 0; j < 4; ++j) {
      whole[j] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i + j], broadcast(inverse)));
      totals[j / 2] = _mm256_add_epi32(totals[j / 2], whole[j]);
    }
    put_unit<kBits>(whole, numbers + i * kLanes);
  }
  if (!kHalves) totals[0] = _mm256_add_epi32(totals[0], totals[1]);
  for (int i = 0; i < (kHalves ? 2 : 1); ++i) {
    sums[i] += sum(_mm256_cvtepi32_ps(totals[i])) * *step;  // whole numbers of 22 bits: no sum is rounded
  }
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
      const auto fix = layout.x_groups == 4 ? fix_x_group<kBits, true> : fix_x_group<kBits, false>;
      fix(row, x_dtype, k, size, columns, numbers, steps + k / size, sums + k / layout.group);
    }
  }
}

inline __m256i words_at(const char* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// Unpacks 32 codes.
template <Codes kCodes>
[[gnu::always_inline]] inline void unpack_codes(const char* p, __m256i* codes) {
  if constexpr (kCodes == Codes::int8) {
    codes[0] = words_at(p);
    codes[1] = words_at(p + 16);
  } else if constexpr (kCodes == Codes::e2m1) {
    // where an index has its sign bit set, as upper bytes have here, the look-up gives zero
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kE2m1Bytes)));
    const __m256i both = _mm256_or_si256(words_at(p), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    codes[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, _mm256_set1_epi16(static_cast<int16_t>(0x800f))));
    codes[1] = _mm256_shuffle_epi8(table, _mm256_srai_epi16(both, 4));
  } else {
    const __m256i both = words_at(p);
    codes[0] = _mm256_and_si256(both, _mm256_set1_epi16(15));
    codes[1] = _mm256_srli_epi16(both, 4);
  }
}

// The scale of a unit in all lanes, or (kScales = 2) those of its two groups of 16 columns in four lanes each.
template <int kScales>
[[gnu::always_inline]] inline Vector unit_scale(const float* p) {
  if constexpr (kScales == 1) return _mm256_broadcast_ss(p);
  const Vector pairs = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
  return _mm256_permutevar_ps(pairs, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// Adds the products of an x group.
template <int kCount, Codes kCodes, int kUnits, int kScales>
[[gnu::always_inline]] inline void add_x_group(const TwoRows& rows, int64_t k, const float* scales, const char* x,
                                               const char* step, int64_t x_stride, Vector (*total)[kCount]) {
  constexpr int64_t kBits = bits_of(kCodes);
  __m256i sums[2][kCount];
#pragma GCC unroll 2
  for (int unit = 0; unit < kUnits; ++unit) {
    __m256i codes[2][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const char* const p = rows.codes[r] + (k + unit * kUnit) * kBits / 8;
      if (unit == 0) prefetch(p + rows.ahead);
      unpack_codes<kCodes>(p, codes[r]);
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
      const Vector factor = _mm256_mul_ps(of_x, unit_scale<kScales>(scales + r * kLanes));
      total[r][m] = multiply_add(_mm256_cvtepi32_ps(sums[r][m]), factor, total[r][m]);
    }
  }
}

template <int kCount, Codes kCodes, int kUnits, int kScales, ScaleForm kForm>
[[gnu::always_inline]] inline void multiply_fixed(const Matrix& matrix, const Layout& layout, const TwoRows& rows,
                                                  const char* input, Vector (*total)[kCount]) {
  const int64_t x_stride = input_stride(layout), groups = row_groups(matrix);
  const char* const steps = input + steps_at(layout);
  const char* const sums = input + sums_at(layout);
  int64_t k = 0;
  for (int64_t g = 0; g < groups; g += kLanes) {
    const int64_t some = groups - g < kLanes ? groups - g : kLanes;
    Vector both[2];
    take_groups<kCount, kForm>(matrix, rows, g, some, sums + g * 4, x_stride, both, total);
    float scales[2 * kLanes];
    store(scales, both[0]);
    store(scales + kLanes, both[1]);
    for (int64_t i = 0; i < some; i += kScales) {
      for (const int64_t end = k + kScales * matrix.group; k < end; k += kUnits * kUnit) {
        const char* const step = steps + k / (kUnits * kUnit) * 4;
        add_x_group<kCount, kCodes, kUnits, kScales>(rows, k, scales + i, input, step, x_stride, total);
      }
    }
  }
}

template <int kCount, Codes kCodes, int kUnits, int kScales, ScaleForm kForm>
[[gnu::noinline]] void multiply_rows(const Matrix& matrix, const Layout& layout, const TwoRows& rows, const char* input,
                                     float* out, int64_t stride, int64_t rows_left) {
  Vector total[2][kCount];
#pragma GCC unroll 4
  for (int i = 0; i < 2 * kCount; ++i) total[i / kCount][i % kCount] = zero();
  multiply_fixed<kCount, kCodes, kUnits, kScales, kForm>(matrix, layout, rows, input, total);
#pragma GCC unroll 2
  for (int m = 0; m < kCount; ++m) {
    out[m * stride] = sum(total[0][m]);
    if (rows_left > 1) out[m * stride + 1] = sum(total[1][m]);
  }
}

// Two rows of the weight and one or two of x at a time: all sums stay in registers.
template <Codes kCodes, int kUnits, int kScales, ScaleForm kForm>
void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride) {
  const int64_t x_stride = input_stride(layout);
  for_two_rows<kCodes, kForm>(matrix, first, last, [&](const TwoRows& rows, int64_t row) {
    const int64_t left = last - row;
    float* const to = out + row - first;
    int64_t m = 0;
    for (; m + 2 <= count; m += 2) {
      multiply_rows<2, kCodes, kUnits, kScales, kForm>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride,
                                                       left);
    }
    if (m < count) {
      multiply_rows<1, kCodes, kUnits, kScales, kForm>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride,
                                                       left);
    }
  });
}

inline void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                             int64_t last, float* out, int64_t stride, char*) {
  with_integer_codes(matrix, [&](auto codes, auto form) {
    constexpr Codes kCodes = codes.value;  // an x group has one or two units, or two groups
    constexpr ScaleForm kForm = form.value;
    auto multiply = layout.x_groups == 1 ? product_of_fixed<kCodes, 2, 1, kForm> : product_of_fixed<kCodes, 1, 1, kForm>;
    if constexpr (kCodes == Codes::e2m1) multiply = layout.x_groups == 4 ? product_of_fixed<kCodes, 1, 2, kForm> : multiply;
    multiply(matrix, layout, count, input, first, last, out, stride);
  });
}

}  // namespace
}  // namespace zero_inference::cpu
