// Products with codes themselves, in tiles. Included by product_amx.cpp behind product_tiles.h and product_code_open.h.
//
//   y = sum_g scale[g] * sum_k (base + code[k]) * x[k] + (minimum[g] - base * scale[g]) * sum_k x[k], with k over group g
//
// Codes are exact in bfloat16, so that nothing is restored: a section, 64 or 32 columns of one group, is multiplied into sums
// of its own, and these are scaled in float32. That takes four stages: codes are opened into a panel, multiplied in tiles, the
// sums are stored, and scaled and added to the totals. A stage waits long for the one before (a tile product takes 52 cycles,
// and a load of what was just stored waits for the store). So each step, of 128 columns or a line of each row, does the stages
// for different steps, and nothing waits for what was just issued.
//
// The totals of a strip of 16 rows stay in registers for a piece of its columns.
//
// Errors of results are 0.5e-6 to 2.0e-6 of their norm (4096 columns in groups of 32 to 256, int4 and int8, x's mean half its
// deviation).
//
// Estimate, not measured: a step of 16 rows of int4 (1024 bytes) in groups of 64, times up to 16 rows of x, takes
//   282 loads, two a cycle: 32 to open, 128 for eight tiles, 32 sums, 64 scales and offsets, 24 prefetches   141 cycles
//   192 vector operations, two a cycle: 128 to open, of which 64 rotate on one port, 64 to scale              96 cycles
//   96 stores, one a cycle: 64 of opened codes, 32 of sums                                                    96 cycles
//   4 tile products                                                                                           64 cycles
// and each piece, of four steps, 48 loads, 80 operations and 48 stores for the conversion of scales and the totals. 110 GB/s on
// 15 cores at 2.6 GHz are 408 cycles a step, with its scales; 204 where two threads share a core.

// Where things lie in a thread's scratch.
struct CodeScratch {
  char panels[2][4 * kTileBytes];    // opened codes of a step
  char sums[4 * kTileBytes];         // [section][tile of x]
  float scales[kTileRows][kLanes];   // of a strip's rows in the groups of a piece
  float offsets[kTileRows][kLanes];  // what belongs to the sums of x
  float totals[kCodeRows / kTileRows][2][kTileRows][kLanes];
};
static_assert(sizeof(CodeScratch) == kCodeScratchBytes, "csrc/cpu/product.cpp says how much there is");

// A tile of codes times the tiles of x that belong to it, in one term.
template <int kInputTiles, int kSums, int kRows, int kInput>
inline void multiply_codes(const char* x, int64_t x_stride) {
  if constexpr (kInputTiles == 1) {
    tile_load<kInput>(x);
    tile_multiply<kSums, kRows, kInput>();
  } else {
    tile_load<6>(x);
    tile_multiply<kSums, kRows, 6>();
    tile_load<7>(x + x_stride);
    tile_multiply<kSums + 1, kRows, 7>();
  }
}

// Block kBlock of a step's four; each section, of one block or two, has sums of its own, in tiles 0 to 3.
template <int kTerms, int kInputTiles, int kSums, int kBlock>
inline void multiply_code_block(const char* panel, const char* x, int64_t x_stride) {
  constexpr int kRows = 4 + kBlock % 2;
  tile_load<kRows>(panel + kBlock * kTileBytes);
  const char* const input = x + kBlock * kTerms * kTileBytes;
  multiply_codes<kInputTiles, kSums, kRows, 6 + kBlock * kTerms % 2>(input, x_stride);
  if constexpr (kTerms == 2) multiply_codes<kInputTiles, kSums, kRows, 7>(input + kTileBytes, x_stride);
}

// Where a group's scales lie, and how many of its columns are left.
struct Scaling {
  const float* at;
  int64_t left;
};

// The panel of the step that is multiplied next, and the tiles of x for it and the one behind it.
struct Flight {
  char* panel;
  const char *x, *next_x;
};

// At most kCodeRows rows of the weight times one or two tiles of x.
template <int kTerms, int kInputTiles, int kSection>
struct CodePass {
  static constexpr int kSections = kStep / kSection;
  static constexpr int kBlocks = kSection / 32;  // of a section
  // Columns of a piece: at least two steps.
  static constexpr int64_t kFit = kMostPieceColumns / (kTerms * kInputTiles);
  static constexpr int64_t kPieceColumns = kFit < 2 * kStep ? 2 * kStep : kFit;

