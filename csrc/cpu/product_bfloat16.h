// Weight rows and x as bfloat16, in one term or in two whose sum is exact for float16 (AVX-512 with BF16).

#pragma once

#include "simd_avx512.h"

#include "product_layout.h"
#include "product_vectors.h"

namespace zero_inference::cpu {
namespace {

// To nearest, ties away from zero.
inline Vector round_to_bfloat16(Vector value) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// 32 float32 as bfloat16: rounded (one term), or rounded and the rest (two terms).
template <int kTerms>
inline void to_bfloat16(Vector one, Vector two, __m512i* terms) {
  if constexpr (kTerms == 1) {
    terms[0] = (__m512i)_mm512_cvtne2ps_pbh(two, one);
  } else {
    const Vector upper_one = round_to_bfloat16(one), upper_two = round_to_bfloat16(two);
    terms[0] = (__m512i)_mm512_cvtne2ps_pbh(upper_two, upper_one);
    terms[1] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(two, upper_two), _mm512_sub_ps(one, upper_one));
  }
}

// Destination of a row: bytes from one block of 32 columns to the next, and from a first term to its second.
struct PanelRow {
  char* out;
  int64_t block, term;
};

template <int kTerms>
inline void put(PanelRow to, int64_t block, const __m512i* terms) {
#pragma GCC unroll 2
  for (int term = 0; term < kTerms; ++term) _mm512_storeu_si512(to.out + block * to.block + term * to.term, terms[term]);
}

// One term is rounded by its conversion to bfloat16; two terms hold float16.
template <int kTerms>
inline Vector value_of(Vector code, Vector scale, Vector minimum) {
  const Vector value = multiply_add(code, scale, minimum);
  return kTerms == 2 ? rounded<Dtype::float16>(value) : value;
}

// These write columns [k, k + count) of a row (at most 2048), padded with zeros.

template <int kTerms>
inline void narrow(const float* values, int64_t padded, PanelRow to) {
  for (int64_t i = 0; i < padded; i += 32) {
    __m512i terms[kTerms];
    to_bfloat16<kTerms>(load(values + i), load(values + i + 16), terms);
    put<kTerms>(to, i / 32, terms);
  }
}

inline void copy_bfloat16(const char* p, int64_t count, PanelRow to, const char* next) {
  for (int64_t i = 0; i < count; i += 32) {
    prefetch(next + i * 2);
    const int64_t left = count - i;
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
    const __m512i value = _mm512_maskz_loadu_epi16(mask, p + i * 2);
    put<1>(to, i / 32, &value);
  }
}

// 32 float16 as two terms of 8 and 3 bits, both exact. Column i is beside i + 16, so a shift and one logical operation join two
// vectors.
inline void split_float16_block(__m256i one, __m256i two, PanelRow to, int64_t block) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  constexpr int kAndOr = 0xea;  // (a & b) | c
  const __m512 values[2] = {_mm512_cvtph_ps(one), _mm512_cvtph_ps(two)};
  const __m512i bits[2] = {_mm512_castps_si512(values[0]), _mm512_castps_si512(values[1])};
  __m512i left[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    left[i] = _mm512_castps_si512(_mm512_sub_ps(values[i], _mm512_castsi512_ps(_mm512_and_si512(bits[i], upper))));
  }
  const __m512i terms[2] = {_mm512_ternarylogic_epi32(bits[1], upper, _mm512_srli_epi32(bits[0], 16), kAndOr),
                            _mm512_or_si512(left[1], _mm512_srli_epi32(left[0], 16))};
  put<2>(to, block, terms);
}

inline void split_float16(const char* p, int64_t count, PanelRow to, const char* next) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    prefetch(next + i * 2);
    split_float16_block(load_32_bytes(p + i * 2), load_32_bytes(p + i * 2 + 32), to, i / 32);
  }
  if (i < count) {
    const __m512i halves = _mm512_maskz_loadu_epi16((1u << (count - i)) - 1, p + i * 2);
    split_float16_block(_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64(halves, 1), to, i / 32);
  }
}

template <int kTerms>
inline void bfloat16_of_int8(const Matrix& matrix, int64_t row, int64_t k, int64_t count, PanelRow to, const char* next) {
  const Scales<2048 / 32 + 2> scales(matrix, row, k, count);
  const uint8_t* const codes = reinterpret_cast<const uint8_t*>(values_at(matrix, row, k));
  int64_t left = left_in_group(matrix, k);
  int64_t index = 0;
  for (int64_t i = 0; i < count; i += 32, left -= 32) {
    if (left == 0) {
      ++index;
      left = matrix.group;
    }
    prefetch(next + i);
    const Vector scale = broadcast(scales.scale[index]), minimum = broadcast(scales.minimum[index]);
    __m512i terms[kTerms];
    to_bfloat16<kTerms>(value_of<kTerms>(_mm512_cvtepi32_ps(bytes(codes + i)), scale, minimum),
                        value_of<kTerms>(_mm512_cvtepi32_ps(bytes(codes + i + 16)), scale, minimum), terms);
    put<kTerms>(to, i / 32, terms);
  }
}

