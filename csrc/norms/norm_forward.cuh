// rms_norm and layer_norm over the last dimension, alone or of a sum that is returned too.
//
//   rms:    out = x * rsqrt(mean(x^2) + eps) * (weight + offset)
//   layer:  out = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * weight + bias
//
// In float32, rounded once; with `round_first` rms_norm's normalized value is rounded before it meets the weight, as
// transformers' Llama family does.
#pragma once

#include "rows.cuh"

namespace zero_inference::norms {

template <typename T>
struct NormForward {
  const T* x;
  const T* residual;  // null: nothing is added
  const T* weight;
  const T* bias;  // of layer_norm
  T* out;
  T* sum;  // x + residual
  int64_t rows;
  int columns;
  float eps;
  float offset;
  bool round_first;
};

template <typename T, bool kLayer, int kVec>
__device__ __forceinline__ void normalize(const NormForward<T>& a, Chunk<T, kVec>& x, const Chunk<T, kVec>& weight,
                                          const Chunk<T, kVec>& bias, float mean, float scale) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if constexpr (kLayer) {
      x.value[i] = (x.value[i] - mean) * scale * weight.value[i] + bias.value[i];
    } else {
      const float normalized = x.value[i] * scale;
      x.value[i] = (a.round_first ? rounded<T>(normalized) : normalized) * (weight.value[i] + a.offset);
    }
  }
}

template <typename S, bool kLayer, bool kAdd>
__global__ void __launch_bounds__(S::kBlock) norm_forward_rows(const NormForward<typename S::Type> a) {
  using T = typename S::Type;
  using Vector = Chunk<T, kVector<T>>;
  constexpr bool kKeep = S::kVectors * (kLayer ? 2 : 1) <= 4;  // weights stay in 16 registers, or come from the cache each time
  constexpr int kKept = kKeep ? S::kVectors : 1;
  float* scratch = reinterpret_cast<float*>(dynamic_shared() + S::kRingBytes / 16);
  int turn = 0;

  RowRing<S> ring;
  ring.sources[0] = a.x;
  if constexpr (kAdd) ring.sources[1] = a.residual;
  ring.rows = a.rows;
  ring.columns = a.columns;
  ring.start(S::first_row());

  uint4 weights[kKept] = {};
  uint4 biases[kLayer ? kKept : 1] = {};
  if constexpr (kKeep) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) < a.columns) {
        weights[v] = *reinterpret_cast<const uint4*>(a.weight + S::column(v));
        if constexpr (kLayer) biases[v] = *reinterpret_cast<const uint4*>(a.bias + S::column(v));
      }
    }
  }

  const float count = static_cast<float>(a.columns);
  for (int64_t row = S::first_row(); row < a.rows; row += S::row_stride()) {
    ring.wait();
    float total[1] = {0.0f};
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      Vector x;
      x.from(ring.at(0, v));
      if constexpr (kAdd) {
        Vector residual;
        residual.from(ring.at(1, v));
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) x.value[i] += residual.value[i];
        const uint4 packed = x.packed();
        *reinterpret_cast<uint4*>(a.sum + row * a.columns + S::column(v)) = packed;
        ring.at(0, v) = packed;
        x.from(packed);
      }
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) total[0] += kLayer ? x.value[i] : x.value[i] * x.value[i];
    }
    row_sum<S::kThreads>(total, scratch, turn);

    float mean = 0.0f;
    if constexpr (kLayer) {
      mean = total[0] / count;
      total[0] = 0.0f;
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        if (S::column(v) >= a.columns) continue;
        Vector x;
        x.from(ring.at(0, v));
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) total[0] += (x.value[i] - mean) * (x.value[i] - mean);
      }
      row_sum<S::kThreads>(total, scratch, turn);
    }
    const float scale = rsqrtf(total[0] / count + a.eps);

#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      Vector x, weight, bias;
      x.from(ring.at(0, v));
      ring.refill(row, v);
      if constexpr (kKeep) {
        weight.from(weights[v]);
        if constexpr (kLayer) bias.from(biases[v]);
      } else {
        weight.load(a.weight + S::column(v));
        if constexpr (kLayer) bias.load(a.bias + S::column(v));
      }
      normalize<T, kLayer>(a, x, weight, bias, mean, scale);
      x.store(a.out + row * a.columns + S::column(v));
    }
    ring.advance();
  }
}

