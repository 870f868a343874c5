// How rows are read: held in the registers of the threads that share them, or through a ring in shared memory.
#pragma once

#include "async_copy.cuh"
#include "device.cuh"
#include "launch.cuh"

namespace zero_inference::norms {

// kThreads threads share a row, kVectors 16-byte vectors each: rows of up to kThreads * kVectors vectors.
template <typename T, int kThreads_, int kVectors_>
struct RowShape {
  using Type = T;
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kPer = kVectors * kVector<T>;  // elements of a thread
  static constexpr int kBlock = kThreads > kWarp ? kThreads : 4 * kWarp;
  static constexpr int kRows = kBlock / kThreads;  // of a block at a time
  static constexpr bool kRing = false;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int64_t first_row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  }
  static __device__ __forceinline__ int64_t row_stride() { return static_cast<int64_t>(gridDim.x) * kRows; }
  static __device__ __forceinline__ int column(int vector) { return (vector * kThreads + thread()) * kVector<T>; }
};

// A thread's share of a row in registers, zero behind the row's end. With one row a block and a block a row the hardware's
// scheduler keeps loads in flight, and nothing passes through shared memory but the sums. kEvictLast: see access.cuh.
//
// Plain loads: with a hint that keeps them out of the L1 cache (where they land on their way) rms_norm lost 4%, and with streaming
// stores 2% more (65536 x 4096 in bfloat16 on an H200).
template <typename S, bool kEvictLast>
struct HeldRow {
  using T = typename S::Type;
  using Vector = Chunk<T, kVector<T>>;

  uint4 packed[S::kVectors];

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
};

constexpr int kSharedBudget = 200 << 10;  // of the 227 KB that a block of an H100 can have

// Rows of kTensors tensors that pass through shared memory: persistent blocks, each thread fetching its own share of the next
// rows while it computes.
//
// A thread reads back only what it copied itself, so the ring needs no barrier, and a vector's place is refilled as soon as the
// thread has used it. In flight are one to three rows a block whatever the registers hold: for passes whose accumulators fill
// the registers.
template <typename T, int kThreads, int kVectors, int kTensors_>
struct RingShape : RowShape<T, kThreads, kVectors> {
  using Row = RowShape<T, kThreads, kVectors>;
  static constexpr bool kRing = true;
  static constexpr int kTensors = kTensors_;
  static constexpr int kStageBytes = kTensors * Row::kBlock * kVectors * 16;
  static constexpr int kStages = kStageBytes <= 16 << 10 ? 3 : 2 * kStageBytes <= kSharedBudget ? 2 : 1;
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
      if constexpr (kEvictLast) {
        copy_async(place(at_stage, tensor, vector), sources[tensor] + row * columns + column, evict_last_policy());
      } else {
        copy_async(place(at_stage, tensor, vector), sources[tensor] + row * columns + column);
      }
    }
  }

  // Send for the first rows; one committed group a row, empty behind the last.
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

  // Behind the last use of a vector of `row`: the same place takes the row that comes kStages turns later.
  __device__ __forceinline__ void refill(int64_t row, int vector) const {
    fetch(row + S::kStages * S::row_stride(), stage, vector);
  }

  __device__ __forceinline__ void advance() {
    copy_commit();
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
};

// Launch shapes by the 16-byte vectors of a row: each calls `visit` with the one for rows of `columns` elements, or is false if
// there is none. They depend on nothing else, so that a row has the same bits whatever it is batched with. Chosen by
// benchmarks/norm_shapes.cu on an H200 (benchmarks/results/h200/norm_shapes_*.tsv).

