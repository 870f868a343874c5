// Forward passes of PolyNorm (poly_norm.cuh).
#pragma once

#include "poly_norm.cuh"

namespace zero_inference::norms {

template <typename S, bool kMul>
__global__ void __launch_bounds__(S::kBlock) poly_forward_rows(const Poly<typename S::Type> a) {
  using T = typename S::Type;
  using Vector = Chunk<T, kVector<T>>;
  __shared__ float scratch[kSumScratch<S::kThreads, 3> + 1];
  int turn = 0;
  const int64_t row = S::first_row();
  if (row >= a.rows) return;  // a whole warp: rows of several warps have a block each
  const int64_t start = row * a.columns;
  using Held = HeldRow<S, (!kMul && S::kThreads * S::kVectors > kEvictLastAbove)>;  // with a factor it gains 1% at most
  const Held held(a.x + start, a.columns);
  const Held gate(kMul ? a.mul + start : nullptr, kMul ? a.columns : 0);
  const int expert = expert_of(a.offsets, a.experts, row);
  const bool padding = expert == a.experts;
  const PolyWeights weights = padding ? PolyWeights{} : weights_of(a, expert);
  float total[3] = {};
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const Vector x = held.at(v);  // zeros after the row's end
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) add_powers(total, x.value[i]);
  }
  row_sum<S::kThreads>(total, scratch, turn);
  const PolyWeights c = scaled(weights, total, 1.0f / static_cast<float>(a.columns), a.eps);
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    if (S::column(v) >= a.columns) continue;
    Vector x = held.at(v);
    const Vector mul = gate.at(v);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      x.value[i] = poly_of(c, x.value[i]);
      if constexpr (kMul) x.value[i] *= mul.value[i];
      if (padding) x.value[i] = 0.0f;
    }
    x.store(a.out + start + S::column(v));
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kLoopThreads) poly_forward_loop(const Poly<T> a) {
  float* scratch = reinterpret_cast<float*>(dynamic_shared());
  int turn = 0;
  const int first = threadIdx.x * kVec;
  constexpr int kStep = kLoopThreads * kVec;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    const int expert = expert_of(a.offsets, a.experts, row);
    const bool padding = expert == a.experts;
    const PolyWeights weights = padding ? PolyWeights{} : weights_of(a, expert);
    float total[3] = {};
    for (int column = first; column < a.columns; column += kStep) {
      Chunk<T, kVec> x;
      x.load(a.x + start + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) add_powers(total, x.value[i]);
    }
    row_sum<kLoopThreads>(total, scratch, turn);
    const PolyWeights c = scaled(weights, total, 1.0f / static_cast<float>(a.columns), a.eps);
    for (int column = first; column < a.columns; column += kStep) {
      Chunk<T, kVec> x, mul;
      x.load(a.x + start + column);
      if (a.mul != nullptr) mul.load(a.mul + start + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        x.value[i] = poly_of(c, x.value[i]);
        if (a.mul != nullptr) x.value[i] *= mul.value[i];
        if (padding) x.value[i] = 0.0f;
      }
      x.store(a.out + start + column);
    }
  }
}

template <typename T, bool kMul>
bool launch_poly_forward_rows(const Poly<T>& a, const Device& device) {
  return with_forward_shape<T, kMul ? 2 : 1, true>(a.columns, [&](auto shape) {
    using S = decltype(shape);
    launch(poly_forward_rows<S, kMul>, dim3(divided_up(a.rows, S::kRows)), S::kBlock, 0, device, a);
    return true;
  });
}

template <typename T>
void poly_forward(const Poly<T>& a, const Device& device) {
  if (a.rows == 0 || a.columns == 0) return;
  const bool vectors = poly_vectors(a);
  if (vectors &&
      (a.mul != nullptr ? launch_poly_forward_rows<T, true>(a, device) : launch_poly_forward_rows<T, false>(a, device)))
    return;
  const dim3 grid(loop_blocks(a.rows, device));
  constexpr int kShared = kSumScratch<kLoopThreads, 3> * 4;
  launch(vectors ? poly_forward_loop<T, kVector<T>> : poly_forward_loop<T, 1>, grid, kLoopThreads, kShared, device, a);
}

}  // namespace zero_inference::norms