// One block a row, which is read again for each sum: for rows too long for the ring, or not aligned (kVec 1).
template <typename T, int kVec, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads) norm_forward_loop(const NormForward<T> a) {
  float* scratch = reinterpret_cast<float*>(dynamic_shared());
  int turn = 0;
  const int first = threadIdx.x * kVec;
  constexpr int kStep = kLoopThreads * kVec;
  const float count = static_cast<float>(a.columns);
  const bool add = a.residual != nullptr;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    float total[1] = {0.0f};
    for (int column = first; column < a.columns; column += kStep) {
      Chunk<T, kVec> x;
      x.load(a.x + start + column);
      if (add) {
        Chunk<T, kVec> residual;
        residual.load(a.residual + start + column);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x.value[i] += residual.value[i];
        x.round_to_element();
        x.store(a.sum + start + column);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) total[0] += kLayer ? x.value[i] : x.value[i] * x.value[i];
    }
    row_sum<kLoopThreads>(total, scratch, turn);
    const T* values = add ? a.sum : a.x;  // each thread reads back what it wrote itself

    float mean = 0.0f;
    if constexpr (kLayer) {
      mean = total[0] / count;
      total[0] = 0.0f;
      for (int column = first; column < a.columns; column += kStep) {
        Chunk<T, kVec> x;
        x.load(values + start + column);
#pragma unroll
        for (int i = 0; i < kVec; ++i) total[0] += (x.value[i] - mean) * (x.value[i] - mean);
      }
      row_sum<kLoopThreads>(total, scratch, turn);
    }
    const float scale = rsqrtf(total[0] / count + a.eps);
    for (int column = first; column < a.columns; column += kStep) {
      Chunk<T, kVec> x, weight, bias;
      x.load(values + start + column);
      weight.load(a.weight + column);
      if constexpr (kLayer) bias.load(a.bias + column);
      normalize<T, kLayer>(a, x, weight, bias, mean, scale);
      x.store(a.out + start + column);
    }
  }
}

template <typename T, bool kLayer, bool kAdd>
bool launch_norm_forward_rows(const NormForward<T>& a, const Device& device) {
  return with_shape<T, kAdd ? 2 : 1, true>(a.columns, [&](auto shape) {
    using S = decltype(shape);
    static std::atomic<int> resident[kDevices];
    constexpr int kShared = S::kRingBytes + kSumScratch<S::kThreads, 1> * 4;
    if (kShared > device.block_shared_bytes()) return false;
    const auto kernel = norm_forward_rows<S, kLayer, kAdd>;
    const int64_t most = int64_t{device.processors()} * resident_blocks(kernel, S::kBlock, kShared, device, resident);
    const int64_t blocks = std::min(divided_up(a.rows, S::kRows), most);
    launch(kernel, dim3(blocks), S::kBlock, kShared, device, a);
    return true;
  });
}

template <typename T, bool kLayer>
void norm_forward(const NormForward<T>& a, const Device& device) {
  if (a.rows == 0 || a.columns == 0) return;
  const bool add = a.residual != nullptr;
  const bool vectors = a.columns % kVector<T> == 0 && aligned(a.x) && aligned(a.residual) && aligned(a.weight) &&
                       aligned(a.bias) && aligned(a.out) && aligned(a.sum);
  if (vectors &&
      (add ? launch_norm_forward_rows<T, kLayer, true>(a, device) : launch_norm_forward_rows<T, kLayer, false>(a, device)))
    return;
  const dim3 grid(std::min<int64_t>(a.rows, int64_t{device.processors()} * 4));
  constexpr int kShared = kSumScratch<kLoopThreads, 1> * 4;
  launch(vectors ? norm_forward_loop<T, kVector<T>, kLayer> : norm_forward_loop<T, 1, kLayer>, grid, kLoopThreads, kShared,
         device, a);
}

}  // namespace zero_inference::norms
