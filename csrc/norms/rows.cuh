// How the threads that share a row read it: held in registers, through a ring in shared memory, or in a loop; and their sums.
#pragma once

#include "../launch.cuh"
#include "../launch_sizes.cuh"

namespace zero_inference::norms {

// For what is read: everything else leaves the L2 cache before it. Passes that write as much as they read are up to 4% faster
// where rows come from memory; why was not found (benchmarks/LOG.md).
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Rows of more 16-byte vectors are read so: shorter ones gain 1%, and lose up to 10% where they are in the cache.
constexpr int kEvictLastAbove = 256;

template <bool kEvictLast>
__device__ __forceinline__ uint4 load_vector(const void* from) {
  if constexpr (!kEvictLast) return *reinterpret_cast<const uint4*>(from);
  uint4 vector;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
               : "l"(from), "l"(evict_last_policy()));
  return vector;
}

// The same for copies into shared memory.
template <bool kEvictLast>
__device__ __forceinline__ void copy_vector(uint4* to_shared, const void* from_global) {
  if constexpr (!kEvictLast) return copy_async(to_shared, from_global);
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global),
               "l"(evict_last_policy())
               : "memory");
}

// Floats that row_sum needs in shared memory for kCount sums: two halves that take turns, so that one barrier a sum is enough.
template <int kThreads, int kCount>
constexpr int kSumScratch = kThreads > kWarp ? 2 * kCount * (kThreads / kWarp) : 0;

__host__ __device__ constexpr int power_of_two_from(int count) {
  return count <= 1 ? 1 : 2 * power_of_two_from((count + 1) / 2);
}

// Lanes that hold the same one of kCount sums after gather_sums.
template <int kCount>
constexpr int kLanesOfSum = kWarp / power_of_two_from(kCount);

// Sums of kCount values over a warp; lane L gets the total of value L / kLanesOfSum<kCount>. Each exchange halves the number of
// values that a lane still carries: 7 sums take 9 shuffles instead of the 35 of as many butterflies, and shuffles issue at a
// quarter of the rate of arithmetic.
template <int kCount>
__device__ __forceinline__ float gather_sums(const float (&value)[kCount]) {
  constexpr int kPadded = power_of_two_from(kCount);
  float carried[kPadded];
#pragma unroll
  for (int i = 0; i < kPadded; ++i) carried[i] = i < kCount ? value[i < kCount ? i : 0] : 0.0f;
  const int lane = threadIdx.x % kWarp;
  int mask = kWarp / 2;
#pragma unroll
  for (int width = kPadded; width > 1; width /= 2, mask /= 2) {
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      const float sent = upper ? carried[i] : carried[i + width / 2];
      const float kept = upper ? carried[i + width / 2] : carried[i];
      carried[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
    }
  }
#pragma unroll
  for (int rest = kLanesOfSum<kCount> / 2; rest > 0; rest /= 2) carried[0] += __shfl_xor_sync(0xffffffffu, carried[0], rest);
  return carried[0];
}

// Sums of kCount values over the kThreads threads of a row, in every one of them and with the same bits: all read the same
// totals, added in the same order. `turn` alternates between 0 and 1 from call to call; where the row has more than a warp, all
// threads of the block call this together.
template <int kThreads, int kCount>
__device__ __forceinline__ void row_sum(float (&value)[kCount], float* scratch, int& turn) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kLanes = kLanesOfSum<kCount>;
  float sum = gather_sums(value);
  if constexpr (kWarps > 1) {
    float* half = scratch + turn * (kSumScratch<kThreads, kCount> / 2);
    turn ^= 1;
    const int lane = threadIdx.x % kWarp;
    const int which = lane / kLanes;
    if (lane % kLanes == 0 && which < kCount) half[which * kWarps + threadIdx.x / kWarp] = sum;
    __syncthreads();
    constexpr int kReaders = kLanes < power_of_two_from(kWarps) ? kLanes : power_of_two_from(kWarps);
    sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kWarps; first += kReaders) {
      const int warp = first + lane % kReaders;
      if (which < kCount && warp < kWarps) sum += half[which * kWarps + warp];
    }
