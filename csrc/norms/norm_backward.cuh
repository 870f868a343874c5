// Gradients of rms_norm and layer_norm, with n = the normalized row, s = its scale, m = grad * (weight + offset):
//
//   rms:    dx = s (m - n mean(m n))                 dweight = sum over rows of grad n
//   layer:  dx = s (m - mean(m) - n mean(m n))       and dbias = sum over rows of grad
//
// and of a fused sum, whose own gradient is added to dx. Nothing is kept from the forward pass: the row is read anyway. In rows
// of one element the differences would be all rounding error; there 1 - n^2 = eps s^2, so that rms's dx = eps s^3 m, and
// layer's is 0. Rows pass through a ring, weight gradients stay in registers.
#pragma once

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
struct NormBackward {
  const T* grad;
  const T* grad_of_sum;  // null: there is none
  const T* x;            // what was normalized
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
      Chunk<T, kVec> x, grad, weight, grad_of_sum;
      x.load(a.x + start + column);
      grad.load(a.grad + start + column);
      weight.load(a.weight + column);
      if (a.grad_of_sum != nullptr) grad_of_sum.load(a.grad_of_sum + start + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float normalized = (x.value[i] - mean) * stats.scale;
        const float m = grad.value[i] * (weight.value[i] + a.offset);
        x.value[i] = stats.outer * (m - stats.mean_m - normalized * stats.mean_mn);
        if (a.grad_of_sum != nullptr) x.value[i] += grad_of_sum.value[i];
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

template <typename S, bool kLayer, bool kAdd>
__global__ void __launch_bounds__(S::kBlock, bounded_blocks(S::kBlock, S::kThreads))
    norm_backward_rows(const NormBackward<typename S::Type> a) {
  using T = typename S::Type;
  using Vector = Chunk<T, kVector<T>>;
  constexpr int kVec = kVector<T>;
  constexpr bool kKeep = S::kVectors <= (kLayer ? 2 : 4) && S::kPer <= 16 && !(kLayer && kAdd);  // or from the cache each time
  float* scratch = reinterpret_cast<float*>(dynamic_shared() + S::kRingBytes / 16);
  int turn = 0;

  RowRing<S, !kLayer> ring;
  ring.sources[0] = a.x;
  ring.sources[1] = a.grad;
  if constexpr (kAdd) ring.sources[2] = a.grad_of_sum;
  ring.rows = a.rows;
  ring.columns = a.columns;
  ring.start(S::first_row());

  uint4 weights[kKeep ? S::kVectors : 1] = {};
  if constexpr (kKeep) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) < a.columns) weights[v] = *reinterpret_cast<const uint4*>(a.weight + S::column(v));
    }
  }
  const auto weight_of = [&](int v) {
    Vector weight;
    if constexpr (kKeep) {
      weight.from(weights[v]);
    } else {
      weight.load(a.weight + S::column(v));
    }
    return weight;
  };

  float weight_sums[S::kPer] = {};
  float bias_sums[kLayer ? S::kPer : 1] = {};
  const float count = static_cast<float>(a.columns);
  for (int64_t row = S::first_row(); row < a.rows; row += S::row_stride()) {
    ring.wait();
    float mean = 0.0f;
    if constexpr (kLayer) {
      float total[1] = {0.0f};
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        if (S::column(v) >= a.columns) continue;
        Vector x;
        x.from(ring.at(0, v));
#pragma unroll
        for (int i = 0; i < kVec; ++i) total[0] += x.value[i];
      }
      row_sum<S::kThreads>(total, scratch, turn);
      mean = total[0] / count;
    }
    float total[kNormSums<kLayer>] = {};
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      const Vector weight = weight_of(v);
      Vector x, grad;
      x.from(ring.at(0, v));
      grad.from(ring.at(1, v));
