// Vectors in plain C++: four lanes, which every 64-bit processor has (simd.h).

#pragma once

#if defined(ZI_SIMD)
#error "a source file has one instruction set"
#endif
#define ZI_SIMD

#include "product_layout.h"

namespace zero_inference::cpu {
namespace {

typedef float Vector __attribute__((vector_size(16)));

constexpr int kLanes = 4;
constexpr int kTokens = 2;

inline Vector zero() { return Vector{}; }
inline Vector broadcast(float value) { return Vector{value, value, value, value}; }
inline Vector load(const float* p) {
  Vector value;
  __builtin_memcpy(&value, p, sizeof(value));
  return value;
}
inline void store(float* p, Vector value) { __builtin_memcpy(p, &value, sizeof(value)); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
inline float sum(Vector value) { return (value[0] + value[2]) + (value[1] + value[3]); }

inline Vector from_float16(const char* p) {
  uint16_t bits[4];
  __builtin_memcpy(bits, p, 8);
  return Vector{float16_value(bits[0]), float16_value(bits[1]), float16_value(bits[2]), float16_value(bits[3])};
}

inline Vector from_bfloat16(const char* p) {
  uint16_t bits[4];
  __builtin_memcpy(bits, p, 8);
  return Vector{bfloat16_value(bits[0]), bfloat16_value(bits[1]), bfloat16_value(bits[2]), bfloat16_value(bits[3])};
}

typedef uint32_t Words __attribute__((vector_size(16)));

template <Dtype kDtype>
inline Vector rounded(Vector value) {
  if constexpr (kDtype == Dtype::float32) return value;
  constexpr uint32_t kCut = kDtype == Dtype::float16 ? 13 : 16;  // bits of the fraction that do not fit: half to even
  Words words;
  __builtin_memcpy(&words, &value, 16);
  Words result = (words + (1u << (kCut - 1)) - 1 + (words >> kCut & 1)) & ~((1u << kCut) - 1);
  if constexpr (kDtype == Dtype::float16) {
    const Vector small = value + 0.75f - 0.75f;  // multiples of 2^-24, as float16's subnormal numbers
    Words bits;
    __builtin_memcpy(&bits, &small, 16);
    const Words is_small = (Words)((words & 0x7fffffffu) < 0x38800000u);  // 2^-14
    result = (bits & is_small) | (result & ~is_small);
  }
  __builtin_memcpy(&value, &result, 16);
  return value;
}

struct Group {
  Vector scale, minimum;
};

template <Codes kCodes, Dtype kDtype>
inline Group group_of(float scale, float minimum) {
  return {broadcast(scale), broadcast(minimum)};
}

template <Dtype kDtype>
inline Vector from_bytes(const char* p) {
  return Vector{element(p, kDtype, 0), element(p, kDtype, 1), element(p, kDtype, 2), element(p, kDtype, 3)};
}

inline Vector halves(float low, float high) { return Vector{low, low, high, high}; }

template <Codes kCodes>
inline Vector of_codes(int a, int b, int c, int d) {
  return Vector{number_of(kCodes, a), number_of(kCodes, b), number_of(kCodes, c), number_of(kCodes, d)};
}

template <Dtype kDtype>
inline Vector dequantize_int8(const uint8_t* p, const Group& group) {
  return rounded<kDtype>(of_codes<Codes::int8>(p[0], p[1], p[2], p[3]) * group.scale + group.minimum);
}

inline void dequantize_e4m3(const uint8_t* p, Vector& even, Vector& odd) {
  even = of_codes<Codes::e4m3>(p[0], p[2], p[4], p[6]);
  odd = of_codes<Codes::e4m3>(p[1], p[3], p[5], p[7]);
}

template <Codes kCodes, Dtype kDtype>
inline void dequantize_nibbles(const uint8_t* p, const Group& group, Vector& even, Vector& odd) {
  const Vector low = of_codes<kCodes>(p[0] & 15, p[1] & 15, p[2] & 15, p[3] & 15);
  const Vector high = of_codes<kCodes>(p[0] >> 4, p[1] >> 4, p[2] >> 4, p[3] >> 4);
  even = rounded<kDtype>(low * group.scale + group.minimum);
  odd = rounded<kDtype>(high * group.scale + group.minimum);
}

inline void split_pairs(Vector one, Vector two, Vector& even, Vector& odd) {
  even = Vector{one[0], one[2], two[0], two[2]};
  odd = Vector{one[1], one[3], two[1], two[3]};
}

inline void store_float16(char* to, Vector x) {
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t bits = float16_bits(x[i]);
    __builtin_memcpy(to + 2 * i, &bits, 2);
  }
}

inline void store_bfloat16(char* to, Vector x) {
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t bits = bfloat16_bits(x[i]);
    __builtin_memcpy(to + 2 * i, &bits, 2);
  }
}

inline Vector max(Vector x, Vector y) { return x > y ? x : y; }
inline Vector below(Vector x, float limit, Vector then, Vector otherwise) { return x < limit ? then : otherwise; }
inline Vector round(Vector x) { return x + 12582912.0f - 12582912.0f; }  // of at most 2^22: no fraction bits are left
// `whole` within [-125, 127]; others are right only where the result is not used.
inline Vector times_two_to(Vector x, Vector whole) {
  for (int i = 0; i < kLanes; ++i) x[i] *= from_bits((to_bits(whole[i] + 12582912.0f) - to_bits(12582912.0f) + 127) << 23);
  return x;
}

inline float max_lane(Vector x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
inline void sum_each(const Vector* x, float* to) {
  for (int i = 0; i < kLanes; ++i) to[i] = sum(x[i]);
}

}  // namespace
}  // namespace zero_inference::cpu
