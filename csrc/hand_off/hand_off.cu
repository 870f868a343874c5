// Hand-off between a CUDA stream and the CPU backend (csrc/cpu/cpu_pool.cpp) without Python: kernels that write and read
// page-locked host memory.
//
//   hand_off_push   writes tensors there, increments the call number and raises the flag to it
//   hand_off_pull   waits until the flag has that number, and reads a tensor; with `weights` and `rows` adds the device's share
//                   of the sum: weights [tokens, k] times rows [tokens * k, width]
//   weighted_rows   that share alone
//
// The device counts the calls, so that a CUDA graph of these kernels can be replayed. No copy engine is used: it would first
// finish queued copies of weights.

#include <optional>
#include <vector>

#include "../operators.cuh"

namespace zero_inference::hand_off {
namespace {

// Indices into the scratch tensor, uint32 [3], initially zero.
constexpr int kFinished = 0;  // blocks that have written their part; wraps to 0
constexpr int kSeen = 1;      // the last flag value that the first block read
constexpr int kNumber = 2;    // of the current call

// Tensors of one call, in units of 16, 4 or 1 bytes.
struct Part {
  const char* source;
  char* target;
  int64_t end;  // units of this part and those before it
  int unit;     // bytes
};
struct Parts {
  Part part[kMostParts];
  int64_t units;
};

// Release: earlier writes are visible to a reader of `value`, on the host too.
__device__ __forceinline__ void raise_flag(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Orders earlier accesses before later ones, for the host too; cheaper than __threadfence_system, which also orders fences.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// One fence per block: the barrier orders the writes of its other threads before it.
__global__ void __launch_bounds__(kPushThreads) push(const Parts parts, uint32_t* flag, uint32_t* scratch) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kPushThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPushThreads + threadIdx.x; i < parts.units; i += stride) {
    int p = 0;
    int64_t begin = 0;
#pragma unroll
    for (int other = 0; other < kMostParts - 1; ++other) {
      if (i >= parts.part[other].end) {
        p = other + 1;
        begin = parts.part[other].end;
      }
    }
    const int unit = parts.part[p].unit;
    const char* const source = parts.part[p].source + (i - begin) * unit;
    char* const target = parts.part[p].target + (i - begin) * unit;
    if (unit == 16) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    } else if (unit == 4) {
      *reinterpret_cast<uint32_t*>(target) = *reinterpret_cast<const uint32_t*>(source);
    } else {
      *target = *source;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    fence_system();
    if (atomicInc(scratch + kFinished, gridDim.x - 1) != gridDim.x - 1) return;
    fence_system();
  }
  raise_flag(flag, ++scratch[kNumber]);
}

__device__ __forceinline__ bool reached(const volatile uint32_t* flag, uint32_t number) {
  return static_cast<int32_t>(*flag - number) >= 0;
}

// Blocks until the CPU has written the output of the current call.
__device__ __forceinline__ void await_output(const uint32_t* flag, const uint32_t* stop, uint32_t* scratch) {
  if (threadIdx.x == 0) {
    const uint32_t number = scratch[kNumber];
    volatile uint32_t* const seen = scratch + kSeen;
    if (blockIdx.x == 0) {  // one thread polls host memory, the others the device
      for (int polls = 1; !reached(flag, number); ++polls) {
        if (polls % 1024 == 0 && *reinterpret_cast<const volatile uint32_t*>(stop) != 0) break;
      }
      if (gridDim.x > 1) fence_system();
      *seen = number;
    } else {
      while (!reached(seen, number)) __nanosleep(100);
    }
    fence_system();
  }
  __syncthreads();
}

template <typename Vector>
__global__ void __launch_bounds__(kThreads) pull(const Vector* source, Vector* __restrict__ target, int64_t vectors,
                                                 const uint32_t* flag, const uint32_t* stop, uint32_t* scratch) {
  await_output(flag, stop, scratch);
  copy_vectors<kUnroll>(source, target, vectors, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                        static_cast<int64_t>(gridDim.x) * kThreads,
                        [](const Vector* from) { return __ldcv(from); });  // not from a cache
}

// Weights [tokens, k] times rows [tokens * k, width], and the same weights times `more`, unless it is null.
struct WeightedRows {
  const void* weights;
  ScalarType weights_dtype;
  const void* rows;
  const void* more;
  int k;
  int64_t width;

