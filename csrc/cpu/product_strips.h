// In which order a weight's codes are read for tiles. Included by product_amx.cpp behind product_wide.h.
//
// Rows are taken in strips of 16, or of 32 where codes are dequantized. All strips of code_rows() rows are multiplied with one
// piece of x, which stays in L1, before the next is begun. Meanwhile the piece behind is asked for from memory.

#pragma once

#include "product_layout.h"

namespace zero_inference::cpu {
namespace {

// Columns of a piece of fixed-point x, whose tiles are 8 or 16 KiB. Others can be tried (benchmarks/cores_products.py --flags):
// 256 or 512.
#if !defined(ZERO_INFERENCE_CODE_COLUMNS)
#define ZERO_INFERENCE_CODE_COLUMNS 512
#endif
static_assert(ZERO_INFERENCE_CODE_COLUMNS == 256 || ZERO_INFERENCE_CODE_COLUMNS == 512,
              "a vector holds the scales of 512 columns in groups of 32");
constexpr int64_t kMaxPieceColumns = ZERO_INFERENCE_CODE_COLUMNS;

// Columns [k, end) of a strip of rows.
struct Piece {
  int64_t row, k, end;
};

// The order of the pieces of rows [first, last): all strips, then the next columns.
struct Pieces {
  int64_t first, last, columns, most;
  int64_t strip = kTileRows;  // rows of one

  int64_t end_of(int64_t k) const { return columns - k < most ? columns : k + most; }
  int64_t rows_of(const Piece& piece) const { return last - piece.row < strip ? last - piece.row : strip; }
  Piece begin() const { return {first, 0, end_of(0)}; }

  // Behind the last one comes the first of the rows that follow.
  Piece after(const Piece& piece) const {
    if (piece.row + strip < last) return {piece.row + strip, piece.k, piece.end};
    if (piece.end < columns) return {first, piece.end, end_of(piece.end)};
    return {last, 0, end_of(0)};
  }
};

// Where the scale of a row and a column lies among all.
inline int64_t scale_bytes(const Matrix& matrix, int64_t row, int64_t column) {
  return (row * groups_in(matrix, matrix.columns) + groups_in(matrix, column)) * 2;
}

// Asks for the codes of one piece after the other, row by row, meanwhile another one is multiplied: of each row the codes, and
// the lines of its scales and minima.
template <int64_t kPieceColumns, int kBits>
struct Prefetcher {
  static constexpr int64_t kRowBytes = kPieceColumns * kBits / 8;  // of a piece, where it is not the row's last one

  const Matrix& matrix;
  const Pieces& pieces;
  int64_t end_row;  // the last row that may be asked for

  // What is asked for: so many rows, and bytes of each.
  Piece piece;
  int64_t rows, bytes;
  // Pointers lie apart, and with them what a row adds: two side by side GCC would add as a vector, and take apart again.
  const char* codes;
  int64_t codes_bytes = pieces.columns * kBits / 8;
  const char* scales;
  int64_t scales_bytes = groups_in(matrix, matrix.columns) * 2;
  const char* minima;
  bool first;  // piece of the row
  uintptr_t scales_of_piece = static_cast<uintptr_t>((kPieceColumns + matrix.group - 1) / matrix.group * 2);  // bytes

  Prefetcher(const Matrix& matrix, const Pieces& pieces, int64_t end_row) : matrix(matrix), pieces(pieces), end_row(end_row) {
    begin(pieces.begin());
    next_piece();
  }

  void begin(const Piece& next) {
    piece = next;
    rows = end_row - piece.row < pieces.strip ? end_row - piece.row : pieces.strip;
    bytes = (piece.end - piece.k) * kBits / 8;
    first = piece.k == 0;
    codes = values_at(matrix, piece.row, 0) + piece.k * kBits / 8;
    const int64_t at = scale_bytes(matrix, piece.row, piece.k);
    scales = static_cast<const char*>(matrix.scales) + at;
    minima = static_cast<const char*>(matrix.minima) + at;
  }

  // The line in which a row's scales or minima of a piece end, unless those of the piece before reach it.
  [[gnu::always_inline]] inline void prefetch_end(const char* p) {
    p += scales_of_piece - 1;
    if ((reinterpret_cast<uintptr_t>(p) & 63) < scales_of_piece) prefetch(p);
  }

  [[gnu::always_inline]] inline void prefetch_row() {
    if (--rows < 0) return;
    if (bytes == kRowBytes) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kRowBytes; i += 64) prefetch(codes + i);
    } else {
      for (int64_t i = 0; i < bytes; i += 64) prefetch(codes + i);
    }
    if (first) {
      prefetch(scales);
      prefetch(minima);
    }
    prefetch_end(scales);
    prefetch_end(minima);
    codes += codes_bytes;
    scales += scales_bytes;
    minima += scales_bytes;
  }

  // Asks for the rest of the piece, which it returns, and goes on with the one behind, if it is not of rows that follow.
  Piece next_piece() {
    while (rows > 0) prefetch_row();
    const Piece finished = piece;
    if (finished.row < pieces.last) begin(pieces.after(finished));
    return finished;
  }
};

}  // namespace
}  // namespace zero_inference::cpu
