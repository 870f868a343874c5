// Sums over partial results in a fixed order: weight gradients have the same bits in every run.
#pragma once

#include "async_copy.cuh"
#include "device.cuh"
#include "launch.cuh"

namespace zero_inference::norms {

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

}  // namespace zero_inference::norms
