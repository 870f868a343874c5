// PolyNorm: out = (w0 N(x^3) + w1 N(x^2) + w2 N(x) + b) * mul, with N(z) = z * rsqrt(mean(z^2) + eps), and its gradients
// (poly_backward.cuh).
//
// With c_p the weight of power p, r_p = rsqrt(mean(x^2p) + eps), h = grad * mul and S_p = sum(h x^p) of a row:
//
//   dx = sum_p c_p r_p p x^(p-1) (h - x^p r_p^2 S_p / D)      dmul = grad * poly
//   dc_p = sum over rows of r_p S_p                           db = sum of h
//
// (by differentiating N(x^p); checked against autograd in tests/test_norms_reference.py). All sums of a row take one pass. In
// rows of one element the difference would be all rounding error; there it is h eps r_p^2.
#pragma once

#include "rows.cuh"

namespace zero_inference::norms {

template <typename T>
struct Poly {
  const T* x;
  const T* mul;            // null: 1
  const T* weight;         // [experts, 3]
  const T* bias;           // [experts]
  const int32_t* offsets;  // [experts] inclusive ends; null: one expert has all rows
  T* out;
  const T* grad;  // from here on of the backward pass
  T* grad_x;
  T* grad_mul;
  T* grad_weight;
  T* grad_bias;
  float4* sums;  // [rows] with experts, else [rows of all blocks]: gradients of the weights in order, then of the bias
  int64_t rows;
  int columns;
  int experts;
  float eps;
};

struct PolyWeights {
  float cube, square, line, bias;
};

// The expert of a row: the first with row < offsets[expert]; `experts` for a row past them all.
__device__ __forceinline__ int expert_of(const int32_t* offsets, int experts, int64_t row) {
  if (offsets == nullptr) return 0;
  int low = 0;
  int high = experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (row < offsets[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <typename T>
__device__ __forceinline__ PolyWeights weights_of(const Poly<T>& a, int expert) {
  const T* weight = a.weight + 3 * static_cast<int64_t>(expert);
  return {Element<T>::to_float(weight[0]), Element<T>::to_float(weight[1]), Element<T>::to_float(weight[2]),
          Element<T>::to_float(a.bias[expert])};
}

// poly(x) = ((cube x + square) x + line) x + bias, with the scales of the row in the coefficients.
__device__ __forceinline__ PolyWeights scaled(const PolyWeights& weights, float scale3, float scale2, float scale1) {
  return {weights.cube * scale3, weights.square * scale2, weights.line * scale1, weights.bias};
}

// The weights times the scales of a row; total are its sums of x^2, x^4, x^6 and inverse is one over its length.
__device__ __forceinline__ PolyWeights scaled(const PolyWeights& weights, const float* total, float inverse, float eps) {
  return scaled(weights, rsqrtf(total[2] * inverse + eps), rsqrtf(total[1] * inverse + eps), rsqrtf(total[0] * inverse + eps));
}

__device__ __forceinline__ float poly_of(const PolyWeights& c, float x) {
  return ((c.cube * x + c.square) * x + c.line) * x + c.bias;
}

// Sums of x^2, x^4, x^6.
__device__ __forceinline__ void add_powers(float* total, float x) {
  const float square = x * x;
  const float cube = square * x;
  total[0] += square;
  total[1] += square * square;
  total[2] += cube * cube;
}

template <typename T>
bool poly_vectors(const Poly<T>& a) {
  return in_vectors<T>(a.columns, a.x, a.mul, a.out, a.grad, a.grad_x, a.grad_mul);
}

template <typename S, bool kMul>
__global__ void __launch_bounds__(S::kBlock) poly_forward_rows(const Poly<typename S::Type> a) {
  using Vector = Chunk<typename S::Type, S::kVec>;
  using Row = RowOf<S, (!kMul && S::kThreads * S::kVectors > kEvictLastAbove)>;  // with a factor it gains 1% at most
  __shared__ float scratch[kSumScratch<S::kThreads, 3> + 1];
  int turn = 0;
  for (int64_t row = S::first_row(); row < a.rows; row += S::row_stride()) {
    const int64_t start = row * a.columns;
    const Row held(a.x + start, a.columns);
    const Row gate(kMul ? a.mul + start : nullptr, kMul ? a.columns : 0);
    const int expert = expert_of(a.offsets, a.experts, row);
    const bool padding = expert == a.experts;
    const PolyWeights weights = padding ? PolyWeights{} : weights_of(a, expert);
    float total[3] = {};
    S::for_padded(a.columns, [&](int v) {
      const Vector x = held.at(v);
#pragma unroll
      for (int i = 0; i < S::kVec; ++i) add_powers(total, x.value[i]);
    });
    row_sum<S::kThreads>(total, scratch, turn);
    const PolyWeights c = scaled(weights, total, 1.0f / static_cast<float>(a.columns), a.eps);
    S::for_each(a.columns, [&](int v) {
      Vector x = held.at(v), mul;
      if constexpr (kMul) mul = gate.at(v);
#pragma unroll
      for (int i = 0; i < S::kVec; ++i) {
        x.value[i] = poly_of(c, x.value[i]);
        if constexpr (kMul) x.value[i] *= mul.value[i];
        if (padding) x.value[i] = 0.0f;
      }
      x.store(a.out + start + S::column(v));
    });
    if constexpr (!S::kLoop) return;  // a block a row
  }
}

template <typename T, bool kMul>
void launch_poly_forward(const Poly<T>& a, const Device& device) {
  with_forward_rows<T, kMul ? 2 : 1, true>(a.rows, a.columns, poly_vectors(a), device, [&](auto shape, int64_t blocks) {
    using S = decltype(shape);
    launch(poly_forward_rows<S, kMul>, dim3(blocks), S::kBlock, 0, device, a);
  });
}

template <typename T>
void poly_forward(const Poly<T>& a, const Device& device) {
  if (a.rows == 0 || a.columns == 0) return;
  a.mul != nullptr ? launch_poly_forward<T, true>(a, device) : launch_poly_forward<T, false>(a, device);
}

}  // namespace zero_inference::norms
