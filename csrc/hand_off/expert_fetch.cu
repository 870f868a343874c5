// Expert cache: routed experts that are not in device memory are fetched from page-locked host memory, or computed on the CPU.
// A CUDA graph captures the first two kernels.
//
//   expert_division   divides routed experts among device cache, fetch and CPU, and evicts experts for fetched ones
//   expert_fetch      copies experts into their slots
//   expert_fill       copies all experts into a block: from their slots, else from host memory
//
// A kernel reads host memory at 46 GB/s with one expert of 2.65 MB, at 50 with more, a copy engine at 55 (H100, PCIe 5); the
// kernel needs no host thread that knows the routing.

#include <cstdint>

#include "../launch_sizes.cuh"
#include "../operators.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using zero_inference::current_stream;

using namespace zero_inference::hand_off;  // launch sizes

enum State : int { kOther, kMissed, kIdle };  // idle: cached, not routed to

// One block. Fetches the most used misses and evicts the least used idle experts, ties by lowest id. Without `keeps` the table
// is unchanged, and fetched experts go to slots 0, 1 ...
__global__ void __launch_bounds__(kThreads)
    divide(const int64_t* __restrict__ chosen, int pairs, int64_t* table, float* uses, int experts,
           const int64_t* __restrict__ quota, float kept_use, bool keeps, int most, int64_t* __restrict__ for_cpu,
           int64_t* __restrict__ slot, int64_t* __restrict__ fetched_slot, int64_t* fetched, int64_t* fetched_into) {
  extern __shared__ int state[];  // [experts]; first whether it is routed to
  float* const used = reinterpret_cast<float*>(state + experts);
  __shared__ int counts[3];
  for (int e = threadIdx.x; e < experts; e += kThreads) state[e] = 0;
  for (int i = threadIdx.x; i < most; i += kThreads) fetched[i] = fetched_into[i] = -1;
  if (threadIdx.x < 3) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    const int64_t e = chosen[p];
    if (e >= 0 && e < experts) state[e] = 1;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    const bool is_chosen = state[e] != 0, is_held = table[e] >= 0;
    used[e] = uses[e] = __fadd_rn(__fmul_rn(uses[e], kept_use), is_chosen ? 1.0f : 0.0f);  // rounded as PyTorch does
    state[e] = is_chosen && !is_held ? kMissed : is_held && !is_chosen ? kIdle : kOther;
    atomicAdd(&counts[state[e]], 1);
  }
  __syncthreads();
  int fetches = min(min(static_cast<int>(quota[counts[kMissed]]), counts[kMissed]), most);
  if (keeps) fetches = min(fetches, counts[kIdle]);
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    const int own = state[e];
    if (own == kOther) continue;
    const float sign = own == kMissed ? -1.0f : 1.0f, key = sign * used[e];
    int rank = 0;
    for (int other = 0; other < experts; ++other) {
      const float others = sign * used[other];
      rank += state[other] == own && (others < key || (others == key && other < e));
    }
    if (rank >= fetches) continue;
    if (own == kMissed) {
      fetched[rank] = e;
      if (!keeps) fetched_into[rank] = rank;
    } else if (keeps) {
      fetched_into[rank] = table[e];
      table[e] = -1;
    }
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    const int64_t e = chosen[p];
    const int64_t held = e >= 0 && e < experts ? table[e] : -1;
    int64_t place = -1;
    for (int i = 0; i < fetches; ++i) {
      if (fetched[i] == e) place = fetched_into[i];
    }
    slot[p] = held;
    fetched_slot[p] = place;
    for_cpu[p] = held >= 0 ? ~e : place >= 0 ? ~(e + experts) : e;
  }
  __syncthreads();
  for (int i = threadIdx.x; keeps && i < fetches; i += kThreads) table[fetched[i]] = fetched_into[i];
}

