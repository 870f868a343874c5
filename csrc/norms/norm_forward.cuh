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

template <typename S, bool kLayer, bool kAdd>
__global__ void __launch_bounds__(S::kBlock) norm_forward_rows(const NormForward<typename S::Type> a) {
  using T = typename S::Type;
  using Row = RowOf<S, (S::kThreads * S::kVectors > kEvictLastAbove)>;
  using Vector = Chunk<T, S::kVec>;
  // weights are loaded with the row, in 16 registers at most
  constexpr bool kEarly = !S::kLoop && S::kVectors * (kLayer ? 2 : 1) <= 4;
  __shared__ float scratch[kSumScratch<S::kThreads, 1> + 1];
  int turn = 0;
  for (int64_t row = S::first_row(); row < a.rows; row += S::row_stride()) {
    const int64_t start = row * a.columns;
    Row x(a.x + start, a.columns);
    uint4 weights[kEarly ? S::kVectors : 1] = {};
    uint4 biases[kEarly && kLayer ? S::kVectors : 1] = {};
    const auto load_weights = [&] {
      if constexpr (kEarly) {
        S::for_each(a.columns, [&](int v) {
          weights[v] = *reinterpret_cast<const uint4*>(a.weight + S::column(v));
          if constexpr (kLayer) biases[v] = *reinterpret_cast<const uint4*>(a.bias + S::column(v));
        });
      }
    };
    float total[1] = {0.0f};
    const auto add_up = [&](const Vector& values) {
#pragma unroll
      for (int i = 0; i < S::kVec; ++i) total[0] += kLayer ? values.value[i] : values.value[i] * values.value[i];
    };
    if constexpr (kAdd) {
      const Row residual(a.residual + start, a.columns);
      load_weights();
      S::for_each(a.columns, [&](int v) {
        Vector sum = x.at(v);
        const Vector added = residual.at(v);
#pragma unroll
        for (int i = 0; i < S::kVec; ++i) sum.value[i] += added.value[i];
        add_up(x.put(v, sum, a.sum + start));
      });
      x.replaced(a.sum + start);
    } else {
      load_weights();
      S::for_padded(a.columns, [&](int v) { add_up(x.at(v)); });
    }
    row_sum<S::kThreads>(total, scratch, turn);

    const float inverse = 1.0f / static_cast<float>(a.columns);
    float mean = 0.0f;
    if constexpr (kLayer) {
      mean = total[0] * inverse;
      total[0] = 0.0f;
      S::for_each(a.columns, [&](int v) {
        const Vector values = x.at(v);
#pragma unroll
        for (int i = 0; i < S::kVec; ++i) total[0] += (values.value[i] - mean) * (values.value[i] - mean);
      });
      row_sum<S::kThreads>(total, scratch, turn);
    }
    const float scale = rsqrtf(total[0] * inverse + a.eps);

    S::for_each(a.columns, [&](int v) {
      Vector values = x.at(v), weight, bias;
      if constexpr (kEarly) {
        weight.from(weights[v]);
        if constexpr (kLayer) bias.from(biases[v]);
      } else {
        weight.load(a.weight + S::column(v));
        if constexpr (kLayer) bias.load(a.bias + S::column(v));
      }
#pragma unroll
      for (int i = 0; i < S::kVec; ++i) {
        if constexpr (kLayer) {
          values.value[i] = (values.value[i] - mean) * scale * weight.value[i] + bias.value[i];
        } else {
          const float normalized = values.value[i] * scale;
          values.value[i] = (a.round_first ? rounded<T>(normalized) : normalized) * (weight.value[i] + a.offset);
        }
      }
      values.store(a.out + start + S::column(v));
    });
    if constexpr (!S::kLoop) return;  // a block a row
  }
}

template <typename T, bool kLayer, bool kAdd>
void launch_norm_forward(const NormForward<T>& a, const Device& device) {
  const bool vectors = in_vectors<T>(a.columns, a.x, a.residual, a.weight, a.bias, a.out, a.sum);
  with_forward_rows<T, kAdd ? 2 : 1, kLayer && !kAdd>(a.rows, a.columns, vectors, device, [&](auto shape, int64_t blocks) {
    using S = decltype(shape);
    launch(norm_forward_rows<S, kLayer, kAdd>, dim3(blocks), S::kBlock, 0, device, a);
  });
}

template <typename T, bool kLayer>
void norm_forward(const NormForward<T>& a, const Device& device) {
  if (a.rows == 0 || a.columns == 0) return;
  a.residual != nullptr ? launch_norm_forward<T, kLayer, true>(a, device) : launch_norm_forward<T, kLayer, false>(a, device);
}

}  // namespace zero_inference::norms
