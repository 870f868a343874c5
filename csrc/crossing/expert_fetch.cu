// The experts of a mixture that tokens chose, and that device memory does not hold: which of them the device fetches itself,
// and the copy of these, straight from page-locked host memory. Both are kernels of the model's stream, so that a CUDA graph
// holds them.
//
//   expert_division   divides what was chosen over device memory, link and CPU
//   expert_fetch      copies experts into staging memory
//
// A kernel that reads host memory reaches 46 GB/s with one expert of 2.65 MB, and 50 with more, where a copy engine reaches 55
// (H100, PCIe 5), and needs no host thread to know what was chosen.

#include <cuda_runtime.h>

#include <cstdint>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../current_stream.cuh"
#include "../launch_sizes.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using zero_inference::current_stream;

using namespace zero_inference::crossing;  // launch sizes

constexpr int kWarp = 32;

// One block. `rank` in shared memory, int [experts]: 0 for an expert that no token chose or that is in a slot, else its number
// among the missed ones, from 1 on, in ascending order.
__global__ void __launch_bounds__(kThreads)
    divide(const int64_t* __restrict__ chosen, int pairs, const int64_t* __restrict__ table, int experts,
           const int64_t* __restrict__ quota, int most, int64_t* __restrict__ for_cpu, int64_t* __restrict__ slot,
           int64_t* __restrict__ staged, int64_t* __restrict__ fetched) {
  extern __shared__ int rank[];
  __shared__ int missed;
  for (int e = threadIdx.x; e < experts; e += kThreads) rank[e] = 0;
  for (int i = threadIdx.x; i < most; i += kThreads) fetched[i] = -1;
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    const int64_t e = chosen[p];
    if (e >= 0 && e < experts && table[e] < 0) rank[e] = 1;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    int count = 0;
    for (int first = 0; first < experts; first += kWarp) {
      const int e = first + threadIdx.x;
      const bool is_missed = e < experts && rank[e] != 0;
      const unsigned int mask = __ballot_sync(~0u, is_missed);
      if (is_missed) rank[e] = count + __popc(mask & ((1u << threadIdx.x) - 1)) + 1;
      count += __popc(mask);
    }
    if (threadIdx.x == 0) missed = count;
  }
  __syncthreads();
  const int over_link = min(static_cast<int>(quota[missed]), most);
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    if (rank[e] > 0 && rank[e] <= over_link) fetched[rank[e] - 1] = e;
  }
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    const int64_t e = chosen[p];
    const bool is_expert = e >= 0 && e < experts;
    const int64_t held = is_expert ? table[e] : -1;
    const bool is_fetched = is_expert && held < 0 && rank[e] <= over_link;
    slot[p] = held;
    staged[p] = is_fetched ? rank[e] - 1 : -1;
    for_cpu[p] = held >= 0 ? ~e : is_fetched ? ~(e + experts) : e;
  }
}

// blockIdx.y: which of `fetched`; blockIdx.z: which of `pieces`, [address in host memory, address in staging memory, bytes of
// an expert].
template <typename Vector>
__global__ void __launch_bounds__(kThreads) fetch(const int64_t* __restrict__ fetched, const int64_t* __restrict__ pieces) {
  const int64_t expert = fetched[blockIdx.y];
  if (expert < 0) return;
  const int64_t* const piece = pieces + 3 * blockIdx.z;
  const int64_t vectors = piece[2] / static_cast<int64_t>(sizeof(Vector));
  const Vector* const source = reinterpret_cast<const Vector*>(piece[0]) + expert * vectors;
  Vector* const target = reinterpret_cast<Vector*>(piece[1]) + blockIdx.y * vectors;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < vectors; first += stride * kUnroll) {
    Vector values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) values[i] = __ldcs(source + first + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) target[first + i * stride] = values[i];
    }
  }
}

void check(const char* name, const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index() && tensor.is_contiguous() &&
                      tensor.scalar_type() == ScalarType::Long,
                  name, " must be int64, contiguous, on CUDA device ", like.get_device_index());
}

void expert_division(const Tensor& chosen, const Tensor& table, int64_t experts, const Tensor& quota, const Tensor& for_cpu,
                     const Tensor& slot, const Tensor& staged, const Tensor& fetched) {
  STD_TORCH_CHECK(chosen.is_cuda(), "expert_division: chosen must be on a CUDA device");
  const Tensor* const all[] = {&chosen, &table, &quota, &for_cpu, &slot, &staged, &fetched};
  for (const Tensor* each : all) check("expert_division: each tensor", *each, chosen);
  STD_TORCH_CHECK(experts > 0 && experts <= kMostExperts && table.numel() >= experts && quota.numel() > experts,
                  "expert_division: experts must be 1 to ", kMostExperts, ", and table and quota have as many; found ", experts,
                  ", ", table.numel(), " and ", quota.numel());
  STD_TORCH_CHECK(for_cpu.numel() == chosen.numel() && slot.numel() == chosen.numel() && staged.numel() == chosen.numel(),
                  "expert_division: outputs must be of ", chosen.numel(), " elements");
  const torch::stable::accelerator::DeviceGuard guard(chosen.get_device_index());
  divide<<<1, kThreads, static_cast<size_t>(experts) * sizeof(int), current_stream(chosen.get_device_index())>>>(
      static_cast<const int64_t*>(chosen.const_data_ptr()), static_cast<int>(chosen.numel()),
      static_cast<const int64_t*>(table.const_data_ptr()), static_cast<int>(experts),
      static_cast<const int64_t*>(quota.const_data_ptr()), static_cast<int>(fetched.numel()),
      static_cast<int64_t*>(for_cpu.mutable_data_ptr()), static_cast<int64_t*>(slot.mutable_data_ptr()),
      static_cast<int64_t*>(staged.mutable_data_ptr()), static_cast<int64_t*>(fetched.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void expert_fetch(const Tensor& fetched, const Tensor& pieces, bool in_vectors) {
  STD_TORCH_CHECK(fetched.is_cuda(), "expert_fetch: fetched must be on a CUDA device");
  check("expert_fetch: fetched", fetched, fetched);
  check("expert_fetch: pieces", pieces, fetched);
  STD_TORCH_CHECK(pieces.dim() == 2 && pieces.size(1) == 3, "expert_fetch: pieces must be [pieces, 3]");
  if (fetched.numel() == 0 || pieces.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(fetched.get_device_index());
  const cudaStream_t stream = current_stream(fetched.get_device_index());
  const dim3 grid(kFetchBlocks, static_cast<unsigned int>(fetched.numel()), static_cast<unsigned int>(pieces.size(0)));
  const int64_t* const experts = static_cast<const int64_t*>(fetched.const_data_ptr());
  const int64_t* const addresses = static_cast<const int64_t*>(pieces.const_data_ptr());
  if (in_vectors) {
    fetch<uint4><<<grid, kThreads, 0, stream>>>(experts, addresses);
  } else {
    fetch<unsigned char><<<grid, kThreads, 0, stream>>>(experts, addresses);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def(
      "expert_division(Tensor chosen, Tensor table, int experts, Tensor quota, Tensor(a!) for_cpu, Tensor(b!) slot, "
      "Tensor(c!) staged, Tensor(d!) fetched) -> ()");
  library.def("expert_fetch(Tensor fetched, Tensor pieces, bool in_vectors) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("expert_division", TORCH_BOX(&expert_division));
  library.impl("expert_fetch", TORCH_BOX(&expert_fetch));
}
