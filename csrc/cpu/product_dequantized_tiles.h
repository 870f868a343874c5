// Products of codes dequantized to bfloat16, in AMX tiles.
//
// Sums of all groups stay in one tile and are stored once a piece. A step of 128 columns is dequantized into one panel while
// the step before is multiplied from the other: a fourth of the products of 32 columns, then two rows, so that neither waits.
// Four tiles hold the sums of a piece; with more than 32 rows of x they are loaded and stored for each step. With up to 4 or 8
// rows of x its tiles have only as many columns, because they are loaded from L2.
//
// 4 bits: the 16 values of a group, twice, are a look-up table of 32 words. Index bit 4 is irrelevant then, so a rotation by 0,
// 4, 8 or 12 bits brings each of a word's four nibbles to the index of one of four copies of the word. Of 64 nibbles the first
// vector has the first and then the second nibbles of 16 words, the second vector the third and fourth; of 32 (groups not
// multiples of 64) one vector has the first to fourth of 8 words. x is prepared in this order. With groups of 16 the table has
// the values of two groups, and index bit 4 says whose word it is. Bytes are converted in column order. E2M1 numbers times an
// 8-bit scale are exact in bfloat16: tables are looked up by the scale, and factors of rows follow at the end.
//
// E4M3 numbers are looked up (e4m3_words) and their sums scaled: those of a row, or, with scales of blocks, of each step. With
// up to 8 rows of x two steps have columns of their own in a tile of sums, with up to 4 four (Layout::pack), so that they are
// scaled together.

#pragma once

#include "simd_avx512.h"

#include "product_layout.h"
#include "product_tiles.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

// 32 float32 rounded to bfloat16.
inline __m512i to_bfloat16(Vector one, Vector two) { return (__m512i)_mm512_cvtne2ps_pbh(two, one); }

// E2M1 numbers times each 8-bit scale.
struct ScaledE2m1 {
  alignas(64) uint16_t bits[256][16] = {};

  // bfloat16 of part * 2^exponent, rounded to zero below its normal numbers; part < 256.
  static constexpr int to_bfloat16_bits(int part, int exponent) {
    if (part == 0) return 0;
    for (exponent += 134; part < 128; --exponent) part <<= 1;
    return exponent <= 0 ? 0 : exponent >= 255 ? 0x7f80 : exponent << 7 | (part & 127);
  }

  explicit constexpr ScaledE2m1(bool e4m3) {
    constexpr int kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int scale = 0; scale < 256; ++scale) {
      const int field = scale >> 3 & 15, part = !e4m3 ? 1 : field > 0 ? (scale & 7) + 8 : scale & 7;
      const int exponent = !e4m3 ? scale - 127 : (field > 0 ? field : 1) - 10;
      const bool nan = !e4m3 && scale == 255;  // E4M3 that is no number counts as 480, as elsewhere
      for (int code = 0; code < 16; ++code) {
        const int sign = (code >> 3 ^ (e4m3 ? scale >> 7 : 0)) << 15;
        bits[scale][code] =
            static_cast<uint16_t>(nan ? 0x7fc0 : sign | to_bfloat16_bits(part * kTwice[code & 7], exponent - 1));
      }
    }
  }
};

constexpr ScaledE2m1 kE2m1TimesE4m3(true), kE2m1TimesE8m0(false);

constexpr int64_t kBlockStride = 2 * kPanelRows * 64;  // of the blocks of a panel
constexpr int64_t kMinimaAt = kPanelRows * kLanes;     // after the scales

// kTables: tables or scales per step of 128 columns: 0 (E4M3), 1 (groups of whole steps), 2 (groups of 64), 4 (one per 32
// columns), 8 (groups of 16, two in a table). E2M1 has 4, with E8M0 scales, or 8, with E4M3 scales.
template <Codes kCodes, int kTables>
struct RowCodes {
  static constexpr int kBits = bits_of(kCodes);
  static constexpr int kUnit = kTables < 4 ? 64 : 32;  // columns that are dequantized together
  static constexpr int kUnits = kStep / kUnit;

  struct Group {
    __m512i table;          // of 4 bits
    Vector scale, minimum;  // of bytes
  };

