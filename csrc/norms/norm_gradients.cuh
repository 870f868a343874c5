// Gradients of rms_norm and layer_norm, with n = the normalized row, s = its scale, m = grad * (weight + offset):
//
//   rms:    dx = s (m - n mean(m n))                 dweight = sum over rows of grad n
//   layer:  dx = s (m - mean(m) - n mean(m n))       and dbias = sum over rows of grad
//
// and of a fused sum, whose own gradient is added to dx. Nothing is kept from the forward pass: the row is read anyway. In rows
// of one element the differences would be all rounding error; there 1 - n^2 = eps s^2, so that rms's dx = eps s^3 m, and
// layer's is 0.
#pragma once

#include "column_sums.cuh"
#include "rows.cuh"

namespace zero_inference::norms {

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