  __device__ float weight(int64_t i) const {
    if (weights_dtype == ScalarType::Float) return static_cast<const float*>(weights)[i];
    if (weights_dtype == ScalarType::Half) return __half2float(static_cast<const __half*>(weights)[i]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(weights)[i]);
  }
};

// Adds kVec elements from `first` on of the sum [tokens, width], in routing order; kUnroll reads are in flight.
template <typename T, int kVec>
__device__ __forceinline__ void add_rows(const WeightedRows& terms, int64_t first, Chunk<T, kVec>& sums) {
  using Unit = typename Chunk<T, kVec>::Packed;
  const int64_t token = first / terms.width;
  const int64_t offset = token * terms.k * terms.width + (first - token * terms.width);
  const auto load = [&](const void* rows, int j) {
    return *reinterpret_cast<const Unit*>(static_cast<const T*>(rows) + offset + j * terms.width);
  };
  const auto add = [&](float weight, const Unit& unit) {
    Chunk<T, kVec> values;
    values.from(unit);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums.value[e] = fmaf(weight, values.value[e], sums.value[e]);
  };
  for (int next = 0; next < terms.k; next += kUnroll) {
    Unit own[kUnroll], more[kUnroll];
    float weights[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (next + i < terms.k) own[i] = load(terms.rows, next + i);
    }
    if (terms.more != nullptr) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (next + i < terms.k) more[i] = load(terms.more, next + i);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) weights[i] = next + i < terms.k ? terms.weight(token * terms.k + next + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (next + i >= terms.k) break;
      add(weights[i], own[i]);
      if (terms.more != nullptr) add(weights[i], more[i]);
    }
  }
}

// `pull` of T [tokens, width] plus the device's share of the sum, which is computed before the wait.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    pull_sum(const WeightedRows terms, const T* source, T* __restrict__ target, int64_t units, const uint32_t* flag,
             const uint32_t* stop, uint32_t* scratch) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  bool waits = true;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; waits || i < units; i += stride) {
    Chunk<T, kVec> sums = {}, values;
    if (i < units) add_rows(terms, i * kVec, sums);
    if (waits) await_output(flag, stop, scratch);
    waits = false;
    if (i >= units) return;
    values.from(__ldcv(reinterpret_cast<const typename Chunk<T, kVec>::Packed*>(source) + i));
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums.value[e] += values.value[e];
    sums.store(target + i * kVec);
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSumThreads) sum_rows(const WeightedRows terms, T* __restrict__ target, int64_t units) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= units) return;
  Chunk<T, kVec> sums = {};
  add_rows(terms, i * kVec, sums);
  sums.store(target + i * kVec);
}

dim3 blocks_for(int64_t units, int64_t of_block) {
  return dim3(std::clamp<int64_t>(divided_up(units, of_block), 1, kMostBlocks));
}

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// 1 to kMostParts contiguous tensors and as many targets; scratch int32 [3] on their device.
void hand_off_push(std::vector<Tensor> tensors, std::vector<int64_t> targets, int64_t flag, const Tensor& scratch) {
  STD_TORCH_CHECK(tensors.size() <= kMostParts && targets.size() == tensors.size(), "hand_off_push: up to ", kMostParts,
                  " tensors and as many targets, found ", tensors.size(), " and ", targets.size());
  Parts parts = {};
  for (size_t p = 0; p < kMostParts; ++p) {
    Part& part = parts.part[p];
    part.unit = 1;
    if (p < tensors.size()) {
      const int64_t bytes = bytes_of(tensors[p]);
      part.source = read<char>(tensors[p]);
      part.target = at<char>(targets[p]);
      for (const int unit : {16, 4}) {
        if (part.unit == 1 && bytes % unit == 0 && aligned(part.source, unit) && aligned(part.target, unit)) part.unit = unit;
      }
      parts.units += bytes / part.unit;
    }
    part.end = parts.units;
  }
  launch(push, blocks_for(parts.units, kPushThreads), kPushThreads, 0, TensorDevice(scratch), parts, at<uint32_t>(flag),
         write<uint32_t>(scratch));
}