template <typename Vector>
__device__ void copy(const Vector* __restrict__ source, Vector* __restrict__ target, int64_t vectors, int64_t begin,
                     int64_t stride) {
  for (int64_t first = begin; first < vectors; first += stride * kUnroll) {
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

// `pieces`: rows of [address in host memory, address of slots, offset in the block, bytes of an expert]. blockIdx.y: index into
// `fetched` and `fetched_into`; blockIdx.z: index into `pieces`.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    fetch(const int64_t* __restrict__ fetched, const int64_t* __restrict__ fetched_into, const int64_t* __restrict__ pieces) {
  const int64_t expert = fetched[blockIdx.y];
  if (expert < 0) return;
  const int64_t* const piece = pieces + 4 * blockIdx.z;
  const int64_t vectors = piece[3] / static_cast<int64_t>(sizeof(Vector));
  copy(reinterpret_cast<const Vector*>(piece[0]) + expert * vectors,
       reinterpret_cast<Vector*>(piece[1]) + fetched_into[blockIdx.y] * vectors, vectors,
       static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, static_cast<int64_t>(gridDim.x) * kThreads);
}

// A thread block copies one of `parts` parts of one piece of one expert at a time.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    fill(const int64_t* __restrict__ table, int64_t experts, const int64_t* __restrict__ pieces, int64_t number, int64_t parts,
         char* block) {
  for (int64_t turn = blockIdx.x; turn < experts * parts * number; turn += gridDim.x) {
    const int64_t part = turn % parts, expert = turn / parts % experts, slot = table[expert];
    const int64_t* const piece = pieces + 4 * (turn / (experts * parts));
    const int64_t source = slot >= 0 ? piece[1] + slot * piece[3] : piece[0] + expert * piece[3];
    copy(reinterpret_cast<const Vector*>(source), reinterpret_cast<Vector*>(block + piece[2] + expert * piece[3]),
         piece[3] / static_cast<int64_t>(sizeof(Vector)), part * kThreads + threadIdx.x, parts * kThreads);
  }
}

void check(const char* name, const Tensor& tensor, const Tensor& like, ScalarType type = ScalarType::Long) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index() && tensor.is_contiguous() &&
                      tensor.scalar_type() == type,
                  name, " must be ",
                  type == ScalarType::Long    ? "int64"
                  : type == ScalarType::Float ? "float32"
                                              : "uint8",
                  ", contiguous, on CUDA device ", like.get_device_index());
}

