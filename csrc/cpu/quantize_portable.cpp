// Quantization in plain C++.

#include "quantize.h"
#include "quantize_lanes.h"

namespace zero_inference::cpu {

const GroupQuantizer kPortableQuantizer = {4, QuantizeLanes<4>::quantize};

}  // namespace zero_inference::cpu
