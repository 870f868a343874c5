// Vectors of AVX-512 with BF16, VBMI and VNNI, for the products (simd.h).

#pragma once

#if defined(ZI_SIMD)
#error "a source file has one instruction set"
#endif
#define ZI_SIMD
#define ZI_SIMD_HAS_MASKS

#include <immintrin.h>

#include "product_layout.h"

namespace zero_inference::cpu {
namespace {

using Vector = __m512;

constexpr int kLanes = 16;
constexpr int kTokens = 4;  // 16 sums of 32 registers

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector broadcast(float value) { return _mm512_set1_ps(value); }
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector value) { _mm512_storeu_ps(p, value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vector value) { return _mm512_reduce_add_ps(value); }

inline __m256i load_32_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline Vector from_float16(const char* p) { return _mm512_cvtph_ps(load_32_bytes(p)); }

inline Vector from_bfloat16(__m256i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)); }

inline Vector from_bfloat16(const char* p) { return from_bfloat16(load_32_bytes(p)); }

template <Dtype kDtype>
inline Vector rounded(Vector value) {
  if constexpr (kDtype == Dtype::bfloat16) return from_bfloat16((__m256i)_mm512_cvtneps_pbh(value));
  if constexpr (kDtype == Dtype::float16) return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  return value;
}

inline Vector code_vector() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// The numbers of 4-bit codes 0 to 15.
template <Codes kCodes>
inline Vector numbers() {
  if constexpr (kCodes == Codes::int4) return code_vector();
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

struct Group {
  Vector scale, minimum, table;  // the values of codes 0 to 15
};

template <Codes kCodes, Dtype kDtype>
inline Group group_of(float scale, float minimum) {
  const Vector all_scale = broadcast(scale), all_minimum = broadcast(minimum);
  return {all_scale, all_minimum, rounded<kDtype>(multiply_add(numbers<kCodes>(), all_scale, all_minimum))};
}

inline __m512i bytes(__m128i p) { return _mm512_cvtepu8_epi32(p); }
inline __m512i bytes(const uint8_t* p) { return bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// e4m3_half_bits of 16 words with E4M3 codes in their upper bytes: the sign is shifted in beside itself.
inline __m256i e4m3_halves(__m256i words) {
  return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}

inline void dequantize_e4m3(const uint8_t* p, Vector& even, Vector& odd) {
  const __m256i both = load_32_bytes(p);
  even = _mm512_cvtph_ps(e4m3_halves(_mm256_slli_epi16(both, 8)));
  odd = _mm512_cvtph_ps(e4m3_halves(both));
}

// A 256th of each positive E4M3 number in bfloat16: lower and upper bytes.
struct E4m3Tables {
  alignas(64) uint8_t lower[128] = {}, upper[128] = {};

  constexpr E4m3Tables() {
    for (int code = 0; code < 128; ++code) {
      int exponent = (code >> 3) + 112, mantissa = (code & 7) << 4;
      if (code > 0 && code < 8) {  // subnormal in E4M3
        for (exponent = 113; mantissa < 128; --exponent) mantissa <<= 1;
      }
      const int bits = code == 0 ? 0 : exponent << 7 | (mantissa & 127);
      lower[code] = static_cast<uint8_t>(bits & 0xff);
      upper[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};

constexpr E4m3Tables kE4m3Tables;

inline __m512i look_up_bytes(const uint8_t* table, __m512i codes) {  // bit 7 does not count
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}

// A 256th of 64 E4M3 numbers in bfloat16: the first half of each 16, then the second. Bytes of two vectors are interleaved
// within 128 bits.
[[gnu::always_inline]] inline void e4m3_words(__m512i codes, __m512i* words) {
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  const __m512i lower = look_up_bytes(kE4m3Tables.lower, codes), sign = _mm512_set1_epi8(-128);
  const __m512i upper = _mm512_ternarylogic_epi32(look_up_bytes(kE4m3Tables.upper, codes), codes, sign, kOrAnd);
  words[0] = _mm512_unpacklo_epi8(lower, upper);
  words[1] = _mm512_unpackhi_epi8(lower, upper);
}

// 64 words in that order.
inline void order_as_e4m3(__m512i& one, __m512i& two) {
  const __m512i first = _mm512_shuffle_i64x2(one, two, 0x88);
  two = _mm512_shuffle_i64x2(one, two, 0xdd);
  one = first;
}

template <Dtype kDtype>
inline Vector from_bytes(__m128i p) {
  if constexpr (kDtype == Dtype::uint8) return _mm512_cvtepi32_ps(bytes(p));
  if constexpr (kDtype == Dtype::e4m3) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(p), 8);
    return _mm512_mul_ps(_mm512_cvtph_ps(e4m3_halves(words)), broadcast(256));
  }
  const Vector power = _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(bytes(p), 23), _mm512_set1_epi32(0x400000)));
  return _mm512_add_ps(power, _mm512_sub_ps(power, power));  // 255 gives infinity, whose difference is not a number
}

template <Dtype kDtype>
inline Vector from_bytes(const char* p) {
  return from_bytes<kDtype>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Vector halves(float low, float high) { return _mm512_mask_blend_ps(0xff00, broadcast(low), broadcast(high)); }

template <Dtype kDtype>
inline Vector dequantize_int8(const uint8_t* p, const Group& group) {
  return rounded<kDtype>(multiply_add(_mm512_cvtepi32_ps(bytes(p)), group.scale, group.minimum));
}

template <Codes, Dtype>
inline void dequantize_nibbles(const uint8_t* p, const Group& group, Vector& even, Vector& odd) {
  const __m512i both = bytes(p);  // only the low four bits of an index count
  even = _mm512_permutexvar_ps(both, group.table);
  odd = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), group.table);
}

inline void split_pairs(Vector one, Vector two, Vector& even, Vector& odd) {
  const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = _mm512_permutex2var_ps(one, places, two);
  odd = _mm512_permutex2var_ps(one, _mm512_add_epi32(places, _mm512_set1_epi32(1)), two);
}

template <Dtype kDtype>
inline Vector from_part(const char* p, int64_t count) {
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (kDtype == Dtype::float32) return _mm512_maskz_loadu_ps(mask, p);
  if constexpr (kDtype >= Dtype::e8m0) return from_bytes<kDtype>(_mm_maskz_loadu_epi8(mask, p));
  const __m256i words = _mm256_maskz_loadu_epi16(mask, p);
  if constexpr (kDtype == Dtype::float16) return _mm512_cvtph_ps(words);
  return from_bfloat16(words);
}

inline void store_float16(char* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bfloat16(char* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

inline Vector max(Vector x, Vector y) { return _mm512_max_ps(x, y); }
inline Vector below(Vector x, float limit, Vector then, Vector otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, broadcast(limit), _CMP_LT_OQ), otherwise, then);
}
inline Vector round(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_two_to(Vector x, Vector whole) { return _mm512_scalef_ps(x, whole); }

inline float max_lane(Vector x) { return _mm512_reduce_max_ps(x); }

// Four sums in each 128-bit lane, of that lane's part of four registers.
inline Vector lane_sums(const Vector* x) {
  const Vector low = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const Vector high = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
}
inline Vector add_lanes(Vector x, Vector y) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
inline void sum_each(const Vector* x, float* to) {
  store(to, add_lanes(add_lanes(lane_sums(x), lane_sums(x + 4)), add_lanes(lane_sums(x + 8), lane_sums(x + 12))));
}

}  // namespace
}  // namespace zero_inference::cpu