  const Matrix& matrix;
  const Layout& layout;
  CodeScratch& scratch;
  Pieces pieces;
  const char* input;   // its tiles, `input_stride` bytes apart
  const char* x_sums;  // of sections, `sums_stride` bytes from tile to tile

  int64_t input_stride = layout.columns / 32 * kTerms * kTileBytes;
  int64_t sums_stride = layout.columns / kSection * 64;
  int64_t groups = groups_in(matrix, matrix.columns);

  CodePass(const Matrix& matrix, const Layout& layout, CodeScratch& scratch, int64_t first, int64_t last, const char* input,
           const char* x_sums)
      : matrix(matrix),
        layout(layout),
        scratch(scratch),
        pieces{first, last, matrix.columns * layout.nibbles, kPieceColumns},
        input(input),
        x_sums(x_sums) {}

  template <Dtype kDtype>
  void convert(const Piece& piece) const {
    const int64_t at = scale_bytes(matrix, layout, piece.row, piece.k);
    const int64_t left = groups - groups_in(matrix, piece.k / layout.nibbles);
    const char* scales = static_cast<const char*>(matrix.scales) + at;
    const char* minima = static_cast<const char*>(matrix.minima) + at;
    const Vector base = broadcast(-base_of(layout));
    for (int64_t r = 0; r < pieces.rows_of(piece); ++r, scales += groups * 2, minima += groups * 2) {
      const Vector scale = left >= kLanes ? from<kDtype>(scales) : from_part<kDtype>(scales, left);
      const Vector minimum = left >= kLanes ? from<kDtype>(minima) : from_part<kDtype>(minima, left);
      store(scratch.scales[r], scale);
      store(scratch.offsets[r], fused(scale, base, minimum));
    }
  }

  using Totals = Vector[kInputTiles][kTileRows];
  using Opening = Opener<kSection, kPieceColumns>;

