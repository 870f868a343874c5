// Quantization with AVX-512 (F, BW, DQ, VL).

#if defined(__x86_64__)

#include "target.h"

ZI_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl")

#include "quantize.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {

const GroupQuantizer kAvx512Quantizer = {16, QuantizeLanes<16>::quantize};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
