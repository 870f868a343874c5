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
// Rows are taken in strips of 16. All strips are multiplied with one piece of x, which stays in L1, before the next is begun.

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

// The last 32 of a row.
inline void open_last_codes(const char* p, char* tile) {
  char codes[32] = {};
  __builtin_memcpy(codes, p, 16);
  open_codes<32>(codes, tile);
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

  int64_t codes_bytes = pieces.columns * kBits / 8;              // of a row
  int64_t scales_bytes = groups_in(matrix, matrix.columns) * 2;  // likewise
  // What is asked for: so many rows, and bytes of each, before these places. Only `rows` changes from row to row: this is
  // between vector operations, and compilers would move several pointers on with those.
  Piece piece;
  int64_t rows, bytes;
  const char *codes_end, *scales_end, *minima_end;

  Asker(const Matrix& matrix, const Layout& layout, const Pieces& pieces, int64_t behind)
      : matrix(matrix), layout(layout), pieces(pieces), behind(behind) {
    begin(pieces.begin());
    next_piece();
  }

  void begin(const Piece& next) {
    piece = next;
    rows = behind - piece.row < pieces.strip ? behind - piece.row : pieces.strip;
    bytes = (piece.end - piece.k) * kBits / 8;
    codes_end = values_at(matrix, piece.row + rows, 0) + piece.k * kBits / 8;
    const int64_t at = scale_bytes(matrix, layout, piece.row + rows, piece.k);
    scales_end = static_cast<const char*>(matrix.scales) + at;
    minima_end = static_cast<const char*>(matrix.minima) + at;
  }

  [[gnu::always_inline]] inline void ask_for_row() {
    if (rows <= 0) return;
    const char* const codes = codes_end - rows * codes_bytes;
    const int64_t scales_at = rows-- * scales_bytes;
    if (bytes == kRowBytes) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kRowBytes; i += 64) ask_for(codes + i);
    } else {
      for (int64_t i = 0; i < bytes; i += 64) ask_for(codes + i);
    }
    ask_for(scales_end - scales_at);
    ask_for(minima_end - scales_at);
  }

  // Asks for the rest of the piece, which it returns, and goes on with the one behind, if it is not of rows that follow.
  Piece next_piece() {
    while (rows > 0) ask_for_row();
    const Piece asked = piece;
    if (asked.row < pieces.last) begin(pieces.after(asked));
    return asked;
  }
};

// Opens codes, steps of kStep columns of one piece after the other, and asks for those of the piece behind.
template <int kSection, int64_t kPieceColumns>
struct Opener {
  static constexpr int64_t kRowsToAsk = kTileRows * kStep / kPieceColumns;  // for, in each step

  const Matrix& matrix;
  const Pieces& pieces;
  Asker<kPieceColumns, 4> asker;

  int64_t row_bytes = pieces.columns / 2;
  // What is opened next.
  Piece piece = pieces.begin();
  int64_t k = 0, rows = pieces.rows_of(piece);
  const char* codes = values_at(matrix, piece.row, 0);

  Opener(const Matrix& matrix, const Layout& layout, const Pieces& pieces, int64_t behind)
      : matrix(matrix), pieces(pieces), asker(matrix, layout, pieces, behind) {}

  // The next step's codes, where there is one more, into a panel of four tiles. Returns its first column.
  [[gnu::always_inline]] inline int64_t open(char* panel) {
    const int64_t column = k;
    if (piece.row >= pieces.last) return column;
    if (rows == kTileRows && piece.end - k >= kStep) {
      const char* p = codes;
      const int64_t stride = row_bytes;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r, p += stride) {
        open_codes<kSection>(p, panel + r * 64);
        open_codes<kSection>(p + 32, panel + 2 * kTileBytes + r * 64);
      }
    } else {
      open_some(panel);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRowsToAsk; ++r) asker.ask_for_row();
    codes += kStep / 2;
    k += kStep;
    if (k >= piece.end) next_piece();
    return column;
  }

  // Fewer rows, or columns. What is not there keeps its place's old codes, of which x is zero or the results are not wanted.
  [[gnu::noinline]] void open_some(char* panel) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kStep && k + i < piece.end; i += 64) {
        const char* const p = codes + r * row_bytes + i / 2;
        char* const tile = panel + i / 32 * kTileBytes + r * 64;
        piece.end - k - i < 64 ? open_last_codes(p, tile) : open_codes<kSection>(p, tile);
      }
    }
  }

  [[gnu::noinline]] void next_piece() {
    piece = asker.next_piece();
    if (piece.row >= pieces.last) return;
    k = piece.k;
    rows = pieces.rows_of(piece);
    codes = values_at(matrix, piece.row, 0) + k / 2;
  }
};
