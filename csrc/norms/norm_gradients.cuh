// Gradients of rms_norm and layer_norm, with n = the normalized row, s = its scale, m = grad * (weight + offset):
//
//   rms:    dx = s (m - n mean(m n))                 dweight = sum over rows of grad n
//   layer:  dx = s (m - mean(m) - n mean(m n))       and dbias = sum over rows of grad
//
// and of a fused sum, whose own gradient is added to dx. Nothing is kept from the forward pass: the row is read anyway. In rows
// of one element the differences would be all rounding error; there 1 - n^2 = eps s^2, so that rms's dx = eps s^3 m, and
// layer's is 0.
#pragma once

#include "async_copy.cuh"
#include "device.cuh"
#include "launch.cuh"
#include "rows.cuh"

namespace zero_inference::norms {

// Sums over partial results in a fixed order: weight gradients have the same bits in every run.
// partial float32 [parts, columns * (second ? 2 : 1)] -> first [columns], second [columns].
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    sum_columns(const float* partial, int64_t parts, int64_t columns, T* first, T* second) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  const int lane = threadIdx.x % kColumnLanes;
  const int part_lane = threadIdx.x / kColumnLanes;
  const int64_t width = second == nullptr ? columns : 2 * columns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnLanes + lane;
  float total = 0.0f;
  if (column < width) {
#pragma unroll 8
    for (int64_t part = part_lane; part < parts; part += kPartLanes) total += partial[part * width + column];
  }
  shared[threadIdx.x] = total;
  __syncthreads();
  if (part_lane == 0 && column < width) {
    for (int other = 1; other < kPartLanes; ++other) total += shared[other * kColumnLanes + lane];
    T* out = column < columns ? first + column : second + (column - columns);
    *out = Element<T>::round(total);
  }
}

template <typename T>
void launch_sum_columns(const float* partial, int64_t parts, int64_t columns, T* first, T* second, const Device& device) {
  const int64_t width = second == nullptr ? columns : 2 * columns;
  launch(sum_columns<T>, dim3(divided_up(width, kColumnLanes)), kColumnThreads, kColumnThreads * 4, device, partial, parts,
         columns, first, second);
}

template <typename T>
struct NormBackward {
  const T* grad;
  const T* grad_sum;  // null: there is none
  const T* x;         // what was normalized
  const T* weight;
  T* grad_x;
  T* grad_weight;
  T* grad_bias;  // of layer_norm
  int64_t rows;
  int columns;
  float eps;
  float offset;
  float* partial;  // [blocks, columns] of weight gradients, then as many of bias gradients in each of its rows
  float* stats;    // [rows, 2] mean and scale, where rows are read in a loop
};

// What a row's elements need to be turned into gradients.
struct RowStats {
  float mean;
  float scale;
  float outer;    // what the difference is multiplied with: scale, but in rows of one element
  float mean_m;   // mean(m), of layer_norm
  float mean_mn;  // mean(m n)
};

template <bool kLayer>
constexpr int kNormSums = kLayer ? 3 : 2;

template <bool kLayer>
__device__ __forceinline__ RowStats row_stats(const float (&total)[kNormSums<kLayer>], float mean, float count, float eps) {
  RowStats stats;
  stats.mean = mean;
  stats.scale = rsqrtf(total[0] / count + eps);
  stats.outer = stats.scale;
  stats.mean_mn = stats.scale * (total[1] / count);
  if (count == 1.0f) {
    stats.outer = kLayer ? 0.0f : stats.scale * stats.scale * stats.scale * eps;
    stats.mean_mn = 0.0f;
  }
  stats.mean_m = 0.0f;
  if constexpr (kLayer) stats.mean_m = total[2] / count;
  return stats;
}

// Adds one element to: sum of squares, sum of m x, sum of m (x centred for layer_norm).
template <bool kLayer>
__device__ __forceinline__ void add_to(float (&total)[kNormSums<kLayer>], float centred, float m) {
  total[0] += centred * centred;
  total[1] += m * centred;
  if constexpr (kLayer) total[2] += m;
}

}  // namespace zero_inference::norms