  // Sums of a section, scaled, are added to the totals.
  [[gnu::always_inline]] static inline void add(const float* sums, const float* scales, const Vector* x_sum, Totals& totals) {
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const Vector scale = broadcast(scales[r * kLanes]), offset = broadcast(scales[(kTileRows + r) * kLanes]);
#pragma GCC unroll 2
      for (int i = 0; i < kInputTiles; ++i) {
        const Vector scaled = fused(load(sums + (i * kTileRows + r) * kLanes), scale, totals[i][r]);
        totals[i][r] = fused(x_sum[i], offset, scaled);
      }
    }
  }

  // Of the section's place in three steps: sums are added, those of the next step take their place, and the products of the
  // step behind that one theirs.
  template <int kPlace>
  [[gnu::always_inline]] inline void advance(const char* panel, const char* x, const char* x_sum_at, Scaling& scaling,
                                             Totals& totals) const {
    constexpr int kSums = kPlace * kInputTiles;
    char* const sums = scratch.sums + kSums * kTileBytes;
    Vector x_sum[kInputTiles];
#pragma GCC unroll 2
    for (int i = 0; i < kInputTiles; ++i) {
      x_sum[i] = load(reinterpret_cast<const float*>(x_sum_at + kPlace * 64 + i * sums_stride));
    }
    add(reinterpret_cast<const float*>(sums), scaling.at, x_sum, totals);
    scaling.left -= kSection;
    if (scaling.left == 0) scaling = {scaling.at + 1, layout.group};
    tile_store<kSums>(sums);
    if constexpr (kInputTiles == 2) tile_store<kSums + 1>(sums + kTileBytes);
    tile_zero<kSums>();
    if constexpr (kInputTiles == 2) tile_zero<kSums + 1>();
    multiply_code_block<kTerms, kInputTiles, kSums, kPlace * kBlocks>(panel, x, input_stride);
    if constexpr (kBlocks == 2) multiply_code_block<kTerms, kInputTiles, kSums, kPlace * 2 + 1>(panel, x, input_stride);
    if constexpr (kPlace + 1 < kSections) advance<kPlace + 1>(panel, x, x_sum_at, scaling, totals);
  }

  const char* x_at(int64_t column) const { return input + column / 32 * kTerms * kTileBytes; }

  // A piece's steps. In step i sums of step i are added, those of i + 1 stored, and i + 2 is multiplied and i + 4 opened.
  [[gnu::always_inline]] inline void multiply(const Piece& piece, int64_t steps, Opening& opener, Flight& flight,
                                              Totals& totals) const {
    const char* x_sum_at = x_sums + piece.k / kSection * 64;
    Scaling scaling = {scratch.scales[0], left_in_group(matrix, piece.k / layout.nibbles) * layout.nibbles};
    for (; steps > 0; --steps) {
      advance<0>(flight.panel, flight.x, x_sum_at, scaling, totals);
      flight.x = flight.next_x;
      flight.next_x = x_at(opener.open(flight.panel));
      flight.panel = flight.panel == scratch.panels[0] ? scratch.panels[1] : scratch.panels[0];
      x_sum_at += kSections * 64;
    }
  }

  // Rows from `behind` on are not asked for.
  [[gnu::noinline]] void run(int64_t behind) const {
    Opening opener(matrix, layout, pieces, behind);
    const char* const x = x_at(opener.open(scratch.panels[0]));
    Flight flight = {scratch.panels[0], x, x_at(opener.open(scratch.panels[1]))};
    Totals totals;
    int before = 2;  // steps with which it begins: nobody keeps their totals
    for (Piece piece = pieces.begin(); piece.row < pieces.last;) {
      if (before == 0) matrix.dtype == Dtype::float16 ? convert<Dtype::float16>(piece) : convert<Dtype::bfloat16>(piece);
      float* const kept = scratch.totals[(piece.row - pieces.first) / kTileRows][0][0];
#pragma GCC unroll 32
      for (int i = 0; i < kInputTiles * kTileRows; ++i) {
        totals[i / kTileRows][i % kTileRows] = piece.k == 0 ? zero() : load(kept + i * kLanes);
      }
      multiply(piece, before > 0 ? 1 : (piece.end - piece.k + kStep - 1) / kStep, opener, flight, totals);
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

// A column of a tile of totals is part of a row of `out`.
inline void write_totals(const CodeScratch& scratch, int64_t rows, int64_t count, float* out, int64_t stride) {
  const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const __mmask16 there = static_cast<__mmask16>(rows - row >= kTileRows ? 0xffff : (1 << (rows - row)) - 1);
    for (int64_t m = 0; m < count; ++m) {
      const float* const totals = scratch.totals[row / kTileRows][m / kTileRows][0] + m % kTileRows;
      _mm512_mask_storeu_ps(out + m * stride + row, there, _mm512_i32gather_ps(lanes, totals, 4));
    }
  }
}

template <int kTerms, int kSection>
void product_of_codes(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* memory) {
  constexpr int64_t kTokensAtOnce = kSection == 32 ? kTileRows : 2 * kTileRows;  // four tiles hold a step's sums
  CodeScratch& scratch = *reinterpret_cast<CodeScratch*>(memory);
  const char* const x_sums = input + sections_at(layout, count);
  __builtin_memset(scratch.panels, 0, sizeof(scratch.panels));
  tiles_begin();
  for (int64_t row = first; row < last; row += kCodeRows) {
    const int64_t end = last - row < kCodeRows ? last : row + kCodeRows;
    for (int64_t m = 0; m < count; m += kTokensAtOnce) {
      const int64_t some = count - m < kTokensAtOnce ? count - m : kTokensAtOnce;
      const char* const x = input + m * layout.columns * 2 * kTerms;
      const char* const sums = x_sums + m / kTileRows * (layout.columns / kSection) * 64;
      if constexpr (kSection == 64) {
        if (some > kTileRows) CodePass<kTerms, 2, 64>(matrix, layout, scratch, row, end, x, sums).run(last);
      }
      if (some <= kTileRows) CodePass<kTerms, 1, kSection>(matrix, layout, scratch, row, end, x, sums).run(last);
      write_totals(scratch, end - row, some, out + m * stride + row - first, stride);
    }
  }
  tiles_end();
}

template <int kTerms>
void product_of_codes(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* memory) {
  const auto multiply = section_columns(layout) == 64 ? product_of_codes<kTerms, 64> : product_of_codes<kTerms, 32>;
  multiply(matrix, layout, count, input, first, last, out, stride, memory);
}
