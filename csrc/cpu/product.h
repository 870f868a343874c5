// Products of a few rows of x with a weight in host memory, which is read once in its stored format. README.md lists which
// kernel runs when.
//
//   out[m][r] = sum_k x[m][k] * W[r][k]
//
// W is plain or codes in groups, whose values zero_inference/kernels/formats.py defines. Forms that dequantize round values to
// the model's dtype, as on a device; of a pair of 4-bit codes the even one has the low nibble. Sums are float32. x is rounded
// to bfloat16 for a bfloat16 weight in AMX tiles, and never below float16's precision for the others. The caller gives each of
// its threads ranges of rows of W.

#pragma once

#include <cstddef>
#include <cstdint>

#define ZI_INLINE static inline __attribute__((always_inline))

namespace zero_inference::cpu {

// Models and plain weights have the first three; scales the first five; zero points uint8.
enum class Dtype : int32_t { float32 = 0, float16 = 1, bfloat16 = 2, e8m0 = 3, e4m3 = 4, uint8 = 5 };

static constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : dtype >= Dtype::e8m0 ? 1 : 2; }

// Codes of zero_inference/kernels/formats.py.
enum class Codes : int32_t { plain = -1, int4 = 0, int8 = 1, e2m1 = 2, e4m3 = 3 };

// Of an element or code; 0 for plain weights.
static constexpr int64_t bits_of(Codes codes) {
  return codes == Codes::plain ? 0 : codes == Codes::int4 || codes == Codes::e2m1 ? 4 : 8;
}

enum class Offsets : int32_t { none = 0, minima = 1, zero_points = 2 };

// float16 and bfloat16 as bits, to and from float32, without branches.
ZI_INLINE float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