void expert_division(const Tensor& chosen, const Tensor& table, const Tensor& uses, int64_t experts, const Tensor& quota,
                     double kept_use, bool keeps, const Tensor& for_cpu, const Tensor& slot, const Tensor& fetched_slot,
                     const Tensor& fetched, const Tensor& fetched_into) {
  STD_TORCH_CHECK(chosen.is_cuda(), "expert_division: chosen must be on a CUDA device");
  const Tensor* const all[] = {&chosen, &table, &quota, &for_cpu, &slot, &fetched_slot, &fetched, &fetched_into};
  for (const Tensor* each : all) check("expert_division: each other tensor", *each, chosen);
  check("expert_division: uses", uses, chosen, ScalarType::Float);
  STD_TORCH_CHECK(
      experts > 0 && experts <= kMostExperts && table.numel() >= experts && uses.numel() >= experts && quota.numel() > experts,
      "expert_division: experts must be 1 to ", kMostExperts, ", and table, uses and quota have as many; found ", experts, ", ",
      table.numel(), ", ", uses.numel(), " and ", quota.numel());
  STD_TORCH_CHECK(for_cpu.numel() == chosen.numel() && slot.numel() == chosen.numel() &&
                      fetched_slot.numel() == chosen.numel() && fetched.numel() == fetched_into.numel(),
                  "expert_division: the first three outputs must be of ", chosen.numel(), " elements, and two of as many");
  const torch::stable::accelerator::DeviceGuard guard(chosen.get_device_index());
  const size_t shared_bytes = static_cast<size_t>(experts) * (sizeof(int) + sizeof(float));
  divide<<<1, kThreads, shared_bytes, current_stream(chosen.get_device_index())>>>(
      static_cast<const int64_t*>(chosen.const_data_ptr()), static_cast<int>(chosen.numel()),
      static_cast<int64_t*>(table.mutable_data_ptr()), static_cast<float*>(uses.mutable_data_ptr()), static_cast<int>(experts),
      static_cast<const int64_t*>(quota.const_data_ptr()), static_cast<float>(kept_use), keeps,
      static_cast<int>(fetched.numel()), static_cast<int64_t*>(for_cpu.mutable_data_ptr()),
      static_cast<int64_t*>(slot.mutable_data_ptr()), static_cast<int64_t*>(fetched_slot.mutable_data_ptr()),
      static_cast<int64_t*>(fetched.mutable_data_ptr()), static_cast<int64_t*>(fetched_into.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void expert_fetch(const Tensor& fetched, const Tensor& fetched_into, const Tensor& pieces, bool in_vectors) {
  STD_TORCH_CHECK(fetched.is_cuda(), "expert_fetch: fetched must be on a CUDA device");
  check("expert_fetch: fetched", fetched, fetched);
  check("expert_fetch: fetched_into", fetched_into, fetched);
  check("expert_fetch: pieces", pieces, fetched);
  STD_TORCH_CHECK(pieces.dim() == 2 && pieces.size(1) == 4 && fetched_into.numel() == fetched.numel(),
                  "expert_fetch: pieces must be [pieces, 4], and fetched_into as many as fetched");
  if (fetched.numel() == 0 || pieces.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(fetched.get_device_index());
  const cudaStream_t stream = current_stream(fetched.get_device_index());
  const dim3 grid(kFetchBlocks, static_cast<unsigned int>(fetched.numel()), static_cast<unsigned int>(pieces.size(0)));
  const int64_t* const experts = static_cast<const int64_t*>(fetched.const_data_ptr());
  const int64_t* const slots = static_cast<const int64_t*>(fetched_into.const_data_ptr());
  const int64_t* const addresses = static_cast<const int64_t*>(pieces.const_data_ptr());
  if (in_vectors) {
    fetch<uint4><<<grid, kThreads, 0, stream>>>(experts, slots, addresses);
  } else {
    fetch<unsigned char><<<grid, kThreads, 0, stream>>>(experts, slots, addresses);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void expert_fill(const Tensor& table, int64_t experts, const Tensor& pieces, const Tensor& block, bool in_vectors) {
  STD_TORCH_CHECK(table.is_cuda() && table.numel() >= experts, "expert_fill: table must be on a CUDA device, of ", experts,
                  " experts or more");
  check("expert_fill: table", table, table);
  check("expert_fill: pieces", pieces, table);
  check("expert_fill: block", block, table, ScalarType::Byte);
  STD_TORCH_CHECK(pieces.dim() == 2 && pieces.size(1) == 4, "expert_fill: pieces must be [pieces, 4]");
  if (experts == 0 || pieces.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(table.get_device_index());
  const cudaStream_t stream = current_stream(table.get_device_index());
  const int64_t parts = experts < kFillTurns ? kFillTurns / experts : 1;
  const auto launch = [&](auto kernel) {
    kernel<<<kFillBlocks, kThreads, 0, stream>>>(static_cast<const int64_t*>(table.const_data_ptr()), experts,
                                                 static_cast<const int64_t*>(pieces.const_data_ptr()), pieces.size(0), parts,
                                                 static_cast<char*>(block.mutable_data_ptr()));
  };
  in_vectors ? launch(fill<uint4>) : launch(fill<unsigned char>);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def(
      "expert_division(Tensor chosen, Tensor(a!) table, Tensor(b!) uses, int experts, Tensor quota, float kept_use, bool "
      "keeps, "
      "Tensor(c!) for_cpu, Tensor(d!) slot, Tensor(e!) fetched_slot, Tensor(f!) fetched, Tensor(g!) fetched_into) -> ()");
  library.def("expert_fetch(Tensor fetched, Tensor fetched_into, Tensor pieces, bool in_vectors) -> ()");
  library.def("expert_fill(Tensor table, int experts, Tensor pieces, Tensor(a!) block, bool in_vectors) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("expert_division", TORCH_BOX(&expert_division));
  library.impl("expert_fetch", TORCH_BOX(&expert_fetch));
  library.impl("expert_fill", TORCH_BOX(&expert_fill));
}
