// Between torch's stable ABI and the kernels: checks that keep memory safe, contiguous inputs, outputs, the current stream.
#pragma once

#include "launch.cuh"

#include <optional>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "../operators.cuh"
#include "device.cuh"

namespace zero_inference::norms {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One call on the device of `x`, whose dtype everything else has to have.
class Call {
 public:
  Call(const char* name, const Tensor& x) : name_(name), like_(x), guard_(x.get_device_index()) {
    STD_TORCH_CHECK(x.is_cuda() && x.dim() > 0, name, ": x must be a CUDA tensor of one or more dimensions");
    columns = x.size(x.dim() - 1);
    rows = columns == 0 ? 0 : x.numel() / columns;
    STD_TORCH_CHECK(columns < (int64_t{1} << 30), name, ": rows of ", columns, " elements are too long");
  }

  Device device() const { return {like_.get_device_index(), current_stream(like_.get_device_index())}; }

  // A contiguous tensor of `numel` elements, kept until the call ends.
  const void* input(const char* what, const Tensor& tensor, int64_t numel) {
    return input(what, tensor, numel, like_.scalar_type());
  }

  const void* input(const char* what, const Tensor& tensor, int64_t numel, ScalarType dtype) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like_.get_device_index(), name_, ": ", what,
                    " must be on the CUDA device of x, index ", like_.get_device_index());
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, name_, ": ", what, " must be ", torch::headeronly::toString(dtype),
                    ", found ", torch::headeronly::toString(tensor.scalar_type()));
    STD_TORCH_CHECK(tensor.numel() == numel, name_, ": ", what, " must have ", numel, " elements, found ", tensor.numel());
    kept_.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
    return kept_.back().const_data_ptr();
  }

  const void* optional_input(const char* what, const std::optional<Tensor>& tensor, int64_t numel) {
    return tensor.has_value() ? input(what, *tensor, numel) : nullptr;
  }

  Tensor output_like(const Tensor& tensor) const { return torch::stable::new_empty(like_, tensor.sizes()); }

  Tensor empty_output() const {
    const int64_t none[] = {0};
    return torch::stable::new_empty(like_, none);
  }

  // float32 memory for partial results; the caching allocator orders its reuse after the kernels of this stream.
  float* scratch(int64_t count) {
    const int64_t sizes[] = {count};
    kept_.push_back(torch::stable::new_empty(like_, sizes, ScalarType::Float));
    return static_cast<float*>(kept_.back().mutable_data_ptr());
  }

  // Calls `run` with a zero of the element type.
  template <typename Run>
  void with_type(Run run) const {
    with_element(name_, "x", like_.scalar_type(), run);
  }

  int64_t rows;
  int64_t columns;

 private:
  const char* name_;
  const Tensor& like_;
  torch::stable::accelerator::DeviceGuard guard_;
  std::vector<Tensor> kept_;
};

}  // namespace zero_inference::norms
