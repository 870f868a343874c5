// Hand-off between a CUDA stream and the CPU backend (csrc/cpu/cpu_pool.h) without Python: kernels that write and read
// page-locked host memory.
//
//   hand_off_push   writes tensors there, increments the call number and raises the flag to it
//   hand_off_pull   waits until the flag has that number, and reads a tensor; with `weights` and `rows` adds the device's share
//                   of the sum: weights [tokens, k] times rows [tokens * k, width]
//   weighted_rows   that share alone
//
// The device counts the calls, so that a CUDA graph of these kernels can be replayed. No copy engine is used: it would first
// finish queued copies of weights.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "../alignment.cuh"
#include "../elements.cuh"
#include "../launch_sizes.cuh"
#include "../operators.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using zero_inference::aligned;
using zero_inference::current_stream;
using zero_inference::Element;

using namespace zero_inference::hand_off;  // launch sizes

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

// One access: 16 bytes, or one element where rows are not whole vectors.
template <typename T, bool kVector>
struct Access {
  using Unit = std::conditional_t<kVector, uint4, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static constexpr int kElements = sizeof(Unit) / sizeof(T);

  static __device__ __forceinline__ void unpack(const Unit& unit, float (&values)[kElements]) {
    if constexpr (kVector) {
      constexpr int kInWord = 4 / sizeof(T);
      const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) Element<T>::unpack(words[i], values + i * kInWord);
    } else {
      values[0] = Element<T>::load(*reinterpret_cast<const T*>(&unit));
    }
  }

  static __device__ __forceinline__ Unit pack(const float (&values)[kElements]) {
    Unit unit;
    if constexpr (kVector) {
      constexpr int kInWord = 4 / sizeof(T);
      unit.x = Element<T>::pack(values);
      unit.y = Element<T>::pack(values + kInWord);
      unit.z = Element<T>::pack(values + 2 * kInWord);
      unit.w = Element<T>::pack(values + 3 * kInWord);
    } else {
      *reinterpret_cast<T*>(&unit) = Element<T>::round(values[0]);
    }
    return unit;
  }
};

// Adds elements from `first` on of the sum [tokens, width], in routing order; kUnroll reads are in flight.
template <typename T, bool kVector>
__device__ __forceinline__ void add_rows(const WeightedRows& of, int64_t first, float (&sums)[Access<T, kVector>::kElements]) {
  using A = Access<T, kVector>;
  using Unit = typename A::Unit;
  const int64_t token = first / of.width;
  const int64_t offset = token * of.k * of.width + (first - token * of.width);
  const auto load = [&](const void* rows, int j) {
    return *reinterpret_cast<const Unit*>(static_cast<const T*>(rows) + offset + j * of.width);
  };
  const auto add = [&](float weight, const Unit& unit) {
    float values[A::kElements];
    A::unpack(unit, values);
#pragma unroll
    for (int e = 0; e < A::kElements; ++e) sums[e] = fmaf(weight, values[e], sums[e]);
  };
  for (int next = 0; next < of.k; next += kUnroll) {
    Unit own[kUnroll], more[kUnroll];
    float weights[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (next + i < of.k) own[i] = load(of.rows, next + i);
    }
    if (of.more != nullptr) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (next + i < of.k) more[i] = load(of.more, next + i);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) weights[i] = next + i < of.k ? of.weight(token * of.k + next + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (next + i >= of.k) break;
      add(weights[i], own[i]);
      if (of.more != nullptr) add(weights[i], more[i]);
    }
  }
}