  [[gnu::always_inline]] static inline Group group_at(const char* from) {
    Group group;
    const float* const scale = reinterpret_cast<const float*>(from);
    if constexpr (kCodes == Codes::e2m1) {
      const auto& tables = kTables == 8 ? kE2m1TimesE4m3.bits : kE2m1TimesE8m0.bits;
      const __m256i first = load_32_bytes(tables[static_cast<uint8_t>(from[0])]);
      group.table = _mm512_broadcast_i64x4(first);
      if constexpr (kTables == 8)
        group.table = _mm512_inserti64x4(group.table, load_32_bytes(tables[static_cast<uint8_t>(from[1])]), 1);
    } else if constexpr (kBits == 4) {
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
    if constexpr (kTables == 0) {
      __m512i words[2];
      e4m3_words(_mm512_loadu_si512(p), words);
      _mm512_store_si512(out, words[0]);
      _mm512_store_si512(out + kBlockStride, words[1]);
    } else if constexpr (kBits == 8) {
      const uint8_t* const codes = reinterpret_cast<const uint8_t*>(p);
      const Vector one = multiply_add(_mm512_cvtepi32_ps(bytes(codes)), group.scale, group.minimum);
      const Vector two = multiply_add(_mm512_cvtepi32_ps(bytes(codes + 16)), group.scale, group.minimum);
      _mm512_store_si512(out, to_bfloat16(one, two));
    } else if constexpr (kUnit == 32) {
      __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m512i counts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
      if constexpr (kTables == 8) {
        constexpr int kAndOr = 0xea;  // (a & b) | c
        const __m512i nibbles = _mm512_set1_epi32(0xf000f),
                      second = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0x100010, 0x100010));
        words = _mm512_ternarylogic_epi32(_mm512_rorv_epi32(words, counts), nibbles, second, kAndOr);
        _mm512_store_si512(out, _mm512_permutexvar_epi16(words, group.table));
      } else {
        look_up_words(words, counts, group.table, out);
      }
    } else {
      const __m512i words = _mm512_broadcast_i64x4(load_32_bytes(p));
      look_up_words(words, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4), group.table, out);
      look_up_words(words, _mm512_setr_epi32(8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12), group.table,
                    out + kBlockStride);
    }
  }
};

// Rows of a step, dequantized one by one.
template <Codes kCodes, int kTables>
struct Rows {
  using Parts = RowCodes<kCodes, kTables>;
  static constexpr int64_t kScaleBytes = kCodes == Codes::e2m1 ? 1 : 4;

  const char* codes;  // of the row
  int64_t codes_bytes;
  const char* scales;
  int64_t scales_bytes;  // of a row
  char* panel;

  // Columns from `columns` on are zero.
  [[gnu::always_inline]] inline void next(int64_t columns) {
    typename Parts::Group group;
#pragma GCC unroll 4
    for (int unit = 0; unit < Parts::kUnits; ++unit) {
      char* const out = panel + unit * (Parts::kUnit / 32) * kBlockStride;
      if (unit * Parts::kUnit < columns) {
        if (kTables > 0 && unit * kTables % Parts::kUnits == 0)
          group = Parts::group_at(scales + unit * kTables / Parts::kUnits * kScaleBytes);
        Parts::dequantize(codes + unit * Parts::kUnit * Parts::kBits / 8, group, out);
      } else {
        for (int i = 0; i < Parts::kUnit / 32; ++i) _mm512_store_si512(out + i * kBlockStride, _mm512_setzero_si512());
      }
    }
    codes += codes_bytes;
    scales += scales_bytes;
    panel += 64;
  }
};

struct DequantizedScratch {
  // Of a step. The two panels differ in the low 12 bits of their addresses (kTermStride).
  char panels[kStep / 32][2][kPanelRows * 64];
  // Scales of each row, converted for several pieces; of E4M3 those of the steps that are added together.
  float scales[kPanelRows][kLanes];
  float minima[kPanelRows][kLanes];
  char totals[2][kSumsBytes];  // by pair of tiles of x
  char sums[2][kSumsBytes];    // of a step whose sums are scaled, likewise
};
static_assert(kPanelRows == kCodeRows, "a pass has one strip of rows");
static_assert(sizeof(DequantizedScratch) == kDequantizedScratchBytes, "product_layout.h has the size");

constexpr int64_t kDequantizedTokens = 2 * 2 * kTileRows;  // rows of x

