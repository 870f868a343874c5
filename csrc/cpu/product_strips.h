// The order in which tiles read a weight's codes, and their prefetch.
//
// Strips are 16 rows, or 32 where codes are dequantized. All strips of code_rows() rows are multiplied with one piece of
// columns of x, which stays in L1; meanwhile the next piece is prefetched.

#pragma once

#include "product_layout.h"

namespace zero_inference::cpu {
namespace {

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

inline int64_t scale_bytes(const Matrix& matrix, int64_t row, int64_t column) {
  return (row * groups_in(matrix, matrix.columns) + groups_in(matrix, column)) * 2;
}

// Prefetches the next piece row by row while another is multiplied: codes, and cache lines of scales and minima.
template <int64_t kPieceColumns, int kBits>
struct Prefetcher {
  static constexpr int64_t kRowBytes = kPieceColumns * kBits / 8;  // of a piece, where it is not the row's last one

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
    if (without(kStripPrefetch)) rows = 0;
    bytes = (piece.end - piece.k) * kBits / 8;
    first = piece.k == 0;
    codes = values_at(matrix, piece.row, 0) + piece.k * kBits / 8;
    const int64_t at = scale_bytes(matrix, piece.row, piece.k);
    scales = static_cast<const char*>(matrix.scales) + at;
    minima = static_cast<const char*>(matrix.minima) + at;
  }

  // The line in which scales or minima of a row end, unless an earlier piece fetched it.
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
