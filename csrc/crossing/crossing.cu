// How a stream of the device and the host's cores meet (csrc/cpu/cores.h), without the host's Python in between: kernels that
// write into page-locked host memory and read from it.
//
//   crossing_push   writes a tensor there; with a flag it begins the next call, and raises the flag to its number
//   crossing_pull   waits until the flag has the number of that call, and reads a tensor from there
//
// The device counts the calls, so that a graph of these kernels can be launched again and again.
//
// No copy engine takes part: one that copies weights would finish those first.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../alignment.cuh"
#include "../current_stream.cuh"
#include "../launch_sizes.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using zero_inference::aligned;
using zero_inference::current_stream;

using namespace zero_inference::crossing;  // launch sizes

// Of the scratch tensor, uint32 [3], zero at first.
constexpr int kFinished = 0;  // blocks that have written their part; wraps to 0
constexpr int kSeen = 1;      // the number that the first block found in the flag
constexpr int kNumber = 2;    // of the call under way

template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    push(const Vector* __restrict__ source, Vector* target, int64_t vectors, uint32_t* flag, uint32_t* scratch) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += stride) target[i] = source[i];
  if (flag == nullptr) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicInc(scratch + kFinished, gridDim.x - 1) == gridDim.x - 1) {
    __threadfence_system();
    *reinterpret_cast<volatile uint32_t*>(flag) = ++scratch[kNumber];
  }
}

__device__ __forceinline__ bool reached(const volatile uint32_t* flag, uint32_t number) {
  return static_cast<int32_t>(*flag - number) >= 0;
}

template <typename Vector>
__global__ void __launch_bounds__(kThreads) pull(const Vector* source, Vector* __restrict__ target, int64_t vectors,
                                                 const uint32_t* flag, const uint32_t* stop, uint32_t* scratch) {
  if (threadIdx.x == 0) {
    const uint32_t number = scratch[kNumber];
    volatile uint32_t* const seen = scratch + kSeen;
    if (blockIdx.x == 0) {  // one thread asks over the link, the others on the device
      for (int polls = 1; !reached(flag, number); ++polls) {
        if (polls % 1024 == 0 && *reinterpret_cast<const volatile uint32_t*>(stop) != 0) break;
      }
      __threadfence();
      *seen = number;
    } else {
      while (!reached(seen, number)) __nanosleep(100);
    }
    __threadfence_system();
  }
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < vectors; first += stride * kUnroll) {
    Vector values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) values[i] = __ldcv(source + first + i * stride);  // not from a cache
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) target[first + i * stride] = values[i];
    }
  }
}

unsigned int blocks_for(int64_t vectors) {
  const int64_t wanted = (vectors + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  return static_cast<unsigned int>(std::clamp<int64_t>(wanted, 1, kMostBlocks));
}

void check(const char* name, const Tensor& tensor, const Tensor& scratch) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), name, ": the tensor must be contiguous and on a CUDA device");
  STD_TORCH_CHECK(scratch.is_cuda() && scratch.get_device_index() == tensor.get_device_index() && scratch.numel() >= 3 &&
                      scratch.scalar_type() == ScalarType::Int,
                  name, ": the scratch must be int32 [3] on the device of the tensor");
}

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void crossing_push(const Tensor& tensor, int64_t target, int64_t flag, const Tensor& scratch) {
  check("crossing_push", tensor, scratch);
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  const cudaStream_t stream = current_stream(tensor.get_device_index());
  const int64_t bytes = bytes_of(tensor);
  uint32_t* const counters = static_cast<uint32_t*>(scratch.mutable_data_ptr());
  const auto launch = [&](auto zero) {
    using Vector = decltype(zero);
    const int64_t vectors = bytes / static_cast<int64_t>(sizeof(Vector));
    push<Vector><<<blocks_for(vectors), kThreads, 0, stream>>>(static_cast<const Vector*>(tensor.const_data_ptr()),
                                                               at<Vector>(target), vectors, at<uint32_t>(flag), counters);
  };
  if (bytes % 16 == 0 && aligned(tensor.const_data_ptr(), 16) && aligned(at<void>(target), 16)) {
    launch(uint4{});
  } else {
    launch(static_cast<unsigned char>(0));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void crossing_pull(const Tensor& out, int64_t source, int64_t flag, int64_t stop, const Tensor& scratch) {
  check("crossing_pull", out, scratch);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const cudaStream_t stream = current_stream(out.get_device_index());
  const int64_t bytes = bytes_of(out);
  uint32_t* const counters = static_cast<uint32_t*>(scratch.mutable_data_ptr());
  const auto launch = [&](auto zero) {
    using Vector = decltype(zero);
    const int64_t vectors = bytes / static_cast<int64_t>(sizeof(Vector));
    pull<Vector><<<blocks_for(vectors), kThreads, 0, stream>>>(at<const Vector>(source),
                                                               static_cast<Vector*>(out.mutable_data_ptr()), vectors,
                                                               at<const uint32_t>(flag), at<const uint32_t>(stop), counters);
  };
  if (bytes % 16 == 0 && aligned(out.const_data_ptr(), 16) && aligned(at<void>(source), 16)) {
    launch(uint4{});
  } else {
    launch(static_cast<unsigned char>(0));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("crossing_push(Tensor tensor, int target, int flag, Tensor(a!) scratch) -> ()");
  library.def("crossing_pull(Tensor(a!) out, int source, int flag, int stop, Tensor(b!) scratch) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("crossing_push", TORCH_BOX(&crossing_push));
  library.impl("crossing_pull", TORCH_BOX(&crossing_pull));
}
