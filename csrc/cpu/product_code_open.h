// How codes are opened for tiles, and in which order a weight's are. Included by product_amx.cpp behind product_wide.h.
//
// All is said in nibbles, and columns are those of nibbles: a row of int8 is one of int4 with twice the columns, in which x[k]
// stands for the lower half of code k, and 16 * x[k] for the upper one.
//
// A nibble c is opened as 16 + c, which is 0x4180 | c << 3: a word of four nibbles is there four times, and each time another
// one of them is rotated to its place, so that it takes a rotation and a logical operation for 32 nibbles. 128 + c, 0x4300 | c,
// is not cheaper, and the sums, from which the base is taken away again, are 6 times as large.
//
// Of 64 nibbles the first vector has the first nibbles of all 16 words and then the second ones, the second vector the third
// and the fourth ones. Of 32, where groups are not multiples of 64, one vector has the first to the fourth ones of 8 words.
//
// Rows are taken in strips of 16, or of 32 where codes are restored. All strips are multiplied with one piece of x, which stays
// in L1, before the next is begun.

// Columns of a piece with one tile of x in one term, whose tiles are 16 KiB; fewer with more. Others can be tried
// (benchmarks/cores_products.py --flags): 256 or 512.
#if !defined(ZERO_INFERENCE_CODE_COLUMNS)
#define ZERO_INFERENCE_CODE_COLUMNS 512
#endif
static_assert(ZERO_INFERENCE_CODE_COLUMNS == 256 || ZERO_INFERENCE_CODE_COLUMNS == 512,
              "a vector holds the scales of 512 columns in groups of 32");
constexpr int64_t kMostPieceColumns = ZERO_INFERENCE_CODE_COLUMNS;

// The base of a code, of one nibble or two.
inline float base_of(const Layout& layout) { return layout.nibbles == 2 ? 16 + 16 * 16 : 16; }

inline __m512i rotated(__m512i words, __m512i counts) {
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
      _mm512_store_si512(tiles + i * kTileBytes, rotated(words, counts));
    }
  } else {
    const __m512i first = _mm512_setr_epi32(29, 29, 29, 29, 29, 29, 29, 29, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i second = _mm512_setr_epi32(5, 5, 5, 5, 5, 5, 5, 5, 9, 9, 9, 9, 9, 9, 9, 9);
    const __m512i words = _mm512_broadcast_i64x4(load_32_bytes(p));
    _mm512_store_si512(tiles, rotated(words, first));
    _mm512_store_si512(tiles + kTileBytes, rotated(words, second));
  }
}

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
inline int64_t scale_bytes(const Matrix& matrix, const Layout& layout, int64_t row, int64_t column) {
  return (row * groups_in(matrix, matrix.columns) + groups_in(matrix, column / layout.nibbles)) * 2;
}

// Asks for the codes of one piece after the other, row by row, meanwhile another one is multiplied: of each row the codes, and
// the lines in which its scales begin.
template <int64_t kPieceColumns, int kBits>
struct Asker {
  static constexpr int64_t kRowBytes = kPieceColumns * kBits / 8;  // of a piece, where it is not the row's last one

  const Matrix& matrix;
  const Layout& layout;
  const Pieces& pieces;
  int64_t behind;  // the last row that may be asked for

  // What is asked for: so many rows, and bytes of each.
  Piece piece;
  int64_t rows, bytes;
  // Pointers lie apart, and with them what a row adds: two side by side GCC would add as a vector, and take apart again.
  const char* codes;
  int64_t codes_bytes = pieces.columns * kBits / 8;
  const char* scales;
  int64_t scales_bytes = groups_in(matrix, matrix.columns) * 2;
  const char* minima;

  Asker(const Matrix& matrix, const Layout& layout, const Pieces& pieces, int64_t behind)
      : matrix(matrix), layout(layout), pieces(pieces), behind(behind) {
    begin(pieces.begin());
    next_piece();
  }

  void begin(const Piece& next) {
    piece = next;
    rows = behind - piece.row < pieces.strip ? behind - piece.row : pieces.strip;
    bytes = (piece.end - piece.k) * kBits / 8;
    codes = values_at(matrix, piece.row, 0) + piece.k * kBits / 8;
    const int64_t at = scale_bytes(matrix, layout, piece.row, piece.k);
    scales = static_cast<const char*>(matrix.scales) + at;
    minima = static_cast<const char*>(matrix.minima) + at;
  }

