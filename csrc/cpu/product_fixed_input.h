// x in fixed point, so that codes are multiplied as integers (AVX-512; product_fixed_narrow.h has AVX2's own).
//
//   y = sum_s step[s] * (scale[s] * sum_k code[k] * n[k] + minimum[s] * sum_k n[k]),  x[k] = step[s] * n[k] for k in x group s
//
// An x group is 64 columns (32 or 16 where groups are not multiples of 64) of one group of the weight. n has 16 bits, n = 256 *
// h + l with signed bytes h and l, and step is a power of two. bfloat16 is exact from 1/128 of the x group's greatest value on,
// float16 from 1/16; of smaller ones at most 2^-15 of the greatest is lost. Sums of products are exact. Sapphire Rapids
// multiplies bytes in 0.28 ns a vector and bfloat16 in 0.74, in tiles twice the columns at once
// (benchmarks/results/h200-fixed/instructions.txt); on Zen 4 both take as long, but unpacking takes fewer steps.
//
// An infinity or NaN makes its step, and so the results, NaN. Sums are float32 before scaling, so x may be up to 10^34.

#pragma once

#include "simd_avx512.h"

#include "product_layout.h"
#include "product_vectors.h"

namespace zero_inference::cpu {
namespace {

constexpr int64_t kFixedColumns = 64;

// 64 columns of a row of x. terms: h and l; for 4 bits even columns before odd ones.
struct FixedBlock {
  alignas(64) char terms[2][64];
  float steps[4];  // of its x groups
  float sums[4];   // of its x groups' values
};

inline __m512i magnitude(Vector value) { return _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff)); }

template <int kBits>
inline void put_bytes(__m512i one, __m512i two, int part, char* terms) {
  if constexpr (kBits == 8) {
    _mm_store_si128(reinterpret_cast<__m128i*>(terms + part * 32), _mm512_cvtepi32_epi8(one));
    _mm_store_si128(reinterpret_cast<__m128i*>(terms + part * 32 + 16), _mm512_cvtepi32_epi8(two));
  } else {
    Vector even, odd;
    split_pairs(_mm512_castsi512_ps(one), _mm512_castsi512_ps(two), even, odd);
    _mm_store_si128(reinterpret_cast<__m128i*>(terms + part * 16), _mm512_cvtepi32_epi8(_mm512_castps_si512(even)));
    _mm_store_si128(reinterpret_cast<__m128i*>(terms + 32 + part * 16), _mm512_cvtepi32_epi8(_mm512_castps_si512(odd)));
  }
}

// Columns [k, k + 64), zeros from `columns` on.
template <int kBits, int kXGroups>
inline void fix_block(const char* x, Dtype dtype, int64_t k, int64_t columns, FixedBlock& block) {
  Vector values[4];
  for (int part = 0; part < 2; ++part) {
    load_two_vectors(x, dtype, k + part * 32, columns, values[2 * part], values[2 * part + 1]);
  }
  constexpr int kVectors = 4 / kXGroups;  // of an x group
  __m512i upper[4], lower[4];
#pragma GCC unroll 4
  for (int s = 0; s < kXGroups; ++s) {
    __m512i most = magnitude(values[s * kVectors]), total = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 1; i < kVectors; ++i) most = _mm512_max_epu32(most, magnitude(values[s * kVectors + i]));
    float inverse;
    find_step(_mm512_reduce_max_epu32(most), block.steps[s], inverse);
#pragma GCC unroll 4
    for (int i = s * kVectors; i < (s + 1) * kVectors; ++i) {
      const __m512i numbers = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], broadcast(inverse)));
      upper[i] = _mm512_srai_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(128)), 8);
      lower[i] = _mm512_sub_epi32(numbers, _mm512_slli_epi32(upper[i], 8));
      total = _mm512_add_epi32(total, numbers);
    }
    // whole numbers of 22 bits: no sum is rounded
    block.sums[s] = static_cast<float>(_mm512_reduce_add_epi32(total)) * block.steps[s];
  }
  for (int part = 0; part < 2; ++part) {
    put_bytes<kBits>(upper[2 * part], upper[2 * part + 1], part, block.terms[0]);
    put_bytes<kBits>(lower[2 * part], lower[2 * part + 1], part, block.terms[1]);
  }
}

template <int kBits>
inline void fix_block(const Layout& layout, const char* x, Dtype dtype, int64_t k, int64_t columns, FixedBlock& block) {
  const auto fix = layout.x_groups == 1   ? fix_block<kBits, 1>
                   : layout.x_groups == 2 ? fix_block<kBits, 2>
                                          : fix_block<kBits, 4>;
  fix(x, dtype, k, columns, block);
}

// Bytes of 4-bit codes.
template <Codes kCodes>
[[gnu::always_inline]] inline __m512i integers(__m512i codes) {
  if constexpr (kCodes == Codes::e2m1)
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kE2m1Bytes))), codes);
  return codes;
}

}  // namespace
}  // namespace zero_inference::cpu
