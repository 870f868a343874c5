// Products of codes with fixed-point x in vectors of 16 words. Included by product_avx2.cpp behind product_narrow.h.
//
// What product_fixed_input.h says of x holds here, too, but its numbers stay whole: an instruction multiplies 16 words with 16
// and adds the products up in pairs, without an error. Columns are taken 32 at a time, and in int4 those of even place come
// before those of odd ones, as codes are opened. A row of the prepared input has the numbers, then for each section its step,
// then the sums of x over groups.

constexpr int64_t kUnit = 32;     // columns
constexpr int64_t kAhead = 4096;  // bytes that are asked for before they are needed, at least

inline int64_t section_columns(const Layout& layout) { return 64 / layout.sections; }

// The number of column `i` of a section lies there.
template <int kBits>
inline int64_t number_at(int64_t i) {
  return kBits == 8 ? i : i / kUnit * kUnit + i % 2 * (kUnit / 2) + i % kUnit / 2;
}

// Columns [k, k + size), zeros from `columns` on. Returns the sum of their values.
template <int kBits>
inline float fix_section(const char* x, Dtype dtype, int64_t k, int64_t size, int64_t columns, int16_t* numbers, float* step) {
  float values[64];
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    Vector one, two;
    two_vectors(x, dtype, k + i, columns, one, two);
    store(values + i, one);
    store(values + i + kLanes, two);
  }
  uint32_t most = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, values + i, 4);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  float inverse;
  find_step(most, *step, inverse);
  int32_t whole[64];
  int32_t total = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m256i some = _mm256_cvtps_epi32(_mm256_mul_ps(load(values + i), broadcast(inverse)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + i), some);
  }
  for (int64_t i = 0; i < size; ++i) {
    numbers[number_at<kBits>(i)] = static_cast<int16_t>(whole[i]);
    total += static_cast<int16_t>(whole[i]);
  }
  return static_cast<float>(total) * *step;
}

template <int kBits>
void prepare_fixed(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, char* input) {
  const int64_t size = section_columns(layout);
  for (int64_t m = 0; m < count; ++m) {
    char* const out = input + m * input_stride(layout);
    const char* const row = x + m * stride * bytes_of(x_dtype);
    float* const steps = reinterpret_cast<float*>(out + steps_at(layout));
    float* const sums = reinterpret_cast<float*>(out + sums_at(layout));
    const int64_t groups = last == columns ? round_up(columns / layout.group, kLanes) : last / layout.group;
    for (int64_t g = first / layout.group; g < groups; ++g) sums[g] = 0;
    for (int64_t k = first; k < last; k += size) {
      int16_t* const numbers = reinterpret_cast<int16_t*>(out) + k;
      sums[k / layout.group] += fix_section<kBits>(row, x_dtype, k, size, columns, numbers, steps + k / size);
    }
  }
}

// Of 32 columns: the codes of two vectors of numbers.
template <int kBits>
[[gnu::always_inline]] inline void open_codes(const char* p, __m256i* codes) {
  if constexpr (kBits == 8) {
    codes[0] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    codes[1] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  } else {
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    codes[0] = _mm256_and_si256(both, _mm256_set1_epi16(15));
    codes[1] = _mm256_srli_epi16(both, 4);
  }
}

// Rows of a weight that are multiplied together, and what is asked for ahead.
template <int kTogether>
struct RowsOfCodes {
  const char* codes[kTogether];
  const char* scales[kTogether];
  const char* minima[kTogether];
  int64_t ahead, scales_ahead;
};

