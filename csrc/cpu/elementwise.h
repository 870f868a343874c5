// Elementwise steps between products, on rows of float32.

#pragma once

#include "product.h"

namespace zero_inference::cpu {

enum class Activation : int32_t {
  relu = 0,
  silu = 1,
  gelu = 2,
  gelu_tanh = 3,
  relu_squared = 4,
  gelu_sigmoid = 5,
  identity = 6
};

void activate(Activation activation, float* values, int64_t count);
// values[i] *= factors[i] + offset
void multiply(float* values, const float* factors, float offset, int64_t count);
void limit_values(float* values, float least, float most, int64_t count);
// De-interleaves `count` pairs: first elements to `firsts`, second ones to the front of `pairs`.
void deinterleave(float* pairs, float* firsts, int64_t count);
void add_bias(float* values, const void* bias, Dtype dtype, int64_t count);
void add_scaled(float* sums, const float* values, float factor, int64_t count);
// Rounds to nearest.
void store(const float* values, void* out, Dtype dtype, int64_t count);

}  // namespace zero_inference::cpu
