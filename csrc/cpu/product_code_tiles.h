// Products with codes themselves, in tiles. Included by product_amx.cpp behind product_tiles.h.
//
//   y = sum_g scale[g] * sum_k (base + code[k]) * x[k] + (minimum[g] - base * scale[g]) * sum_k x[k], with k over group g
//
// Codes are exact in bfloat16, so that nothing is restored: a section, the columns of one group among 128, is multiplied into
// sums of its own, and these are scaled in float32, once for 16 rows of x. The codes of a section are opened in order, so the
// prepared x is that of plain weights, with its sums over sections behind it.
//
// An int4 code c is opened as 16 + c, which is 0x4180 | c << 3: a byte shuffle, a shift and a logical operation for 32 codes.
// 128 + c, 0x4300 | c, would not be cheaper in this order, and the sums, from which the base is taken away again, 6 times as
// large. Errors of results are 0.4e-6 to 3.3e-6 of their norm (4096 columns in groups of 32 to 256, int4 and int8, x's mean
// half its deviation).
//
// Estimate, not measured: 16 rows and 64 columns of int4 in groups of 64, times up to 16 rows of x, are 96 operations to open
// and 32 to scale on two ports, 64 cycles; 144 vectors and lines loaded, 72 cycles; two tile products, 32 cycles. That is 14
// weights a cycle, where 105 GB/s on 15 cores at 3 GHz are 4.2. 64 rows of x scale four times as often: 6.

constexpr int64_t kWindow = kLanes;  // groups whose scales are converted at a time
// Stages that are asked for together, 256 contiguous bytes of a row of int4, and so many of these pieces before they are
// needed. Other distances can be tried (benchmarks/cores_products.py --flags).
constexpr int64_t kPieceStages = 4;
constexpr int64_t kPieceColumns = kPieceStages * kStep;
#if !defined(ZERO_INFERENCE_PIECES_AHEAD)
#define ZERO_INFERENCE_PIECES_AHEAD 2
#endif
constexpr int64_t kPiecesAhead = ZERO_INFERENCE_PIECES_AHEAD;

inline constexpr float base_of(int bits) { return bits == 4 ? 16 : 0; }

// 32 codes, in order, as bfloat16: base + code.
template <int kBits>
inline __m512i brain_codes(const char* p) {
  if constexpr (kBits == 4) {
    // a word's upper byte is the pair that its code is in: quarter q of the vector takes bytes 4 q to 4 q + 3
    const __m512i first =
        _mm512_broadcast_i32x4(_mm_setr_epi16(0x0080, 0x0080, 0x0180, 0x0180, 0x0280, 0x0280, 0x0380, 0x0380));
    const __m512i quarter = _mm512_setr_epi64(0, 0, 0x0400040004000400, 0x0400040004000400, 0x0800080008000800,
                                              0x0800080008000800, 0x0c000c000c000c00, 0x0c000c000c000c00);
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i words = _mm512_shuffle_epi8(pairs, _mm512_or_si512(first, quarter));
    const __m512i shifted = _mm512_srlv_epi16(words, _mm512_set1_epi32(9 << 16 | 5));
    return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), 0xea);  // (a & b) | c
  } else {
    // the lower half of such a float32 is zero, so two of them go together without being rounded
    const __m512i words = _mm512_cvtepu8_epi16(load_32_bytes(p));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 16));
    return _mm512_or_si512(_mm512_castps_si512(odd), _mm512_srli_epi32(_mm512_castps_si512(even), 16));
  }
}

// Codes of kCount rows in so many blocks of 32 columns, to their places in a panel.
template <int kBits, int kCount>
inline void open_rows(const char* codes, int64_t row_bytes, int64_t blocks, char* out) {
  for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      _mm512_store_si512(out + block * kTermStride + r * 64, brain_codes<kBits>(codes + r * row_bytes + block * 4 * kBits));
    }
  }
}

