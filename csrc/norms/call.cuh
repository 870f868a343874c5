// Between torch's stable ABI and the kernels: contiguous inputs, outputs, scratch memory.
#pragma once

#include <optional>
#include <vector>

#include "../operators.cuh"

namespace zero_inference::norms {

// One call on the device of `x`; keeps its inputs and scratch until it ends.
class Call : public TensorDevice {
 public:
  explicit Call(const Tensor& x) : TensorDevice(x), columns(x.size(x.dim() - 1)), like_(x) {
    rows = columns == 0 ? 0 : x.numel() / columns;
    STD_TORCH_CHECK(columns < (int64_t{1} << 30), "norms: rows of ", columns, " elements are too long");
  }

  // Contiguous.
  template <typename T>
  const T* input(const Tensor& tensor) {
    kept_.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
    return read<T>(kept_.back());
  }
  template <typename T>
  const T* input(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? input<T>(*tensor) : nullptr;
  }

  Tensor output_like(const Tensor& tensor) const { return torch::stable::new_empty(like_, tensor.sizes()); }

  // float32 memory for partial results; the caching allocator orders its reuse after the kernels of this stream.
  float* scratch(int64_t count) {
    const int64_t sizes[] = {count};
    kept_.push_back(torch::stable::new_empty(like_, sizes, ScalarType::Float));
    return write<float>(kept_.back());
  }

  int64_t rows = 0, columns;

 private:
  const Tensor& like_;
  std::vector<Tensor> kept_;
};

}  // namespace zero_inference::norms
