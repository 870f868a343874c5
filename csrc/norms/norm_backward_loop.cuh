// Backward passes of rms_norm and layer_norm (norm_gradients.cuh) for rows that are too long for the ring, or not aligned.
#pragma once

#include "norm_gradients.cuh"

namespace zero_inference::norms {

template <typename T, int kVec, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads) norm_backward_loop(const NormBackward<T> a) {
  float* scratch = reinterpret_cast<float*>(dynamic_shared());
  int turn = 0;
  const int first = threadIdx.x * kVec;
  constexpr int kStep = kLoopThreads * kVec;
  const float count = static_cast<float>(a.columns);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    float mean = 0.0f;
    if constexpr (kLayer) {
      float total[1] = {0.0f};
      for (int column = first; column < a.columns; column += kStep) {
        Chunk<T, kVec> x;
        x.load(a.x + start + column);
#pragma unroll
        for (int i = 0; i < kVec; ++i) total[0] += x.value[i];
      }
      row_sum<kLoopThreads>(total, scratch, turn);
      mean = total[0] / count;
    }
    float total[kNormSums<kLayer>] = {};
    for (int column = first; column < a.columns; column += kStep) {
      Chunk<T, kVec> x, grad, weight;
      x.load(a.x + start + column);
      grad.load(a.grad + start + column);
      weight.load(a.weight + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) add_to<kLayer>(total, x.value[i] - mean, grad.value[i] * (weight.value[i] + a.offset));
    }
    row_sum<kLoopThreads>(total, scratch + kSumScratch<kLoopThreads, 1>, turn);
    const RowStats stats = row_stats<kLayer>(total, mean, count, a.eps);
    for (int column = first; column < a.columns; column += kStep) {
      Chunk<T, kVec> x, grad, weight, grad_sum;
      x.load(a.x + start + column);
      grad.load(a.grad + start + column);
      weight.load(a.weight + column);
      if (a.grad_sum != nullptr) grad_sum.load(a.grad_sum + start + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float normalized = (x.value[i] - mean) * stats.scale;
        const float m = grad.value[i] * (weight.value[i] + a.offset);
        x.value[i] = stats.outer * (m - stats.mean_m - normalized * stats.mean_mn);
        if (a.grad_sum != nullptr) x.value[i] += grad_sum.value[i];
      }
      x.store(a.grad_x + start + column);
    }
    if (threadIdx.x == 0) {
      a.stats[2 * row] = mean;
      a.stats[2 * row + 1] = stats.scale;
    }
  }
}

// Weight gradients of kVec columns a thread over the rows of a part: blockIdx.y of gridDim.y.
template <typename T, int kVec, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads) norm_weight_parts(const NormBackward<T> a) {
  const int column = (blockIdx.x * kLoopThreads + threadIdx.x) * kVec;
  if (column >= a.columns) return;
  float weight_sums[kVec] = {};
  float bias_sums[kVec] = {};
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    Chunk<T, kVec> x, grad;
    x.load(a.x + row * a.columns + column);
    grad.load(a.grad + row * a.columns + column);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      weight_sums[i] += grad.value[i] * ((x.value[i] - a.stats[2 * row]) * a.stats[2 * row + 1]);
      if constexpr (kLayer) bias_sums[i] += grad.value[i];
    }
  }
  float* partial = a.partial + blockIdx.y * static_cast<int64_t>(a.columns) * (kLayer ? 2 : 1);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    partial[column + i] = weight_sums[i];
    if constexpr (kLayer) partial[a.columns + column + i] = bias_sums[i];
  }
}

template <typename T, int kVec, bool kLayer, typename Allocate>
void launch_norm_backward_loop(NormBackward<T>& a, const Device& device, Allocate allocate) {
  const int64_t parts = std::min<int64_t>(divided_up(a.rows, kLoopRowsOfPart), kLoopParts);
  a.stats = allocate(2 * a.rows);
  a.partial = allocate(parts * a.columns * (kLayer ? 2 : 1));
  const dim3 grid(loop_blocks(a.rows, device));
  constexpr int kShared = 4 * (kSumScratch<kLoopThreads, 1> + kSumScratch<kLoopThreads, kNormSums<kLayer>>);
  launch(norm_backward_loop<T, kVec, kLayer>, grid, kLoopThreads, kShared, device, a);
  launch(norm_weight_parts<T, kVec, kLayer>, dim3(divided_up(a.columns, kLoopThreads * kVec), parts), kLoopThreads, 0, device,
         a);
  launch_sum_columns(a.partial, parts, a.columns, a.grad_weight, kLayer ? a.grad_bias : nullptr, device);
}

}  // namespace zero_inference::norms
