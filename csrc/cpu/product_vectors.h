// Conversions to float32 vectors that all products share, for any instruction set (simd.h). Dequantized values are rounded to
// the model's dtype, so they are those that a device computes.

#pragma once

#include "product_layout.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

// `count` elements, unaligned, to float32, padded with zeros.
template <Dtype kDtype>
inline void widen(const char* p, int64_t count, int64_t padded, float* out, const char* next) {
  constexpr int64_t kBytes = kDtype == Dtype::float32 ? 4 : 2;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    prefetch(next + i * kBytes);
    store(out + i, from<kDtype>(p + i * kBytes));
  }
  if (i < count) {
    store(out + i, from_part<kDtype>(p + i * kBytes, count - i));
    i += kLanes;
  }
  for (; i < padded; i += kLanes) store(out + i, zero());
}

inline void widen(Dtype dtype, const char* p, int64_t count, int64_t padded, float* out, const char* next) {
  with_dtype(dtype, [&](auto of) { widen<of.value>(p, count, padded, out, next); });
}

// Up to kLanes scales or offsets, the rest zeros.
template <Dtype kDtype>
inline Vector some_of(const char* p, int64_t count) {
  return count >= kLanes ? from<kDtype>(p) : from_part<kDtype>(p, count);
}

inline Vector some_of(Dtype dtype, const char* p, int64_t count) {
  switch (dtype) {
    case Dtype::float32:
      return some_of<Dtype::float32>(p, count);
    case Dtype::float16:
      return some_of<Dtype::float16>(p, count);
    case Dtype::bfloat16:
      return some_of<Dtype::bfloat16>(p, count);
    case Dtype::e8m0:
      return some_of<Dtype::e8m0>(p, count);
    case Dtype::e4m3:
      return some_of<Dtype::e4m3>(p, count);
    default:
      return some_of<Dtype::uint8>(p, count);
  }
}

// How scales of integer codes are read: those that occur most without a branch.
enum class ScaleForm {
  float16,    // and minima
  bfloat16,   // and minima
  symmetric,  // bfloat16 without offsets
  e8m0,       // without offsets
  e4m3,       // and scales of rows
  any
};

// Not of `any`.
template <ScaleForm kForm>
constexpr int64_t scale_bytes() {
  return kForm == ScaleForm::e8m0 || kForm == ScaleForm::e4m3 ? 1 : 2;
}

template <ScaleForm kForm>
constexpr bool has_minima() {
  return kForm == ScaleForm::float16 || kForm == ScaleForm::bfloat16;
}

inline ScaleForm scale_form(const Matrix& matrix) {
  const bool of_rows = matrix.row_scales != nullptr, none = matrix.offset_kind == Offsets::none;
  if (matrix.group_rows != 1 || of_rows != (matrix.scale_dtype == Dtype::e4m3)) return ScaleForm::any;
  if (matrix.codes == Codes::e2m1) {
    return !none                               ? ScaleForm::any
           : matrix.scale_dtype == Dtype::e8m0 ? ScaleForm::e8m0
           : matrix.scale_dtype == Dtype::e4m3 ? ScaleForm::e4m3
                                               : ScaleForm::any;
  }
  if (none && matrix.codes == Codes::int4 && matrix.scale_dtype == Dtype::bfloat16) return ScaleForm::symmetric;
  if (matrix.offset_kind != Offsets::minima || bytes_of(matrix.scale_dtype) != 2) return ScaleForm::any;
  return matrix.scale_dtype == Dtype::float16 ? ScaleForm::float16 : ScaleForm::bfloat16;
}

// Calls run(Constant<codes>, Constant<scale form>) for integer codes.
template <typename Run>
inline void with_integer_codes(const Matrix& matrix, const Run& run) {
  const ScaleForm form = scale_form(matrix);
  if (matrix.codes == Codes::e2m1) {
    constexpr Constant<Codes::e2m1> kE2m1{};
    if (form == ScaleForm::e8m0) return run(kE2m1, Constant<ScaleForm::e8m0>{});
    return form == ScaleForm::e4m3 ? run(kE2m1, Constant<ScaleForm::e4m3>{}) : run(kE2m1, Constant<ScaleForm::any>{});
  }
  const auto with_form = [&](auto codes) {
    if (form == ScaleForm::float16) return run(codes, Constant<ScaleForm::float16>{});
    if (form == ScaleForm::bfloat16) return run(codes, Constant<ScaleForm::bfloat16>{});
    run(codes, Constant<ScaleForm::any>{});
  };
  if (form == ScaleForm::symmetric) return run(Constant<Codes::int4>{}, Constant<ScaleForm::symmetric>{});
  matrix.codes == Codes::int4 ? with_form(Constant<Codes::int4>{}) : with_form(Constant<Codes::int8>{});
}