ZI_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ZI_INLINE float bfloat16_value(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

ZI_INLINE uint16_t bfloat16_bits(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

ZI_INLINE float float16_value(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  // the exponent's bias differs by 112; subnormal numbers come out right, because the product normalises them
  const float value = from_bits((half & 0x7fffu) << 13) * from_bits(239u << 23);
  const uint32_t bits = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u | (half & 0x3ffu) << 13 : to_bits(value);
  return from_bits(bits | sign);
}

ZI_INLINE uint16_t float16_bits(float value) {
  const uint32_t sign = (to_bits(value) >> 16) & 0x8000u;
  const uint32_t bits = to_bits(value) & 0x7fffffffu;
  // below 2^-14 half's numbers are 2^-24 apart, as float's are from 0.5 on: the sum rounds
  const uint32_t small = to_bits(from_bits(bits) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;  // not a number; or too large, from 65520 on
  return static_cast<uint16_t>(sign | (bits >= 0x477ff000u ? large : bits < 0x38800000u ? small : normal));
}

// 2^(bits - 127); 255 is not a number.
ZI_INLINE float e8m0_value(uint8_t bits) {
  return from_bits(bits == 0 ? 0x400000u : bits == 255 ? 0x7fc00000u : static_cast<uint32_t>(bits) << 23);
}

// A 256th of the value, exact, as bits of float16: exponents differ by 8. Not numbers count as 480.
ZI_INLINE uint16_t e4m3_half_bits(uint8_t bits) { return static_cast<uint16_t>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7); }

static inline float element(const void* values, Dtype dtype, int64_t index) {
  if (dtype == Dtype::float32) return static_cast<const float*>(values)[index];
  if (dtype >= Dtype::e8m0) {
    const uint8_t byte = static_cast<const uint8_t*>(values)[index];
    return dtype == Dtype::e8m0   ? e8m0_value(byte)
           : dtype == Dtype::e4m3 ? float16_value(e4m3_half_bits(byte)) * 256
                                  : static_cast<float>(byte);
  }
  const uint16_t bits = static_cast<const uint16_t*>(values)[index];
  return dtype == Dtype::float16 ? float16_value(bits) : bfloat16_value(bits);
}

// The number of a code; of E4M3 divided by 256.
static inline float number_of(Codes codes, int code) {
  constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (codes == Codes::e2m1) return code < 8 ? kE2m1[code] : -kE2m1[code - 8];
  return codes == Codes::e4m3 ? float16_value(e4m3_half_bits(static_cast<uint8_t>(code))) : static_cast<float>(code);
}

// Ascending: each includes those before it. avx512 is F, BW, DQ, VL, VBMI, VNNI and BF16 (Sapphire Rapids, Zen 4 and
// later), amx adds tiles of bfloat16 and int8.
enum class Instructions : int32_t { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best that processor and operating system support. Requests permission for AMX where the system requires it.
Instructions best_instructions();

// A weight; zero_inference/cpu/products.py has the same fields.
struct Matrix {
  const void* values;       // rows x columns, row-major: elements of `dtype`, or codes
  const void* scales;       // rows / group_rows x groups of a row, of `scale_dtype`; null: none
  const void* offsets;      // as many: minima of `scale_dtype`, or zero points in uint8; null: none
  const float* row_scales;  // a factor of the scales of each row; null: none
  int64_t rows, columns;
  int64_t group;       // columns that share a scale, not 0 for codes; only with E4M3 may the last one of a row be smaller
  int64_t group_rows;  // rows that share scales
  Codes codes;
  Dtype scale_dtype;
  Offsets offset_kind;
  int32_t divides;  // whether scales are divided by `row_scales`
  Dtype dtype;      // of the model: of plain elements and of dequantized values
};

// Calls work(address, offset in bytes, bytes) for each tensor that rows [first, last) read.
template <typename Work>
static inline void for_tensors(const Matrix& matrix, int64_t first, int64_t last, const Work& work) {
  const int64_t bits = matrix.codes == Codes::plain ? 8 * bytes_of(matrix.dtype) : bits_of(matrix.codes);
  if (matrix.scales != nullptr) {
    const int64_t groups = (matrix.columns + matrix.group - 1) / matrix.group;
    const int64_t from = first / matrix.group_rows * groups;
    const int64_t count = (last + matrix.group_rows - 1) / matrix.group_rows * groups - from;
    const int64_t scale_bytes = bytes_of(matrix.scale_dtype);
    const int64_t offset_bytes = matrix.offset_kind == Offsets::minima ? scale_bytes : 1;
    work(matrix.scales, from * scale_bytes, count * scale_bytes);
    if (matrix.offsets != nullptr) work(matrix.offsets, from * offset_bytes, count * offset_bytes);
  }
  if (matrix.row_scales != nullptr) work(matrix.row_scales, first * 4, (last - first) * 4);
  work(matrix.values, first * matrix.columns * bits / 8, (last - first) * matrix.columns * bits / 8);
}

static inline int64_t stored_bytes(const Matrix& matrix) {
  int64_t total = 0;
  for_tensors(matrix, 0, matrix.rows, [&](const void*, int64_t, int64_t bytes) { total += bytes; });
  return total;
}

// Bytes of a stored row, scales and offsets included.
static inline int64_t row_bytes(const Matrix& matrix) { return stored_bytes(matrix) / (matrix.rows > 0 ? matrix.rows : 1); }

// Bytes of the prepared input of `count` rows; a multiple of 64.
size_t input_bytes(const Matrix& matrix, int64_t count, Instructions instructions);

// Columns of which `first` of prepare_input is a multiple.
int64_t input_step(const Matrix& matrix);

// Converts columns [first, last) of x [count, columns], rows `stride` elements apart, to the form that the product reads, in
// `input` (64-byte aligned). Several threads may each prepare a part; all must be done before a product begins.
void prepare_input(const Matrix& matrix, int64_t count, Instructions instructions, const void* x, Dtype x_dtype, int64_t stride,
                   int64_t first, int64_t last, void* input);

// Scratch bytes of one thread; 64-byte aligned.
size_t scratch_bytes(const Matrix& matrix, int64_t count, Instructions instructions);

// out[m * stride + r - first] in float32, for rows [first, last) of the weight. Ranges of multiples of 16 rows are fast.
void product(const Matrix& matrix, int64_t count, Instructions instructions, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch);

// Sum of all 8-byte words modulo 2^64, the last one padded with zeros: measures the bandwidth that products can reach.
uint64_t read_bytes_sum(const void* data, int64_t bytes, Instructions instructions);

}  // namespace zero_inference::cpu
