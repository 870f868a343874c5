// Products of codes with fixed-point x (product_fixed_input.h), in AMX tiles of bytes.
//
// A tile of 16 rows and 64 columns of codes times a tile of x (4 columns a row, up to 16 rows and terms) is a tile of exact
// integer sums, which are scaled in float32 and added to totals. A turn, 128 columns, has four stages: unpack to a
// panel, multiply, store sums, scale. A tile product takes 52 cycles and a load waits for the store before it, so stages of
// different turns are interleaved. int8 codes are multiplied in place.
//
// Scaling takes the most. With up to 8 rows of x both terms share a tile, and with up to 4 two blocks of 64 columns do, as two
// x groups of a block: each has columns of its own and zeros elsewhere, so all products add to one tile, whose shares are added
// at the end. With more rows each term has a tile, and integers are joined before they are scaled.

#pragma once

#include "simd_avx512.h"

#include "product_fixed_input.h"
#include "product_layout.h"
#include "product_tiles.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

// Scratch of a thread. Loads and stores that are close in time lie at different offsets in a page (4K aliasing).
struct FixedScratch {
  char panel[4 * kTileBytes];           // unpacked codes of two turns
  char sums[4 * kTileBytes];            // of a turn
  char copies[4 * kTileBytes];          // of codes that do not fill a turn
  float factors[2][kTileRows][kLanes];  // scales and minima of a strip's rows in the groups of a piece
  float totals[kCodeRows / kTileRows][kTileRows][kLanes];
  int32_t groups[8][kLanes];  // of a piece's packs: which group scales which column
};
static_assert(sizeof(FixedScratch) == kFixedScratchBytes, "product_layout.h has the size");

// At the page offset of the input.
inline FixedScratch& scratch_beside(const char* input, char* memory) {
  return *reinterpret_cast<FixedScratch*>(memory + ((input - memory) & (kPageBytes - 1)));
}

// 64 codes of 4 bits as bytes: even columns, then odd ones.
template <Codes kCodes>
inline void unpack_row(const char* p, char* row) {
  const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
  const __m512i codes = _mm512_srlv_epi32(_mm512_broadcast_i64x4(load_32_bytes(p)), shifts);
  _mm512_store_si512(row, integers<kCodes>(_mm512_and_si512(codes, _mm512_set1_epi8(15))));
}

struct CodeRows {
  const char* rows;
  int64_t stride;
};

constexpr int kBlocks = 2;  // of 64 columns, of a turn
constexpr int kTurn = kBlocks * 64;

// Codes of the next turns, piece by piece; prefetches the next piece.
template <Codes kCodes>
struct Unpacker {
  static constexpr int kBits = bits_of(kCodes);
  static constexpr int64_t kTurnBytes = kTurn * kBits / 8;                       // of a row
  static constexpr int64_t kRowsToPrefetch = kTileRows * 64 / kMaxPieceColumns;  // for, with each 64 columns

  const Matrix& matrix;
  const Pieces& pieces;
  Prefetcher<kMaxPieceColumns, kCodes> prefetcher;
  char* copies;  // of a turn that lacks rows or columns

  int64_t row_bytes = pieces.columns * kBits / 8;
  // The next turn.
  Piece piece = pieces.begin();
  int64_t k = 0, rows = pieces.rows_of(piece);
  const char* codes = values_at(matrix, piece.row, 0);

  Unpacker(const Matrix& matrix, const Pieces& pieces, int64_t end_row, char* copies)
      : matrix(matrix), pieces(pieces), prefetcher(matrix, pieces, end_row), copies(copies) {}

  // Codes of the next turn, at column k; after the last one their values are unused.
  [[gnu::always_inline]] inline CodeRows begin() const {
    if (__builtin_expect(rows == kTileRows && piece.end - k >= kTurn, 1)) return {codes, row_bytes};
    copy();
    return {copies, kTurnBytes};
  }

  // Missing columns and rows are zero: x is zero there, or the results are unused.
  [[gnu::noinline]] void copy() const {
    __builtin_memset(copies, 0, kTileRows * kTurnBytes);
    const int64_t some = piece.end - k < kTurn ? (piece.end - k) * kBits / 8 : kTurnBytes;
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_memcpy(copies + r * kTurnBytes, codes + r * row_bytes, static_cast<size_t>(some));
    }
  }

  [[gnu::always_inline]] inline void prefetch_rows() {
#pragma GCC unroll 4
    for (int64_t r = 0; r < kRowsToPrefetch; ++r) prefetcher.prefetch_row();
  }

  [[gnu::always_inline]] inline void end() {
    codes += kTurnBytes;
    k += kTurn;
    if (__builtin_expect(k >= piece.end, 0)) next_piece();
  }

  [[gnu::noinline]] void next_piece() {
    piece = prefetcher.next_piece();
    k = piece.k;
    rows = 0;
    if (piece.row >= pieces.last) return;
    rows = pieces.rows_of(piece);
    codes = values_at(matrix, piece.row, 0) + k * kBits / 8;
  }
};

