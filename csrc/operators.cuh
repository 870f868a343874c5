// What operators share on the host: the stream of PyTorch, checks of tensors, the type of their elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace zero_inference {

inline cudaStream_t current_stream(int32_t device) {
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  return static_cast<cudaStream_t>(current);
}

// Calls run(T{}) with the element type of tensor `name`.
template <typename Run>
void with_element(const char* operation, const char* name, torch::headeronly::ScalarType dtype, const Run& run) {
  using torch::headeronly::ScalarType;
  if (dtype == ScalarType::Half) return run(__half{});
  if (dtype == ScalarType::BFloat16) return run(__nv_bfloat16{});
  STD_TORCH_CHECK(dtype == ScalarType::Float, operation, ": ", name, " must be Half, BFloat16 or Float, found ",
                  torch::headeronly::toString(dtype));
  run(float{});
}

inline void check_tensor(const char* operation, const char* name, const torch::stable::Tensor& tensor,
                         torch::headeronly::ScalarType dtype, int64_t numel, const torch::stable::Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), operation, ": ", name,
                  " must be on CUDA device ", like.get_device_index());
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous(), operation, ": ", name,
                  " must be ", torch::headeronly::toString(dtype), ", contiguous, of ", numel, " elements, found ",
                  torch::headeronly::toString(tensor.scalar_type()), " of ", tensor.numel());
}

}  // namespace zero_inference
