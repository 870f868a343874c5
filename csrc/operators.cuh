// Host code of all operators: a tensor's device and data, the type of its elements. Where an operator checks nothing, its
// callers in Python do.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "elements.cuh"
#include "launch.cuh"
#include "launch_sizes.cuh"

namespace zero_inference {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device of a tensor, current until the end of a call, and PyTorch's current stream.
class TensorDevice : public Device {
 public:
  explicit TensorDevice(const Tensor& tensor) : Device{tensor.get_device_index(), nullptr}, guard_(index) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &current));
    stream = static_cast<cudaStream_t>(current);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls run(T{}) with the element type of a tensor.
template <typename Run>
void with_element(ScalarType dtype, const Run& run) {
  if (dtype == ScalarType::Half) return run(__half{});
  if (dtype == ScalarType::BFloat16) return run(__nv_bfloat16{});
  STD_TORCH_CHECK(dtype == ScalarType::Float, "tensors must be Half, BFloat16 or Float, found ",
                  torch::headeronly::toString(dtype));
  run(float{});
}

}  // namespace zero_inference
