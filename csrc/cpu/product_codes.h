// Products with int4 codes themselves, for few rows of x. Included by product_avx512.cpp behind product_wide.h.
//
//   y = sum_g scale[g] * (sum_k x[k] * (128 + code[k]) - 128 * sum_k x[k]) + minimum[g] * sum_k x[k], with k over group g
//
// 128 + code is a bfloat16 of which the code is the last bits (0x4300 | code), so that it takes a shift and one logical
// operation, and no look-up: of those that take a table of 32 words Intel's processors do one in two cycles. The sums of x over
// groups are prepared, and so is what 128 adds to each lane of a chunk's sums, which begin with its opposite. Taken away at the
// end of a row instead it would leave 16 times the error: 1.7e-5 of the result's norm, and so 1.0e-6 (2368 columns in groups of
// 64, x's mean half its deviation).
//
// A chunk of 128 codes is 32 words of four: all first codes of the words are one vector, all second ones, and so on, and x is
// prepared in this order, in one bfloat16 term or in two.

constexpr int64_t kChunk = 128;
constexpr int64_t kCodesBlock = 2048;  // columns of which the scales are converted at a time
constexpr int64_t kAhead = 4096;       // bytes that are asked for before they are needed, at least

// In a row of the prepared input: where the sums over groups begin, and behind them what the sums of chunks begin with.
template <int kTerms>
inline int64_t sums_at(const Layout& layout) {
  return layout.columns * 2 * kTerms;
}

template <int kTerms>
inline int64_t offsets_at(const Layout& layout) {
  return sums_at<kTerms>(layout) + sums_bytes(layout);
}

// 128 elements of x from column k to their places in a row of the prepared input; `quarters` are the sums of each 32 of them.
template <int kTerms>
inline void prepare_chunk(const Layout& layout, const char* x, Dtype dtype, int64_t k, int64_t columns, char* out,
                          float* quarters) {
  Vector values[8], even[4], odd[4];
  for (int i = 0; i < 4; ++i) {
    two_vectors(x, dtype, k + 32 * i, columns, values[2 * i], values[2 * i + 1]);
    split_pairs(values[2 * i], values[2 * i + 1], even[i], odd[i]);
  }
  Vector place[4][2];  // by place in a word
  for (int i = 0; i < 2; ++i) {
    split_pairs(even[2 * i], even[2 * i + 1], place[0][i], place[2][i]);
    split_pairs(odd[2 * i], odd[2 * i + 1], place[1][i], place[3][i]);
  }
  const __m512bh minus_128 = (__m512bh)_mm512_set1_epi16(static_cast<short>(0xc300));
  Vector offset = zero();
  for (int q = 0; q < 4; ++q) {
    __m512i terms[kTerms];
    to_brain<kTerms>(place[q][0], place[q][1], terms);
    for (int term = 0; term < kTerms; ++term) {
      _mm512_storeu_si512(out + term * layout.columns * 2 + k * 2 + q * 64, terms[term]);
      offset = _mm512_dpbf16_ps(offset, minus_128, (__m512bh)terms[term]);
    }
  }
  store(reinterpret_cast<float*>(out + offsets_at<kTerms>(layout) + k / kChunk * kVectorBytes), offset);
  for (int i = 0; i < 4; ++i) {
    quarters[i] = _mm512_mask_reduce_add_ps(static_cast<__mmask16>(0xf << 4 * i), offset) / -128;
  }
}

template <int kTerms>
void prepare_codes(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, char* input) {
  for (int64_t m = 0; m < count; ++m) {
    char* const out = input + m * input_stride(layout);
    float* const sums = reinterpret_cast<float*>(out + sums_at<kTerms>(layout));
    const int64_t groups = last == columns ? round_up(columns / layout.group, kLanes) : last / layout.group;
    for (int64_t g = first / layout.group; g < groups; ++g) sums[g] = 0;
    for (int64_t k = first; k < last; k += kChunk) {
      float quarters[4];
      prepare_chunk<kTerms>(layout, x + m * stride * bytes_of(x_dtype), x_dtype, k, columns, out, quarters);
      for (int i = 0; i < 4 && k + 32 * i < last; ++i) sums[(k + 32 * i) / layout.group] += quarters[i];
    }
  }
}

// The four vectors of 128 + code.
inline void open_codes(__m512i words, __m512i* codes) {
  const __m512i low = _mm512_set1_epi16(15), add = _mm512_set1_epi16(0x4300);
  constexpr int kAndOr = 0xea;  // (a & b) | c
  codes[0] = _mm512_ternarylogic_epi32(words, low, add, kAndOr);
  codes[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), low, add, kAndOr);
  codes[2] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 8), low, add, kAndOr);
  codes[3] = _mm512_or_si512(_mm512_srli_epi16(words, 12), add);
}

// Of the 16 lanes of a chunk's sums, which hold the first group's, the second's and so on.
inline __m512i group_of_lane(int64_t group) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return group == 32 ? _mm512_srli_epi32(lanes, 2) : group == 64 ? _mm512_srli_epi32(lanes, 3) : _mm512_setzero_si512();
}

