// Products of up to four rows of x with E4M3 codes in bfloat16, for AVX-512 with VBMI and BF16.
//
// Each number of E4M3 is one of bfloat16: codes are looked up (e4m3_words), and x is in their order. 64 values take 5
// instructions, through float16 (product_direct.h) 18.

#pragma once

#include "simd_avx512.h"

#include "product_direct.h"

namespace zero_inference::cpu {
namespace {

struct E4m3Bfloat16 {
  static constexpr bool kGrouped = true, kScalesSums = true;
  static constexpr int64_t kColumns = 64, kBytes = kColumns;
  static Group group(float scale, float) { return E4m3Float32::group(scale, 0); }

  template <int kCount, int kRowsHere>
  [[gnu::always_inline]] static inline void add(const Direct<kCount, kRowsHere>& work, const char* const* codes, int64_t at,
                                                Vector (*sums)[kRowsHere]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRowsHere; ++r) {
      __m512i weights[2];
      e4m3_words(_mm512_loadu_si512(codes[r]), weights);
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

// In the order of e4m3_words.
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
      order_as_e4m3(words[0], words[1]);
      _mm512_storeu_si512(out + k * 2, words[0]);
      _mm512_storeu_si512(out + k * 2 + 64, words[1]);
    }
  }
}

}  // namespace
}  // namespace zero_inference::cpu
