// PolyNorm: out = (w0 N(x^3) + w1 N(x^2) + w2 N(x) + b) * mul, with N(z) = z * rsqrt(mean(z^2) + eps), and its gradients.
//
// With c_p the weight of power p, r_p = rsqrt(mean(x^2p) + eps), h = grad * mul and S_p = sum(h x^p) of a row:
//
//   dx = sum_p c_p r_p p x^(p-1) (h - x^p r_p^2 S_p / D)      dmul = grad * poly
//   dc_p = sum over rows of r_p S_p                           db = sum of h
//
// (by differentiating N(x^p); checked against autograd in tests/test_norms_reference.py). All sums of a row take one pass. In
// rows of one element the difference would be all rounding error; there it is h eps r_p^2.
#pragma once

#include "../alignment.cuh"
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
  float4*
      sums;  // [rows] with experts, else [blocks * rows of a block]: gradients of the weights in their order, then of the bias
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
  return {Element<T>::load(weight[0]), Element<T>::load(weight[1]), Element<T>::load(weight[2]),
          Element<T>::load(a.bias[expert])};
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

}  // namespace zero_inference::norms