// A step to multiply.
struct Dequantized {
  const char *panel, *x;
  Begin begin;
  bool ends;    // its sums are stored
  bool second;  // it has more rows than a tile
  bool first;   // no totals to add its scaled sums to
};

// kCodeRows rows of the weight, up to four tiles of x.
template <int kInputTiles, Codes kCodes, int kTables>
struct DequantizedPass {
  static constexpr int kBits = bits_of(kCodes);
  static constexpr int kPairs = (kInputTiles + 1) / 2;  // of tiles of x
  static constexpr int tiles_of(int pair) { return kInputTiles - 2 * pair >= 2 ? 2 : 1; }
  static constexpr int64_t kScalesColumns = 32 * kLanes;  // whose scales a vector has
  static constexpr int64_t kPieceColumns = kDequantizedColumns / kPairs;
  static constexpr int kPrefetchesInBlock = kPanelRows * kStep / kPieceColumns / (4 * kPairs);

  using Prefetching = Prefetcher<kPieceColumns, kCodes>;
  using StepRows = Rows<kCodes, kTables>;

  const Matrix& matrix;
  const Layout& layout;
  DequantizedScratch& scratch;
  Pieces pieces;
  const char* input;  // its tiles, `input_stride` bytes apart

  int64_t x_row_bytes = tile_row_bytes(layout);
  int64_t x_tile_bytes = kTileRows * x_row_bytes;
  int64_t input_stride = layout.columns / 32 * x_tile_bytes;
  bool scales_steps = kTables == 0 && row_groups(matrix) > 1;
  bool one_scale =  // for all rows
      matrix.row_scales == nullptr && pieces.first / matrix.group_rows == (pieces.last - 1) / matrix.group_rows;
  int64_t scales_stride = one_scale ? 0 : kLanes;

  DequantizedPass(const Matrix& matrix, const Layout& layout, DequantizedScratch& scratch, int64_t first, int64_t last,
                  const char* input)
      : matrix(matrix),
        layout(layout),
        scratch(scratch),
        pieces{first, last, matrix.columns, kPieceColumns, kPanelRows},
        input(input) {}

  // Group index, from that of `column`, of 16 blocks of 32 columns.
  __m512i groups_from(int64_t column) const {
    const int64_t before = matrix.group - left_in_group(matrix, column);
    const Vector middle = _mm512_add_ps(code_vector(), broadcast(static_cast<float>(before / 32) + 0.5f));
    return _mm512_cvttps_epi32(_mm512_div_ps(middle, broadcast(static_cast<float>(matrix.group / 32))));
  }

  void convert(const Piece& piece) const {
    if constexpr (kTables == 0 || kCodes == Codes::e2m1) return;
    const __m512i groups_of_blocks = groups_from(piece.k);
    const bool spread = kTables == 4 && matrix.group != 32;  // to 16 blocks of 32 columns
    float* const to = scratch.scales[0];
    convert_rows<false>(matrix, piece.row, pieces.rows_of(piece), groups_in(matrix, piece.k), to, to + kMinimaAt,
                        spread ? &groups_of_blocks : nullptr);
  }

  StepRows rows_at(const Piece& step, int panel) const {
    const char* const codes = values_at(matrix, step.row, 0) + step.k * kBits / 8;
    const char* scales;
    int64_t scales_bytes;
    if constexpr (kCodes == Codes::e2m1) {
      scales_bytes = row_groups(matrix);
      scales = static_cast<const char*>(matrix.scales) + step.row * scales_bytes + groups_in(matrix, step.k);
    } else {
      const int64_t first = step.k / kScalesColumns * kScalesColumns;
      const int64_t scale =
          kTables > 1 ? (step.k - first) / (kStep / kTables) : groups_in(matrix, step.k) - groups_in(matrix, first);
      scales_bytes = kVectorBytes;
      scales = reinterpret_cast<const char*>(scratch.scales[0] + scale);
    }
    return {codes, matrix.columns * kBits / 8, scales, scales_bytes, scratch.panels[0][panel]};
  }

