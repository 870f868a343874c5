// Products with codes of floating point numbers: MXFP4, NVFP4, and FP8 with scales of blocks or of rows alone.

#include "product_kernel.cuh"

namespace zero_inference::quantization {

void multiply_floats(const Task& task, Codes codes, const Device& device) {
  using Mxfp4 = Format<kE2M1, Scales::kE8M0, 1>;
  using Nvfp4 = Format<kE2M1, Scales::kE4M3, 2>;
  using Fp8 = Format<kE4M3, Scales::kSums, 1>;
  const auto run = codes == kE4M3                                  ? launch_tokens<__nv_bfloat16, Fp8>
                   : 1 << task.group_shift == Mxfp4::kLaneElements ? launch_tokens<__nv_bfloat16, Mxfp4>
                                                                   : launch_tokens<__nv_bfloat16, Nvfp4>;
  run(task, device);
}

}  // namespace zero_inference::quantization
