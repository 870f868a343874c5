// Kernels with AVX-512 (F, BW, DQ, VL), BF16, VBMI and VNNI.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni")

#include "simd_avx512.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "product_direct.h"
#include "product_e4m3.h"
#include "product_fixed_vectors.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {
namespace {

void prepare_avx512(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                    int64_t last, int64_t columns, char* input) {
  const auto prepare = layout.form == Form::bfloat16 ? prepare_bfloat16 : prepare_by_form<prepare_fixed<4>, prepare_fixed<8>>;
  prepare(layout, count, x, x_dtype, stride, first, last, columns, input);
}

void product_avx512(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                    float* out, int64_t stride, char* scratch) {
  if (layout.form == Form::bfloat16) return direct<E4m3Bfloat16>(matrix, layout, count, input, first, last, out, stride);
  product_by_form<product_of_fixed>(matrix, layout, count, input, first, last, out, stride, scratch);
}

}  // namespace

const Kernels kAvx512 = {
    prepare_avx512, product_avx512, read_sum, attend_with, merge_group, kLanes, QuantizeLanes<kLanes>::quantize};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