// Multiplied in one turn, while the panel is filled anew.
struct Turn {
  CodeRows codes;
  char* panel;
  const char* x;
};

// The next panel with its tiles of x, and x of the one after.
struct Flight {
  char* panel;
  const char *x, *next_x;
};

// Scales of the next sums: columns left in their group or group of each column; steps and sums of x.
struct Scaling {
  const float* at;
  int64_t left;
  const int32_t* groups;
  const char* x_factors;
};

template <Codes kCodes, int kXGroups, int kInputs, int kPack>
struct FixedPass {
  static constexpr int kBits = bits_of(kCodes);
  // A turn has kBlocks / kPack packs, each with kInputs tiles of sums.
  static constexpr int kPanels = kBits == 8 ? 0 : 2;
  static constexpr bool kShared = kPack * kXGroups > 1;  // columns have scales of their own

  using Totals = Vector[kTileRows];
  using Unpacking = Unpacker<kCodes>;

  const Matrix& matrix;
  FixedScratch& scratch;
  Pieces pieces;
  const char* input;      // tiles of x
  const char* x_factors;  // of packs

  FixedPass(const Matrix& matrix, const Layout& layout, FixedScratch& scratch, int64_t first, int64_t last, const char* input)
      : matrix(matrix),
        scratch(scratch),
        pieces{first, last, matrix.columns, kMaxPieceColumns},
        input(input),
        x_factors(input + fixed_tile_bytes(layout)) {}

  [[gnu::noinline]] void convert(const Piece& piece) const {
    convert_rows<true>(matrix, piece.row, pieces.rows_of(piece), groups_in(matrix, piece.k), scratch.factors[0][0],
                       scratch.factors[1][0]);
  }

  // Group of each column of the packs' sums.
  [[gnu::noinline]] void find_groups(const Piece& piece) const {
    constexpr int kParts = kPack * kXGroups, kWidth = kLanes / kParts, kColumns = 64 / kXGroups;
    int64_t left = left_in_group(matrix, piece.k);
    int32_t group = 0;
    for (int64_t i = 0; i < kMaxPieceColumns / kColumns; ++i) {
      for (int64_t lane = 0; lane < kWidth; ++lane) scratch.groups[i / kParts][i % kParts * kWidth + lane] = group;
      left -= kColumns;
      if (left > 0) continue;
      ++group;
      left = matrix.group;
    }
  }