  [[gnu::always_inline]] inline void ask_for_row() {
    if (--rows < 0) return;
    if (bytes == kRowBytes) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kRowBytes; i += 64) ask_for(codes + i);
    } else {
      for (int64_t i = 0; i < bytes; i += 64) ask_for(codes + i);
    }
    ask_for(scales);
    ask_for(minima);
    codes += codes_bytes;
    scales += scales_bytes;
    minima += scales_bytes;
  }

  // Asks for the rest of the piece, which it returns, and goes on with the one behind, if it is not of rows that follow.
  Piece next_piece() {
    while (rows > 0) ask_for_row();
    const Piece asked = piece;
    if (asked.row < pieces.last) begin(pieces.after(asked));
    return asked;
  }
};

// What is opened in one turn: 16 rows, `stride` bytes apart.
struct Codes {
  const char* rows;
  int64_t stride;
  int64_t three_strides = 3 * stride;
};

// Rows [kRow, kRow + 8) of the kHalf-th 64 columns of a turn, to its panel.
template <int kSection, int kHalf, int kRow>
[[gnu::always_inline]] inline void open_rows(const Codes& codes, char* panel) {
  const char* p = codes.rows + kRow * codes.stride + kHalf * 32;
  char* const tiles = panel + kHalf * 2 * kTileBytes;
#pragma GCC unroll 2
  for (int r = kRow; r < kRow + 8; r += 4, p += 4 * codes.stride) {  // addresses of four rows without one more addition
    open_codes<kSection>(p, tiles + r * 64);
    open_codes<kSection>(p + codes.stride, tiles + (r + 1) * 64);
    open_codes<kSection>(p + 2 * codes.stride, tiles + (r + 2) * 64);
    open_codes<kSection>(p + codes.three_strides, tiles + (r + 3) * 64);
  }
}

// Where the codes are that are opened: turns of kTurn columns of one piece after the other. Asks for those of the piece behind.
template <int64_t kPieceColumns, int kTurn>
struct Opener {
  static constexpr int64_t kRowBytes = kTurn / 2;
  static constexpr int64_t kRowsToAsk = kTileRows * 64 / kPieceColumns;  // for, with each 64 columns

  const Matrix& matrix;
  const Pieces& pieces;
  Asker<kPieceColumns, 4> asker;
  char* copies;  // of a turn that lacks rows or columns

  int64_t row_bytes = pieces.columns / 2;
  // What is opened next.
  Piece piece = pieces.begin();
  int64_t k = 0, rows = pieces.rows_of(piece);
  const char* codes = values_at(matrix, piece.row, 0);

  Opener(const Matrix& matrix, const Layout& layout, const Pieces& pieces, int64_t behind, char* copies)
      : matrix(matrix), pieces(pieces), asker(matrix, layout, pieces, behind), copies(copies) {}

  // Of the next turn, which begins at column k. Behind the last one come turns of which nothing is wanted.
  [[gnu::always_inline]] inline Codes begin() const {
    if (__builtin_expect(rows == kTileRows && piece.end - k >= kTurn, 1)) return {codes, row_bytes};
    copy();
    return {copies, kRowBytes};
  }

  // In the place of what is not there are zeros, of which x is zero or the results are not wanted.
  [[gnu::noinline]] void copy() const {
    __builtin_memset(copies, 0, kTileRows * kRowBytes);
    const int64_t some = piece.end - k < kTurn ? (piece.end - k) / 2 : kRowBytes;
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_memcpy(copies + r * kRowBytes, codes + r * row_bytes, static_cast<size_t>(some));
    }
  }

  [[gnu::always_inline]] inline void ask() {
#pragma GCC unroll 4
    for (int r = 0; r < kRowsToAsk; ++r) asker.ask_for_row();
  }

  [[gnu::always_inline]] inline void end() {
    codes += kRowBytes;
    k += kTurn;
    if (__builtin_expect(k >= piece.end, 0)) next_piece();
  }

  [[gnu::noinline]] void next_piece() {
    piece = asker.next_piece();
    k = piece.k;
    rows = 0;
    if (piece.row >= pieces.last) return;
    rows = pieces.rows_of(piece);
    codes = values_at(matrix, piece.row, 0) + k / 2;
  }
};
