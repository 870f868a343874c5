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
  constexpr bool kEarly = S::kVectors * (kLayer ? 2 : 1) <= 4;  // weights are loaded with the row, in 16 registers at most
  __shared__ float scratch[kSumScratch<S::kThreads, 1> + 1];
  int turn = 0;
  const int64_t row = S::first_row();
  if (row >= a.rows) return;  // a whole warp: rows of several warps have a block each
  const int64_t start = row * a.columns;
  using Held = HeldRow<S, (S::kThreads * S::kVectors > kEvictLastAbove)>;
  Held x(a.x + start, a.columns);
  uint4 weights[kEarly ? S::kVectors : 1] = {};
  uint4 biases[kEarly && kLayer ? S::kVectors : 1] = {};
  const auto load_weights = [&] {
    if constexpr (kEarly) {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        if (S::column(v) >= a.columns) continue;
        weights[v] = *reinterpret_cast<const uint4*>(a.weight + S::column(v));
        if constexpr (kLayer) biases[v] = *reinterpret_cast<const uint4*>(a.bias + S::column(v));
      }
    }
  };
  float total[1] = {0.0f};
  const auto add_up = [&](const Vector& values) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) total[0] += kLayer ? values.value[i] : values.value[i] * values.value[i];
  };
  if constexpr (kAdd) {
    const Held residual(a.residual + start, a.columns);
    load_weights();
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      Vector sum = x.at(v);
      const Vector added = residual.at(v);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) sum.value[i] += added.value[i];
      x.packed[v] = sum.packed();
      *reinterpret_cast<uint4*>(a.sum + start + S::column(v)) = x.packed[v];
      add_up(x.at(v));
    }
  } else {
    load_weights();
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) add_up(x.at(v));  // zeros after the row's end
  }
  row_sum<S::kThreads>(total, scratch, turn);

  const float inverse = 1.0f / static_cast<float>(a.columns);
  float mean = 0.0f;
  if constexpr (kLayer) {
    mean = total[0] * inverse;
    total[0] = 0.0f;
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      const Vector values = x.at(v);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) total[0] += (values.value[i] - mean) * (values.value[i] - mean);
    }
    row_sum<S::kThreads>(total, scratch, turn);
  }
  const float scale = rsqrtf(total[0] * inverse + a.eps);

#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    if (S::column(v) >= a.columns) continue;
    Vector values = x.at(v), weight, bias;
    if constexpr (kEarly) {
      weight.from(weights[v]);
      if constexpr (kLayer) bias.from(biases[v]);
    } else {
      weight.load(a.weight + S::column(v));
      if constexpr (kLayer) bias.load(a.bias + S::column(v));
    }
    normalize<T, kLayer>(a, values, weight, bias, mean, scale);
    values.store(a.out + start + S::column(v));
  }
}

// One block a row, which is read again for each sum: for rows too long for the registers, or not aligned (kVec 1).
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
        x.from(x.packed());  // rounded
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
  constexpr bool kHeavy = kLayer && !kAdd;
  return with_forward_shape<T, kAdd ? 2 : 1, kHeavy>(a.columns, [&](auto shape) {
    using S = decltype(shape);
    launch(norm_forward_rows<S, kLayer, kAdd>, dim3(divided_up(a.rows, S::kRows)), S::kBlock, 0, device, a);
    return true;
  });
}

template <typename T, bool kLayer>
void norm_forward(const NormForward<T>& a, const Device& device) {
  if (a.rows == 0 || a.columns == 0) return;
  const bool add = a.residual != nullptr;
  const bool vectors = in_vectors<T>(a.columns, a.x, a.residual, a.weight, a.bias, a.out, a.sum);
  if (vectors &&
      (add ? launch_norm_forward_rows<T, kLayer, true>(a, device) : launch_norm_forward_rows<T, kLayer, false>(a, device)))
    return;
  const dim3 grid(loop_blocks(a.rows, device));
  constexpr int kShared = kSumScratch<kLoopThreads, 1> * 4;
  launch(vectors ? norm_forward_loop<T, kVector<T>, kLayer> : norm_forward_loop<T, 1, kLayer>, grid, kLoopThreads, kShared,
         device, a);
}

}  // namespace zero_inference::norms