  // Scales and adds the stored sums, and stores those in the pack's tiles.
  template <int kIndex>
  [[gnu::always_inline]] inline void finish(Scaling& scaling, Totals& totals) const {
    char* const sums = scratch.sums + kIndex * kInputs * kTileBytes;
    const Vector step = load(reinterpret_cast<const float*>(scaling.x_factors));
    const Vector x_sum = load(reinterpret_cast<const float*>(scaling.x_factors + 64));
    const __m512i columns = kShared ? _mm512_loadu_si512(scaling.groups) : _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      __m512i sum = _mm512_load_si512(sums + r * 64);
      if constexpr (kInputs == 2)
        sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), _mm512_load_si512(sums + kTileBytes + r * 64));
      const Vector stepped = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), step);
      const float* const at = scaling.at + r * kLanes;
      Vector scale, minimum;
      if constexpr (kShared) {
        scale = _mm512_permutexvar_ps(columns, load(at));
        minimum = _mm512_permutexvar_ps(columns, load(at + kTileRows * kLanes));
      } else {
        scale = broadcast(at[0]);
        minimum = broadcast(at[kTileRows * kLanes]);
      }
      totals[r] = multiply_add(x_sum, minimum, multiply_add(stepped, scale, totals[r]));
    }
    scaling.x_factors += 128;
    if constexpr (kShared) {
      scaling.groups += kLanes;
    } else {
      scaling.left -= 64;
      if (scaling.left == 0) {
        ++scaling.at;
        scaling.left = matrix.group;
      }
    }
    tile_store<kIndex * kInputs>(sums);
    tile_zero<kIndex * kInputs>();
    if constexpr (kInputs == 2) {
      tile_store<kIndex * kInputs + 1>(sums + kTileBytes);
      tile_zero<kIndex * kInputs + 1>();
    }
  }

  // Block kBlock of a turn and the rest.
  template <int kBlock>
  [[gnu::always_inline]] inline void advance(const Turn& turn, Unpacking& unpacker, Scaling& scaling, Totals& totals) const {
    constexpr int kRows = 4 + kBlock % 2, kX = kInputs == 2 ? 6 : 6 + kBlock % 2, kSums = kBlock / kPack * kInputs;
    const char* const x = turn.x + kBlock * kInputs * kTileBytes;
    if constexpr (kBits == 4) {
      tile_load<kRows>(turn.panel + kBlock * kTileBytes);
    } else {
      tile_load<kRows>(turn.codes.rows + kBlock * 64, turn.codes.stride);
    }
    tile_load<kX>(x);
    if constexpr (kInputs == 2) tile_load<7>(x + kTileBytes);
    if constexpr (kBlock % kPack == 0) finish<kBlock / kPack>(scaling, totals);
    tile_multiply_bytes<kSums, kRows, kX>();
    if constexpr (kInputs == 2) tile_multiply_bytes<kSums + 1, kRows, 7>();
    if constexpr (kBits == 4) {
      const char* p = turn.codes.rows + kBlock * 32;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r, p += turn.codes.stride)
        unpack_row<kCodes>(p, turn.panel + kBlock * kTileBytes + r * 64);
    }
    unpacker.prefetch_rows();
    if constexpr (kBlock + 1 < kBlocks) advance<kBlock + 1>(turn, unpacker, scaling, totals);
  }

  const char* x_at(int64_t column) const { return input + column / 64 * kInputs * kTileBytes; }

  [[gnu::always_inline]] inline void multiply_turn(Unpacking& unpacker, Scaling& scaling, Flight& flight,
                                                   Totals& totals) const {
    const char* const x = x_at(unpacker.k);
    const Turn turn = {unpacker.begin(), flight.panel, kPanels == 0 ? x : flight.x};
    advance<0>(turn, unpacker, scaling, totals);
    unpacker.end();
    flight.x = flight.next_x;
    flight.next_x = x;
    if (kPanels == 2) flight.panel = flight.panel == scratch.panel ? scratch.panel + kBlocks * kTileBytes : scratch.panel;
  }

  // Fills the first panels.
  [[gnu::noinline]] Flight begin(Unpacking& unpacker) const {
    const char* x[2] = {input, input};
    for (int i = 0; i < kPanels; ++i) {
      x[i] = x_at(unpacker.k);
      const CodeRows codes = unpacker.begin();
      char* const panel = scratch.panel + i * kBlocks * kTileBytes;
      for (int block = 0; block < kBlocks; ++block) {
        for (int r = 0; r < kTileRows; ++r)
          unpack_row<kCodes>(codes.rows + r * codes.stride + block * 32, panel + block * kTileBytes + r * 64);
        unpacker.prefetch_rows();
      }
      unpacker.end();
    }
    return {scratch.panel, x[0], x[1]};
  }

  // In turn i: adds sums of turn i, stores those of i + 1, multiplies i + 2, unpacks 256 columns ahead. Prefetches up to row
  // `end_row`.
  [[gnu::noinline]] void run(int64_t end_row) const {
    Unpacking unpacker(matrix, pieces, end_row, scratch.copies);
    Flight flight = begin(unpacker);
    Totals totals;
    int before = 2;  // turns that fill the pipeline; their totals are dropped
    int64_t k = -1;
    for (Piece piece = pieces.begin(); piece.row < pieces.last;) {
      if (before == 0) convert(piece);
      if (kShared && piece.k != k) find_groups(piece);
      k = piece.k;
      float* const stored = scratch.totals[(piece.row - pieces.first) / kTileRows][0];
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) totals[r] = piece.k == 0 ? zero() : load(stored + r * kLanes);
      Scaling scaling = {scratch.factors[0][0], left_in_group(matrix, piece.k), scratch.groups[0],
                         x_factors + piece.k / (64 * kPack) * 128};
      for (int64_t turns = before > 0 ? 1 : (piece.end - piece.k + kTurn - 1) / kTurn; turns > 0; --turns) {
        multiply_turn(unpacker, scaling, flight, totals);
      }
      if (before > 0) {
        --before;
        continue;
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) store(stored + r * kLanes, totals[r]);
      piece = pieces.after(piece);
    }
  }
};

