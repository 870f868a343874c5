// Dequantizes codes to bfloat16 in panels of 32 rows, for AMX tiles.
//
// int4: the 16 values of a group, twice, are a look-up table of 32 words. Index bit 4 is irrelevant then, so a rotation by 0,
// 4, 8 or 12 bits brings each of a word's four nibbles to the index of one of four copies of the word. Of 64 nibbles the first
// vector has the first and then the second nibbles of 16 words, the second vector the third and fourth; of 32 (groups not
// multiples of 64) one vector has the first to fourth of 8 words. x is prepared in this order. int8 is converted in column
// order.

#pragma once

#include "simd_avx512.h"

#include "product_layout.h"

namespace zero_inference::cpu {
namespace {

// 32 float32 rounded to bfloat16.
inline __m512i to_bfloat16(Vector one, Vector two) { return (__m512i)_mm512_cvtne2ps_pbh(two, one); }

constexpr int64_t kBlockStride = 2 * kPanelRows * 64;                    // of the blocks of a panel
constexpr int64_t kMinimaAt = kDequantizedStrips * kPanelRows * kLanes;  // after the scales

// kTables: tables or scales per step of 128 columns: 1 (groups of whole steps), 2 (groups of 64), 4 (one per 32 columns).
template <int kBits, int kTables>
struct RowCodes {
  static constexpr int kUnit = kBits == 4 && kTables < 4 ? 64 : 32;  // columns that are dequantized together
  static constexpr int kUnits = kStep / kUnit;

  struct Group {
    __m512i table;          // of int4
    Vector scale, minimum;  // of int8
  };

  [[gnu::always_inline]] static inline Group group_at(const float* scale) {
    Group group;
    if constexpr (kBits == 4) {
      const Vector values = multiply_add(code_vector(), broadcast(scale[0]), broadcast(scale[kMinimaAt]));
      group.table = to_bfloat16(values, values);
    } else {
      group.scale = broadcast(scale[0]);
      group.minimum = broadcast(scale[kMinimaAt]);
    }
    return group;
  }

  [[gnu::always_inline]] static inline void look_up_words(__m512i words, __m512i counts, __m512i table, char* out) {
    _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_rorv_epi32(words, counts), table));
  }

  // One unit of a row.
  [[gnu::always_inline]] static inline void dequantize(const char* p, const Group& group, char* out) {
    if constexpr (kBits == 8) {
      const uint8_t* const codes = reinterpret_cast<const uint8_t*>(p);
      const Vector one = multiply_add(_mm512_cvtepi32_ps(bytes(codes)), group.scale, group.minimum);
      const Vector two = multiply_add(_mm512_cvtepi32_ps(bytes(codes + 16)), group.scale, group.minimum);
      _mm512_store_si512(out, to_bfloat16(one, two));
    } else if constexpr (kUnit == 32) {
      const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      look_up_words(words, _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), group.table, out);
    } else {
      const __m512i words = _mm512_broadcast_i64x4(load_32_bytes(p));
      look_up_words(words, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4), group.table, out);
      look_up_words(words, _mm512_setr_epi32(8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12), group.table,
                    out + kBlockStride);
    }
  }
};

// Rows of a step, dequantized one by one.
template <int kBits, int kTables>
struct Rows {
  using Parts = RowCodes<kBits, kTables>;

  const char* codes;  // of the row
  int64_t codes_bytes;
  const float* scales;
  char* panel;

  // Columns from `columns` on are zero.
  [[gnu::always_inline]] inline void next(int64_t columns) {
    typename Parts::Group group;
#pragma GCC unroll 4
    for (int unit = 0; unit < Parts::kUnits; ++unit) {
      char* const out = panel + unit * (Parts::kUnit / 32) * kBlockStride;
      if (unit * Parts::kUnit < columns) {
        if (unit * kTables % Parts::kUnits == 0) group = Parts::group_at(scales + unit * kTables / Parts::kUnits);
        Parts::dequantize(codes + unit * Parts::kUnit * kBits / 8, group, out);
      } else {
        for (int i = 0; i < Parts::kUnit / 32; ++i) _mm512_store_si512(out + i * kBlockStride, _mm512_setzero_si512());
      }
    }
    codes += codes_bytes;
    scales += kLanes;
    panel += 64;
  }
};

}  // namespace
}  // namespace zero_inference::cpu
