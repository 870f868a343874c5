// Products with AVX-512, BF16 and VNNI.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")

#include "simd_avx512.h"

#include "product_bfloat16.h"
#include "product_direct.h"
#include "product_fixed_vectors.h"
#include "product_layout.h"
#include "product_panel.h"

namespace zero_inference::cpu::avx512 {

namespace {

// Products of bfloat16 pairs; dequantized values are rounded to bfloat16, as on a device.
struct Bfloat16 {
  static constexpr Dtype kDtype = Dtype::bfloat16;
  static constexpr int64_t kBytes = 2;
  static constexpr int64_t kBlock = kBlockBytes / kBytes;

  static Vector step(Vector total, const char* weight, const char* x) {
    return _mm512_dpbf16_ps(total, (__m512bh)_mm512_loadu_si512(weight), (__m512bh)_mm512_loadu_si512(x));
  }

  static void dequantize(const Matrix& matrix, const Layout& layout, int64_t row, int64_t k, int64_t count, int64_t padded,
                         char* panel, const char* next) {
    to_bfloat16_panel<1>(matrix, layout, row, k, count, padded, {panel, 64, 0}, next);
  }
};

struct PlainBfloat16 {
  using Weight = __m512i;
  static constexpr bool kGrouped = false;
  static constexpr int kVectors = 1;
  static constexpr int64_t kColumns = 32, kBytes = 64, kInputBytes = 2;
  static Group group(float scale, float minimum) { return {broadcast(scale), broadcast(minimum), zero()}; }
  static void unpack(const char* p, const Group*, Weight* weight) { weight[0] = _mm512_loadu_si512(p); }
  static Vector multiply(Vector total, Weight weight, const char* x) {
    return _mm512_dpbf16_ps(total, (__m512bh)weight, (__m512bh)_mm512_loadu_si512(x));
  }
};

struct Int8Bfloat16 : PlainBfloat16 {
  static constexpr bool kGrouped = true;
  static constexpr int64_t kBytes = 32;
  static void unpack(const char* p, const Group* group, Weight* weight) {
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(p);
    to_bfloat16<1>(multiply_add(_mm512_cvtepi32_ps(bytes(codes)), group->scale, group->minimum),
                   multiply_add(_mm512_cvtepi32_ps(bytes(codes + 16)), group->scale, group->minimum), weight);
  }
};

void product_bfloat16(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* scratch) {
  if (is_direct(matrix, layout, count) && matrix.bits == 0) {
    direct<PlainBfloat16>(matrix, layout, count, input, first, last, out, stride);
  } else if (is_direct(matrix, layout, count) && matrix.bits == 8) {
    direct<Int8Bfloat16>(matrix, layout, count, input, first, last, out, stride);
  } else {
    product_in_vectors<Bfloat16>(matrix, layout, count, input, first, last, out, stride, scratch);
  }
}

void prepare_bfloat16(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                      int64_t last, int64_t columns, char* input) {
  for (int64_t m = 0; m < count; ++m) {
    char* const out = input + m * input_stride(layout);
    for (int64_t k = first; k < (last == columns ? layout.columns : last); k += 64) {
      __m512i terms[2][1];
      bfloat16_input<1>(x + m * stride * bytes_of(x_dtype), x_dtype, k, columns, layout.pairs, terms);
      _mm512_storeu_si512(out + 2 * k, terms[0][0]);
      _mm512_storeu_si512(out + 2 * k + 64, terms[1][0]);
    }
  }
}

}  // namespace

void prepare_input(const Layout& layout, int64_t count, const void* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, void* input) {
  const auto prepare = layout.form == Form::float32    ? prepare_float32
                       : layout.form == Form::bfloat16 ? prepare_bfloat16
                       : layout.bits == 4              ? prepare_fixed<4>
                                                       : prepare_fixed<8>;
  prepare(layout, count, static_cast<const char*>(x), x_dtype, stride, first, last, columns, static_cast<char*>(input));
}

void product(const Matrix& matrix, const Layout& layout, int64_t count, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch) {
  const char* const x = static_cast<const char*>(input);
  if (layout.form == Form::fixed) return product_of_fixed(matrix, layout, count, x, first, last, out, stride);
  const auto multiply_rows = layout.form == Form::float32 ? product_float32 : product_bfloat16;
  multiply_rows(matrix, layout, count, x, first, last, out, stride, static_cast<char*>(scratch));
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
