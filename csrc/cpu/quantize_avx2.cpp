// Quantization with AVX2, FMA and F16C.

#if defined(__x86_64__)

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c")

#include "quantize.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {

const GroupQuantizer kAvx2Quantizer = {8, QuantizeLanes<8>::quantize};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
