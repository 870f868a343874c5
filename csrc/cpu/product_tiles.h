// Tile instructions of AMX, sums in four tiles, and strips of codes.
//
// With ZERO_INFERENCE_EMULATED_TILES they are plain C++ for tests on processors without AMX: slow, same results.

#pragma once

#include "simd_avx512.h"

#include "product_layout.h"
#include "product_vectors.h"

namespace zero_inference::cpu {
namespace {

// Operand of ldtilecfg.
struct alignas(64) TileShapes {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "the operand of ldtilecfg has 64 bytes");

#if !defined(ZERO_INFERENCE_EMULATED_TILES)

// Tiles of 16 rows: of 64 bytes in tiles 4 and 5 (the weight), of `x_row_bytes` in the others (x and sums).
inline void tiles_begin(int64_t x_row_bytes = 64) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = tile == 4 || tile == 5 ? 64 : static_cast<uint16_t>(x_row_bytes);
    shapes.rows[tile] = 16;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

// Else the system saves the tiles at each context switch.
inline void tiles_end() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// 16 rows. "memory" keeps earlier stores before the load.
template <int kTile>
inline void tile_load(const char* p, int64_t stride = 64) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(char* p) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(static_cast<int64_t>(64)), "i"(kTile) : "memory");
}

// sums[i][j] += sum_p rows[i][2p] * pairs[p][2j] + rows[i][2p + 1] * pairs[p][2j + 1]; AT&T syntax reverses the operands.
template <int kSums, int kRowTile, int kPairs>
inline void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRowTile), "i"(kPairs));
}

// sums[i][j] += sum over p and b < 4 of rows[i][4p + b] * x[p][4j + b]; rows unsigned, x signed.
template <int kSums, int kRowTile, int kX>
inline void tile_multiply_bytes() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRowTile), "i"(kX));
}

#else

struct EmulatedTile {
  char bytes[1024];
};
thread_local EmulatedTile tiles[8];
thread_local size_t row_bytes_of_x = 0;  // 0: not configured

inline size_t row_bytes_of(int tile) {
  if (row_bytes_of_x == 0) __builtin_trap();
  return tile == 4 || tile == 5 ? 64 : row_bytes_of_x;
}

inline void tiles_begin(int64_t x_row_bytes = 64) { row_bytes_of_x = static_cast<size_t>(x_row_bytes); }
inline void tiles_end() {
  row_bytes_of_x = 0;
  __builtin_memset(tiles, 0x7f, sizeof(tiles));
}

template <int kTile>
inline void tile_zero() {
  __builtin_memset(tiles[kTile].bytes, 0, 1024);
}

template <int kTile>
inline void tile_load(const char* p, int64_t stride = 64) {
  __builtin_memset(tiles[kTile].bytes, 0, 1024);
  for (int64_t row = 0; row < 16; ++row) {
    __builtin_memcpy(tiles[kTile].bytes + row * 64, p + row * stride, row_bytes_of(kTile));
  }
}

template <int kTile>
inline void tile_store(char* p) {
  for (int64_t row = 0; row < 16; ++row) __builtin_memcpy(p + row * 64, tiles[kTile].bytes + row * 64, row_bytes_of(kTile));
}

inline float bfloat16_at(const EmulatedTile& tile, int row, int column) {
  uint16_t bits;
  __builtin_memcpy(&bits, tile.bytes + row * 64 + column * 2, 2);
  return bfloat16_value(bits);
}

template <typename Sum, typename Add>
inline void add_to_sums(EmulatedTile& sums, const Add& add) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      Sum sum;
      __builtin_memcpy(&sum, sums.bytes + i * 64 + j * 4, 4);
      add(i, j, sum);
      __builtin_memcpy(sums.bytes + i * 64 + j * 4, &sum, 4);
    }
  }
}

template <int kSums, int kRowTile, int kPairs>
inline void tile_multiply() {
  add_to_sums<float>(tiles[kSums], [](int i, int j, float& sum) {
    for (int k = 0; k < 32; ++k) sum += bfloat16_at(tiles[kRowTile], i, k) * bfloat16_at(tiles[kPairs], k / 2, 2 * j + k % 2);
  });
}

