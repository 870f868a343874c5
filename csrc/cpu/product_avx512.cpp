// Products with AVX-512, BF16 and VNNI.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")

#include "simd_avx512.h"

#include "product_direct.h"
#include "product_fixed_vectors.h"
#include "product_layout.h"

namespace zero_inference::cpu::avx512 {

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
  __m512i total[4] = {};
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t ahead = at + 4096 + 64 * i;
      prefetch(p + (ahead < bytes ? ahead : at));
      total[i] = _mm512_add_epi64(total[i], _mm512_loadu_si512(p + at + 64 * i));
    }
  }
  const __m512i all = _mm512_add_epi64(_mm512_add_epi64(total[0], total[1]), _mm512_add_epi64(total[2], total[3]));
  uint64_t result = static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
  return result + words_sum(p + at, bytes - at);
}

}  // namespace zero_inference::cpu::avx512

ZI_TARGET_END

#endif
