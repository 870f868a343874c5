// Attention with AVX-512 (F, BW, DQ, VL, BF16).

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

#include "simd_avx512.h"

#include "attention_kernel.h"

namespace zero_inference::cpu {

const AttentionKernels kAvx512Attention = {attend_with, merge_group};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
