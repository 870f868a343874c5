// Else g++ does not vectorize most selections, because a comparison might trap.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include "elementwise.h"

#include <cstring>

// One clone per instruction set, chosen at load time. Not by arch=, which matches that one processor only
// (benchmarks/cpu_activations.cpp). Only for functions without a declaration in a header: clang 14 fails on others.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define ZI_FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZI_FOR_EACH_CPU
#endif

namespace zero_inference::cpu {

namespace {

// exp(x) = 2^n * exp(r), |r| <= ln(2) / 2, Taylor polynomial of degree 7: relative error below 3e-7. Clamped, without branches.
ZI_INLINE float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum is rounded to a whole number
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float sum = 1.0f / 5040;
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return sum * from_bits((to_bits(shifted) + 127) << 23);
}

ZI_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

ZI_INLINE float tanh_of(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// x * Phi(x), Phi by Abramowitz and Stegun 7.1.26, whose error is below 1.5e-7.
ZI_INLINE float gelu_of(float x) {
  const float z = (x < 0 ? -x : x) * 0.70710678f;
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  float sum = 1.061405429f;
  sum = sum * t - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const float tail = 0.5f * sum * t * exponential(-z * z);
  return x * (x < 0 ? tail : 1.0f - tail);
}

ZI_INLINE float gelu_tanh_of(float x) { return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x))); }

namespace each_cpu {

ZI_FOR_EACH_CPU void activate(Activation activation, float* values, int64_t count) {
  switch (activation) {
    case Activation::relu:
      for (int64_t i = 0; i < count; ++i) values[i] = values[i] > 0 ? values[i] : 0;
      break;
    case Activation::silu:
      for (int64_t i = 0; i < count; ++i) values[i] = values[i] * sigmoid(values[i]);
      break;
    case Activation::gelu:
      for (int64_t i = 0; i < count; ++i) values[i] = gelu_of(values[i]);
      break;
    case Activation::gelu_tanh:
      for (int64_t i = 0; i < count; ++i) values[i] = gelu_tanh_of(values[i]);
      break;
    case Activation::relu_squared:
      for (int64_t i = 0; i < count; ++i) values[i] = values[i] > 0 ? values[i] * values[i] : 0;
      break;
    case Activation::gelu_sigmoid:
      for (int64_t i = 0; i < count; ++i) values[i] = values[i] * sigmoid(1.702f * values[i]);
      break;
    case Activation::identity:
      break;
  }
}

ZI_FOR_EACH_CPU void multiply(float* values, const float* factors, float offset, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factors[i] + offset;
}

ZI_FOR_EACH_CPU void limit_values(float* values, float least, float most, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[i] < least ? least : values[i];
    values[i] = value > most ? most : value;
  }
}

ZI_FOR_EACH_CPU void deinterleave(float* pairs, float* firsts, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    firsts[i] = pairs[2 * i];
    pairs[i] = pairs[2 * i + 1];
  }
}

ZI_FOR_EACH_CPU void add_bias(float* values, const void* bias, Dtype dtype, int64_t count) {
  if (dtype == Dtype::float32) {
    const float* of = static_cast<const float*>(bias);
    for (int64_t i = 0; i < count; ++i) values[i] += of[i];
  } else if (dtype == Dtype::bfloat16) {
    const uint16_t* of = static_cast<const uint16_t*>(bias);
    for (int64_t i = 0; i < count; ++i) values[i] += bfloat16_value(of[i]);
  } else {
    const uint16_t* of = static_cast<const uint16_t*>(bias);
    for (int64_t i = 0; i < count; ++i) values[i] += float16_value(of[i]);
  }
}

ZI_FOR_EACH_CPU void add_scaled(float* sums, const float* values, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i] * factor;
}

ZI_FOR_EACH_CPU void store(const float* values, void* out, Dtype dtype, int64_t count) {
  if (dtype == Dtype::float32) {
    std::memcpy(out, values, count * sizeof(float));
  } else if (dtype == Dtype::bfloat16) {
    uint16_t* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_bits(values[i]);
  } else {
    uint16_t* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < count; ++i) to[i] = float16_bits(values[i]);
  }
}

}  // namespace each_cpu

}  // namespace

void activate(Activation activation, float* values, int64_t count) { each_cpu::activate(activation, values, count); }

void multiply(float* values, const float* factors, float offset, int64_t count) {
  each_cpu::multiply(values, factors, offset, count);
}

void limit_values(float* values, float least, float most, int64_t count) { each_cpu::limit_values(values, least, most, count); }

void deinterleave(float* pairs, float* firsts, int64_t count) { each_cpu::deinterleave(pairs, firsts, count); }

void add_bias(float* values, const void* bias, Dtype dtype, int64_t count) { each_cpu::add_bias(values, bias, dtype, count); }

void add_scaled(float* sums, const float* values, float factor, int64_t count) {
  each_cpu::add_scaled(sums, values, factor, count);
}

void store(const float* values, void* out, Dtype dtype, int64_t count) { each_cpu::store(values, out, dtype, count); }

}  // namespace zero_inference::cpu
