// The stream that PyTorch uses on a device.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

namespace zero_inference {

inline cudaStream_t current_stream(int32_t device) {
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  return static_cast<cudaStream_t>(current);
}

}  // namespace zero_inference
