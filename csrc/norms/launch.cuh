// Kernel launches and what they have to know of the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../launch_sizes.cuh"

namespace zero_inference::norms {

constexpr int kDevices = 64;

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("norm kernels: ") + cudaGetErrorString(error));
}

struct Device {
  int index;
  cudaStream_t stream;

  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, index));
    return value;
  }
  int processors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int block_shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, const Device& device,
            Arguments... arguments) {
  kernel<<<grid, threads, shared_bytes, device.stream>>>(arguments...);
  check_cuda(cudaGetLastError());
}

// Blocks of `kernel` that one processor holds; queried once a device, where the kernel is also allowed its shared memory.
// `known` belongs to this kernel alone.
template <typename Kernel>
int resident_blocks(Kernel kernel, int threads, int shared_bytes, const Device& device, std::atomic<int> (&known)[kDevices]) {
  int blocks = device.index < kDevices ? known[device.index].load(std::memory_order_relaxed) : 0;
  if (blocks == 0) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
    blocks = std::max(blocks, 1);
    if (device.index < kDevices) known[device.index].store(blocks, std::memory_order_relaxed);
  }
  return blocks;
}

// Blocks of a kernel whose blocks take rows in turn, each reading a row in a loop.
inline int64_t loop_blocks(int64_t rows, const Device& device) {
  return std::min<int64_t>(rows, int64_t{device.processors()} * kLoopBlocks);
}

inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace zero_inference::norms
