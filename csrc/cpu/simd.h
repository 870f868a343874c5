// Vectors of one instruction set. A source file includes simd_avx2.h or simd_avx512.h first, or gets plain C++. Each defines
//
//   Vector, kLanes, kTokens                  a float32 vector, its lanes, rows of x that are multiplied together
//   zero, broadcast, load, store, multiply_add, sum
//   from_float16, from_bfloat16              kLanes elements to float32
//   from_bytes<dtype>                        likewise, of a dtype of one byte
//   rounded<dtype>                           float32 rounded to dtype
//   Group, group_of<codes, dtype>(scale, minimum)
//   dequantize_int8<dtype>, dequantize_nibbles<codes, dtype>   kLanes bytes of codes to float32
//   dequantize_e4m3(p, even, odd)            2 * kLanes codes to a 256th of their numbers
//   halves(low, high)                        one value in the lower half of the lanes, another in the upper half
//   split_pairs(one, two, even, odd)         elements of even and odd index
//
// and for attention: store_float16, store_bfloat16, max, below(x, limit, then, otherwise), round, times_two_to(x, whole),
// max_lane(x), sum_each(const Vector[kLanes], float*)

#pragma once

#if !defined(ZI_SIMD)
#include "simd_portable.h"
#endif

namespace zero_inference::cpu {
namespace {

constexpr int64_t kVectorBytes = kLanes * 4;

template <Dtype kDtype>
inline Vector from(const char* p) {
  if constexpr (kDtype == Dtype::float32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kDtype == Dtype::float16) return from_float16(p);
  if constexpr (kDtype == Dtype::bfloat16) return from_bfloat16(p);
  if constexpr (kDtype >= Dtype::e8m0) return from_bytes<kDtype>(p);
}

template <auto kValue>
struct Constant {
  static constexpr auto value = kValue;
};

// Returns run(Constant<dtype>).
template <typename Run>
[[gnu::always_inline]] inline auto with_dtype(Dtype dtype, const Run& run) {
  if (dtype == Dtype::float32) return run(Constant<Dtype::float32>{});
  return dtype == Dtype::float16 ? run(Constant<Dtype::float16>{}) : run(Constant<Dtype::bfloat16>{});
}

inline Vector from(Dtype dtype, const char* p) {
  return with_dtype(dtype, [&](auto of) { return from<of.value>(p); });
}

#if !defined(ZI_SIMD_HAS_MASKS)
// The first `count` < kLanes elements; reads no more, and fills with zeros.
template <Dtype kDtype>
inline Vector from_part(const char* p, int64_t count) {
  char part[kVectorBytes] = {};
  __builtin_memcpy(part, p, static_cast<size_t>(count * bytes_of(kDtype)));
  return from<kDtype>(part);
}
#endif

}  // namespace
}  // namespace zero_inference::cpu