// `pull` of T [tokens, width] plus the device's share of the sum, which is computed before the wait.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    pull_sum(const WeightedRows of, const T* source, T* __restrict__ target, int64_t units, const uint32_t* flag,
             const uint32_t* stop, uint32_t* scratch) {
  using A = Access<T, kVector>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  bool waits = true;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; waits || i < units; i += stride) {
    float sums[A::kElements] = {};
    if (i < units) add_rows<T, kVector>(of, i * A::kElements, sums);
    if (waits) await_output(flag, stop, scratch);
    waits = false;
    if (i >= units) return;
    float values[A::kElements];
    A::unpack(__ldcv(reinterpret_cast<const typename A::Unit*>(source) + i), values);
#pragma unroll
    for (int e = 0; e < A::kElements; ++e) sums[e] += values[e];
    reinterpret_cast<typename A::Unit*>(target)[i] = A::pack(sums);
  }
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kSumThreads) sum_rows(const WeightedRows of, T* __restrict__ target, int64_t units) {
  using A = Access<T, kVector>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= units) return;
  float sums[A::kElements] = {};
  add_rows<T, kVector>(of, i * A::kElements, sums);
  reinterpret_cast<typename A::Unit*>(target)[i] = A::pack(sums);
}

unsigned int blocks_for(int64_t units, int64_t of_block) {
  return static_cast<unsigned int>(std::clamp<int64_t>((units + of_block - 1) / of_block, 1, kMostBlocks));
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

void hand_off_push(std::vector<Tensor> tensors, std::vector<int64_t> targets, int64_t flag, const Tensor& scratch) {
  STD_TORCH_CHECK(!tensors.empty() && tensors.size() <= kMostParts && targets.size() == tensors.size(), "hand_off_push: 1 to ",
                  kMostParts, " tensors and as many targets, found ", tensors.size(), " and ", targets.size());
  STD_TORCH_CHECK(flag != 0, "hand_off_push: there must be a flag");
  Parts parts = {};
  for (size_t p = 0; p < kMostParts; ++p) {
    Part& part = parts.part[p];
    part.unit = 1;
    if (p < tensors.size()) {
      check("hand_off_push", tensors[p], scratch);
      const int64_t bytes = bytes_of(tensors[p]);
      part.source = static_cast<const char*>(tensors[p].const_data_ptr());
      part.target = at<char>(targets[p]);
      for (const int unit : {16, 4}) {
        if (part.unit == 1 && bytes % unit == 0 && aligned(part.source, unit) && aligned(part.target, unit)) part.unit = unit;
      }
      parts.units += bytes / part.unit;
    }
    part.end = parts.units;
  }
  const torch::stable::accelerator::DeviceGuard guard(scratch.get_device_index());
  const cudaStream_t stream = current_stream(scratch.get_device_index());
  push<<<blocks_for(parts.units, kPushThreads), kPushThreads, 0, stream>>>(parts, at<uint32_t>(flag),
                                                                           static_cast<uint32_t*>(scratch.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Checks the tensors of a sum whose result is `out`.
WeightedRows weighted(const char* name, const Tensor& out, int64_t width, const Tensor& weights, const Tensor& rows,
                      const std::optional<Tensor>& more) {
  const ScalarType weights_dtype = weights.scalar_type();
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous() && rows.dim() == 2 && rows.is_contiguous() &&
                      rows.size(0) == weights.numel() && weights.size(0) * rows.size(1) == out.numel() && rows.size(1) == width,
                  name, ": weights [tokens, k] and rows [tokens * k, width] must be contiguous and fit the result");
  STD_TORCH_CHECK(
      weights_dtype == ScalarType::Float || weights_dtype == ScalarType::Half || weights_dtype == ScalarType::BFloat16, name,
      ": weights must be Float, Half or BFloat16, found ", torch::headeronly::toString(weights_dtype));
  const bool fits =
      !more.has_value() || (more->numel() == rows.numel() && more->is_contiguous() && more->is_cuda() &&
                            more->scalar_type() == rows.scalar_type() && more->get_device_index() == out.get_device_index());
  STD_TORCH_CHECK(fits && rows.is_cuda() && weights.is_cuda() && rows.get_device_index() == out.get_device_index() &&
                      weights.get_device_index() == out.get_device_index() && rows.scalar_type() == out.scalar_type(),
                  name, ": rows and more must be alike and of the result's dtype, all on its device");
  return {weights.const_data_ptr(),
          weights_dtype,
          rows.const_data_ptr(),
          more.has_value() ? more->const_data_ptr() : nullptr,
          static_cast<int>(weights.size(1)),
          width};
}

// Calls launch(T, std::bool_constant<rows are whole vectors>).
template <typename Launch>
void with_access(const char* name, const Tensor& out, const WeightedRows& of, const void* source, const Launch& launch) {
  zero_inference::with_element(name, "the result", out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    if (zero_inference::in_vectors<T>(of.width, out.const_data_ptr(), of.rows, of.more, source)) {
      launch(zero, std::true_type{});
    } else {
      launch(zero, std::false_type{});
    }
  });
}

void hand_off_pull(const Tensor& out, int64_t source, int64_t flag, int64_t stop, const Tensor& scratch,
                   const std::optional<Tensor>& weights, const std::optional<Tensor>& rows, const std::optional<Tensor>& more) {
  check("hand_off_pull", out, scratch);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const cudaStream_t stream = current_stream(out.get_device_index());
  uint32_t* const counters = static_cast<uint32_t*>(scratch.mutable_data_ptr());
  if (weights.has_value()) {
    STD_TORCH_CHECK(rows.has_value(), "hand_off_pull: weights of which rows?");
    const WeightedRows of = weighted("hand_off_pull", out, rows->size(1), *weights, *rows, more);
    with_access("hand_off_pull", out, of, at<void>(source), [&](auto zero, auto in_vectors) {
      using T = decltype(zero);
      const int64_t units = out.numel() / Access<T, in_vectors.value>::kElements;
      pull_sum<T, in_vectors.value><<<blocks_for(units, kThreads), kThreads, 0, stream>>>(
          of, at<const T>(source), static_cast<T*>(out.mutable_data_ptr()), units, at<const uint32_t>(flag),
          at<const uint32_t>(stop), counters);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  const int64_t bytes = bytes_of(out);
  const auto launch = [&](auto zero) {
    using Vector = decltype(zero);
    const int64_t vectors = bytes / static_cast<int64_t>(sizeof(Vector));
    pull<Vector><<<blocks_for(vectors, kThreads * kUnroll), kThreads, 0, stream>>>(
        at<const Vector>(source), static_cast<Vector*>(out.mutable_data_ptr()), vectors, at<const uint32_t>(flag),
        at<const uint32_t>(stop), counters);
  };
  if (bytes % 16 == 0 && aligned(out.const_data_ptr(), 16) && aligned(at<void>(source), 16)) {
    launch(uint4{});
  } else {
    launch(static_cast<unsigned char>(0));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// [tokens, width] in the dtype of `rows`.
Tensor weighted_rows(const Tensor& weights, const Tensor& rows, const std::optional<Tensor>& more) {
  STD_TORCH_CHECK(weights.is_cuda() && weights.dim() == 2 && rows.is_cuda() && rows.dim() == 2,
                  "weighted_rows: weights [tokens, k] and rows [tokens * k, width] must be on a CUDA device");
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  const int64_t sizes[] = {weights.size(0), rows.size(1)};
  Tensor out = torch::stable::new_empty(rows, sizes);
  const WeightedRows of = weighted("weighted_rows", out, rows.size(1), weights, rows, more);
  if (out.numel() == 0) return out;
  with_access("weighted_rows", out, of, nullptr, [&](auto zero, auto in_vectors) {
    using T = decltype(zero);
    const int64_t units = out.numel() / Access<T, in_vectors.value>::kElements;
    sum_rows<T, in_vectors.value>
        <<<static_cast<unsigned int>((units + kSumThreads - 1) / kSumThreads), kSumThreads, 0,
           current_stream(rows.get_device_index())>>>(of, static_cast<T*>(out.mutable_data_ptr()), units);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace

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
