// Products with codes themselves, in tiles. Included by product_amx.cpp behind product_tiles.h and product_code_scaling.h.
//
//   y = sum_g scale[g] * sum_k (base + code[k]) * x[k] + (minimum[g] - base * scale[g]) * sum_k x[k], with k over group g
//
// Codes are exact in bfloat16, so that nothing is restored: a section, 64 or 32 columns of one group, is multiplied into sums
// of its own, and these are scaled in float32. That takes four stages: codes are opened into a panel, multiplied in tiles, the
// sums are stored, and scaled and added to the totals. A stage waits long for the one before (a tile product takes 52 cycles,
// and a load of what was just stored waits for the store). So each turn, of 128 or 256 columns, does the stages for different
// turns, and nothing waits for what was just issued. Inside a turn products and opened rows alternate, because those of one
// tile of sums wait for each other.
//
// Storing sums, and loading them again, takes the most. With up to 8 rows of x two sections share a tile of sums, a pack, and
// with up to 4 rows four: x of the first section lies in the first columns of its tile, x of the next one in the columns
// behind, and the others are zero, so that the products of both add to one tile. A vector of scales then has those of several
// groups, and the totals' shares are added at the end. The two terms of x for float16 share a tile likewise.
//
// The totals of a strip of 16 rows stay in registers for a piece of its columns.
//
// Errors of results are 0.5e-6 to 2.2e-6 of their norm (groups of 32 to 256, int4 and int8, x's mean half its deviation).
//
// Estimate, not measured: 1024 bytes of int4 in groups of 64, 16 rows of 128 columns, take in packs of 1, 2 and 4 sections
//   loads, two a cycle             282, 233, 208: 32 to open, 128 for eight tiles, 24 prefetches; sums, scales, offsets
//   vector operations, two a cycle 192, 192, 160: 128 to open, of which 64 rotate on one port; 2 or 4 for each row of a pack
//   stores, one a cycle             96,  80,  72: 64 of opened codes, and the sums
//   4 tile products                 64 cycles; one behind the other in one tile of sums 104, 208, 208

// Tile kRows times two tiles of x.
template <int kSums, int kMoreSums, int kRows>
inline void multiply_two(const char* x, const char* more_x) {
  tile_load<6>(x);
  tile_load<7>(more_x);
  tile_multiply<kSums, kRows, 6>();
  tile_multiply<kMoreSums, kRows, 7>();
}

// What is done in one turn: codes are opened into the panel behind those that are multiplied.
struct Turn {
  Codes codes;
  char* panel;
  const char *x, *x_sums;
};

// The panel that is multiplied next and its tiles of x, and those of the panel behind.
struct Flight {
  char* panel;
  const char *x, *next_x;
  int parity;  // of its turn
};

// At most kCodeRows rows of the weight times one or two tiles of x.
template <int kTerms, int kInputTiles, int kSection, int kPack>
struct CodePass {
  static constexpr int kPackColumns = kSection * kPack;
  static constexpr int kTurn = kPackColumns > kStep ? kPackColumns : kStep;  // columns
  static constexpr int kPacks = kTurn / kPackColumns;  // of a turn; one has its sums in two tiles by turns
  static constexpr int kHalves = kTurn / 64;
  static constexpr int kPanels = 256 / kTurn;
  static constexpr bool kPlain = kTerms * kInputTiles == 1;
  // Columns of a piece: at least 256.
  static constexpr int64_t kFit = kMostPieceColumns / (kTerms * kInputTiles);
  static constexpr int64_t kPieceColumns = kFit < 2 * kStep ? 2 * kStep : kFit;
  static_assert(kPack == 1 || kPlain, "sections share a tile where there is one");

  const Matrix& matrix;
  const Layout& layout;
  CodeScratch& scratch;
  PieceScales scales{matrix, layout, scratch};
  Pieces pieces;
  const char* input;   // its tiles, `input_stride` bytes apart
  const char* x_sums;  // of packs, `sums_stride` bytes from tile to tile

  int64_t input_stride = layout.columns / 32 * kTerms * kTileBytes;
  int64_t sums_stride = layout.columns / kPackColumns * 64;

  CodePass(const Matrix& matrix, const Layout& layout, CodeScratch& scratch, int64_t first, int64_t last, const char* input,
           const char* x_sums)
      : matrix(matrix),
        layout(layout),
        scratch(scratch),
        pieces{first, last, matrix.columns * layout.nibbles, kPieceColumns},
        input(input),
        x_sums(x_sums) {}

  using Totals = Vector[kInputTiles][kTileRows];
  using Opening = Opener<kPieceColumns, kTurn>;

