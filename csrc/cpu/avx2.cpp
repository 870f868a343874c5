// Kernels with AVX2, FMA and F16C.

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c")

#include "simd_avx2.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "product_direct.h"
#include "product_fixed_narrow.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {

const Kernels kAvx2 = {prepare_by_form<prepare_fixed<4>, prepare_fixed<8>>,
                       product_by_form<product_of_fixed>,
                       read_sum,
                       attend_with,
                       merge_group,
                       kLanes,
                       QuantizeLanes<kLanes>::quantize};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
