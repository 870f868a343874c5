// Products with int4 and int8 in groups with minima, our own formats.

#include "product_kernel.cuh"

namespace zero_inference::quantization {
namespace {

template <typename T>
void run(const Task& task, Codes codes, const Device& device) {
  using Int4 = Format<kInt4, Scales::kMinima, 1>;
  using Int4Halves = Format<kInt4, Scales::kMinima, 2>;  // groups of 16
  using Int8 = Format<kInt8, Scales::kMinima, 1>;
  const auto run = codes == kInt8                                 ? launch_tokens<T, Int8>
                   : 1 << task.group_shift >= Int4::kLaneElements ? launch_tokens<T, Int4>
                                                                  : launch_tokens<T, Int4Halves>;
  run(task, device);
}

}  // namespace

void multiply_minima(const Task& task, Codes codes, bool half, const Device& device) {
  half ? run<__half>(task, codes, device) : run<__nv_bfloat16>(task, codes, device);
}

}  // namespace zero_inference::quantization
