// Kernels with AVX-512 (F, BW, DQ, VL), BF16 and VNNI.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")

#include "simd_avx512.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "product_direct.h"
#include "product_fixed_vectors.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {

const Kernels kAvx512 = {prepare_by_form<prepare_fixed<4>, prepare_fixed<8>>,
                         product_by_form<product_of_fixed>,
                         read_sum,
                         attend_with,
                         merge_group,
                         kLanes,
                         QuantizeLanes<kLanes>::quantize};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