// A section of a panel times one or two tiles of x. One alone takes two of the sums' four tiles, and the next section the
// others.
template <int kInputTiles, int kTerms, int kFirst>
void multiply_section(const char* panel, const char* input, int64_t input_stride, int64_t blocks, bool second, char* sums) {
  tile_zero<kFirst>();
  tile_zero<kFirst + 2>();
  if constexpr (kInputTiles == 2) tile_zero<1>();
  if constexpr (kInputTiles == 2) tile_zero<3>();
  for (int64_t block = 0; block < blocks; ++block) {
    tile_load<4>(panel + block * kTermStride);
    if (second) tile_load<5>(panel + block * kTermStride + kTileBytes);
#pragma GCC unroll 2
    for (int term = 0; term < kTerms; ++term) {
      const char* const x = input + (block * kTerms + term) * kTileBytes;
      tile_load<6>(x);
      if constexpr (kInputTiles == 2) tile_load<7>(x + input_stride);
      tile_multiply<kFirst, 4, 6>();
      if (second) tile_multiply<kFirst + 2, 5, 6>();
      if constexpr (kInputTiles == 2) tile_multiply<1, 4, 7>();
      if constexpr (kInputTiles == 2) {
        if (second) tile_multiply<3, 5, 7>();
      }
    }
  }
  tile_store<kFirst>(sums);
  if (second) tile_store<kFirst + 2>(sums + kTileBytes);
  if constexpr (kInputTiles == 2) {
    tile_store<1>(sums + kTermStride);
    if (second) tile_store<3>(sums + kTermStride + kTileBytes);
  }
}

// Scales, and what belongs to the sums of x, of kWindow groups of each row of a panel, in float32.
struct Window {
  float scale[kPanelRows][kWindow];
  float offset[kPanelRows][kWindow];
};

// Sums of a section, of up to kPanelRows rows, scaled and added to the totals of 16 rows of x. `index` is the group's place.
inline void add_section(const float* sums, const Window& window, int64_t index, Vector x_sum, int64_t rows, float* totals) {
  const float* scale = window.scale[0] + index;
  const float* offset = window.offset[0] + index;
  for (const float* const end = totals + rows * kLanes; totals < end; totals += 4 * kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Vector scaled = fused(load(sums + r * kLanes), broadcast(scale[r * kWindow]), load(totals + r * kLanes));
      store(totals + r * kLanes, fused(x_sum, broadcast(offset[r * kWindow]), scaled));
    }
    sums += 4 * kLanes;
    scale += 4 * kWindow;
    offset += 4 * kWindow;
  }
}

// Where things lie in a thread's scratch. Panels and sums are there in two turns, see kTermStride.
struct CodeScratch {
  char panels[kStep / 32][2][kTermBytes];
  float sums[2][2][kPanelRows * 16];  // [rows of x, by 16][turn][rows of the weight][16]
  Window window;
  float totals[1];  // [rows of x, by 16][kPanelRows][16]
};
static_assert(offsetof(CodeScratch, totals) == kCodeScratchBytes, "csrc/cpu/product.cpp says how much there is");

// kStep columns of a panel, or what is left of a row.
struct Stage {
  int64_t row, rows, k, columns;
  char* panel;
  const char* codes;   // of its first row
  const char* ahead;   // what is asked for for its first row, of the same distance from row to row,
  int64_t ahead_rows;  // and for how many rows
};

// While a stage is opened, the stage before is multiplied, and while a section is multiplied, the section before is scaled:
// tiles are not loaded from what was just stored, nor vectors from tiles that were.
template <int kBits, int kTerms>
struct CodeTiles {
  const Matrix& matrix;
  const Layout& layout;
  int64_t count, last;
  const char* input;
  CodeScratch* scratch;

  int64_t section = section_columns(layout);
  int64_t blocks = (count + kTileRows - 1) / kTileRows;             // tiles of x beside each other
  int64_t block_bytes = layout.columns / 32 * kTerms * kTileBytes;  // from one to the next
  int64_t sections = layout.columns / section;
  int64_t row_bytes = matrix.columns * kBits / 8;
  int64_t groups = groups_in(matrix, matrix.columns);
  int64_t pieces = (matrix.columns + kPieceColumns - 1) / kPieceColumns;
  int64_t window_begin = -1;  // the first group in the window
  // the section that is multiplied next, and which tiles of x with it
  int64_t next_section = 0, next_block = 0;
  // the section that is multiplied, but not scaled yet
  int64_t waiting_section = -1, waiting_block = 0;
  int turn = 0;

