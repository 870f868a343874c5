// The device that kernels are launched on, their launches, and whether memory can be accessed in vectors. Without torch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace zero_inference {

constexpr int kDevices = 64;  // devices for which attributes of kernels are cached

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

struct Device {
  int index;
  cudaStream_t stream;

  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, index));
    return value;
  }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int block_shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
};

// `splits`: neighbouring blocks in the grid's x dimension that are one cluster.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, int splits, const Device& device,
                     Arguments... arguments) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned int>(splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = device.stream;
  config.attrs = &cluster;
  config.numAttrs = splits > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, const Device& device,
            Arguments... arguments) {
  kernel<<<grid, threads, shared_bytes, device.stream>>>(arguments...);
  check_cuda(cudaGetLastError());
}

// Blocks of `kernel` that one SM holds; queried once a device, where the kernel is also allowed its shared memory.
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

// Whether `kernel` was compiled for devices with clusters (Hopper and later); queried once a device, where the kernel is also
// allowed all shared memory. `known` belongs to this kernel alone.
template <typename Kernel>
bool has_clusters(Kernel kernel, int shared_bytes, const Device& device, std::atomic<int> (&known)[kDevices]) {
  enum : int { kUnknown, kWithout, kWith };
  int answer = device.index < kDevices ? known[device.index].load(std::memory_order_relaxed) : kUnknown;
  if (answer == kUnknown) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel));
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    answer = attributes.ptxVersion >= 90 ? kWith : kWithout;
    if (device.index < kDevices) known[device.index].store(answer, std::memory_order_relaxed);
  }
  return answer == kWith;
}

inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Whether a launch has three blocks for two SMs: enough not to split its sums over a cluster.
inline bool fills(int64_t blocks, int multiprocessors) { return 2 * blocks >= 3 * int64_t{multiprocessors}; }

// A null pointer is aligned: nothing is there to be accessed.
inline bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether rows of `length` elements, one after the other from each of `pointers`, are whole aligned 16-byte vectors.
template <typename T, typename... Pointers>
bool in_vectors(int64_t length, Pointers... pointers) {
  return length % static_cast<int64_t>(16 / sizeof(T)) == 0 && (aligned(pointers, 16) && ...);
}

}  // namespace zero_inference
