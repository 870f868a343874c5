// Products with int4 in groups with zero points, and with symmetric int4 and int8.

#include "product_kernel.cuh"

namespace zero_inference::quantization {
namespace {

template <typename T>
void run(const Task& task, Codes codes, const Device& device) {
  const auto run = codes == kInt8 ? launch_tokens<T, Format<kInt8, Scales::kZeroPoints, 1>>
                                  : launch_tokens<T, Format<kInt4, Scales::kZeroPoints, 1>>;
  run(task, device);
}

}  // namespace

void multiply_zero_points(const Task& task, Codes codes, bool half, const Device& device) {
  half ? run<__half>(task, codes, device) : run<__nv_bfloat16>(task, codes, device);
}

}  // namespace zero_inference::quantization
