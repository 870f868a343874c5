// Products of a few rows with a weight where it lies in host memory, read once, in the bytes that the link would carry.
//
//   out[m][r] = sum_k x[m][k] * W[r][k]
//
// W is plain (float32, float16, bfloat16), or groups of codes: W[r][k] = code * scale + minimum, as
// zero_inference/kernels/quantization.py defines them, of which an int4 pair holds the even element in its low nibble.
// Sums are kept in float32. x is multiplied in the precision of the weight: rounded to bfloat16 for a bfloat16 weight where the
// processor has instructions for that, and never to less than float16's for the others. What a code stands for is rounded to
// the dtype of its scale, as a device does that dequantizes the weight; but in groups of up to 256, codes are multiplied as
// they are with x in fixed-point numbers of 16 bits (product_fixed_input.h), where that is faster: for up to 8 rows of x with
// avx2 (product_fixed_narrow.h) and 4 with avx512, and where groups are multiples of 32 in tiles, with scales in bfloat16 for
// up to 16 rows of x (int4 in groups of 32: 8). These functions know no threads: the caller gives each of its threads ranges of
// rows of W.

#pragma once

#include <cstddef>
#include <cstdint>

namespace zero_inference::cpu {

enum class Dtype : int32_t { float32 = 0, float16 = 1, bfloat16 = 2 };

// In ascending order; a processor that has one has those before it. avx512 is F, BW, DQ, VL, VNNI and BF16 (Cooper Lake,
// Sapphire Rapids, Zen 4 and later): one without BF16 counts as avx2. amx is avx512 and tiles of bfloat16 and bytes.
enum class Instructions : int32_t { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best that this processor and its operating system have. Asks the system for the use of AMX where that takes a call.
Instructions best_instructions();

struct Matrix {
  const void* values;  // rows x columns, row-major: elements of `dtype`, or codes of `bits`
  const void* scales;  // rows x columns / group, of `dtype`; null for a plain weight
  const void* minima;  // as many
  int64_t rows, columns, group;
  int32_t bits;  // 8 or 4; 0 for a plain weight
  Dtype dtype;
};

// Bytes (a multiple of 64) that the prepared input of `count` rows takes for products with `matrix`.
size_t input_bytes(const Matrix& matrix, int64_t count, Instructions instructions);

// Columns that one call of prepare_input begins at a multiple of (the last part ends where the columns do).
int64_t input_step(const Matrix& matrix, Instructions instructions);

// Brings columns [first, last) of x [count, columns], rows `stride` elements apart, into the form that the products read, in
// `input` (64-byte aligned). Parts may be prepared by several threads; all must be there before a product begins.
void prepare_input(const Matrix& matrix, int64_t count, Instructions instructions, const void* x, Dtype x_dtype, int64_t stride,
                   int64_t first, int64_t last, void* input);

// Bytes that a thread lends to `product`, for itself alone; 64-byte aligned.
size_t scratch_bytes(const Matrix& matrix, int64_t count, Instructions instructions);

// Rows [first, last) of the weight times all `count` rows of the input: out[m * stride + r - first], float32.
// Any first and last are right; ranges of whole multiples of 16 rows are fast.
void product(const Matrix& matrix, int64_t count, Instructions instructions, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch);

// The sum of all 8-byte words, modulo 2^64; a last word that is cut off is filled with zeros. Only for measuring: what the
// cores can read at most.
uint64_t read_bytes_sum(const void* data, int64_t bytes, Instructions instructions);

}  // namespace zero_inference::cpu
