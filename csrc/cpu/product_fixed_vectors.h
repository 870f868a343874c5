// Products of codes with fixed-point x in vectors, up to 8 rows of x at a time (AVX-512 VNNI).
//
// A chunk is 64 bytes of codes; one instruction adds products of four bytes to each of 16 sums. A row of the prepared input:
// for each chunk h and l (int4: even columns before odd ones), then the steps for its sums, then the sums of x over groups.

#pragma once

#include "simd_avx512.h"

#include "product_fixed_input.h"
#include "product_fixed_rows.h"
#include "product_layout.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

constexpr int64_t kChunkBytes = 64;

template <int kBits>
constexpr int64_t kChunkColumns = kChunkBytes * 8 / kBits;

template <int kBits>
void prepare_fixed(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, char* input) {
  constexpr int64_t kParts = kChunkColumns<kBits> / kFixedColumns, kPartBytes = 64 / kParts;  // of a chunk, of a term's vector
  const int64_t x_group = kFixedColumns / layout.x_groups, lanes = kLanes / kParts / layout.x_groups;
  for (int64_t m = 0; m < count; ++m) {
    char* const out = input + m * input_stride(layout);
    float* const sums = reinterpret_cast<float*>(out + sums_at(layout));
    const int64_t groups = last == columns ? round_up(columns / layout.group, kLanes) : last / layout.group;
    for (int64_t g = first / layout.group; g < groups; ++g) sums[g] = 0;
    for (int64_t k = first; k < (last == columns ? layout.columns : last); k += kFixedColumns) {
      FixedBlock block;
      fix_block<kBits>(layout, x + m * stride * bytes_of(x_dtype), x_dtype, k, columns, block);
      const int64_t chunk = k / kChunkColumns<kBits>, part = k / kFixedColumns % kParts;
      char* const to = out + chunk * kChunkColumns<kBits> * 2 + part * kPartBytes;
      for (int64_t i = 0; i < 2 * kParts; ++i) {  // by term, and half where the chunk has two blocks
        __builtin_memcpy(to + i * 64, block.terms[i / kParts] + i % kParts * kPartBytes, kPartBytes);
      }
      float* const steps = reinterpret_cast<float*>(out + steps_at(layout)) + chunk * kLanes + part * (kLanes / kParts);
      for (int64_t s = 0; s < layout.x_groups; ++s) {
        for (int64_t lane = 0; lane < lanes; ++lane) steps[s * lanes + lane] = block.steps[s];
        if (k + s * x_group < columns) sums[(k + s * x_group) / layout.group] += block.sums[s];
      }
    }
  }
}

// Index of the scale of each of a chunk's sums.
template <int kBits>
struct GroupOfLane {
  int64_t group;
  __m512i lanes;
  int64_t left;

  explicit GroupOfLane(int64_t group) : group(group) { restart(); }

  void restart() {
    const __m512i columns = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                               _mm512_set1_epi32(kChunkColumns<kBits> / kLanes));
    lanes = _mm512_srl_epi32(columns, _mm_cvtsi64_si128(__builtin_ctzll(static_cast<unsigned long long>(group))));
    left = group;
  }

  [[gnu::always_inline]] inline void next() {
    left -= kChunkColumns<kBits>;
    if (left > 0) return;
    lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(1 - left / group)));
    left = group;
  }
};

// kWhole: the chunk has all its bytes.
template <int kCount, Codes kCodes, bool kWhole>
[[gnu::always_inline]] inline void add_chunk(const TwoRows& rows, int64_t at, int64_t bytes, __m512i groups,
                                             const Vector* scales, const char* x, const char* steps, int64_t x_stride,
                                             Vector (*total)[kCount]) {
  constexpr int64_t kBits = bits_of(kCodes);
  const __m512i low = _mm512_set1_epi8(15);
  __m512i codes[2][2];
  Vector scale[2];
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    const char* const p = rows.codes[r] + at;
    prefetch(p + rows.ahead);
    codes[r][0] = kWhole ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((1ull << bytes) - 1, p);
    if constexpr (kBits == 4) {
      codes[r][1] = integers<kCodes>(_mm512_and_si512(_mm512_srli_epi16(codes[r][0], 4), low));
      codes[r][0] = integers<kCodes>(_mm512_and_si512(codes[r][0], low));
    }
    scale[r] = _mm512_permutexvar_ps(groups, scales[r]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kCount; ++m, x += x_stride, steps += x_stride) {
    const Vector step = load(reinterpret_cast<const float*>(steps));
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[r][0], _mm512_loadu_si512(x));
      if constexpr (kBits == 4) sums = _mm512_dpbusd_epi32(sums, codes[r][1], _mm512_loadu_si512(x + 64));
      sums = _mm512_slli_epi32(sums, 8);
      constexpr int64_t kLower = 64 * 8 / kBits;
      sums = _mm512_dpbusd_epi32(sums, codes[r][0], _mm512_loadu_si512(x + kLower));
      if constexpr (kBits == 4) sums = _mm512_dpbusd_epi32(sums, codes[r][1], _mm512_loadu_si512(x + kLower + 64));
      total[r][m] = multiply_add(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), step), scale[r], total[r][m]);
    }
  }
}