template <int kSums, int kRowTile, int kX>
inline void tile_multiply_bytes() {
  add_to_sums<int32_t>(tiles[kSums], [](int i, int j, int32_t& sum) {
    for (int k = 0; k < 64; ++k) {
      const int code = static_cast<uint8_t>(tiles[kRowTile].bytes[i * 64 + k]);
      sum += code * static_cast<int8_t>(tiles[kX].bytes[k / 4 * 64 + j * 4 + k % 4]);
    }
  });
}

#endif

constexpr int64_t kSumsBytes = 4 * kTileBytes;  // of two tiles of rows and two of x

enum class Begin { zero, keep, load };

// Tiles 0 to 3: first 16 rows of the weight times first and second tile of x, then the next 16 rows.
template <int kRowTiles, int kInputTiles>
inline void begin_sums(Begin begin, const char* sums) {
  if (begin == Begin::zero) {
    tile_zero<0>();
    if constexpr (kInputTiles == 2) tile_zero<1>();
    if constexpr (kRowTiles == 2) tile_zero<2>();
    if constexpr (kRowTiles == 2 && kInputTiles == 2) tile_zero<3>();
  } else if (begin == Begin::load) {
    tile_load<0>(sums);
    if constexpr (kInputTiles == 2) tile_load<1>(sums + kTileBytes);
    if constexpr (kRowTiles == 2) tile_load<2>(sums + 2 * kTileBytes);
    if constexpr (kRowTiles == 2 && kInputTiles == 2) tile_load<3>(sums + 3 * kTileBytes);
  }
}

template <int kRowTiles, int kInputTiles>
inline void store_sums(char* sums) {
  tile_store<0>(sums);
  if constexpr (kInputTiles == 2) tile_store<1>(sums + kTileBytes);
  if constexpr (kRowTiles == 2) tile_store<2>(sums + 2 * kTileBytes);
  if constexpr (kRowTiles == 2 && kInputTiles == 2) tile_store<3>(sums + 3 * kTileBytes);
}

// A fourth of the products of a block of 32 columns: tiles 4 and 5 are rows of the weight (`second`: two tiles), 6 and 7 x,
// which may be loaded already; tile 7 has rows of 64 bytes.
template <int kInputTiles, int kPart, bool kLoadInput>
inline void multiply_part(bool second, const char* rows, const char* x, int64_t x_stride, int64_t x_row_bytes = 64) {
  if constexpr (kPart == 0) {
    if constexpr (kLoadInput) tile_load<6>(x, x_row_bytes);
    tile_load<4>(rows);
    tile_multiply<0, 4, 6>();
  } else if constexpr (kPart == 1) {
    if (!second) return;
    tile_load<5>(rows + kTileBytes);
    tile_multiply<2, 5, 6>();
  } else if constexpr (kInputTiles == 2 && kPart == 2) {
    if constexpr (kLoadInput) tile_load<7>(x + x_stride);
    tile_multiply<1, 4, 7>();
  } else if constexpr (kInputTiles == 2) {
    if (second) tile_multiply<3, 5, 7>();
  }
}

// Indices of the first column of a tile's 4-byte elements.
inline __m512i tile_column() {
  return _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
}

// The scale of a row's E4M3 numbers as e4m3_words returns them.
inline float e4m3_scale(const Matrix& matrix, int64_t row, int64_t group) {
  const float factor = row_factor(matrix, row) * 256;
  if (matrix.scales == nullptr) return factor;
  const int64_t at = (matrix.group_rows == 1 ? row : row / matrix.group_rows) * row_groups(matrix) + group;
  return element(matrix.scales, matrix.scale_dtype, at) * factor;
}

