// What lies between the products of a block, on rows of float32.

#pragma once

#include <cstdint>

#include "block.h"

namespace zero_inference::cpu {

// values[i] = f(values[i])
void activate(Activation activation, float* values, int64_t count);
// values[i] *= factors[i] + offset
void multiply(float* values, const float* factors, float offset, int64_t count);
// values[i] = least, or most, where it is beyond
void limit_values(float* values, float least, float most, int64_t count);
// Of `count` pairs the first ones go to `firsts`, and the second ones to the front of `pairs`.
void part_pairs(float* pairs, float* firsts, int64_t count);
// values[i] += bias[i], which is of `dtype`
void add_bias(float* values, const void* bias, Dtype dtype, int64_t count);
// sums[i] += values[i] * factor
void add_scaled(float* sums, const float* values, float factor, int64_t count);
// The number of `dtype` at `value`.
float load(const void* value, Dtype dtype);
// out[i] = values[i] rounded to nearest, which is of `dtype`
void store(const float* values, void* out, Dtype dtype, int64_t count);

}  // namespace zero_inference::cpu