// Forward passes that read kReads tensors as large as x. kHeavy: PolyNorm, and layer_norm of one tensor, whose second sum waits for
// the first; with eight elements a vector these want fewer threads a row where one tensor is read.
template <typename T, int kReads, bool kHeavy, typename Visit>
bool with_forward_shape(int64_t columns, Visit visit) {
  const int64_t vectors = columns / kVector<T>;
  if (vectors <= 32) return visit(RowShape<T, 32, 1>{});
  if (vectors <= 64) return visit(RowShape<T, 32, 2>{});
  if constexpr (kReads == 1 && kHeavy && kVector<T> == 8) {
    if (vectors <= 128) return visit(RowShape<T, 32, 4>{});
    if (vectors <= 160) return visit(RowShape<T, 32, 5>{});
    if (vectors <= 192) return visit(RowShape<T, 64, 3>{});
    if (vectors <= 256) return visit(RowShape<T, 64, 4>{});
    if (vectors <= 512) return visit(RowShape<T, 128, 4>{});
  } else {
    if (vectors <= 128) return visit(RowShape<T, 64, 2>{});
    if (vectors <= 192) return visit(RowShape<T, 64, 3>{});
    if (vectors <= 256) return visit(RowShape<T, 128, 2>{});
    if (vectors <= 384) return visit(RowShape<T, kReads == 1 ? 128 : 256, kReads == 1 ? 4 : 2>{});
    if constexpr (kReads == 1) {
      if (vectors <= 512) return visit(RowShape<T, 256, 2>{});
    } else if constexpr (!kHeavy) {
      if (vectors <= 512) return visit(RowShape<T, 512, 1>{});
    }
  }
  if (vectors <= 640) return visit(RowShape<T, 160, 4>{});
  if constexpr (kReads > 1 && !kHeavy) {
    if (vectors <= 1024) return visit(RowShape<T, 512, 2>{});
  }
  if (vectors <= 1024) return visit(RowShape<T, 256, 4>{});
  if constexpr (kReads == 1 && !kHeavy) {
    if (vectors <= 1536) return visit(RowShape<T, 256, 8>{});
  }
  if (vectors <= 2048) return visit(RowShape<T, 512, 4>{});
  if constexpr (kReads == 1) {
    if (vectors <= 4096) return visit(RowShape<T, 512, 8>{});
  }
  if (vectors <= 4096) return visit(RowShape<T, 1024, 4>{});
  return false;
}

// The backward pass of poly_norm: in registers as long as what two passes over the row need of them fits.
template <typename T, bool kMul, typename Visit>
bool with_poly_backward_shape(int64_t columns, Visit visit) {
  const int64_t vectors = columns / kVector<T>;
  if (vectors <= 32) return visit(RowShape<T, 32, 1>{});
  if (vectors <= 64) return visit(RowShape<T, 32, 2>{});
  if (vectors <= 128) return visit(RowShape<T, 32, 4>{});
  if constexpr (kMul) {
    if (vectors <= 192) return visit(RowShape<T, 64, 3>{});
    if (vectors <= 256) return visit(RowShape<T, 64, 4>{});
    if (vectors <= 512) return visit(RingShape<T, 64, 8, 3>{});
    if (vectors <= 640) return visit(RingShape<T, 128, 5, 3>{});
    if (vectors <= 1024) return visit(RingShape<T, 128, 8, 3>{});
    if (vectors <= 2048) return visit(RingShape<T, 256, 8, 3>{});
    if (vectors <= 4096) return visit(RingShape<T, 512, 8, 3>{});
  } else {
    if (vectors <= 160) return visit(RowShape<T, 32, 5>{});
    if (vectors <= 256) return visit(RowShape<T, 64, 4>{});
    if (vectors <= 512) return visit(RowShape<T, 128, 4>{});
    if (vectors <= 640) return visit(RowShape<T, 128, 5>{});
    if (vectors <= 1024) return visit(RowShape<T, 256, 4>{});
    if (vectors <= 2048) return visit(RowShape<T, 512, 4>{});
    if (vectors <= 4096) return visit(RingShape<T, 512, 8, 2>{});
  }
  return false;
}

// The backward passes of rms_norm and layer_norm, by elements: a thread holds accumulators of weight gradients in registers, a
// float an element for the weight and one for the bias.
template <typename T, int kTensors, typename Visit>
bool with_norm_backward_shape(int64_t columns, Visit visit) {
  constexpr int kEight = 8 / kVector<T>;  // vectors of eight elements
  if (columns <= 256) return visit(RingShape<T, 32, kEight, kTensors>{});
  if (columns <= 512) return visit(RingShape<T, 32, 2 * kEight, kTensors>{});
  if (columns <= 1024) return visit(RingShape<T, 32, 4 * kEight, kTensors>{});
  if (columns <= 2048) return visit(RingShape<T, 128, 2 * kEight, kTensors>{});
  if (columns <= 4096) return visit(RingShape<T, 256, 2 * kEight, kTensors>{});
  if (columns <= 8192) return visit(RingShape<T, 512, 2 * kEight, kTensors>{});
  if (columns <= 16384) return visit(RingShape<T, 512, 4 * kEight, kTensors>{});
  return false;
}

constexpr int kLoopThreads = 512;  // of the kernels that read a row more than once, for rows too long or not aligned

}  // namespace zero_inference::norms
