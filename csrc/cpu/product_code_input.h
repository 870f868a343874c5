// How codes are opened for tiles, and x brought into the order that this gives. Included by product_amx.cpp behind
// product_wide.h.
//
// All is said in nibbles: a row of int8 is one of int4 with twice the columns, in which x[k] stands for the lower half of code
// k, and 16 * x[k] for the upper one.
//
// A nibble c is opened as 16 + c, which is 0x4180 | c << 3: a word of four nibbles is there four times, and each time another
// one of them is turned to its place, so that it takes a turn and a logical operation for 32 nibbles. 128 + c, 0x4300 | c, is
// not cheaper, and the sums, from which the base is taken away again, are 6 times as large.
//
// Of 64 nibbles the first vector has the first nibbles of all 16 words and then the second ones, the second vector the third
// and the fourth ones. Of 32, where groups are not multiples of 64, one vector has the first to the fourth ones of 8 words.

// The base of a code, of one nibble or two.
inline float base_of(const Layout& layout) { return layout.nibbles == 2 ? 16 + 16 * 16 : 16; }

inline __m512i turned(__m512i words, __m512i counts) {
  const __m512i nibbles = _mm512_rorv_epi32(words, counts);
  return _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), 0xea);  // (a & b) | c
}

// 64 nibbles as bfloat16, to a row of two tiles.
template <int kSection>
[[gnu::always_inline]] inline void open_codes(const char* p, char* tiles) {
  if constexpr (kSection == 32) {
    const __m512i counts = _mm512_setr_epi32(29, 29, 29, 29, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 16)));
      _mm512_store_si512(tiles + i * kTileBytes, turned(words, counts));
    }
  } else {
    const __m512i first = _mm512_setr_epi32(29, 29, 29, 29, 29, 29, 29, 29, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i second = _mm512_setr_epi32(5, 5, 5, 5, 5, 5, 5, 5, 9, 9, 9, 9, 9, 9, 9, 9);
    const __m512i words = _mm512_broadcast_i64x4(load_32_bytes(p));
    _mm512_store_si512(tiles, turned(words, first));
    _mm512_store_si512(tiles + kTileBytes, turned(words, second));
  }
}

// The last 32 of a row.
inline void open_last_codes(const char* p, char* tile) {
  char codes[32] = {};
  __builtin_memcpy(codes, p, 16);
  open_codes<32>(codes, tile);
}

// x for 64 nibbles from nibble k on: terms [half][term].
template <int kTerms>
inline void code_input(const Layout& layout, const char* x, Dtype dtype, int64_t k, int64_t columns, __m512i (*terms)[kTerms]) {
  Vector one, two, even[2], odd[2];
  if (layout.nibbles == 2) {
    two_vectors(x, dtype, k / 2, columns, one, two);
    split_pairs(one, two, even[0], odd[0]);
    to_brain<kTerms>(even[0], _mm512_mul_ps(even[0], broadcast(16)), terms[0]);
    to_brain<kTerms>(odd[0], _mm512_mul_ps(odd[0], broadcast(16)), terms[1]);
  } else if (section_columns(layout) == 32) {
    const __m512i low = _mm512_setr_epi32(0x40000, 0xc0008, 0x140010, 0x1c0018, 0x50001, 0xd0009, 0x150011, 0x1d0019, 0x60002,
                                          0xe000a, 0x160012, 0x1e001a, 0x70003, 0xf000b, 0x170013, 0x1f001b);
    for (int half = 0; half < 2; ++half) {
      two_vectors(x, dtype, k + half * 32, columns, one, two);
      to_brain<kTerms>(one, two, terms[half]);
      for (int term = 0; term < kTerms; ++term) terms[half][term] = _mm512_permutexvar_epi16(low, terms[half][term]);
    }
  } else {
    Vector place[4];  // by place in a word
    for (int half = 0; half < 2; ++half) {
      two_vectors(x, dtype, k + half * 32, columns, one, two);
      split_pairs(one, two, even[half], odd[half]);
    }
    split_pairs(even[0], even[1], place[0], place[2]);
    split_pairs(odd[0], odd[1], place[1], place[3]);
    to_brain<kTerms>(place[0], place[1], terms[0]);
    to_brain<kTerms>(place[2], place[3], terms[1]);
  }
}

// Sums of the prepared x over sections, of 16 rows of x a vector: [rows of x, by 16][sections]. Of int8 only the lower halves
// count, which come first in a tile.
template <int kTerms>
void prepare_sections(const Layout& layout, int64_t count, int64_t first, int64_t last, char* input) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const int64_t section = section_columns(layout), tiles = section / 32 * kTerms;
  for (int64_t block = 0; block < (count + kTileRows - 1) / kTileRows; ++block) {
    const char* const x = input + block * (layout.columns / 32) * kTerms * kTileBytes;
    char* const sums = input + sections_at(layout, count) + block * (layout.columns / section) * 64;
    for (int64_t k = first; k < last; k += section) {
      Vector total = zero();
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const char* const pairs = x + (k / 32 * kTerms + tile) * kTileBytes;
        for (int64_t i = 0; i < kTileBytes / layout.nibbles; i += 64) {
          total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_load_si512(pairs + i), ones);
        }
      }
      store(reinterpret_cast<float*>(sums + k / section * 64), total);
    }
  }
}