  // A fourth of a block's products, and its share of kRows rows to dequantize.
  template <int kTiles, int kPart, int kRows>
  [[gnu::always_inline]] inline void advance(bool second, const char* block, const char* x, StepRows& rows,
                                             Prefetching& prefetcher) const {
    constexpr int kRowsInBlock = kRows / (kStep / 32 * kPairs);
    multiply_part<kTiles, kPart, true>(second, block, x, input_stride, x_row_bytes);
    if constexpr (kRows > 0) {
#pragma GCC unroll 2
      for (int r = kRowsInBlock * kPart / 4; r < kRowsInBlock * (kPart + 1) / 4; ++r) rows.next(kStep);
      if constexpr (kPart * kPrefetchesInBlock % 4 == 0) prefetcher.prefetch_row();
    }
  }

  int64_t place_of(const Piece& step) const { return step.k / kStep & (layout.pack - 1); }

  // Adds the stored sums of a step, or of several.
  template <int kPair>
  [[gnu::noinline]] void add_scaled(const Dequantized& step) const {
    const char* sums = scratch.sums[kPair];
    char* totals = scratch.totals[kPair];
    const __mmask16 added = step.first ? 0 : 0xffff;  // to what is there
    for (int tile = 0; tile < (step.second ? 4 : 2); ++tile, sums += kTileBytes, totals += kTileBytes) {
      if (tile % 2 >= tiles_of(kPair)) continue;
      const float* const scales = scratch.scales[0] + tile / 2 * kTileRows * scales_stride;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        float* const total = reinterpret_cast<float*>(totals) + r * kLanes;
        const Vector sum = load(reinterpret_cast<const float*>(sums) + r * kLanes);
        store(total, multiply_add(sum, load(scales + r * scales_stride), _mm512_maskz_loadu_ps(added, total)));
      }
    }
  }

  // Scales of a step, in its columns of a tile of sums: of each row, or one for all. The first step fills all columns, because
  // the last steps of a row may be fewer.
  [[gnu::noinline]] void take_scales(const Piece& step) const {
    const int64_t group = groups_in(matrix, step.k), width = layout.width, place = place_of(step) * width;
    const __mmask16 columns = static_cast<__mmask16>(place == 0 ? 0xffff : ((1 << width) - 1) << place);
    for (int64_t r = 0; r < (one_scale ? 1 : pieces.rows_of(step)); ++r) {
      _mm512_mask_storeu_ps(scratch.scales[r], columns, broadcast(e4m3_scale(matrix, step.row + r, group)));
    }
  }

  template <int kPair, int kRows>
  [[gnu::always_inline]] inline void multiply(const Dequantized& step, StepRows& rows, Prefetching& prefetcher) const {
    constexpr int kTiles = tiles_of(kPair);
    char* const sums = scales_steps ? scratch.sums[kPair] : scratch.totals[kPair];
    const char* block = step.panel;
    const char* x = step.x + 2 * kPair * input_stride;
    step.second ? begin_sums<2, kTiles>(step.begin, sums) : begin_sums<1, kTiles>(step.begin, sums);
    for (int i = 0; i < kStep / 32; ++i, block += kBlockStride, x += x_tile_bytes) {
      advance<kTiles, 0, kRows>(step.second, block, x, rows, prefetcher);
      advance<kTiles, 1, kRows>(step.second, block, x, rows, prefetcher);
      advance<kTiles, 2, kRows>(step.second, block, x, rows, prefetcher);
      advance<kTiles, 3, kRows>(step.second, block, x, rows, prefetcher);
    }
    if (!step.ends) return;
    step.second ? store_sums<2, kTiles>(sums) : store_sums<1, kTiles>(sums);
    if (scales_steps) add_scaled<kPair>(step);
  }

  template <int kRows>
  [[gnu::noinline]] void multiply(const Dequantized& step, StepRows rows, Prefetching& prefetcher) const {
    multiply<0, kRows>(step, rows, prefetcher);
    if constexpr (kPairs == 2) multiply<1, kRows>(step, rows, prefetcher);
  }

  // Partial steps, or nothing to multiply yet.
  [[gnu::noinline]] void dequantize(const Piece& step, StepRows rows) const {
    for (int64_t r = 0; r < pieces.rows_of(step); ++r) rows.next(step.end - step.k);
  }

  Dequantized dequantized(const Piece& step, int64_t first_column, int panel) const {
    const bool zero = scales_steps ? place_of(step) == 0 : step.k == 0;
    const bool load = (step.k == first_column && !scales_steps) || kPairs == 2;
    const bool last = step.k + kStep >= matrix.columns || place_of(step) == layout.pack - 1;  // of those scaled together
    if (scales_steps) take_scales(step);
    return {scratch.panels[0][panel],
            input + step.k / 32 * x_tile_bytes,
            zero   ? Begin::zero
            : load ? Begin::load
                   : Begin::keep,
            scales_steps ? last : step.end - step.k <= kStep || kPairs == 2,
            pieces.rows_of(step) > kTileRows,
            step.k < kStep * layout.pack};
  }

  // Prefetches up to row `end_row`.
  [[gnu::noinline]] void run(int64_t end_row) const {
    Prefetching prefetcher(matrix, pieces, end_row);
    Piece step = pieces.begin();  // of which columns [k, k + kStep) are in a panel
    int64_t first_column = 0;     // of its piece
    int panel = 0;
    convert(step);
    dequantize(step, rows_at(step, panel));
    while (step.row < pieces.last) {
      const Dequantized now = dequantized(step, first_column, panel);
      panel = 1 - panel;
      step.k += kStep;
      if (step.k >= step.end) {
        step = prefetcher.next_piece();
        first_column = step.k;
      }
      const bool more = step.row < pieces.last;
      if (more && step.k % kScalesColumns == 0) convert(step);
      const StepRows rows = more ? rows_at(step, panel) : StepRows{};
      const int64_t whole = more && step.end - step.k >= kStep ? pieces.rows_of(step) : 0;
      if (whole == kPanelRows) {
        multiply<kPanelRows>(now, rows, prefetcher);
      } else if (whole == kTileRows) {
        multiply<kTileRows>(now, rows, prefetcher);
      } else {
        multiply<0>(now, rows, prefetcher);
        if (more) dequantize(step, rows);
      }
    }
  }
};

