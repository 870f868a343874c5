// Kernels in plain C++: vectors of four, which every 64-bit processor has.

#include "simd_portable.h"

#include "attention_kernel.h"
#include "kernels.h"
#include "product_direct.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {

const Kernels kPortable = {
    prepare_float32, product_float32, read_sum, attend_with, merge_group, kLanes, QuantizeLanes<kLanes>::quantize};

}  // namespace zero_inference::cpu
