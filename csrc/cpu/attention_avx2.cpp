// Attention with AVX2, FMA and F16C.

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c")

#include "simd_avx2.h"

#include "attention_kernel.h"

namespace zero_inference::cpu {

const AttentionKernels kAvx2Attention = {attend_with, merge_group};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
