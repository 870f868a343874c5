// How rows are read: held in the registers of the threads that share them, or through a ring in shared memory.
#pragma once

#include "../launch_sizes.cuh"
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
  static constexpr int kBlock = kThreads > kWarp ? kThreads : kOneWarpRowsBlock;
  static constexpr int kRows = kBlock / kThreads;  // of a block at a time
  static constexpr bool kRing = false;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int64_t first_row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  }
  static __device__ __forceinline__ int64_t row_stride() { return static_cast<int64_t>(gridDim.x) * kRows; }
  static __device__ __forceinline__ int column(int vector) { return (vector * kThreads + thread()) * kVector<T>; }
};

// A thread's share of a row in registers, zero after the row's end. With one row a block and a block a row the hardware's
// scheduler keeps loads in flight, and nothing passes through shared memory but the sums. kEvictLast: see device.cuh.
//
// Plain loads: with a hint that keeps them out of the L1 cache (where they land on their way) rms_norm lost 4%, and with
// streaming stores 2% more (65536 x 4096 in bfloat16 on an H200).
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
      if constexpr (kEvictLast) {
        copy_async(place(at_stage, tensor, vector), sources[tensor] + row * columns + column, evict_last_policy());
      } else {
        copy_async(place(at_stage, tensor, vector), sources[tensor] + row * columns + column);
      }
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

}  // namespace zero_inference::norms