template <Codes kCodes, int kXGroups>
void multiply_fixed(const Matrix& matrix, const Layout& layout, FixedScratch& scratch, int64_t first, int64_t last,
                    const char* input, int64_t end_row) {
  if (layout.inputs == 2) return FixedPass<kCodes, kXGroups, 2, 1>(matrix, layout, scratch, first, last, input).run(end_row);
  if constexpr (kXGroups == 1) {
    if (layout.pack == 2) return FixedPass<kCodes, 1, 1, 2>(matrix, layout, scratch, first, last, input).run(end_row);
  }
  FixedPass<kCodes, kXGroups, 1, 1>(matrix, layout, scratch, first, last, input).run(end_row);
}

template <Codes kCodes>
constexpr auto multiply_fixed_of(const Layout& layout) {
  return layout.x_groups == 1 ? multiply_fixed<kCodes, 1> : multiply_fixed<kCodes, 2>;
}

void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* memory) {
  const auto multiply = matrix.codes == Codes::int4   ? multiply_fixed_of<Codes::int4>(layout)
                        : matrix.codes == Codes::e2m1 ? multiply_fixed_of<Codes::e2m1>(layout)
                                                      : multiply_fixed_of<Codes::int8>(layout);
  FixedScratch& scratch = scratch_beside(input, memory);
  tiles_begin();
  const int64_t rows_together = code_rows(matrix);
  for (int64_t row = first; row < last; row += rows_together) {
    const int64_t end = last - row < rows_together ? last : row + rows_together;
    float of_rows[kCodeRows];
    const float* const factors = factors_at_end(matrix, row, end - row, of_rows);
    for (int64_t m = 0; m < count; m += tokens_at_once(layout)) {
      const int64_t some = count - m < tokens_at_once(layout) ? count - m : tokens_at_once(layout);
      multiply(matrix, layout, scratch, row, end, input + m / tokens_at_once(layout) * fixed_input_bytes(layout), last);
      const char* const totals = reinterpret_cast<const char*>(scratch.totals);
      write_out(totals, 1, end - row, some, out + m * stride + row - first, stride, factors, kTileRows / layout.width);
    }
  }
  tiles_end();
}

// Columns [first, last): whole packs.
template <int kBits>
void prepare_fixed_tiles(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                         int64_t last, int64_t columns, char* input) {
  // Rows of a tile in the second x group: 4 bits have even columns in rows 4 to 7, odd ones in 12 to 15.
  const __mmask16 second = layout.x_groups == 1 ? 0 : kBits == 4 ? 0xf0f0 : 0xff00;
  const int64_t beside = layout.inputs == 2 ? 1 : 2;  // terms
  const int64_t x_group_columns = beside * layout.width;
  for (int64_t m = 0; m < count; m += tokens_at_once(layout), input += fixed_input_bytes(layout)) {
    const int64_t tokens = count - m < tokens_at_once(layout) ? count - m : tokens_at_once(layout);
    for (int64_t k = first; k < last; k += 64 * layout.pack) {
      alignas(64) float factors[2][kLanes] = {};
      for (int64_t b = 0; b < layout.pack; ++b) {
        char* const tiles = input + (k / 64 + b) * layout.inputs * kTileBytes;
        __builtin_memset(tiles, 0, static_cast<size_t>(layout.inputs * kTileBytes));
        for (int64_t i = 0; i < tokens; ++i) {
          FixedBlock block;
          fix_block<kBits>(layout, x + (m + i) * stride * bytes_of(x_dtype), x_dtype, k + b * 64, columns, block);
          const int64_t column = b * layout.x_groups * x_group_columns + i;  // of the first x group's upper bytes
          const __m512i places =
              _mm512_mask_add_epi32(tile_column(), second, tile_column(), _mm512_set1_epi32(static_cast<int>(x_group_columns)));
          for (int64_t term = 0; term < 2; ++term) {
            char* const to = tiles + (beside == 2 ? (column + term * layout.width) * 4 : term * kTileBytes + column * 4);
            _mm512_i32scatter_epi32(to, places, _mm512_load_si512(block.terms[term]), 4);
          }
          for (int64_t s = 0; s < layout.x_groups; ++s) {
            const int64_t here = column + s * x_group_columns;
            factors[0][here] = beside == 2 ? 256 * block.steps[s] : block.steps[s];
            if (beside == 2) factors[0][here + layout.width] = block.steps[s];
            factors[1][here] = block.sums[s];
          }
        }
      }
      char* const to = input + fixed_tile_bytes(layout) + k / (64 * layout.pack) * 128;
      __builtin_memcpy(to, factors, sizeof(factors));
    }
  }
}

}  // namespace
}  // namespace zero_inference::cpu