#pragma unroll
    for (int rest = kReaders / 2; rest > 0; rest /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, rest);
  }
  if constexpr (kCount == 1) {
    value[0] = sum;  // every lane has it
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = __shfl_sync(0xffffffffu, sum, i * kLanes);
  }
}

// kThreads threads share a row, kVectors 16-byte vectors each: rows of up to kThreads * kVectors vectors.
template <typename T, int kThreads_, int kVectors_>
struct RowShape {
  using Type = T;
  static constexpr int kVec = kVector<T>;
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kPer = kVectors * kVec;  // elements of a thread
  static constexpr int kBlock = kThreads > kWarp ? kThreads : kOneWarpRowThreads;
  static constexpr int kRows = kBlock / kThreads;  // of a block at a time
  static constexpr bool kRing = false, kLoop = false;
  static constexpr int kRingBytes = 0;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int64_t first_row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  }
  static __device__ __forceinline__ int64_t row_stride() { return static_cast<int64_t>(gridDim.x) * kRows; }
  static __device__ __forceinline__ int column(int vector) { return (vector * kThreads + thread()) * kVec; }

  // Calls visit(v) for the thread's vectors of a row; for_padded also for those after the row's end, which are held as zeros.
  template <typename Visit>
  static __device__ __forceinline__ void for_each(int columns, Visit visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) < columns) visit(v);
    }
  }
  template <typename Visit>
  static __device__ __forceinline__ void for_padded(int, Visit visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) visit(v);
  }
};

// A block a row, which is read again for each sum: rows too long for the registers, or not aligned (kVec 1). A vector's number
// is its column.
template <typename T, int kVec_>
struct LoopShape {
  using Type = T;
  static constexpr int kVec = kVec_;
  static constexpr int kThreads = kLoopThreads, kBlock = kLoopThreads, kRows = 1;
  static constexpr int kVectors = 1, kPer = kVec;  // at once
  static constexpr bool kRing = false, kLoop = true;
  static constexpr int kRingBytes = 0;

  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ int64_t first_row() { return blockIdx.x; }
  static __device__ __forceinline__ int64_t row_stride() { return gridDim.x; }
  static __device__ __forceinline__ int column(int vector) { return vector; }

  template <typename Visit>
  static __device__ __forceinline__ void for_each(int columns, Visit visit) {
    for (int v = threadIdx.x * kVec; v < columns; v += kThreads * kVec) visit(v);
  }
  template <typename Visit>
  static __device__ __forceinline__ void for_padded(int columns, Visit visit) {
    for_each(columns, visit);
  }
};

// A thread's share of a row in registers, zero after the row's end. With a block a row the hardware's scheduler keeps loads in
// flight. Plain loads: with a hint that keeps them out of the L1 cache (where they land on their way) rms_norm lost 4%, and
// with streaming stores 2% more (65536 x 4096 in bfloat16 on an H200).
template <typename S, bool kEvictLast>
struct HeldRow {
  using T = typename S::Type;
  using Vector = Chunk<T, kVector<T>>;

  uint4 packed[S::kVectors];

  HeldRow() = default;
  __device__ __forceinline__ HeldRow(const T* row, int columns) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      packed[v] = make_uint4(0, 0, 0, 0);
      if (S::column(v) < columns) packed[v] = load_vector<kEvictLast>(row + S::column(v));
    }
  }

  __device__ __forceinline__ Vector at(int vector) const {
    Vector values;
    values.from(packed[vector]);
    return values;
  }

  // Replaces a vector, also in memory at row `to`; returns it rounded. All vectors are replaced.
  __device__ __forceinline__ Vector put(int vector, const Vector& values, T* to) {
    packed[vector] = values.packed();
    *reinterpret_cast<uint4*>(to + S::column(vector)) = packed[vector];
    return at(vector);
  }
  __device__ __forceinline__ void replaced(const T*) {}
};

// The same of a row in memory, for LoopShape: a thread reads back only what it wrote itself.
template <typename S>
struct LoopRow {
  using T = typename S::Type;
  using Vector = Chunk<T, S::kVec>;

  const T* row;

  LoopRow() = default;
  __device__ __forceinline__ LoopRow(const T* row, int) : row(row) {}

