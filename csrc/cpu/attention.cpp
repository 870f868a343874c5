// Splits attention into items, chooses the kernels, and has those in plain C++.

#include "attention.h"

#include "attention_kernel.h"

namespace zero_inference::cpu {
namespace {

const AttentionKernels kPortableAttention = {attend_with, merge_group};

// Balances the load.
constexpr int64_t kItemsPerThread = 8;
// A part writes and reads back 4 bytes an output element, so it has at least this many positions.
constexpr int64_t kMinPositions = 2 * kPiece;

const AttentionKernels& kernels(Instructions instructions) {
#if defined(__x86_64__)
  if (instructions >= Instructions::avx512) return kAvx512Attention;
  if (instructions >= Instructions::avx2) return kAvx2Attention;
#endif
  return kPortableAttention;
}

}  // namespace

int64_t attention_splits(const Attention& attention, int64_t threads) {
  const int64_t groups = attention.batch * attention.kv_heads;
  const int64_t seen = attention.positions - first_position(attention);
  const int64_t wanted = (kItemsPerThread * threads + groups - 1) / groups;
  const int64_t most = seen / kMinPositions;
  const int64_t splits = wanted < most ? wanted : most;
  return threads > 1 && splits > 1 ? splits : 1;
}

int64_t attention_items(const Attention& attention, int64_t splits) { return attention.batch * attention.kv_heads * splits; }

size_t attention_scratch_bytes(const Attention& attention) { return sizeof(float) * Scratch(attention).floats; }

size_t attention_partial_bytes(const Attention& attention, int64_t splits) {
  if (splits == 1) return 0;
  return sizeof(float) * attention_items(attention, splits) * partial_floats(attention);
}

void attend(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* scratch,
            void* partials) {
  kernels(instructions).attend(attention, splits, first, last, static_cast<float*>(scratch), static_cast<float*>(partials));
}

void merge(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* partials) {
  if (splits == 1) return;
  const AttentionKernels& chosen = kernels(instructions);
  for (int64_t group = first; group < last; ++group) {
    chosen.merge(attention, splits, group, static_cast<float*>(partials));
  }
}

}  // namespace zero_inference::cpu
