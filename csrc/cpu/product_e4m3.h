// Products of up to four rows of x with E4M3 codes in bfloat16, for AVX-512 with VBMI and BF16.
//
// Each number of E4M3 is one of bfloat16: two tables of 128 bytes hold the lower and upper bytes of a 256th of them, and the
// code's sign joins. Interleaved bytes are words in the order of 128-bit lanes, in which x is prepared. Two vectors of values
// take 5 instructions, through float16 (product_direct.h) four take 18.

#pragma once

#include "simd_avx512.h"

#include "product_direct.h"

namespace zero_inference::cpu {
namespace {

struct E4m3Tables {
  alignas(64) uint8_t lower[128] = {}, upper[128] = {};

  constexpr E4m3Tables() {
    for (int code = 0; code < 128; ++code) {
      int exponent = (code >> 3) + 112, mantissa = (code & 7) << 4;
      if (code > 0 && code < 8) {  // subnormal in E4M3
        for (exponent = 113; mantissa < 128; --exponent) mantissa <<= 1;
      }
      const int bits = code == 0 ? 0 : exponent << 7 | (mantissa & 127);
      lower[code] = static_cast<uint8_t>(bits & 0xff);
      upper[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};

constexpr E4m3Tables kE4m3Tables;

struct E4m3Bfloat16 {
  static constexpr bool kGrouped = true, kScalesSums = true;
  static constexpr int64_t kColumns = 64, kBytes = kColumns;
  static Group group(float scale, float) { return E4m3Float32::group(scale, 0); }

  [[gnu::always_inline]] static inline __m512i look_up(const uint8_t* table, __m512i codes) {  // bit 7 does not count
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
  }

  template <int kCount, int kRowsHere>
  [[gnu::always_inline]] static inline void add(const Direct<kCount, kRowsHere>& work, const char* const* codes, int64_t at,
                                                Vector (*sums)[kRowsHere]) {
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
#pragma GCC unroll 4
    for (int r = 0; r < kRowsHere; ++r) {
      const __m512i bytes = _mm512_loadu_si512(codes[r]), lower = look_up(kE4m3Tables.lower, bytes);
      const __m512i upper = _mm512_ternarylogic_epi32(look_up(kE4m3Tables.upper, bytes), bytes, _mm512_set1_epi8(-128), kOrAnd);
      const __m512i weights[2] = {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const __m512i x = _mm512_loadu_si512(work.x[m] + at * 2 + v * 64);
          sums[m][r] = _mm512_dpbf16_ps(sums[m][r], (__m512bh)weights[v], (__m512bh)x);
        }
      }
    }
  }
};

// In blocks of 64 columns: the first half of each 16, then the second.
void prepare_bfloat16(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                      int64_t last, int64_t columns, char* input) {
  for (int64_t m = 0; m < count; ++m) {
    char* const out = input + m * input_stride(layout);
    for (int64_t k = first; k < (last == columns ? layout.columns : last); k += E4m3Bfloat16::kColumns) {
      __m512i words[2];
      for (int half = 0; half < 2; ++half) {
        Vector one, two;
        load_two_vectors(x + m * stride * bytes_of(x_dtype), x_dtype, k + half * 32, columns, one, two);
        words[half] = (__m512i)_mm512_cvtne2ps_pbh(two, one);
      }
      _mm512_storeu_si512(out + k * 2, _mm512_shuffle_i64x2(words[0], words[1], 0x88));
      _mm512_storeu_si512(out + k * 2 + 64, _mm512_shuffle_i64x2(words[0], words[1], 0xdd));
    }
  }
}

}  // namespace
}  // namespace zero_inference::cpu