#pragma unroll
      for (int i = 0; i < kVec; ++i) add_to<kLayer>(total, x.value[i] - mean, grad.value[i] * (weight.value[i] + a.offset));
    }
    row_sum<S::kThreads>(total, scratch + kSumScratch<S::kThreads, 1>, turn);
    const RowStats stats = row_stats<kLayer>(total, mean, count, a.eps);

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      const Vector weight = weight_of(v);
      Vector x, grad, grad_of_sum;
      x.from(ring.at(0, v));
      grad.from(ring.at(1, v));
      if constexpr (kAdd) grad_of_sum.from(ring.at(2, v));
      ring.refill(row, v);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float normalized = (x.value[i] - mean) * stats.scale;
        const float m = grad.value[i] * (weight.value[i] + a.offset);
        weight_sums[v * kVec + i] += grad.value[i] * normalized;
        if constexpr (kLayer) bias_sums[v * kVec + i] += grad.value[i];
        x.value[i] = stats.outer * (m - stats.mean_m - normalized * stats.mean_mn);
        if constexpr (kAdd) x.value[i] += grad_of_sum.value[i];
      }
      x.store(a.grad_x + row * a.columns + S::column(v));
    }
    ring.advance();
  }

  const int64_t width = static_cast<int64_t>(a.columns) * (kLayer ? 2 : 1);
  float* partial = a.partial + blockIdx.x * width;
  const auto put = [&](float* to, const float* sums) {
    if constexpr (S::kRows == 1) {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        if (S::column(v) >= a.columns) continue;
#pragma unroll
        for (int i = 0; i < kVec; i += 4) {
          *reinterpret_cast<float4*>(to + S::column(v) + i) =
              make_float4(sums[v * kVec + i], sums[v * kVec + i + 1], sums[v * kVec + i + 2], sums[v * kVec + i + 3]);
        }
      }
    } else {  // the block's rows are summed where the ring was
      constexpr int kWidest = S::kThreads * S::kPer;
      static_assert(S::kRows * kWidest * 4 <= S::kRingBytes);
      float* shared = reinterpret_cast<float*>(dynamic_shared());
      copy_wait<0>();
      __syncthreads();
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) shared[threadIdx.x / S::kThreads * kWidest + S::column(v) + i] = sums[v * kVec + i];
      }
      __syncthreads();
      for (int column = threadIdx.x; column < a.columns; column += S::kBlock) {
        float sum = shared[column];
        for (int group = 1; group < S::kRows; ++group) sum += shared[group * kWidest + column];
        to[column] = sum;
      }
    }
  };
  put(partial, weight_sums);
  if constexpr (kLayer) put(partial + a.columns, bias_sums);
}

// Parts of the weight gradient: of kRowsOfPart rows or more each where that fills the device.
inline int64_t parts_of(int64_t rows, int rows_at_once, int multiprocessors, int resident) {
  const int64_t wanted = std::max<int64_t>(divided_up(rows, kRowsOfPart * rows_at_once), multiprocessors);
  return std::min({wanted, int64_t{multiprocessors} * resident, divided_up(rows, rows_at_once)});
}

// `allocate(count)` gives float32 device memory that lives until the kernels are queued.
template <typename T, bool kLayer, bool kAdd, typename Allocate>
void launch_norm_backward(NormBackward<T>& a, const Device& device, Allocate allocate) {
  const int64_t width = static_cast<int64_t>(a.columns) * (kLayer ? 2 : 1);
  int64_t parts = 0;
  const auto run = [&](auto shape) {
    using S = decltype(shape);
    constexpr int kShared = S::kRingBytes + 4 * (kSumScratch<S::kThreads, 1> + kSumScratch<S::kThreads, kNormSums<kLayer>>);
    if (kShared > device.block_shared_bytes()) return false;
    if constexpr (S::kLoop) {
      parts = std::min<int64_t>(divided_up(a.rows, kLoopRowsOfPart), kLoopParts);
      a.stats = allocate(2 * a.rows);
      a.partial = allocate(parts * width);
      launch(norm_backward_loop<T, S::kVec, kLayer>, dim3(loop_blocks(a.rows, device)), S::kBlock, kShared, device, a);
      const dim3 grid(divided_up(a.columns, kLoopThreads * S::kVec), parts);
      launch(norm_weight_parts<T, S::kVec, kLayer>, grid, kLoopThreads, 0, device, a);
    } else {
      static std::atomic<int> resident[kDevices];
      const auto kernel = norm_backward_rows<S, kLayer, kAdd>;
      parts =
          parts_of(a.rows, S::kRows, device.multiprocessors(), resident_blocks(kernel, S::kBlock, kShared, device, resident));
      a.partial = allocate(parts * width);
      launch(kernel, dim3(parts), S::kBlock, kShared, device, a);
    }
    return true;
  };
  const bool vectors = in_vectors<T>(a.columns, a.x, a.grad, a.grad_of_sum, a.weight, a.grad_x);
  if (a.rows > 0 && !(vectors && with_norm_backward_shape<T, kAdd ? 3 : 2>(a.columns, run))) {
    vectors ? run(LoopShape<T, kVector<T>>{}) : run(LoopShape<T, 1>{});
  }
  launch(sum_columns<T>, dim3(divided_up(width, kColumnLanes)), kColumnThreads, kColumnThreads * 4, device, a.partial, parts,
         static_cast<int64_t>(a.columns), a.grad_weight, a.grad_bias);
}

template <typename T, bool kLayer, typename Allocate>
void norm_backward(NormBackward<T> a, const Device& device, Allocate allocate) {
  if (a.columns == 0) return;
  a.grad_of_sum != nullptr ? launch_norm_backward<T, kLayer, true>(a, device, allocate)
                           : launch_norm_backward<T, kLayer, false>(a, device, allocate);
}

}  // namespace zero_inference::norms
