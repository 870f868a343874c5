// float16 and bfloat16 as bits, to and from float32, without branches.

#pragma once

#include <cstdint>

#define ZI_INLINE static inline __attribute__((always_inline))

namespace zero_inference::cpu {

ZI_INLINE float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

ZI_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ZI_INLINE float bfloat16_value(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

ZI_INLINE uint16_t bfloat16_bits(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

ZI_INLINE float float16_value(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  // the exponent's bias differs by 112; subnormal numbers come out right, because the product normalises them
  const float value = from_bits((half & 0x7fffu) << 13) * from_bits(239u << 23);
  const uint32_t bits = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u | (half & 0x3ffu) << 13 : to_bits(value);
  return from_bits(bits | sign);
}

ZI_INLINE uint16_t float16_bits(float value) {
  const uint32_t sign = (to_bits(value) >> 16) & 0x8000u;
  const uint32_t bits = to_bits(value) & 0x7fffffffu;
  // below 2^-14 half's numbers are 2^-24 apart, as float's are from 0.5 on: the sum rounds
  const uint32_t small = to_bits(from_bits(bits) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;  // not a number; or too large, from 65520 on
  return static_cast<uint16_t>(sign | (bits >= 0x477ff000u ? large : bits < 0x38800000u ? small : normal));
}

}  // namespace zero_inference::cpu
