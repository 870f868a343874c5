// x in fixed point, so that codes are multiplied as integers (AVX-512; product_fixed_narrow.h has AVX2's own).
//
//   y = sum_s step[s] * (scale[s] * sum_k code[k] * n[k] + minimum[s] * sum_k n[k]),  x[k] = step[s] * n[k] for k in x group s
//
// An x group is 64 columns (32 where groups are not multiples of 64) of one group of the weight. n has 16 bits, n = 256 * h + l
// with signed bytes h and l, and step is a power of two. bfloat16 is exact from 1/128 of the x group's greatest value on,
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

// 64 columns of a row of x. terms: h and l; for int4 even columns before odd ones.
struct FixedBlock {
  alignas(64) char terms[2][64];
  float steps[2];  // of its x groups
  float sums[2];   // of its x groups' values
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
template <int kBits>
inline void fix_block(const Layout& layout, const char* x, Dtype dtype, int64_t k, int64_t columns, FixedBlock& block) {
  Vector values[2][2];
  __m512i most[2];
  for (int part = 0; part < 2; ++part) {
    load_two_vectors(x, dtype, k + part * 32, columns, values[part][0], values[part][1]);
    most[part] = _mm512_max_epu32(magnitude(values[part][0]), magnitude(values[part][1]));
  }
  if (layout.x_groups == 1) most[0] = most[1] = _mm512_max_epu32(most[0], most[1]);
  float sums[2];
  float inverse[2];
  for (int part = 0; part < 2; ++part) {
    find_step(_mm512_reduce_max_epu32(most[part]), block.steps[part], inverse[part]);
    __m512i numbers[2], upper[2], lower[2];
    for (int i = 0; i < 2; ++i) {
      numbers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values[part][i], broadcast(inverse[part])));
      upper[i] = _mm512_srai_epi32(_mm512_add_epi32(numbers[i], _mm512_set1_epi32(128)), 8);
      lower[i] = _mm512_sub_epi32(numbers[i], _mm512_slli_epi32(upper[i], 8));
    }
    put_bytes<kBits>(upper[0], upper[1], part, block.terms[0]);
    put_bytes<kBits>(lower[0], lower[1], part, block.terms[1]);
    sums[part] = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(numbers[0], numbers[1])));
  }
  if (layout.x_groups == 1) sums[0] += sums[1];  // whole numbers of 23 bits
  for (int x_group = 0; x_group < layout.x_groups; ++x_group) block.sums[x_group] = sums[x_group] * block.steps[x_group];
}

}  // namespace
}  // namespace zero_inference::cpu
