// Products of a few rows of x with a weight in host memory, which is read once in its stored format. README.md lists which
// kernel runs when.
//
//   out[m][r] = sum_k x[m][k] * W[r][k]
//
// W is plain or codes in groups: W[r][k] = code * scale + minimum (zero_inference/kernels/quantization.py), rounded to the
// dtype of the scale, as on a device; an int4 pair has the even element in its low nibble. Sums are float32. x is rounded to
// bfloat16 for a bfloat16 weight in AMX tiles, and never below float16's precision for the others. The caller gives each of its
// threads ranges of rows of W.

#pragma once

#include <cstddef>
#include <cstdint>

#define ZI_INLINE static inline __attribute__((always_inline))

namespace zero_inference::cpu {

enum class Dtype : int32_t { float32 = 0, float16 = 1, bfloat16 = 2 };

static inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

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

static inline float element(const void* values, Dtype dtype, int64_t index) {
  if (dtype == Dtype::float32) return static_cast<const float*>(values)[index];
  const uint16_t bits = static_cast<const uint16_t*>(values)[index];
  return dtype == Dtype::float16 ? float16_value(bits) : bfloat16_value(bits);
}

// Ascending: each includes those before it. avx512 is F, BW, DQ, VL, VNNI and BF16 (Cooper Lake, Sapphire Rapids, Zen 4 and
// later), amx adds tiles of bfloat16 and int8.
enum class Instructions : int32_t { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best that processor and operating system support. Requests permission for AMX where the system requires it.
Instructions best_instructions();

struct Matrix {
  const void* values;  // rows x columns, row-major: elements of `dtype`, or codes of `bits`
  const void* scales;  // rows x columns / group, of `dtype`; null for a plain weight
  const void* minima;  // as many
  int64_t rows, columns, group;
  int32_t bits;  // 8 or 4; 0 for a plain weight
  Dtype dtype;
};

// Bytes of a stored row, scales and minima included.
static inline int64_t row_bytes(const Matrix& matrix) {
  const int64_t size = bytes_of(matrix.dtype);
  return matrix.bits == 0 ? matrix.columns * size
                          : matrix.columns * matrix.bits / 8 + 2 * (matrix.columns / matrix.group) * size;
}

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
