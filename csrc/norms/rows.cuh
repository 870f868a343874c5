// Rows that pass through shared memory: persistent blocks, each thread fetching its own share of the next rows while it
// computes.
//
// A thread reads back only what it copied itself, so the ring needs no barrier, and a vector's place is refilled as soon as the
// thread has used it. In flight are one to three rows a block whatever the registers hold, which the latency of HBM wants.
#pragma once

#include "async_copy.cuh"
#include "device.cuh"
#include "launch.cuh"

namespace zero_inference::norms {

constexpr int kSharedBudget = 200 << 10;  // of the 227 KB that a block of an H100 can have

// kThreads threads share a row, kPer elements each: rows of up to kThreads * kPer elements, in 16-byte vectors.
template <typename T, int kThreads_, int kPer_, int kTensors_>
struct Shape {
  using Type = T;
  static constexpr int kThreads = kThreads_;
  static constexpr int kPer = kPer_;
  static constexpr int kTensors = kTensors_;
  static constexpr int kVectors = kPer / kVector<T>;  // of a thread and tensor
  static constexpr int kBlock = kThreads > kWarp ? kThreads : 4 * kWarp;
  static constexpr int kRows = kBlock / kThreads;  // of a block at a time
  static constexpr int kStageBytes = kTensors * kBlock * kVectors * 16;
  static constexpr int kStages = kStageBytes <= 16 << 10 ? 3 : 2 * kStageBytes <= kSharedBudget ? 2 : 1;
  static constexpr int kRingBytes = kStages * kStageBytes;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int64_t first_row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  }
  static __device__ __forceinline__ int64_t row_stride() { return static_cast<int64_t>(gridDim.x) * kRows; }
  static __device__ __forceinline__ int column(int vector) { return (vector * kThreads + thread()) * kVector<T>; }
};

template <typename S>
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
      copy_async(place(at_stage, tensor, vector), sources[tensor] + row * columns + column);
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

// Calls `visit` with the Shape for rows of `columns` elements; false if there is none. The sizes are chosen so that a thread's
// accumulators of weight gradients (kPer floats each for weight and bias) stay in registers.
template <typename T, int kTensors, bool kForward, typename Visit>
bool with_shape(int64_t columns, Visit visit) {
  if (columns <= 256) return visit(Shape<T, 32, 8, kTensors>{});
  if (columns <= 512) return visit(Shape<T, 32, 16, kTensors>{});
  if (columns <= 1024) return visit(Shape<T, 32, 32, kTensors>{});
  if (columns <= 2048) return visit(Shape<T, 128, 16, kTensors>{});
  if (columns <= 4096) return visit(Shape<T, 256, 16, kTensors>{});
  if (columns <= 8192) return visit(Shape<T, 512, 16, kTensors>{});
  if (columns <= 16384) return visit(Shape<T, 512, 32, kTensors>{});
  if constexpr (kForward && kTensors * sizeof(T) <= 4) {
    if (columns <= 32768) return visit(Shape<T, 1024, 32, kTensors>{});
  }
  return false;
}

constexpr int kLoopThreads = 512;  // of the kernels that read a row more than once, for rows too long or not aligned

}  // namespace zero_inference::norms