template <int kCount, Codes kCodes, ScaleForm kForm>
[[gnu::always_inline]] inline void multiply_fixed(const Matrix& matrix, const Layout& layout, const TwoRows& rows,
                                                  const char* input, Vector (*total)[kCount]) {
  constexpr int64_t kBits = bits_of(kCodes);
  const int64_t x_stride = input_stride(layout), groups = row_groups(matrix);
  const int64_t row_bytes = matrix.columns * kBits / 8, span = kLanes * matrix.group * kBits / 8;
  GroupOfLane<kBits> of_lane(matrix.group);
  const char *x = input, *steps = input + steps_at(layout);
  const char* sums = input + sums_at(layout);
  int64_t at = 0;
  for (int64_t g = 0; g < groups; g += kLanes, sums += kVectorBytes) {
    const int64_t some = groups - g;
    Vector scales[2];
    take_groups<kCount, kForm>(matrix, rows, g, some, sums, x_stride, scales, total);
    of_lane.restart();
    const int64_t end = at + span < row_bytes ? at + span : row_bytes;
    for (; at + kChunkBytes <= end; at += kChunkBytes, steps += kVectorBytes, x += 2 * kChunkColumns<kBits>) {
      add_chunk<kCount, kCodes, true>(rows, at, 0, of_lane.lanes, scales, x, steps, x_stride, total);
      of_lane.next();
    }
    if (at < end) add_chunk<kCount, kCodes, false>(rows, at, end - at, of_lane.lanes, scales, x, steps, x_stride, total);
  }
}

// Not inlined: beside the state of its loop, one row of x with int4 took 8% longer.
template <int kCount, Codes kCodes, ScaleForm kForm>
[[gnu::noinline]] void multiply_rows(const Matrix& matrix, const Layout& layout, const TwoRows& rows, const char* input,
                                     float* out, int64_t stride, int64_t rows_left) {
  Vector total[2][kCount];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kCount; ++i) total[i / kCount][i % kCount] = zero();
  multiply_fixed<kCount, kCodes, kForm>(matrix, layout, rows, input, total);
#pragma GCC unroll 8
  for (int m = 0; m < kCount; ++m) {
    out[m * stride] = sum(total[0][m]);
    if (rows_left > 1) out[m * stride + 1] = sum(total[1][m]);
  }
}

// kRest: rows of x after the last four.
template <int kRest, Codes kCodes, ScaleForm kForm>
void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride) {
  const int64_t x_stride = input_stride(layout);
  for_two_rows<kCodes, kForm>(matrix, first, last, [&](const TwoRows& rows, int64_t row) {
    float* const to = out + row - first;
    int64_t m = 0;
    for (; m + 8 <= count; m += 8) {  // the two rows are in L1 after the first time
      multiply_rows<8, kCodes, kForm>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, last - row);
    }
    for (; m + 4 <= count; m += 4) {
      multiply_rows<4, kCodes, kForm>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, last - row);
    }
    if constexpr (kRest > 0) {
      multiply_rows<kRest, kCodes, kForm>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, last - row);
    }
  });
}

inline void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                             int64_t last, float* out, int64_t stride, char*) {
  with_integer_codes(matrix, [&](auto codes, auto form) {
    const int64_t rest = count % 4;
    const auto multiply = rest == 0   ? product_of_fixed<0, codes.value, form.value>
                          : rest == 1 ? product_of_fixed<1, codes.value, form.value>
                          : rest == 2 ? product_of_fixed<2, codes.value, form.value>
                                      : product_of_fixed<3, codes.value, form.value>;
    multiply(matrix, layout, count, input, first, last, out, stride);
  });
}

}  // namespace
}  // namespace zero_inference::cpu