// Where the scales of a row are, from a group on. Without scales or offsets, addresses that may be prefetched in their place.
struct RowScales {
  const char *scales, *offsets;
  const float* of_row;

  RowScales() = default;
  RowScales(const Matrix& matrix, int64_t row, int64_t group) {
    const int64_t shared = matrix.group_rows == 1 ? row : row / matrix.group_rows;
    const int64_t at = shared * row_groups(matrix) + group, size = bytes_of(matrix.scale_dtype);
    of_row = matrix.row_scales + (matrix.row_scales == nullptr ? 0 : row);
    scales =
        matrix.scales == nullptr ? reinterpret_cast<const char*>(of_row) : static_cast<const char*>(matrix.scales) + at * size;
    offsets = matrix.offsets == nullptr
                  ? scales
                  : static_cast<const char*>(matrix.offsets) + at * (matrix.offset_kind == Offsets::minima ? size : 1);
  }
};

// The factor and summand that turn up to kLanes groups' codes into values, padded with zeros. E2M1 codes count as numbers, or
// (kUnsigned) as twice the number plus 12, which is 0 to 24; of E4M3 codes as number_of returns them.
template <bool kUnsigned>
inline void convert_scales(const Matrix& matrix, const RowScales& from, int64_t count, Vector& scale, Vector& minimum) {
  scale = matrix.scales == nullptr ? broadcast(1) : some_of(matrix.scale_dtype, from.scales, count);
  if (matrix.row_scales != nullptr) scale = matrix.divides ? scale / broadcast(*from.of_row) : scale * broadcast(*from.of_row);
  if (matrix.offset_kind == Offsets::minima) {
    minimum = some_of(matrix.scale_dtype, from.offsets, count);
  } else if (matrix.offset_kind == Offsets::zero_points) {
    minimum = zero() - some_of(Dtype::uint8, from.offsets, count) * scale;
  } else if (matrix.codes == Codes::e4m3) {
    scale = scale * broadcast(256);
    minimum = zero();
  } else if (matrix.codes == Codes::e2m1) {
    minimum = kUnsigned ? scale * broadcast(-6) : zero();
    if (kUnsigned) scale = scale * broadcast(0.5f);
  } else {
    minimum = scale * broadcast(matrix.codes == Codes::int4 ? -8 : -128);
  }
}

// Factor of a row's scales.
inline float row_factor(const Matrix& matrix, int64_t row) {
  if (matrix.row_scales == nullptr) return 1;
  return matrix.divides ? 1 / matrix.row_scales[row] : matrix.row_scales[row];
}

// As convert_scales, in a form that is known; with e4m3 without row_factor.
template <ScaleForm kForm, bool kUnsigned>
[[gnu::always_inline]] inline void load_scales(const Matrix& matrix, const RowScales& from_row, int64_t count, Vector& scale,
                                               Vector& minimum) {
  if constexpr (kForm == ScaleForm::symmetric) {
    scale = some_of<Dtype::bfloat16>(from_row.scales, count);
    minimum = scale * broadcast(-8);
  } else if constexpr (kForm == ScaleForm::e8m0 || kForm == ScaleForm::e4m3) {
    scale = some_of<kForm == ScaleForm::e8m0 ? Dtype::e8m0 : Dtype::e4m3>(from_row.scales, count);
    if (kUnsigned) scale = scale * broadcast(0.5f);
    minimum = kUnsigned ? scale * broadcast(-12) : zero();
  } else if constexpr (has_minima<kForm>()) {
    constexpr Dtype kDtype = kForm == ScaleForm::float16 ? Dtype::float16 : Dtype::bfloat16;
    scale = some_of<kDtype>(from_row.scales, count);
    minimum = some_of<kDtype>(from_row.offsets, count);
  } else {
    convert_scales<kUnsigned>(matrix, from_row, count, scale, minimum);
  }
}

// Scales and minima in float32 of the groups of columns [k, k + count) of a row.
template <int64_t kMax>
struct Scales {
  float scale[kMax + 2 * kLanes];
  float minimum[kMax + 2 * kLanes];

  Scales() {}
  Scales(const Matrix& matrix, int64_t row, int64_t k, int64_t count) { convert(matrix, row, k, count); }