// Factors of rows [first, first + rows) that their codes were not scaled with, or null.
inline const float* factors_at_end(const Matrix& matrix, int64_t first, int64_t rows, float* factors) {
  const bool e4m3 = matrix.codes == Codes::e4m3 && row_groups(matrix) == 1;
  if (!e4m3 && (matrix.codes != Codes::e2m1 || scale_form(matrix) != ScaleForm::e4m3)) return nullptr;
  for (int64_t r = 0; r < rows; ++r) factors[r] = e4m3 ? e4m3_scale(matrix, first + r, 0) : row_factor(matrix, first + r);
  return factors;
}

// A column of a tile is part of a row of `out`; with `pack` shares beside each other, which are added. `x_tiles` beside each
// other belong to the same rows of the weight. `factors` of these rows, where not null.
void write_out(const char* sums, int64_t x_tiles, int64_t rows, int64_t count, float* out, int64_t stride,
               const float* factors = nullptr, int64_t pack = 1) {
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int64_t left = rows - row;
    const __mmask16 mask = static_cast<__mmask16>(left >= kTileRows ? 0xffff : (1 << left) - 1);
    const Vector factor = factors == nullptr ? broadcast(1) : load(factors + row);
    for (int64_t m = 0; m < count; ++m) {
      const char* const tile = sums + (row / kTileRows * x_tiles + m / kTileRows) * kTileBytes;
      Vector values = _mm512_i32gather_ps(tile_column(), tile + m % kTileRows * 4, 4);
      for (int64_t share = 1; share < pack; ++share) {
        values = _mm512_add_ps(values, _mm512_i32gather_ps(tile_column(), tile + (m + share * kTileRows / pack) * 4, 4));
      }
      _mm512_mask_storeu_ps(out + m * stride + row, mask, values * factor);
    }
  }
}

// The order in which tiles read a weight's codes, and their prefetch. Strips are 16 rows, or 32 where codes are dequantized.
// All strips of code_rows() rows are multiplied with one piece of columns of x, which stays in L1; meanwhile the next piece is
// prefetched.

// Columns of a piece of fixed-point x: its tiles are 8 or 16 KiB, and a vector holds their scales in groups of 32.
constexpr int64_t kMaxPieceColumns = 512;

struct Piece {
  int64_t row, k, end;
};

// All strips, then the next columns.
struct Pieces {
  int64_t first, last, columns, most;
  int64_t strip = kTileRows;  // rows of one

  int64_t end_of(int64_t k) const { return columns - k < most ? columns : k + most; }
  int64_t rows_of(const Piece& piece) const { return last - piece.row < strip ? last - piece.row : strip; }
  Piece begin() const { return {first, 0, end_of(0)}; }

  // After the last piece comes the first one of the next rows.
  Piece after(const Piece& piece) const {
    if (piece.row + strip < last) return {piece.row + strip, piece.k, piece.end};
    if (piece.end < columns) return {first, piece.end, end_of(piece.end)};
    return {last, 0, end_of(0)};
  }
};

// Scales and minima of kLanes groups from `group` on, in `count` rows, to rows of `scales` and `minima`; permuted by `order`
// unless it is null.
template <bool kUnsigned, ScaleForm kForm>
inline void convert_rows(const Matrix& matrix, int64_t row, int64_t count, int64_t group, float* scales, float* minima,
                         const __m512i* order) {
  const int64_t groups = row_groups(matrix);
  RowScales from_row(matrix, row, group);
  for (int64_t r = 0; r < count; ++r) {
    Vector scale, minimum;
    load_scales<kForm, kUnsigned>(matrix, from_row, groups - group, scale, minimum);
    store(scales + r * kLanes, order == nullptr ? scale : _mm512_permutexvar_ps(*order, scale));
    store(minima + r * kLanes, order == nullptr ? minimum : _mm512_permutexvar_ps(*order, minimum));
    if constexpr (kForm == ScaleForm::any) {
      from_row = RowScales(matrix, row + r + 1, group);
    } else {
      from_row.scales += groups * scale_bytes<kForm>();
      from_row.offsets += groups * scale_bytes<kForm>();
    }
  }
}