  // The sums in scratch of the turn's pack kIndex are added, and those in tile kSums take their place.
  template <int kSums, int kPlace, int kIndex>
  [[gnu::always_inline]] inline void finish(const Turn& turn, Scaling& scaling, Totals& totals) const {
    char* const sums = scratch.sums + kPlace * kTileBytes;
    Vector x_sum[kInputTiles];
#pragma GCC unroll 2
    for (int i = 0; i < kInputTiles; ++i) {
      x_sum[i] = load(reinterpret_cast<const float*>(turn.x_sums + kIndex * 64 + i * sums_stride));
    }
    add_scaled<kPack>(reinterpret_cast<const float*>(sums), scaling, x_sum, totals);
    if constexpr (kPack == 1) {
      scaling.left -= kSection;
      if (scaling.left == 0) scaling = {scaling.at + 1, layout.group, scaling.groups};
    } else {
      scaling.groups += kLanes;
    }
    tile_store<kSums>(sums);
    if constexpr (kInputTiles == 2) tile_store<kSums + 1>(sums + kTileBytes);
    tile_zero<kSums>();
    if constexpr (kInputTiles == 2) tile_zero<kSums + 1>();
  }

  // Block kBlock of a turn's, of 32 columns.
  template <int kParity, int kBlock>
  [[gnu::always_inline]] inline void multiply_block(const char* x) const {
    constexpr int kSums = (kPacks == 1 ? kParity : kBlock * 32 / kPackColumns) * kInputTiles;
    constexpr int kRows = 4 + kBlock % 2;
    if constexpr (kPlain) {
      tile_multiply<kSums, kRows, 6 + kBlock % 2>();
    } else if constexpr (kInputTiles == 1) {
      multiply_two<kSums, kSums, kRows>(x, x + kTileBytes);
    } else {
      multiply_two<kSums, kSums + 1, kRows>(x, x + input_stride);
      if constexpr (kTerms == 2) multiply_two<kSums, kSums + 1, kRows>(x + kTileBytes, x + input_stride + kTileBytes);
    }
  }

  // 64 columns of a turn, and those behind. Loads come first, products and rows that are opened take turns.
  template <int kParity, int kHalf>
  [[gnu::always_inline]] inline void advance(const Turn& turn, Opening& opener, Scaling& scaling, Totals& totals) const {
    const char* const rows = turn.panel + kHalf * 2 * kTileBytes;
    const char* const x = turn.x + kHalf * 2 * kTerms * kTileBytes;
    tile_load<4>(rows);
    tile_load<5>(rows + kTileBytes);
    if constexpr (kPlain) {
      tile_load<6>(x);
      tile_load<7>(x + kTileBytes);
    }
    if constexpr (kPacks == 1 && kHalf == 1) finish<1 - kParity, 2, 0>(turn, scaling, totals);
    if constexpr (kPacks == 2) finish<kHalf * kInputTiles, 2 * kHalf, kHalf>(turn, scaling, totals);
    if constexpr (kPacks == 4) {
      finish<2 * kHalf, 2 * kHalf, 2 * kHalf>(turn, scaling, totals);
      finish<2 * kHalf + 1, 2 * kHalf + 1, 2 * kHalf + 1>(turn, scaling, totals);
    }
    multiply_block<kParity, 2 * kHalf>(x);
    open_rows<kSection, kHalf, 0>(turn.codes, turn.panel);
    multiply_block<kParity, 2 * kHalf + 1>(x + kTerms * kTileBytes);
    open_rows<kSection, kHalf, 8>(turn.codes, turn.panel);
    opener.ask();
    if constexpr (kHalf + 1 < kHalves) advance<kParity, kHalf + 1>(turn, opener, scaling, totals);
  }

  const char* x_at(int64_t column) const { return input + column / 32 * kTerms * kTileBytes; }

  template <int kParity>
  [[gnu::always_inline]] inline void multiply_turn(const char* x_sum_at, Opening& opener, Scaling& scaling, Flight& flight,
                                                   Totals& totals) const {
    const Turn turn = {opener.begin(), flight.panel, flight.x, x_sum_at};
    const char* const x = x_at(opener.k);
    advance<kParity, 0>(turn, opener, scaling, totals);
    opener.end();
    flight.x = kPanels == 1 ? x : flight.next_x;
    flight.next_x = x;
    if (kPanels == 2) flight.panel = flight.panel == scratch.panel ? scratch.panel + kTurn * 32 : scratch.panel;
  }

  // A piece's turns. In turn i sums of turn i are added, those of i + 1 stored, i + 2 is multiplied, and what is 256 columns
  // behind it opened.
  [[gnu::always_inline]] inline void multiply(const Piece& piece, int64_t turns, Opening& opener, Flight& flight,
                                              Totals& totals) const {
    const char* x_sum_at = x_sums + piece.k / kPackColumns * 64;
    Scaling scaling = {scratch.scales[0], scales.left_in(piece), scratch.groups[0]};
    bool second = kPacks == 1 && flight.parity != 0;
    for (;; x_sum_at += kPacks * 64) {
      if (!second) {
        multiply_turn<0>(x_sum_at, opener, scaling, flight, totals);
        flight.parity = 1;
        if (--turns == 0) return;
        if (kPacks > 1) continue;
        x_sum_at += 64;
      }
      multiply_turn<1>(x_sum_at, opener, scaling, flight, totals);
      flight.parity = 0;
      if (--turns == 0) return;
      second = false;
    }
  }