  __device__ __forceinline__ Vector at(int vector) const {
    Vector values;
    values.load(row + vector);
    return values;
  }

  __device__ __forceinline__ Vector put(int vector, Vector values, T* to) const {
    values.store(to + vector);
    values.from(values.packed());
    return values;
  }
  __device__ __forceinline__ void replaced(const T* to) { row = to; }
};

template <typename S, bool kEvictLast>
using RowOf = std::conditional_t<S::kLoop, LoopRow<S>, HeldRow<S, kEvictLast>>;

// Rows of kTensors tensors that pass through shared memory, for passes whose accumulators fill the registers: persistent
// blocks, each thread fetching its own share of the next one to three rows while it computes. It reads back only what it copied
// itself, so the ring needs no barrier, and a vector's place is refilled at once.
template <typename T, int kThreads, int kVectors, int kTensors_>
struct RingShape : RowShape<T, kThreads, kVectors> {
  using Row = RowShape<T, kThreads, kVectors>;
  static constexpr bool kRing = true;
  static constexpr int kTensors = kTensors_;
  static constexpr int kStageBytes = kTensors * Row::kBlock * kVectors * 16;
  static constexpr int kStages = ring_stages(kStageBytes);
  static constexpr int kRingBytes = kStages * kStageBytes;
};

// kEvictLast: read with that policy of the L2 cache. It gains the backward passes of rms_norm and poly_norm 1 to 2%, and costs
// those of layer_norm and of poly_norm with a factor up to 7%.
template <typename S, bool kEvictLast>
struct RowRing {
  using T = typename S::Type;

  const T* sources[S::kTensors];
  int64_t rows;
  int columns;
  int stage = 0;

  __device__ __forceinline__ uint4* place(int at_stage, int tensor, int vector) const {
    return dynamic_shared() + ((at_stage * S::kTensors + tensor) * S::kVectors + vector) * S::kBlock + threadIdx.x;
  }

  __device__ __forceinline__ void fetch(int64_t row, int at_stage, int vector) const {
    const int column = S::column(vector);
    if (row >= rows || column >= columns) return;
#pragma unroll
    for (int tensor = 0; tensor < S::kTensors; ++tensor) {
      copy_vector<kEvictLast>(place(at_stage, tensor, vector), sources[tensor] + row * columns + column);
    }
  }

  // Start copying the first rows; one committed group a row, empty after the last.
  __device__ __forceinline__ void start(int64_t row) const {
#pragma unroll
    for (int at_stage = 0; at_stage < S::kStages; ++at_stage) {
#pragma unroll
      for (int vector = 0; vector < S::kVectors; ++vector) fetch(row + at_stage * S::row_stride(), at_stage, vector);
      copy_commit();
    }
  }

  __device__ __forceinline__ void wait() const { copy_wait<S::kStages - 1>(); }

  __device__ __forceinline__ uint4& at(int tensor, int vector) const { return *place(stage, tensor, vector); }

  // After the last use of a vector of `row`: the same place takes the row that comes kStages turns later.
  __device__ __forceinline__ void refill(int64_t row, int vector) const {
    fetch(row + S::kStages * S::row_stride(), stage, vector);
  }

  __device__ __forceinline__ void advance() {
    copy_commit();
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
};

// Blocks that take rows in turn, each reading a row in a loop.
inline int64_t loop_blocks(int64_t rows, const Device& device) {
  return std::min<int64_t>(rows, int64_t{device.multiprocessors()} * kLoopBlocks);
}

// Calls run(shape, blocks) for a forward pass, `vectors`: rows are whole aligned vectors.
template <typename T, int kReads, bool kHeavy, typename Run>
void with_forward_rows(int64_t rows, int64_t columns, bool vectors, const Device& device, Run run) {
  const auto held = [&](auto shape) {
    run(shape, divided_up(rows, decltype(shape)::kRows));
    return true;
  };
  if (vectors && with_forward_shape<T, kReads, kHeavy>(columns, held)) return;
  vectors ? run(LoopShape<T, kVector<T>>{}, loop_blocks(rows, device)) : run(LoopShape<T, 1>{}, loop_blocks(rows, device));
}

}  // namespace zero_inference::norms