// Adds a section's products, of columns from `k` on.
template <int kCount, int kTogether, int kBits, int kUnits>
[[gnu::always_inline]] inline void add_section(const RowsOfCodes<kTogether>& rows, int64_t k, const float* scales,
                                               const char* x, const char* step, int64_t x_stride, Vector (*total)[kCount]) {
  __m256i sums[kTogether][kCount];
#pragma GCC unroll 2
  for (int unit = 0; unit < kUnits; ++unit) {
    __m256i codes[kTogether][2];
#pragma GCC unroll 2
    for (int r = 0; r < kTogether; ++r) {
      const char* const p = rows.codes[r] + (k + unit * kUnit) * kBits / 8;
      if (unit == 0) ask_for(p + rows.ahead);
      open_codes<kBits>(p, codes[r]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      const __m256i* const numbers = reinterpret_cast<const __m256i*>(x + m * x_stride + (k + unit * kUnit) * 2);
      const __m256i one = _mm256_loadu_si256(numbers), two = _mm256_loadu_si256(numbers + 1);
#pragma GCC unroll 2
      for (int r = 0; r < kTogether; ++r) {
        const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(codes[r][0], one), _mm256_madd_epi16(codes[r][1], two));
        sums[r][m] = unit == 0 ? both : _mm256_add_epi32(sums[r][m], both);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kCount; ++m) {
    const Vector of_x = _mm256_broadcast_ss(reinterpret_cast<const float*>(step + m * x_stride));
#pragma GCC unroll 2
    for (int r = 0; r < kTogether; ++r) {
      const Vector factor = _mm256_mul_ps(of_x, _mm256_broadcast_ss(scales + r * kLanes));
      total[r][m] = fused(_mm256_cvtepi32_ps(sums[r][m]), factor, total[r][m]);
    }
  }
}

template <int kCount, int kTogether, int kBits, int kUnits, Dtype kDtype>
[[gnu::always_inline]] inline void multiply_fixed(const Matrix& matrix, const Layout& layout,
                                                  const RowsOfCodes<kTogether>& rows, const char* input,
                                                  Vector (*total)[kCount]) {
  const int64_t x_stride = input_stride(layout), groups = groups_in(matrix, matrix.columns);
  const char* const steps = input + steps_at(layout);
  const char* const sums = input + sums_at(layout);
  int64_t k = 0;
  for (int64_t g = 0; g < groups; g += kLanes) {
    const int64_t some = groups - g < kLanes ? groups - g : kLanes;
    float scales[kTogether * kLanes];
#pragma GCC unroll 2
    for (int r = 0; r < kTogether; ++r) {
      const char *const scale = rows.scales[r] + g * 2, *const minimum = rows.minima[r] + g * 2;
      ask_for(scale + rows.scales_ahead);
      ask_for(minimum + rows.scales_ahead);
      store(scales + r * kLanes, some == kLanes ? from<kDtype>(scale) : from_part<kDtype>(scale, some));
      const Vector minima = some == kLanes ? from<kDtype>(minimum) : from_part<kDtype>(minimum, some);
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
        total[r][m] = fused(minima, load(reinterpret_cast<const float*>(sums + m * x_stride) + g), total[r][m]);
      }
    }
    for (int64_t i = 0; i < some; ++i) {
      for (const int64_t end = k + matrix.group; k < end; k += kUnits * kUnit) {
        const char* const step = steps + k / (kUnits * kUnit) * 4;
        add_section<kCount, kTogether, kBits, kUnits>(rows, k, scales + i, input, step, x_stride, total);
      }
    }
  }
}

// `kCount` rows of x from row `m` on.
template <int kCount, int kTogether, int kBits, int kUnits, Dtype kDtype>
[[gnu::noinline]] void multiply_rows(const Matrix& matrix, const Layout& layout, const RowsOfCodes<kTogether>& rows,
                                     const char* input, float* out, int64_t stride, int64_t some) {
  Vector total[kTogether][kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kTogether * kCount; ++i) total[i / kCount][i % kCount] = zero();
  multiply_fixed<kCount, kTogether, kBits, kUnits, kDtype>(matrix, layout, rows, input, total);
#pragma GCC unroll 4
  for (int m = 0; m < kCount; ++m) {
    out[m * stride] = sum(total[0][m]);
    if constexpr (kTogether == 2) {
      if (some > 1) out[m * stride + 1] = sum(total[1][m]);
    }
  }
}

// Two rows of the weight at a time times all rows of x, one, two or four together: then there are registers for all sums.
template <int kBits, int kUnits, Dtype kDtype>
void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride) {
  const int64_t row_bytes = matrix.columns * kBits / 8, row_scales = groups_in(matrix, matrix.columns) * 2;
  const int64_t rows_ahead = round_up((kAhead + row_bytes - 1) / row_bytes, 2), x_stride = input_stride(layout);
  for (int64_t row = first; row < last; row += 2) {
    RowsOfCodes<2> rows;
    for (int r = 0; r < 2; ++r) {
      const int64_t here = row + r < last ? row + r : row;
      rows.codes[r] = values_at(matrix, here, 0);
      rows.scales[r] = static_cast<const char*>(matrix.scales) + here * row_scales;
      rows.minima[r] = static_cast<const char*>(matrix.minima) + here * row_scales;
    }
    const bool more = row + 1 + rows_ahead < last;
    rows.ahead = more ? rows_ahead * row_bytes : 0;
    rows.scales_ahead = more ? rows_ahead * row_scales : 0;
    const int64_t some = last - row;
    float* const to = out + row - first;
    int64_t m = 0;
    for (; m + 2 <= count; m += 2) {
      multiply_rows<2, 2, kBits, kUnits, kDtype>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, some);
    }
    if (m < count) {
      multiply_rows<1, 2, kBits, kUnits, kDtype>(matrix, layout, rows, input + m * x_stride, to + m * stride, stride, some);
    }
  }
}

template <int kBits, int kUnits>
void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                      float* out, int64_t stride) {
  const bool half = matrix.dtype == Dtype::float16;
  const auto multiply =
      half ? product_of_fixed<kBits, kUnits, Dtype::float16> : product_of_fixed<kBits, kUnits, Dtype::bfloat16>;
  multiply(matrix, layout, count, input, first, last, out, stride);
}

inline void product_of_fixed(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first,
                             int64_t last, float* out, int64_t stride) {
  const bool two = layout.sections == 1;  // units in a section
  const auto multiply = matrix.bits == 4 ? (two ? product_of_fixed<4, 2> : product_of_fixed<4, 1>)
                                         : (two ? product_of_fixed<8, 2> : product_of_fixed<8, 1>);
  multiply(matrix, layout, count, input, first, last, out, stride);
}