template <int kInputTiles>
void multiply_dequantized(const Matrix& matrix, const Layout& layout, DequantizedScratch& scratch, int64_t first, int64_t last,
                          const char* input, int64_t end_row) {
  const auto run = [&](auto codes, auto tables) {
    DequantizedPass<kInputTiles, codes.value, tables.value>(matrix, layout, scratch, first, last, input).run(end_row);
  };
  if (matrix.codes == Codes::int8) return run(Constant<Codes::int8>{}, Constant<4>{});
  if (matrix.codes == Codes::e4m3) return run(Constant<Codes::e4m3>{}, Constant<0>{});
  if (matrix.codes == Codes::e2m1) {
    constexpr Constant<Codes::e2m1> kE2m1{};
    return matrix.group == 16 ? run(kE2m1, Constant<8>{}) : run(kE2m1, Constant<4>{});
  }
  constexpr Constant<Codes::int4> kInt4{};
  if (layout.pairs == 32) return run(kInt4, Constant<4>{});
  matrix.group == 64 ? run(kInt4, Constant<2>{}) : run(kInt4, Constant<1>{});
}

void product_of_dequantized(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                            int64_t last, float* out, int64_t stride, char* memory) {
  DequantizedScratch& scratch = *reinterpret_cast<DequantizedScratch*>(memory);
  tiles_begin(tile_row_bytes(layout));
  const int64_t rows_together = code_rows(matrix);
  for (int64_t row = first; row < last; row += rows_together) {
    const int64_t end = last - row < rows_together ? last : row + rows_together;
    const int64_t most = count > 2 * kTileRows && without(kFourInputTiles) ? 2 * kTileRows : kDequantizedTokens;
    for (int64_t m = 0; m < count; m += most) {
      const int64_t some = count - m < most ? count - m : most;
      const auto multiply = some <= 16   ? multiply_dequantized<1>
                            : some <= 32 ? multiply_dequantized<2>
                            : some <= 48 ? multiply_dequantized<3>
                                         : multiply_dequantized<4>;
      multiply(matrix, layout, scratch, row, end, input + m * layout.columns * 2, last);
      float of_rows[kPanelRows];
      const float* const factors = factors_at_end(matrix, row, end - row, of_rows);
      for (int64_t i = 0; i < some; i += 2 * kTileRows) {
        const char* const sums = scratch.totals[i / (2 * kTileRows)];
        const int64_t tokens = some - i < 2 * kTileRows ? some - i : 2 * kTileRows;
        write_out(sums, 2, end - row, tokens, out + (m + i) * stride + row - first, stride, factors, layout.pack);
      }
    }
  }
  tiles_end();
}

}  // namespace
}  // namespace zero_inference::cpu
