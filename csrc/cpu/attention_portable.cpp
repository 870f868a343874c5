// Attention in plain C++, for any processor.

#include "attention_kernel.h"

namespace zero_inference::cpu {
namespace {

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float size = from_bits(rest << 13) * 0x1p112f;  // subnormal numbers too
  return from_bits(sign | to_bits(size));
}

inline void narrow(float value, float* to) { *to = value; }

inline void narrow(float value, BFloat16* to) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = value == value ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
  to->bits = static_cast<uint16_t>(rounded >> 16);
}

inline void narrow(float value, Float16* to) {
  const uint32_t sign = to_bits(value) >> 16 & 0x8000, bits = to_bits(value) & 0x7fffffff;
  uint32_t half;
  if (bits > 0x7f800000) {
    half = 0x7e00;
  } else if (bits >= 0x477ff000) {  // 65520 and more
    half = 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: the sum's last bit is 2^-24
    half = to_bits(from_bits(bits) + 0.5f) - 0x3f000000;
  } else {
    half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

struct Portable {
  static constexpr int kLanes = 4, kTile = 4;
  struct Register {
    float lane[kLanes];
  };

  template <typename Function>
  static inline Register each(Function function) {
    Register result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
    return result;
  }

  static inline Register zero() { return all(0.0f); }
  static inline Register all(float value) {
    return each([=](int) { return value; });
  }
  template <typename T>
  static inline Register load(const T* from) {
    return each([=](int i) { return widen(from[i]); });
  }
  template <typename T>
  static inline Register load(const T* from, int64_t count) {
    return each([=](int i) { return i < count ? widen(from[i]) : 0.0f; });
  }
  template <typename T>
  static inline void store(T* to, const Register& x) {
    for (int i = 0; i < kLanes; ++i) narrow(x.lane[i], to + i);
  }
  template <typename T>
  static inline void store(T* to, const Register& x, int64_t count) {
    for (int i = 0; i < count; ++i) narrow(x.lane[i], to + i);
  }

  static inline Register add(const Register& x, const Register& y) {
    return each([&](int i) { return x.lane[i] + y.lane[i]; });
  }
  static inline Register sub(const Register& x, const Register& y) {
    return each([&](int i) { return x.lane[i] - y.lane[i]; });
  }
  static inline Register mul(const Register& x, const Register& y) {
    return each([&](int i) { return x.lane[i] * y.lane[i]; });
  }
  static inline Register div(const Register& x, const Register& y) {
    return each([&](int i) { return x.lane[i] / y.lane[i]; });
  }
  static inline Register max(const Register& x, const Register& y) {
    return each([&](int i) { return x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]; });
  }
  static inline Register fma(const Register& x, const Register& y, const Register& z) {
    return each([&](int i) { return x.lane[i] * y.lane[i] + z.lane[i]; });
  }
  static inline Register below(const Register& x, float limit, const Register& then, const Register& otherwise) {
    return each([&](int i) { return x.lane[i] < limit ? then.lane[i] : otherwise.lane[i]; });
  }
  static inline Register round(const Register& x) {  // of at most 2^22: the sum has no fraction bits left
    return each([&](int i) { return x.lane[i] + 12582912.0f - 12582912.0f; });
  }
  // `whole` within [-125, 127]; others are right only where the result is not used.
  static inline Register times_two_to(const Register& x, const Register& whole) {
    return each([&](int i) {
      const uint32_t exponent = to_bits(whole.lane[i] + 12582912.0f) - to_bits(12582912.0f);
      return x.lane[i] * from_bits((exponent + 127) << 23);
    });
  }

  static inline float sum(const Register& x) { return x.lane[0] + x.lane[1] + (x.lane[2] + x.lane[3]); }
  static inline float largest(const Register& x) {
    float most = x.lane[0];
    for (int i = 1; i < kLanes; ++i) most = x.lane[i] > most ? x.lane[i] : most;
    return most;
  }
  static inline void sums(const Register* x, float* to) {
    for (int i = 0; i < kTile; ++i) to[i] = sum(x[i]);
  }
};

}  // namespace

const AttentionKernels kPortableAttention = {attend_with<Portable>, merge_group<Portable>};

}  // namespace zero_inference::cpu