  void convert(const Matrix& matrix, int64_t row, int64_t k, int64_t count) {
    const int64_t first = groups_in(matrix, k), groups = groups_in(matrix, k + count - 1) + 1 - first;
    const int64_t size = bytes_of(matrix.scale_dtype);
    RowScales from_row(matrix, row, first);
    for (int64_t i = 0; i < groups; i += kLanes) {
      Vector scales, minima;
      convert_scales<false>(matrix, from_row, groups - i, scales, minima);
      store(scale + i, scales);
      store(minimum + i, minima);
      from_row.scales += kLanes * size;
      from_row.offsets += kLanes * (matrix.offset_kind == Offsets::zero_points ? 1 : size);
    }
  }
};

inline Vector rounded(Dtype dtype, Vector value) {
  return with_dtype(dtype, [&](auto to) { return rounded<to.value>(value); });
}

// For any group size, columns in order; up to kMax of them.
template <Codes kCodes, int64_t kMax>
inline void dequantize_one_by_one(const Matrix& matrix, int64_t row, int64_t k, int64_t count, int64_t padded, float* out) {
  const Scales<kMax> scales(matrix, row, k, count);
  const uint8_t* const codes = reinterpret_cast<const uint8_t*>(values_at(matrix, row, k));
  const int64_t group_columns = matrix.group;
  int64_t left = left_in_group(matrix, k), group = 0;
  float scale = scales.scale[0], minimum = scales.minimum[0];
  for (int64_t i = 0; i < count; ++i, --left) {
    if (left == 0) {
      ++group;
      left = group_columns;
      scale = scales.scale[group];
      minimum = scales.minimum[group];
    }
    const int code = bits_of(kCodes) == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
    out[i] = number_of(kCodes, code) * scale + minimum;
  }
  for (int64_t i = count; i < padded; ++i) out[i] = 0;
  for (int64_t i = 0; i < padded; i += kLanes) store(out + i, rounded(matrix.dtype, load(out + i)));
}

template <int64_t kMax>
inline void dequantize_one_by_one(const Matrix& matrix, int64_t row, int64_t k, int64_t count, int64_t padded, float* out) {
  const auto dequantize = matrix.codes == Codes::int8   ? dequantize_one_by_one<Codes::int8, kMax>
                          : matrix.codes == Codes::int4 ? dequantize_one_by_one<Codes::int4, kMax>
                          : matrix.codes == Codes::e2m1 ? dequantize_one_by_one<Codes::e2m1, kMax>
                                                        : dequantize_one_by_one<Codes::e4m3, kMax>;
  dequantize(matrix, row, k, count, padded, out);
}

// 2 * kLanes elements of x from column k, zeros from `columns` on.
inline void load_two_vectors(const char* x, Dtype dtype, int64_t k, int64_t columns, Vector& one, Vector& two) {
  const int64_t bytes = bytes_of(dtype);
  const char* p = x + k * bytes;
  char tail[2 * kVectorBytes] = {};
  if (k + 2 * kLanes > columns) {
    if (k < columns) __builtin_memcpy(tail, p, static_cast<size_t>((columns - k) * bytes));
    p = tail;
  }
  one = from(dtype, p);
  two = from(dtype, p + kLanes * bytes);
}

inline void prepare_float32(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                            int64_t last, int64_t columns, char* input) {
  for (int64_t m = 0; m < count; ++m) {
    float* const out = reinterpret_cast<float*>(input + m * input_stride(layout));
    for (int64_t k = first; k < (last == columns ? layout.columns : last); k += 2 * kLanes) {
      Vector one, two;
      load_two_vectors(x + m * stride * bytes_of(x_dtype), x_dtype, k, columns, one, two);
      if (layout.pairs) {
        Vector even, odd;
        split_pairs(one, two, even, odd);
        one = even;
        two = odd;
      }
      store(out + k, one);
      store(out + k + kLanes, two);
    }
  }
}

// Sum of all 8-byte words, the last one padded with zeros.
inline uint64_t read_sum(const char* p, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
  Words total[4] = {};
  int64_t at = 0;
  for (; at + 4 * kVectorBytes <= bytes; at += 4 * kVectorBytes) {
#pragma GCC unroll 4
    for (int64_t line = at; line < at + 4 * kVectorBytes; line += 64) prefetch(p + (line + 4096 < bytes ? line + 4096 : at));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Words words;
      __builtin_memcpy(&words, p + at + i * kVectorBytes, sizeof(words));
      total[i] += words;
    }
  }
  uint64_t result = 0;
  for (int64_t i = 0; i < 4 * kVectorBytes / 8; ++i) result += total[i / (kVectorBytes / 8)][i % (kVectorBytes / 8)];
  for (; at < bytes; at += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, p + at, static_cast<size_t>(bytes - at < 8 ? bytes - at : 8));
    result += word;
  }
  return result;
}

}  // namespace
}  // namespace zero_inference::cpu