template <bool kUnsigned>
inline void convert_rows(const Matrix& matrix, int64_t row, int64_t count, int64_t group, float* scales, float* minima,
                         const __m512i* order = nullptr) {
  const ScaleForm form = scale_form(matrix);
  const auto convert = form == ScaleForm::float16     ? convert_rows<kUnsigned, ScaleForm::float16>
                       : form == ScaleForm::bfloat16  ? convert_rows<kUnsigned, ScaleForm::bfloat16>
                       : form == ScaleForm::symmetric ? convert_rows<kUnsigned, ScaleForm::symmetric>
                       : form == ScaleForm::e8m0      ? convert_rows<kUnsigned, ScaleForm::e8m0>
                       : form == ScaleForm::e4m3      ? convert_rows<kUnsigned, ScaleForm::e4m3>
                                                      : convert_rows<kUnsigned, ScaleForm::any>;
  convert(matrix, row, count, group, scales, minima, order);
}

// Prefetches the next piece row by row while another is multiplied: codes, and scales and offsets of up to two cache lines.
template <int64_t kPieceColumns, Codes kCodes>
struct Prefetcher {
  static constexpr int kBits = bits_of(kCodes);
  static constexpr int64_t kRowBytes = kPieceColumns * kBits / 8;  // of a piece, where it is not the row's last one
  static constexpr bool kOffsets = kCodes == Codes::int4 || kCodes == Codes::int8;

  const Matrix& matrix;
  const Pieces& pieces;
  int64_t end_row;  // prefetches up to this row

  // Next to prefetch.
  Piece piece;
  int64_t rows, bytes;
  // Pointers and strides are not adjacent: GCC would add two of them as a vector.
  const char* codes;
  int64_t codes_bytes = pieces.columns * kBits / 8;
  const char* scales;
  // From row to row: 0 where these rows share scales.
  int64_t scales_bytes = matrix.scales == nullptr ? 4
                         : matrix.group_rows > 1  ? 0
                                                  : row_groups(matrix) * bytes_of(matrix.scale_dtype);
  const char* offsets;
  int64_t offsets_bytes = matrix.offset_kind == Offsets::zero_points ? row_groups(matrix) : scales_bytes;
  // Bytes of the scales of a piece; offsets have as many, or fewer.
  int64_t scales_of_piece = (kPieceColumns + matrix.group - 1) / matrix.group * bytes_of(matrix.scale_dtype);

  Prefetcher(const Matrix& matrix, const Pieces& pieces, int64_t end_row) : matrix(matrix), pieces(pieces), end_row(end_row) {
    begin(pieces.begin());
    next_piece();
  }

  void begin(const Piece& next) {
    piece = next;
    rows = end_row - piece.row < pieces.strip ? end_row - piece.row : pieces.strip;
    if (without(kStripPrefetch)) rows = 0;
    bytes = (piece.end - piece.k) * kBits / 8;
    codes = values_at(matrix, piece.row, 0) + piece.k * kBits / 8;
    const RowScales from_row(matrix, piece.row, groups_in(matrix, piece.k));
    scales = from_row.scales;
    offsets = from_row.offsets;
  }

  [[gnu::always_inline]] inline void prefetch_row() {
    if (--rows < 0) return;
    if (bytes == kRowBytes) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kRowBytes; i += 64) prefetch(codes + i);
    } else {
      for (int64_t i = 0; i < bytes; i += 64) prefetch(codes + i);
    }
    prefetch(scales);
    prefetch(scales + scales_of_piece - 1);
    scales += scales_bytes;
    if constexpr (kOffsets) {
      prefetch(offsets);
      prefetch(offsets + scales_of_piece - 1);
      offsets += offsets_bytes;
    }
    codes += codes_bytes;
  }

  // Prefetches the rest of the piece, moves to the next one of these rows, and returns the former.
  Piece next_piece() {
    while (rows > 0) prefetch_row();
    const Piece finished = piece;
    if (finished.row < pieces.last) begin(pieces.after(finished));
    return finished;
  }
};

}  // namespace
}  // namespace zero_inference::cpu