WeightedRows weighted(const Tensor& weights, const Tensor& rows, const std::optional<Tensor>& more) {
  return {weights.const_data_ptr(),
          weights.scalar_type(),
          rows.const_data_ptr(),
          more.has_value() ? more->const_data_ptr() : nullptr,
          static_cast<int>(weights.size(1)),
          rows.size(1)};
}

// Calls run(T{}, elements of an access).
template <typename Run>
void with_access(const Tensor& out, const WeightedRows& terms, const void* source, const Run& run) {
  with_element(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    if (in_vectors<T>(terms.width, out.const_data_ptr(), terms.rows, terms.more, source)) {
      run(zero, std::integral_constant<int, kVector<T>>{});
    } else {
      run(zero, std::integral_constant<int, 1>{});
    }
  });
}

// weights [tokens, k], rows and more [tokens * k, width] in the dtype of out, contiguous, on its device.
void hand_off_pull(const Tensor& out, int64_t source, int64_t flag, int64_t stop, const Tensor& scratch,
                   const std::optional<Tensor>& weights, const std::optional<Tensor>& rows, const std::optional<Tensor>& more) {
  const TensorDevice device(out);
  const auto* const raised = at<const uint32_t>(flag);
  const auto* const stopped = at<const uint32_t>(stop);
  uint32_t* const counters = write<uint32_t>(scratch);
  if (weights.has_value()) {
    const WeightedRows terms = weighted(*weights, *rows, more);
    with_access(out, terms, at<void>(source), [&](auto zero, auto vec) {
      using T = decltype(zero);
      const int64_t units = out.numel() / vec.value;
      launch(pull_sum<T, vec.value>, blocks_for(units, kThreads), kThreads, 0, device, terms, at<const T>(source),
             write<T>(out), units, raised, stopped, counters);
    });
    return;
  }
  const int64_t bytes = bytes_of(out);
  const auto run = [&](auto zero) {
    using Vector = decltype(zero);
    const int64_t vectors = bytes / static_cast<int64_t>(sizeof(Vector));
    launch(pull<Vector>, blocks_for(vectors, kThreads * kUnroll), kThreads, 0, device, at<const Vector>(source),
           write<Vector>(out), vectors, raised, stopped, counters);
  };
  const bool whole = bytes % 16 == 0 && aligned(out.const_data_ptr(), 16) && aligned(at<void>(source), 16);
  whole ? run(uint4{}) : run(static_cast<unsigned char>(0));
}

// [tokens, width] in the dtype of `rows`.
Tensor weighted_rows(const Tensor& weights, const Tensor& rows, const std::optional<Tensor>& more) {
  const TensorDevice device(rows);
  const int64_t sizes[] = {weights.size(0), rows.size(1)};
  Tensor out = torch::stable::new_empty(rows, sizes);
  if (out.numel() == 0) return out;
  const WeightedRows terms = weighted(weights, rows, more);
  with_access(out, terms, nullptr, [&](auto zero, auto vec) {
    using T = decltype(zero);
    const int64_t units = out.numel() / vec.value;
    launch(sum_rows<T, vec.value>, dim3(divided_up(units, kSumThreads)), kSumThreads, 0, device, terms, write<T>(out), units);
  });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("hand_off_push(Tensor[] tensors, int[] targets, int flag, Tensor(a!) scratch) -> ()");
  library.def(
      "hand_off_pull(Tensor(a!) out, int source, int flag, int stop, Tensor(b!) scratch, Tensor? weights=None, "
      "Tensor? rows=None, Tensor? more=None) -> ()");
  library.def("weighted_rows(Tensor weights, Tensor rows, Tensor? more=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("hand_off_push", TORCH_BOX(&hand_off_push));
  library.impl("hand_off_pull", TORCH_BOX(&hand_off_pull));
  library.impl("weighted_rows", TORCH_BOX(&weighted_rows));
}

}  // namespace
}  // namespace zero_inference::hand_off