// Columns [k, k + count) of two rows, added to `total`.
template <int kCount, int kTerms>
inline void multiply_codes(const Matrix& matrix, const Layout& layout, const char* input, const int64_t* rows,
                           const int64_t* ahead, int64_t k, int64_t count, Vector (*total)[kCount]) {
  using BlockScales = Scales<kCodesBlock / 32 + 2>;
  const BlockScales scales[2] = {{matrix, rows[0], k, count}, {matrix, rows[1], k, count}};
  const char* const codes[2] = {values_at(matrix, rows[0], k), values_at(matrix, rows[1], k)};
  const __m512i spread = group_of_lane(matrix.group);
  const int64_t x_stride = input_stride(layout);
  const char* x = input + k * 2;
  const char* const offsets = input + offsets_at<kTerms>(layout) + k / kChunk * kVectorBytes;
  int64_t group = 0;
  int64_t left = left_in_group(matrix, k);
  for (int64_t i = 0; i < count; i += kChunk, x += kChunk * 2) {
    __m512i weights[2][4];
    Vector scale[2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const char* const p = codes[r] + i / 2;
      ask_for(p + ahead[r]);
      const __mmask64 there = count - i >= kChunk ? ~0ull : (1ull << (count - i) / 2) - 1;
      open_codes(_mm512_maskz_loadu_epi8(there, p), weights[r]);
      scale[r] = _mm512_permutexvar_ps(spread, load(scales[r].scale + group));
    }
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      const Vector offset = load(reinterpret_cast<const float*>(offsets + m * x_stride + i / kChunk * kVectorBytes));
      Vector sums[2] = {offset, offset};
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          const __m512bh values = (__m512bh)_mm512_loadu_si512(x + m * x_stride + term * layout.columns * 2 + q * 64);
          sums[0] = _mm512_dpbf16_ps(sums[0], (__m512bh)weights[0][q], values);
          sums[1] = _mm512_dpbf16_ps(sums[1], (__m512bh)weights[1][q], values);
        }
      }
      total[0][m] = fused(sums[0], scale[0], total[0][m]);
      total[1][m] = fused(sums[1], scale[1], total[1][m]);
    }
    left -= kChunk;
    if (left <= 0) {
      group += matrix.group < kChunk ? groups_in(matrix, kChunk) : 1;
      left = matrix.group;
    }
  }
}

// The second term.
template <int kCount, int kTerms>
inline void add_minima(const Matrix& matrix, const Layout& layout, const char* input, const int64_t* rows,
                       Vector (*total)[kCount]) {
  const int64_t groups = groups_in(matrix, matrix.columns);
  for (int64_t g = 0; g < groups; g += kLanes) {
    const int64_t some = groups - g < kLanes ? groups - g : kLanes;
    for (int r = 0; r < 2; ++r) {
      const int64_t at = (rows[r] * groups + g) * bytes_of(matrix.dtype);
      alignas(64) float minimum[kLanes];
      const char* const minima = static_cast<const char*>(matrix.minima) + at;
      widen(matrix.dtype, minima, some, some, minimum, minima);
      for (int m = 0; m < kCount; ++m) {
        const char* const sums = input + m * input_stride(layout) + sums_at<kTerms>(layout);
        total[r][m] = fused(load(minimum), load(reinterpret_cast<const float*>(sums) + g), total[r][m]);
      }
    }
  }
}

template <int kCount, int kTerms>
void product_of_codes(const Matrix& matrix, const Layout& layout, const char* input, int64_t first, int64_t last, float* out,
                      int64_t stride) {
  const int64_t row_bytes = matrix.columns / 2;
  const int64_t rows_ahead = round_up((kAhead + row_bytes - 1) / row_bytes, 2);
  for (int64_t row = first; row < last; row += 2) {
    const int64_t rows[2] = {row, row + 1 < last ? row + 1 : row};
    const int64_t ahead[2] = {rows[0] + rows_ahead < last ? rows_ahead * row_bytes : 0,
                              rows[1] + rows_ahead < last ? rows_ahead * row_bytes : 0};
    Vector total[2][kCount];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kCount; ++i) total[i / kCount][i % kCount] = zero();
    for (int64_t k = 0; k < matrix.columns; k += kCodesBlock) {
      const int64_t columns = matrix.columns - k < kCodesBlock ? matrix.columns - k : kCodesBlock;
      multiply_codes<kCount, kTerms>(matrix, layout, input, rows, ahead, k, columns, total);
    }
    add_minima<kCount, kTerms>(matrix, layout, input, rows, total);
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      out[m * stride + row - first] = sum(total[0][m]);
      if (row + 1 < last) out[m * stride + row + 1 - first] = sum(total[1][m]);
    }
  }
}

template <int kTerms>
void product_of_codes(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride) {
  if (count == 1) return product_of_codes<1, kTerms>(matrix, layout, input, first, last, out, stride);
  if (count == 2) return product_of_codes<2, kTerms>(matrix, layout, input, first, last, out, stride);
  if (count == 3) return product_of_codes<3, kTerms>(matrix, layout, input, first, last, out, stride);
  product_of_codes<4, kTerms>(matrix, layout, input, first, last, out, stride);
}
