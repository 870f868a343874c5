// Products with AVX2, FMA and F16C.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c")

#include "simd_avx2.h"

#include "product_direct.h"
#include "product_fixed_narrow.h"
#include "product_layout.h"

namespace zero_inference::cpu::avx2 {

void prepare_input(const Layout& layout, int64_t count, const void* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, void* input) {
  const auto prepare = layout.form == Form::float32 ? prepare_float32 : layout.bits == 4 ? prepare_fixed<4> : prepare_fixed<8>;
  prepare(layout, count, static_cast<const char*>(x), x_dtype, stride, first, last, columns, static_cast<char*>(input));
}

void product(const Matrix& matrix, const Layout& layout, int64_t count, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch) {
  const char* const x = static_cast<const char*>(input);
  if (layout.form == Form::fixed) return product_of_fixed(matrix, layout, count, x, first, last, out, stride);
  product_float32(matrix, layout, count, x, first, last, out, stride, static_cast<char*>(scratch));
}

uint64_t read_bytes_sum(const void* data, int64_t bytes) {
  const char* const p = static_cast<const char*>(data);
  __m256i total[4] = {};
  int64_t at = 0;
  for (; at + 128 <= bytes; at += 128) {
    prefetch(p + (at + 4096 < bytes ? at + 4096 : at));
    prefetch(p + (at + 4160 < bytes ? at + 4160 : at));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      total[i] = _mm256_add_epi64(total[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + at + 32 * i)));
    }
  }
  uint64_t words[16];
  __builtin_memcpy(words, total, sizeof(words));
  uint64_t result = 0;
  for (int i = 0; i < 16; ++i) result += words[i];
  return result + words_sum(p + at, bytes - at);
}

}  // namespace zero_inference::cpu::avx2

ZI_TARGET_END

#endif
