// Attention of a few new tokens over keys and values in host memory, each read once.
//
//   out[t] = sum_p w[t][p] V[p],  w[t] = softmax over p of (cap(scale * q[t] . K[p]) + slope * (p - own(t)) + mask[t][p])
//
// cap(x) = softcap * tanh(x / softcap); own(t) = positions - tokens + t is the position of new token t, which sees positions up
// to its own, of those only the last `window` if set. A sink is one more logit of the softmax, without a value. Sums are
// float32. A token that sees nothing gets zeros.
//
// Keys and values are in blocks of `block_positions`. Where a head's rows of a block are contiguous, cores read runs of
// block_positions * head_dim elements (16 KB at 64 positions of 128 float16), which hardware prefetchers follow; other strides
// work too.
//
// These functions start no threads: the caller shares items out, and calls `merge` once all are done.

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

// Parts per sequence and head, such that `threads` threads have enough items.
int64_t attention_splits(const Attention& attention, int64_t threads);

// Independent items: sequence, then head, then part; neighbours are adjacent in memory.
int64_t attention_items(const Attention& attention, int64_t splits);

// Scratch bytes of one thread; 64-byte aligned.
size_t attention_scratch_bytes(const Attention& attention);

// Bytes of partial results for `merge`; 0 with one split, which writes `out` itself. 64-byte aligned.
size_t attention_partial_bytes(const Attention& attention, int64_t splits);

// Computes items [first, last).
void attend(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* scratch,
            void* partials);

// Outputs of groups (sequence, head) [first, last) from all their parts; no-op with one split.
void merge(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* partials);

struct AttentionKernels {
  void (*attend)(const Attention& attention, int64_t splits, int64_t first, int64_t last, float* scratch, float* partials);
  void (*merge)(const Attention& attention, int64_t splits, int64_t group, float* partials);
};
extern const AttentionKernels kAvx2Attention, kAvx512Attention;

}  // namespace zero_inference::cpu
