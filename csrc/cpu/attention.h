// Attention of a few new tokens over keys and values in host memory, each read once.
//
//   out[t] = sum_p w[t][p] V[p],  w[t] = softmax over p of (cap(scale * q[t] . K[p]) + slope * (p - own(t)) + mask[t][p])
//
// cap(x) = softcap * tanh(x / softcap); own(t) = positions - tokens + t is the position of new token t, which sees positions up
// to its own, of those only the last `window` if set. A sink is one more logit of the softmax, without a value. Sums are
// float32. A token that sees nothing gets zeros.
//
// Keys and values are in blocks of `block_positions`. Where a head's rows of a block are contiguous, threads read runs of
// block_positions * head_dim elements (16 KB at 64 positions of 128 float16), which hardware prefetchers follow; other strides
// work too.
//
// Work is divided into items that any thread may compute: sequence, then head, then part; neighbours are adjacent in memory.
// With more than one part the results of a group (sequence, head) are merged when all items are done.

#pragma once

#include <cstddef>
#include <cstdint>

#include "product.h"

namespace zero_inference::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

enum class Mask : int32_t { none = 0, boolean = 1, float32 = 2, float16 = 3, bfloat16 = 4 };

// Keys or values; position p of a sequence and a head is at block * (p / block_positions) + position * (p % block_positions).
struct CachedRows {
  const void* data;
  int64_t block, batch, head, position;  // strides in elements; a row's elements are contiguous
};

// A tensor [batch, heads, tokens, elements] of contiguous rows.
struct TokenRows {
  int64_t batch, head, token;  // strides in elements; 0 where all share one
};

struct Attention {
  int64_t batch, heads, kv_heads;  // heads is a multiple of kv_heads
  int64_t tokens, positions;       // new tokens; positions with them
  int64_t block_positions;
  int64_t key_dim, value_dim, window;  // window 0: every position
  const void* queries;
  TokenRows query_strides;
  CachedRows keys, values;
  void* out;  // of the queries' dtype
  TokenRows out_strides;
  const void* mask;  // added, or booleans that are true where a token sees
  TokenRows mask_strides;
  const float* slopes;   // one a head, or null
  const float* sinks;    // one a head, or null
  float scale, softcap;  // softcap 0: none
  Dtype dtype;           // of queries, keys, values and out
  Mask mask_kind;
};

// Positions per step of the online softmax: 32 KB of keys and values at 128 float16 stay in L1.
constexpr int64_t kPiece = 64;
constexpr int64_t kPadding = 16;  // floats; rows of queries and sums begin at a multiple of them

static inline int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

// The oldest visible position.
static inline int64_t first_position(const Attention& a) {
  const int64_t first = a.positions - a.tokens + 1 - a.window;
  return a.window > 0 && first > 0 ? first : 0;
}

// Rows of queries that read the same keys and values.
static inline int64_t rows_of(const Attention& a) { return a.heads / a.kv_heads * a.tokens; }

// Partial result: weighted sums of all rows, then the largest logit and the sum of weights of each.
static inline int64_t partial_floats(const Attention& a) { return rows_of(a) * padded(a.value_dim) + padded(2 * rows_of(a)); }

namespace {

// Offsets in a thread's scratch, in floats.
struct Scratch {
  int64_t query_stride, sum_stride, sums, largest, weights, floats;
  explicit Scratch(const Attention& a) {
    query_stride = padded(a.key_dim), sum_stride = padded(a.value_dim);
    sums = rows_of(a) * query_stride;
    largest = sums + rows_of(a) * sum_stride;
    weights = largest + rows_of(a);
    floats = sums + partial_floats(a);
  }
};

}  // namespace

// Parts per sequence and head, such that `threads` threads have enough items.
int64_t attention_splits(const Attention& attention, int64_t threads);

}  // namespace zero_inference::cpu
