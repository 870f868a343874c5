// What lies between the products of a block, on rows of float32.

#pragma once

#include <cstdint>

#include "block.h"

namespace zero_inference::cpu {

// values[i] = f(values[i])
void activate(Activation activation, float* values, int64_t count);
// values[i] *= factors[i]
void multiply(float* values, const float* factors, int64_t count);
// values[i] += bias[i], which is of `dtype`
void add_bias(float* values, const void* bias, Dtype dtype, int64_t count);
// sums[i] += values[i] * factor
void add_scaled(float* sums, const float* values, float factor, int64_t count);
// The number of `dtype` at `value`.
float load(const void* value, Dtype dtype);
// out[i] = values[i] rounded to nearest, which is of `dtype`
void store(const float* values, void* out, Dtype dtype, int64_t count);

}  // namespace zero_inference::cpu