  static void ask_for_piece(const char* p) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kPieceColumns * kBits / 8; i += 64) ask_for(p + i);
  }

  // The first pieces of a panel's rows, and the lines in which their scales begin.
  void ask_for_begin(int64_t row, int64_t rows) const {
    for (int64_t r = row; r < row + rows; ++r) {
      for (int64_t piece = 0; piece < kPiecesAhead && piece < pieces; ++piece)
        ask_for_piece(values_at(matrix, r, piece * kPieceColumns));
      ask_for(static_cast<const char*>(matrix.scales) + r * groups * 2);
      ask_for(static_cast<const char*>(matrix.minima) + r * groups * 2);
    }
  }

  // What is asked for is kPiecesAhead ahead of a row: in the next panel where this one's rows end before.
  Stage stage_at(int64_t row, int64_t rows, int64_t k, char* panel) const {
    const int64_t columns = matrix.columns - k < kStep ? matrix.columns - k : kStep;
    Stage stage = {row, rows, k, columns, panel, values_at(matrix, row, k), nullptr, rows};
    int64_t piece = k / kPieceColumns + kPiecesAhead;
    if (piece >= pieces) {
      piece -= pieces;
      row += kPanelRows;
      stage.ahead_rows = piece >= pieces || row >= last ? 0 : last - row < kPanelRows ? last - row : kPanelRows;
    }
    if (stage.ahead_rows > 0) stage.ahead = values_at(matrix, row, piece * kPieceColumns);
    return stage;
  }

  // Four rows, of which one asks for a piece, another one at each stage of it.
  void open(const Stage& stage, int64_t r) const {
    const int64_t asking = r + stage.k / kStep % kPieceStages;
    if (asking < stage.ahead_rows) ask_for_piece(stage.ahead + asking * row_bytes);
    const char* const codes = stage.codes + r * row_bytes;
    char* const out = stage.panel + r * 64;
    if (r + 4 > stage.rows) {
      for (int64_t i = 0; i < stage.rows - r; ++i) {
        open_rows<kBits, 1>(codes + i * row_bytes, 0, stage.columns / 32, out + i * 64);
      }
    } else if (stage.columns == kStep) {
      open_rows<kBits, 4>(codes, row_bytes, kStep / 32, out);
    } else {
      open_rows<kBits, 4>(codes, row_bytes, stage.columns / 32, out);
    }
  }

  // Groups from `group` on; the lines after are asked for.
  template <Dtype kDtype>
  void convert(const Stage& stage, int64_t group) {
    const int64_t some = groups - group < kWindow ? groups - group : kWindow;
    for (int64_t r = 0; r < stage.rows; ++r) {
      const int64_t at = ((stage.row + r) * groups + group) * 2;
      const char* const scales = static_cast<const char*>(matrix.scales) + at;
      const char* const minima = static_cast<const char*>(matrix.minima) + at;
      ask_for(scales + 64);
      ask_for(minima + 64);
      const Vector scale = some == kWindow ? from<kDtype>(scales) : from_part<kDtype>(scales, some);
      const Vector minimum = some == kWindow ? from<kDtype>(minima) : from_part<kDtype>(minima, some);
      store(scratch->window.scale[r], scale);
      store(scratch->window.offset[r], fused(scale, broadcast(-base_of(kBits)), minimum));
    }
    window_begin = group;
  }

  float* totals(int64_t block) const { return scratch->totals + block * kPanelRows * kLanes; }

  // The section that waits, of the panel that `stage` is in.
  void scale(const Stage& stage) {
    if (waiting_section < 0) return;
    const int64_t group = groups_in(matrix, waiting_section * section);
    if (window_begin < 0 || group >= window_begin + kWindow) {
      const int64_t begin = group & -kWindow;
      matrix.dtype == Dtype::float16 ? convert<Dtype::float16>(stage, begin) : convert<Dtype::bfloat16>(stage, begin);
    }
    const char* const x_sums = input + sections_at(layout, count);
    for (int64_t i = 0; i < 2 && waiting_block + i < blocks; ++i) {
      const char* const x_sum = x_sums + ((waiting_block + i) * sections + waiting_section) * 64;
      add_section(scratch->sums[i][turn ^ 1], scratch->window, group - window_begin,
                  load(reinterpret_cast<const float*>(x_sum)), stage.rows, totals(waiting_block + i));
    }
    waiting_section = -1;
  }

  // A step is a section times one or two tiles of x.
  int64_t steps(const Stage& stage) const {
    return (stage.columns >> __builtin_ctzll(static_cast<unsigned long long>(section))) * ((blocks + 1) / 2);
  }

  void multiply(const Stage& stage, int64_t number) {
    for (int64_t step = 0; step < number; ++step) {
      const int64_t k = next_section * section;
      const char* const panel = stage.panel + (k - stage.k) / 32 * kTermStride;
      const char* const x = input + next_block * block_bytes + k / 32 * kTerms * kTileBytes;
      const auto kernel = next_block + 1 < blocks ? multiply_section<2, kTerms, 0>
                          : turn                  ? multiply_section<1, kTerms, 1>
                                                  : multiply_section<1, kTerms, 0>;
      kernel(panel, x, block_bytes, section / 32, stage.rows > kTileRows, reinterpret_cast<char*>(scratch->sums[0][turn]));
      scale(stage);
      waiting_section = next_section;
      waiting_block = next_block;
      turn ^= 1;
      next_block += 2;
      if (next_block < blocks) continue;
      next_block = 0;
      ++next_section;
    }
  }

  // The rest of a stage's steps, and where its rows are complete, their results.
  void finish(const Stage& stage, int64_t left_steps, int64_t first, float* out, int64_t stride) {
    multiply(stage, left_steps);
    if (stage.rows == 0 || stage.k + stage.columns != matrix.columns) return;
    scale(stage);
    next_section = 0;
    window_begin = -1;
    const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    for (int64_t r = 0; r < stage.rows; r += kTileRows) {
      const int64_t left = stage.rows - r;
      const __mmask16 there = static_cast<__mmask16>(left >= kTileRows ? 0xffff : (1 << left) - 1);
      for (int64_t m = 0; m < count; ++m) {
        const Vector values = _mm512_i32gather_ps(lanes, totals(m / kTileRows) + r * kLanes + m % kTileRows, 4);
        _mm512_mask_storeu_ps(out + m * stride + stage.row + r - first, there, values);
      }
    }
    __builtin_memset(scratch->totals, 0, static_cast<size_t>(blocks * kPanelRows * 64));
  }

  void product(int64_t first, float* out, int64_t stride) {
    tiles_begin();
    __builtin_memset(scratch->totals, 0, static_cast<size_t>(blocks * kPanelRows * 64));
    ask_for_begin(first, last - first < kPanelRows ? last - first : kPanelRows);
    Stage before = {};
    for (int64_t row = first; row < last; row += kPanelRows) {
      const int64_t rows = last - row < kPanelRows ? last - row : kPanelRows;
      for (int64_t k = 0; k < matrix.columns; k += kStep) {
        const Stage stage = stage_at(row, rows, k, scratch->panels[0][before.panel == scratch->panels[0][0]]);
        const int64_t all = steps(before);
        int64_t done = 0;
        for (int64_t r = 0; r < rows; r += 4) {
          open(stage, r);
          const int64_t due = all * (r + 4) / kPanelRows;
          multiply(before, due - done);
          done = due;
        }
        finish(before, all - done, first, out, stride);
        before = stage;
      }
    }
    finish(before, steps(before), first, out, stride);
    tiles_end();
  }
};

// Sums of the prepared x over sections, of 16 rows of x a vector: [rows of x, by 16][sections].
template <int kTerms>
void prepare_sections(const Layout& layout, int64_t count, int64_t first, int64_t last, char* input) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const int64_t section = section_columns(layout), tiles = section / 32 * kTerms;
  for (int64_t block = 0; block < (count + kTileRows - 1) / kTileRows; ++block) {
    const char* const x = input + block * (layout.columns / 32) * kTerms * kTileBytes;
    char* const sums = input + sections_at(layout, count) + block * (layout.columns / section) * 64;
    for (int64_t k = first; k < last; k += section) {
      const char* const pairs = x + k / 32 * kTerms * kTileBytes;
      Vector total = zero();
      for (int64_t i = 0; i < tiles * kTileBytes; i += 64) {
        total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_load_si512(pairs + i), ones);
      }
      store(reinterpret_cast<float*>(sums + k / section * 64), total);
    }
  }
}

template <int kBits, int kTerms>
void product_of_codes(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride, char* scratch) {
  CodeTiles<kBits, kTerms> tiles = {matrix, layout, count, last, input, reinterpret_cast<CodeScratch*>(scratch)};
  tiles.product(first, out, stride);
}
