// Vectors of AVX2, FMA and F16C, for the products (simd.h).

#pragma once

#if defined(ZI_SIMD)
#error "a source file has one instruction set"
#endif
#define ZI_SIMD

#include <immintrin.h>

#include "product_layout.h"

namespace zero_inference::cpu {
namespace {

using Vector = __m256;

constexpr int kLanes = 8;
constexpr int kTokens = 2;  // 8 sums of 16 registers

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector value) { _mm256_storeu_ps(p, value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

inline float sum(Vector value) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline Vector from_float16(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline Vector from_bfloat16(const char* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

template <Dtype kDtype>
inline Vector rounded(Vector value) {
  if constexpr (kDtype == Dtype::float16) return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  if constexpr (kDtype == Dtype::bfloat16) {  // half to even
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  return value;
}

struct Group {
  Vector scale, minimum;  // of E2M1 `scale` has the values of codes 0 to 7
};

template <Codes kCodes, Dtype kDtype>
inline Group group_of(float scale, float minimum) {
  const Vector all = broadcast(scale);
  if constexpr (kCodes != Codes::e2m1) return {all, broadcast(minimum)};
  return {rounded<kDtype>(_mm256_mul_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), all)), zero()};
}

inline __m256i bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }

// e4m3_half_bits of 8 words with E4M3 codes in their upper bytes: the sign is shifted in beside itself.
inline __m128i e4m3_halves(__m128i words) {
  return _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
}

inline void dequantize_e4m3(const uint8_t* p, Vector& even, Vector& odd) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  even = _mm256_cvtph_ps(e4m3_halves(_mm_slli_epi16(both, 8)));
  odd = _mm256_cvtph_ps(e4m3_halves(both));
}

template <Dtype kDtype>
inline Vector from_bytes(const char* p) {
  if constexpr (kDtype == Dtype::uint8) return _mm256_cvtepi32_ps(bytes(p));
  if constexpr (kDtype == Dtype::e4m3) {
    const __m128i words = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 8);
    return _mm256_mul_ps(_mm256_cvtph_ps(e4m3_halves(words)), broadcast(256));
  }
  const Vector power = _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(bytes(p), 23), _mm256_set1_epi32(0x400000)));
  return _mm256_add_ps(power, _mm256_sub_ps(power, power));  // 255 gives infinity, whose difference is not a number
}

inline Vector halves(float low, float high) { return _mm256_blend_ps(broadcast(low), broadcast(high), 0xf0); }

template <Dtype kDtype>
inline Vector dequantize(__m256i codes, const Group& group) {
  return rounded<kDtype>(_mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), group.scale, group.minimum));
}

template <Dtype kDtype>
inline Vector dequantize_int8(const uint8_t* p, const Group& group) {
  return dequantize<kDtype>(bytes(p), group);
}

// Bit 3 of `codes` is the sign.
inline Vector dequantize_e2m1(__m256i codes, const Group& group) {
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(group.scale, codes), _mm256_castsi256_ps(sign));
}

template <Codes kCodes, Dtype kDtype>
inline void dequantize_nibbles(const uint8_t* p, const Group& group, Vector& even, Vector& odd) {
  const __m256i both = bytes(p), upper = _mm256_srli_epi32(both, 4);
  if constexpr (kCodes == Codes::e2m1) {
    even = dequantize_e2m1(both, group);
    odd = dequantize_e2m1(upper, group);
  } else {
    even = dequantize<kDtype>(_mm256_and_si256(both, _mm256_set1_epi32(15)), group);
    odd = dequantize<kDtype>(upper, group);
  }
}

inline void split_pairs(Vector one, Vector two, Vector& even, Vector& odd) {
  // within halves of 128 bits, then the middle quarters change places
  const __m256d low = _mm256_castps_pd(_mm256_shuffle_ps(one, two, 0x88));
  const __m256d high = _mm256_castps_pd(_mm256_shuffle_ps(one, two, 0xdd));
  even = _mm256_castpd_ps(_mm256_permute4x64_pd(low, 0xd8));
  odd = _mm256_castpd_ps(_mm256_permute4x64_pd(high, 0xd8));
}

inline void store_float16(char* to, Vector x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bfloat16(char* to, Vector x) {
  const Vector value = _mm256_blendv_ps(rounded<Dtype::bfloat16>(x), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(value), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

inline Vector max(Vector x, Vector y) { return _mm256_max_ps(x, y); }
inline Vector below(Vector x, float limit, Vector then, Vector otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, broadcast(limit), _CMP_LT_OQ));
}
inline Vector round(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// `whole` within [-125, 127]; others are right only where the result is not used.
inline Vector times_two_to(Vector x, Vector whole) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

inline float max_lane(Vector x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline void sum_each(const Vector* x, float* to) {
  const Vector low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Vector high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  store(to, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
}

}  // namespace
}  // namespace zero_inference::cpu