  template <int kHalf>
  [[gnu::always_inline]] inline static void open_from(const Codes& codes, char* panel) {
    open_rows<kSection, kHalf, 0>(codes, panel);
    open_rows<kSection, kHalf, 8>(codes, panel);
    if constexpr (kHalf + 1 < kHalves) open_from<kHalf + 1>(codes, panel);
  }

  // The first panels, before anything is multiplied.
  [[gnu::noinline]] Flight begin(Opening& opener) const {
    const char* x[2];
    for (int i = 0; i < kPanels; ++i) {
      x[i] = x_at(opener.k);
      open_from<0>(opener.begin(), scratch.panel + i * kTurn * 32);
      for (int half = 0; half < kHalves; ++half) opener.ask();
      opener.end();
    }
    tile_zero<0>();
    return {scratch.panel, x[0], x[kPanels - 1], 0};
  }

  // Rows from `behind` on are not asked for.
  [[gnu::noinline]] void run(int64_t behind) const {
    Opening opener(matrix, layout, pieces, behind, scratch.copies);
    Flight flight = begin(opener);
    Totals totals;
    int before = 2;  // turns with which it begins: nobody keeps their totals
    int64_t k = -1;
    for (Piece piece = pieces.begin(); piece.row < pieces.last;) {
      if (before == 0) scales.convert(piece, pieces.rows_of(piece));
      if (kPack > 1 && piece.k != k) scales.template find_groups<kSection, kPack>(piece);
      k = piece.k;
      float* const kept = scratch.totals[(piece.row - pieces.first) / kTileRows][0][0];
#pragma GCC unroll 32
      for (int i = 0; i < kInputTiles * kTileRows; ++i) {
        totals[i / kTileRows][i % kTileRows] = piece.k == 0 ? zero() : load(kept + i * kLanes);
      }
      multiply(piece, before > 0 ? 1 : (piece.end - piece.k + kTurn - 1) / kTurn, opener, flight, totals);
      if (before > 0) {
        --before;
        continue;
      }
#pragma GCC unroll 32
      for (int i = 0; i < kInputTiles * kTileRows; ++i) store(kept + i * kLanes, totals[i / kTileRows][i % kTileRows]);
      piece = pieces.after(piece);
    }
  }
};

template <int kTerms, int kSection, int kPack>
void product_of_packs(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* memory) {
  constexpr int64_t kTokensAtOnce = kSection == 32 ? kTileRows : 2 * kTileRows;  // four tiles hold a turn's sums
  CodeScratch& scratch = scratch_beside(input, memory);
  const char* const x_sums = input + sections_at(layout, count);
  tiles_begin();
  for (int64_t row = first; row < last; row += kCodeRows) {
    const int64_t end = last - row < kCodeRows ? last : row + kCodeRows;
    for (int64_t m = 0; m < count; m += kTokensAtOnce) {
      const int64_t some = count - m < kTokensAtOnce ? count - m : kTokensAtOnce;
      const char* const x = input + m * layout.columns * 2 * kTerms;
      const char* const sums = x_sums + m / kTileRows * (layout.columns / pack_columns(layout)) * 64;
      if constexpr (kSection == 64 && kPack == 1) {
        if (some > kTileRows) CodePass<kTerms, 2, 64, 1>(matrix, layout, scratch, row, end, x, sums).run(last);
      }
      if (some <= kTileRows) CodePass<kTerms, 1, kSection, kPack>(matrix, layout, scratch, row, end, x, sums).run(last);
      write_totals(layout, scratch, end - row, some, out + m * stride + row - first, stride);
    }
  }
  tiles_end();
}

template <int kTerms, int kPack>
void product_of_packs(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* memory) {
  const auto multiply =
      section_columns(layout) == 64 ? product_of_packs<kTerms, 64, kPack> : product_of_packs<kTerms, 32, kPack>;
  multiply(matrix, layout, count, input, first, last, out, stride, memory);
}

inline void product_of_codes(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                             int64_t last, float* out, int64_t stride, char* memory) {
  const auto multiply = layout.terms == 2  ? product_of_packs<2, 1>
                        : layout.pack == 4 ? product_of_packs<1, 4>
                        : layout.pack == 2 ? product_of_packs<1, 2>
                                           : product_of_packs<1, 1>;
  multiply(matrix, layout, count, input, first, last, out, stride, memory);
}
