// Attention of a few new tokens over keys and values where they lie in host memory, each read once.
//
//   out[t] = sum_p w[t][p] V[p],  w[t] = softmax over p of (cap(scale * q[t] . K[p]) + slope * (p - own(t)) + mask[t][p])
//
// cap(x) = softcap * tanh(x / softcap); own(t) = positions - tokens + t is the position of new token t, which sees positions up
// to its own, and of those the last `window` (its own included) if there is one. A sink is one more logit of the softmax,
// without a value. Sums are float32. A token that sees nothing gets zeros.
//
// Keys and values lie in blocks of `block_positions` positions. Where a block's rows of one head are contiguous, a core reads
// runs of block_positions * head_dim elements (16 KB at 64 positions of 128 float16), which is what the prefetchers of a core
// follow; position-major memory (one block, a row of one head every batch * kv_heads rows) is right too, in runs of one row.
//
// These functions know no threads: the caller shares the items out, and calls `merge` for all once all items are done.

#pragma once

#include <cstddef>
#include <cstdint>

#include "product.h"

namespace zero_inference::cpu {

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

// Into how many parts the positions of each sequence and head are split, so that `threads` threads have enough items.
int64_t attention_splits(const Attention& attention, int64_t threads);

// Independent items: sequence, then head of keys and values, then part. Neighbours lie next to each other in memory.
int64_t attention_items(const Attention& attention, int64_t splits);

// Bytes that a thread lends to `attend`, for itself alone; 64-byte aligned.
size_t attention_scratch_bytes(const Attention& attention);

// Bytes of what the items leave for `merge`; 0 where one split writes `out` itself. 64-byte aligned.
size_t attention_partial_bytes(const Attention& attention, int64_t splits);

// Items [first, last).
void attend(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* scratch,
            void* partials);

// Outputs of sequences and heads of keys and values [first, last), of batch * kv_heads, from all their parts; nothing to do for
// one split.
void merge(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* partials);

// One instruction set each; `attend` and `merge` choose.
struct AttentionKernels {
  void (*attend)(const Attention& attention, int64_t splits, int64_t first, int64_t last, float* scratch, float* partials);
  void (*merge)(const Attention& attention, int64_t splits, int64_t group, float* partials);
};
extern const AttentionKernels kPortableAttention, kAvx2Attention, kAvx512Attention;

}  // namespace zero_inference::cpu
