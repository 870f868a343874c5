// x for products with codes in tiles, in the order in which codes are opened (product_code_open.h). Included by product_amx.cpp
// behind that.

// x for 64 nibbles from nibble k on: terms [half][term].
template <int kTerms>
inline void code_input(const Layout& layout, const char* x, Dtype dtype, int64_t k, int64_t columns, __m512i (*terms)[kTerms]) {
  Vector one, two, even[2], odd[2];
  if (layout.nibbles == 2) {
    two_vectors(x, dtype, k / 2, columns, one, two);
    split_pairs(one, two, even[0], odd[0]);
    to_brain<kTerms>(even[0], _mm512_mul_ps(even[0], broadcast(16)), terms[0]);
    to_brain<kTerms>(odd[0], _mm512_mul_ps(odd[0], broadcast(16)), terms[1]);
  } else if (nibble_order(layout) == 32) {
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

// A tile of pairs, a row of x in each of its columns, from 16 rows of x in 32 columns.
inline void put_pairs(const char* rows, char* tile) {
  const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int64_t pair = 0; pair < 16; ++pair) {
    _mm512_store_si512(tile + pair * 64, _mm512_i32gather_epi32(lanes, rows + pair * 4, 4));
  }
}

// Tiles whose columns are shared by sections or terms (Layout): of so few rows of x that there is one for 32 columns.
template <int kTerms>
void prepare_shared_tiles(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                          int64_t last, int64_t columns, char* input) {
  const int64_t section = section_columns(layout);
  for (int64_t k = first; k < last; k += 64) {
    alignas(64) char rows[2][kTileBytes] = {};
    for (int64_t m = 0; m < count; ++m) {
      __m512i terms[2][kTerms];
      code_input<kTerms>(layout, x + m * stride * bytes_of(x_dtype), x_dtype, k, columns, terms);
      for (int64_t part = 0; part < 2 * kTerms; ++part) {
        const int64_t half = part / kTerms, term = part % kTerms;
        const int64_t place = (k + half * 32) / section % layout.pack * kTerms + term;
        _mm512_store_si512(rows[half] + (place * layout.width + m) * 64, terms[half][term]);
      }
    }
    for (int64_t half = 0; half < 2; ++half) put_pairs(rows[half], input + (k / 32 + half) * kTileBytes);
  }
}

// Sums of the prepared x over packs of sections, in the columns of its tiles a vector: [rows of x, by 16][packs]. Of int8 only
// the lower halves count, which come first in a tile.
inline void prepare_sections(const Layout& layout, int64_t count, int64_t first, int64_t last, char* input) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const int64_t pack = pack_columns(layout), tiles = pack / 32 * layout.terms;
  for (int64_t block = 0; block < (count + kTileRows - 1) / kTileRows; ++block) {
    const char* const x = input + block * (layout.columns / 32) * layout.terms * kTileBytes;
    char* const sums = input + sections_at(layout, count) + block * (layout.columns / pack) * 64;
    for (int64_t k = first; k < last; k += pack) {
      Vector total = zero();
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const char* const pairs = x + (k / 32 * layout.terms + tile) * kTileBytes;
        for (int64_t i = 0; i < kTileBytes / layout.nibbles; i += 64) {
          total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_load_si512(pairs + i), ones);
        }
      }
      store(reinterpret_cast<float*>(sums + k / pack * 64), total);
    }
  }
}