// 64 codes by a table of 32 words: 16 values for each half.
template <int kTerms>
inline void look_up(__m256i pairs, Vector one, Vector two, bool halves_differ, PanelRow to, int64_t block) {
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(0x100), 1);
  const __m512i words = _mm512_cvtepu8_epi16(pairs);
  __m512i low = words, high = words;  // bit 4 of an index chooses the half; with equal halves it may be anything
  if (halves_differ) {
    high = _mm512_or_si512(words, second);
    low = _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(15), _mm512_srli_epi16(second, 4), 0xea);  // (a & b) | c
  }
  high = _mm512_srli_epi16(high, 4);
  __m512i tables[kTerms], even[kTerms], odd[kTerms];
  to_bfloat16<kTerms>(one, two, tables);
#pragma GCC unroll 2
  for (int term = 0; term < kTerms; ++term) {
    even[term] = _mm512_permutexvar_epi16(low, tables[term]);
    odd[term] = _mm512_permutexvar_epi16(high, tables[term]);
  }
  put<kTerms>(to, block, even);
  put<kTerms>(to, block + 1, odd);
}

template <int kTerms>
inline void bfloat16_of_int4(const Matrix& matrix, int64_t row, int64_t k, int64_t count, PanelRow to, const char* next) {
  const Scales<2048 / 32 + 2> scales(matrix, row, k, count);
  const char* const codes = values_at(matrix, row, k);
  const Vector code = code_vector();
  if (matrix.group == 32) {
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
      prefetch(next + i / 2);
      const Vector one = value_of<kTerms>(code, broadcast(scales.scale[i / 32]), broadcast(scales.minimum[i / 32]));
      const Vector two = value_of<kTerms>(code, broadcast(scales.scale[i / 32 + 1]), broadcast(scales.minimum[i / 32 + 1]));
      look_up<kTerms>(load_32_bytes(codes + i / 2), one, two, true, to, i / 32);
    }
    if (i < count) {  // the last group, then zeros
      const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
      const Vector one = value_of<kTerms>(code, broadcast(scales.scale[i / 32]), broadcast(scales.minimum[i / 32]));
      look_up<kTerms>(_mm256_zextsi128_si256(last), one, zero(), true, to, i / 32);
    }
    return;
  }
  int64_t left = left_in_group(matrix, k);
  int64_t index = 0;
  for (int64_t i = 0; i < count; i += 64, left -= 64) {
    if (left == 0) {
      ++index;
      left = matrix.group;
    }
    prefetch(next + i / 2);
    const Vector values = value_of<kTerms>(code, broadcast(scales.scale[index]), broadcast(scales.minimum[index]));
    look_up<kTerms>(load_32_bytes(codes + i / 2), values, values, false, to, i / 32);
  }
}

template <int kTerms>
inline void to_bfloat16_panel(const Matrix& matrix, const Layout& layout, int64_t row, int64_t k, int64_t count, int64_t padded,
                              PanelRow to, const char* next) {
  if (matrix.bits != 0 && !layout.vectors) {
    float values[2048];
    dequantize_one_by_one(matrix, row, k, count, padded, values);  // bfloat16 is rounded when it is made
    return narrow<kTerms>(values, padded, to);
  }
  if (matrix.bits == 8) {
    bfloat16_of_int8<kTerms>(matrix, row, k, count, to, next);
  } else if (matrix.bits == 4) {
    bfloat16_of_int4<kTerms>(matrix, row, k, count, to, next);
  } else if constexpr (kTerms == 1) {
    copy_bfloat16(values_at(matrix, row, k), count, to, next);
  } else {
    split_float16(values_at(matrix, row, k), count, to, next);
  }
  const __m512i zeros[2] = {};
  for (int64_t i = layout.pairs == 64 ? round_up(count, 64) : round_up(count, 32); i < padded; i += 32)
    put<kTerms>(to, i / 32, zeros);
}

// 64 elements of x from column k, in the order `pairs` (Layout::pairs); terms [half][term].
template <int kTerms>
inline void bfloat16_input(const char* x, Dtype dtype, int64_t k, int64_t columns, int64_t pairs, __m512i (*terms)[kTerms]) {
  Vector values[4];
  load_two_vectors(x, dtype, k, columns, values[0], values[1]);
  load_two_vectors(x, dtype, k + 32, columns, values[2], values[3]);
  if (pairs == 64) {
    Vector even[2], odd[2];
    split_pairs(values[0], values[1], even[0], odd[0]);
    split_pairs(values[2], values[3], even[1], odd[1]);
    to_bfloat16<kTerms>(even[0], even[1], terms[0]);
    to_bfloat16<kTerms>(odd[0], odd[1], terms[1]);
    return;
  }
  to_bfloat16<kTerms>(values[0], values[1], terms[0]);
  to_bfloat16<kTerms>(values[2], values[3], terms[1]);
  if (pairs == 32) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
    for (int part = 0; part < 2 * kTerms; ++part) {
      __m512i& term = terms[part / kTerms][part % kTerms];
      term = _mm512_permutexvar_epi16(places, term);
    }
  }
}

}  // namespace
}  // namespace zero_inference::cpu
