// How the sums of codes in tiles are scaled and added, and where they lie. Included by product_amx.cpp behind
// product_code_open.h.

// Where things lie in a thread's scratch. What is read next to each other is in the same part of a page as the input's tiles
// that belong to it, and is written again a turn later: a load whose address has the last 12 bits of a store before it waits.
struct CodeScratch {
  char panel[8 * kTileBytes];        // opened codes of 256 columns
  char sums[4 * kTileBytes];         // of packs
  char copies[2 * kTileBytes];       // of codes that do not fill a turn
  float scales[kTileRows][kLanes];   // of a strip's rows in the groups of a piece
  float offsets[kTileRows][kLanes];  // what belongs to the sums of x
  float totals[kCodeRows / kTileRows][2][kTileRows][kLanes];
  int32_t groups[8][kLanes];  // of a piece's packs: which group scales which column
};
static_assert(sizeof(CodeScratch) == kCodeScratchBytes, "csrc/cpu/product.cpp says how much there is");

// At the same place of a page as the input.
inline CodeScratch& scratch_beside(const char* input, char* memory) {
  return *reinterpret_cast<CodeScratch*>(memory + ((input - memory) & (kPageBytes - 1)));
}

// What is added next: its scales, how many columns of the group are left, and for packs of several sections their groups.
struct Scaling {
  const float* at;
  int64_t left;
  const int32_t* groups;
};

// The scales of a piece's rows, and the groups that they belong to.
struct PieceScales {
  const Matrix& matrix;
  const Layout& layout;
  CodeScratch& scratch;
  int64_t groups = groups_in(matrix, matrix.columns);

  // Columns from the piece's begin to the end of its first group.
  int64_t left_in(const Piece& piece) const { return left_in_group(matrix, piece.k / layout.nibbles) * layout.nibbles; }

  template <Dtype kDtype>
  void convert(const Piece& piece, int64_t rows) const {
    const int64_t at = scale_bytes(matrix, layout, piece.row, piece.k);
    const int64_t left = groups - groups_in(matrix, piece.k / layout.nibbles);
    const char* scales = static_cast<const char*>(matrix.scales) + at;
    const char* minima = static_cast<const char*>(matrix.minima) + at;
    const Vector base = broadcast(-base_of(layout));
    for (int64_t r = 0; r < rows; ++r, scales += groups * 2, minima += groups * 2) {
      const Vector scale = left >= kLanes ? from<kDtype>(scales) : from_part<kDtype>(scales, left);
      const Vector minimum = left >= kLanes ? from<kDtype>(minima) : from_part<kDtype>(minima, left);
      store(scratch.scales[r], scale);
      store(scratch.offsets[r], fused(scale, base, minimum));
    }
  }

  void convert(const Piece& piece, int64_t rows) const {
    matrix.dtype == Dtype::float16 ? convert<Dtype::float16>(piece, rows) : convert<Dtype::bfloat16>(piece, rows);
  }

  // Which of the piece's groups scale the columns of the sums of its packs, of kPack sections each.
  template <int kSection, int kPack>
  [[gnu::noinline]] void find_groups(const Piece& piece) const {
    constexpr int kWidth = kLanes / kPack;
    int64_t left = left_in(piece);
    int32_t group = 0;
    for (int64_t i = 0; i < kMostPieceColumns / kSection; ++i) {
      for (int64_t lane = 0; lane < kWidth; ++lane) scratch.groups[i / kPack][i % kPack * kWidth + lane] = group;
      left -= kSection;
      if (left > 0) continue;
      ++group;
      left = layout.group;
    }
  }
};

template <int kPack>
inline Vector scales_at(const float* p, __m512i groups) {
  if constexpr (kPack == 1) return broadcast(*p);
  return _mm512_permutexvar_ps(groups, load(p));
}

// Sums of a pack of 16 rows and one or two tiles of x, scaled, are added to their totals.
template <int kPack, int kInputTiles>
[[gnu::always_inline]] inline void add_scaled(const float* sums, const Scaling& scaling, const Vector* x_sum,
                                              Vector (&totals)[kInputTiles][kTileRows]) {
  const __m512i groups = kPack == 1 ? _mm512_setzero_si512() : _mm512_loadu_si512(scaling.groups);
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    const Vector scale = scales_at<kPack>(scaling.at + r * kLanes, groups);
    const Vector offset = scales_at<kPack>(scaling.at + (kTileRows + r) * kLanes, groups);
#pragma GCC unroll 2
    for (int i = 0; i < kInputTiles; ++i) {
      const Vector scaled = fused(load(sums + (i * kTileRows + r) * kLanes), scale, totals[i][r]);
      totals[i][r] = fused(x_sum[i], offset, scaled);
    }
  }
}

// A column of a tile of totals is part of a row of `out`; where it shares the tile, of each share one is.
inline void write_totals(const Layout& layout, const CodeScratch& scratch, int64_t rows, int64_t count, float* out,
                         int64_t stride) {
  const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const __mmask16 there = static_cast<__mmask16>(rows - row >= kTileRows ? 0xffff : (1 << (rows - row)) - 1);
    for (int64_t m = 0; m < count; ++m) {
      const float* const totals = scratch.totals[row / kTileRows][m / kTileRows][0] + m % kTileRows;
      Vector total = _mm512_i32gather_ps(lanes, totals, 4);
      for (int64_t share = layout.width; share < kTileRows; share += layout.width) {
        total = _mm512_add_ps(total, _mm512_i32gather_ps(lanes, totals + share, 4));
      }
      _mm512_mask_storeu_ps(out + m * stride + row, there, total);
    }
  }
}
