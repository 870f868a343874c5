// Reads of page-locked host memory by kernels that a CUDA graph can capture: no copy engine or host thread needs the ids.
//
//   expert_division   divides routed experts among device cache, fetch and CPU, and evicts experts for fetched ones
//   expert_fetch      copies experts into their slots
//   expert_fill       copies all experts into a block: from their slots, else from host memory
//   embedding_rows    copies rows of an embedding table
//
// A kernel reads host memory at 46 GB/s with one expert of 2.65 MB, at 50 with more, a copy engine at 55 (H100, PCIe 5).

#include <torch/headeronly/macros/Macros.h>

#include "../operators.cuh"

namespace zero_inference::hand_off {
namespace {

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
__device__ void copy(const Vector* source, Vector* target, int64_t vectors, int64_t begin, int64_t stride) {
  copy_vectors<kUnroll>(source, target, vectors, begin, stride, [](const Vector* from) { return __ldcs(from); });
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

// chosen, for_cpu, slot and fetched_slot int64 of one size; table int64 and uses float32 [>= experts]; quota int64 [experts +
// 1]; fetched and fetched_into int64 of one size.
void expert_division(const Tensor& chosen, const Tensor& table, const Tensor& uses, int64_t experts, const Tensor& quota,
                     double kept_use, bool keeps, const Tensor& for_cpu, const Tensor& slot, const Tensor& fetched_slot,
                     const Tensor& fetched, const Tensor& fetched_into) {
  STD_TORCH_CHECK(experts > 0 && experts <= kMostExperts, "expert_division: experts must be 1 to ", kMostExperts, ", found ",
                  experts);
  const TensorDevice device(chosen);
  const int shared_bytes = static_cast<int>(experts) * static_cast<int>(sizeof(int) + sizeof(float));
  launch(divide, dim3(1), kThreads, shared_bytes, device, read<int64_t>(chosen), static_cast<int>(chosen.numel()),
         write<int64_t>(table), write<float>(uses), static_cast<int>(experts), read<int64_t>(quota),
         static_cast<float>(kept_use), keeps, static_cast<int>(fetched.numel()), write<int64_t>(for_cpu), write<int64_t>(slot),
         write<int64_t>(fetched_slot), write<int64_t>(fetched), write<int64_t>(fetched_into));
}

// All int64; pieces [pieces, 4]; fetched_into of as many as fetched.
void expert_fetch(const Tensor& fetched, const Tensor& fetched_into, const Tensor& pieces, bool in_vectors) {
  if (fetched.numel() == 0 || pieces.numel() == 0) return;
  const TensorDevice device(fetched);
  const dim3 grid(kFetchBlocks, static_cast<unsigned int>(fetched.numel()), static_cast<unsigned int>(pieces.size(0)));
  launch(in_vectors ? fetch<uint4> : fetch<unsigned char>, grid, kThreads, 0, device, read<int64_t>(fetched),
         read<int64_t>(fetched_into), read<int64_t>(pieces));
}

// table int64 [>= experts]; pieces int64 [pieces, 4]; block uint8.
void expert_fill(const Tensor& table, int64_t experts, const Tensor& pieces, const Tensor& block, bool in_vectors) {
  if (experts == 0 || pieces.numel() == 0) return;
  const TensorDevice device(table);
  const int64_t parts = experts < kFillTurns ? kFillTurns / experts : 1;
  launch(in_vectors ? fill<uint4> : fill<unsigned char>, dim3(kFillBlocks), kThreads, 0, device, read<int64_t>(table), experts,
         read<int64_t>(pieces), pieces.size(0), parts, write<char>(block));
}

// `table` [rows, columns] and `out` [tokens, columns], in vectors. An id out of range fails a device assertion, as in PyTorch.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    gather(const int64_t* __restrict__ ids, int64_t tokens, const Vector* __restrict__ table, int64_t rows, int64_t columns,
           Vector* __restrict__ out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < tokens * columns; i += stride) {
    const int64_t token = i / columns;
    const int64_t id = ids[token];
    const bool is_row = id >= 0 && id < rows;
    CUDA_KERNEL_ASSERT(is_row);
    if (is_row) out[i] = __ldcs(table + id * columns + (i - token * columns));
  }
}

// ids int64, contiguous; table [rows, columns] of 2 or 4 bytes an element; out [ids, columns].
void embedding_rows(const Tensor& ids, const Tensor& table, const Tensor& out) {
  if (out.numel() == 0) return;
  const TensorDevice device(ids);
  const int64_t row_bytes = table.size(1) * static_cast<int64_t>(table.element_size());
  const auto run = [&](auto zero) {
    using Vector = decltype(zero);
    const int64_t columns = row_bytes / static_cast<int64_t>(sizeof(Vector));
    const int64_t blocks = std::min<int64_t>(kMostRowBlocks, divided_up(ids.numel() * columns, kThreads));
    launch(gather<Vector>, dim3(blocks), kThreads, 0, device, read<int64_t>(ids), ids.numel(), read<Vector>(table),
           table.size(0), columns, write<Vector>(out));
  };
  const bool whole = row_bytes % 16 == 0 && aligned(table.const_data_ptr(), 16) && aligned(out.const_data_ptr(), 16);
  whole ? run(uint4{}) : run(static_cast<unsigned short>(0));
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("embedding_rows(Tensor ids, Tensor table, Tensor(a!) out) -> ()");
  library.def(
      "expert_division(Tensor chosen, Tensor(a!) table, Tensor(b!) uses, int experts, Tensor quota, float kept_use, bool "
      "keeps, Tensor(c!) for_cpu, Tensor(d!) slot, Tensor(e!) fetched_slot, Tensor(f!) fetched, Tensor(g!) fetched_into) -> "
      "()");
  library.def("expert_fetch(Tensor fetched, Tensor fetched_into, Tensor pieces, bool in_vectors) -> ()");
  library.def("expert_fill(Tensor table, int experts, Tensor pieces, Tensor(a!) block, bool in_vectors) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("embedding_rows", TORCH_BOX(&embedding_rows));
  library.impl("expert_division", TORCH_BOX(&expert_division));
  library.impl("expert_fetch", TORCH_BOX(&expert_fetch));
  library.impl("expert_fill", TORCH_BOX(&expert_fill));
}

}  // namespace
}  // namespace zero_inference::hand_off
