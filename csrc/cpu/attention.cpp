// Splits attention into items; attention of a decoder layer as a task, which stores the new keys and values, then attends. C
// interface for zero_inference/cpu/attention.py.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "task.h"

namespace zero_inference::cpu {

namespace {

// Each thread takes a contiguous run of items, then small parts of the rest; shares as for products (block.cpp).
constexpr double kOwnShare = 0.75;
constexpr int64_t kPartsOfThread = 32;  // the size of those parts: a core that is slower delays the others by 1/32 at most
// Parts of a head's positions: enough items to balance the load, and at least so many positions, because a part writes and
// reads back 4 bytes an output element.
constexpr int64_t kItemsPerThread = 8;
constexpr int64_t kMinPositions = 2 * kPiece;

int64_t groups_of(const Attention& attention) { return attention.batch * attention.kv_heads; }

size_t scratch_bytes_of(const Attention& attention) { return aligned(sizeof(float) * Scratch(attention).floats); }

size_t partial_bytes(const Attention& attention, int64_t splits) {
  return splits == 1 ? 0 : sizeof(float) * groups_of(attention) * splits * partial_floats(attention);
}

// Outputs of groups [first, last) from all their parts.
void merge(const Attention& attention, Instructions instructions, int64_t splits, int64_t first, int64_t last, void* partials) {
  for (int64_t group = first; group < last && splits > 1; ++group) {
    kernels_of(instructions).merge(attention, splits, group, static_cast<float*>(partials));
  }
}

// New rows [(sequence, head), tokens, dim] to the cache, for groups [first, last).
void store_rows(const Attention& a, const CachedRows& rows, const char* from, int64_t dim, int64_t first, int64_t last) {
  const size_t bytes = dim * bytes_of(a.dtype);
  char* const data = static_cast<char*>(const_cast<void*>(rows.data));
  for (int64_t group = first; group < last; ++group) {
    const int64_t start = rows.batch * (group / a.kv_heads) + rows.head * (group % a.kv_heads);
    for (int64_t token = 0; token < a.tokens; ++token) {
      const int64_t position = a.positions - a.tokens + token;
      const int64_t at = start + rows.block * (position / a.block_positions) + rows.position * (position % a.block_positions);
      std::memcpy(data + at * bytes_of(a.dtype), from + (group * a.tokens + token) * bytes, bytes);
    }
  }
}

void attend_all(const Attention& attention, Instructions instructions, int64_t threads) {
  const int64_t splits = attention_splits(attention, threads), items = groups_of(attention) * splits;
  const int64_t step = std::max<int64_t>(1, items / (threads * kPartsOfThread)), parts = (items + step - 1) / step;
  const size_t scratch_bytes = scratch_bytes_of(attention);
  const Buffer partials(partial_bytes(attention, splits)), scratch(scratch_bytes * threads);
  std::atomic<int64_t> next{0};
  on_threads(std::min(threads, parts), [&](int64_t thread) {
    float* const own = reinterpret_cast<float*>(static_cast<char*>(scratch.get()) + thread * scratch_bytes);
    for (int64_t part; (part = next.fetch_add(1)) < parts;) {
      kernels_of(instructions)
          .attend(attention, splits, part * step, std::min((part + 1) * step, items), own, static_cast<float*>(partials.get()));
    }
  });
  merge(attention, instructions, splits, 0, groups_of(attention), partials.get());
}

// Input of a call: queries [batch, heads, tokens, key_dim], then new keys [batch, kv_heads, tokens, key_dim], then new values
// [batch, kv_heads, tokens, value_dim]. Output: [batch, tokens, heads, value_dim]. `extra`: tokens, positions with them,
// window. No mask.
class AttentionTask : public Task {
 public:
  // queries, out, tokens, positions and window of `layer` are ignored: they come with a call.
  AttentionTask(const Attention& layer, Instructions instructions) : attention_(layer), instructions_(instructions) {}

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override {
    Attention& a = attention_;
    a.tokens = call.extra[0], a.positions = call.extra[1], a.window = call.extra[2];
    a.queries = call.input, a.out = call.output;
    a.query_strides = {a.heads * a.tokens * a.key_dim, a.tokens * a.key_dim, a.key_dim};
    a.out_strides = {a.tokens * a.heads * a.value_dim, a.value_dim, a.heads * a.value_dim};
    splits_ = attention_splits(a, pool.threads());
    scratch_bytes_ = scratch_bytes_of(a);
    scratch_ = static_cast<char*>(workspace.threads.reserve(scratch_bytes_ * pool.threads()));
    partials_ = static_cast<float*>(workspace.hidden.reserve(partial_bytes(a, splits_)));
  }

  // With one split a thread stores the new rows of its own items. With more there is a barrier, because another thread may
  // attend the last part.
  void run(const Call& call, ThreadPool& pool, int thread) override {
    const Attention& a = attention_;
    const int64_t groups = groups_of(a), items = groups * splits_;
    if (splits_ > 1) {
      store_new_rows(call, groups * thread / pool.threads(), groups * (thread + 1) / pool.threads());
      pool.barrier();
    }
    const auto take = [&](int64_t first, int64_t last) {
      if (splits_ == 1) store_new_rows(call, first, last);
      float* const scratch = reinterpret_cast<float*>(scratch_ + thread * scratch_bytes_);
      kernels_of(instructions_).attend(a, splits_, first, last, scratch, partials_);
    };
    const int64_t own = static_cast<int64_t>(kOwnShare * static_cast<double>(items) / pool.threads());
    take(own * thread, own * (thread + 1));
    const int64_t step = std::max<int64_t>(1, items / (pool.threads() * kPartsOfThread));
    for (int64_t first; (first = own * pool.threads() + pool.next_part() * step) < items;) {
      take(first, std::min(first + step, items));
    }
    if (splits_ > 1) {
      pool.barrier();
      merge(a, instructions_, splits_, groups * thread / pool.threads(), groups * (thread + 1) / pool.threads(), partials_);
    }
  }

 private:
  void store_new_rows(const Call& call, int64_t first, int64_t last) const {
    const Attention& a = attention_;
    const int64_t size = bytes_of(a.dtype), rows = a.batch * a.tokens;
    const char* const keys = static_cast<const char*>(call.input) + rows * a.heads * a.key_dim * size;
    store_rows(a, a.keys, keys, a.key_dim, first, last);
    store_rows(a, a.values, keys + rows * a.kv_heads * a.key_dim * size, a.value_dim, first, last);
  }

  Attention attention_;
  const Instructions instructions_;
  // of the running call
  int64_t splits_ = 1;
  size_t scratch_bytes_ = 0;
  char* scratch_ = nullptr;
  float* partials_ = nullptr;
};

}  // namespace

int64_t attention_splits(const Attention& attention, int64_t threads) {
  const int64_t groups = groups_of(attention);
  const int64_t seen = attention.positions - first_position(attention);
  const int64_t wanted = (kItemsPerThread * threads + groups - 1) / groups;
  const int64_t most = seen / kMinPositions;
  const int64_t splits = wanted < most ? wanted : most;
  return threads > 1 && splits > 1 ? splits : 1;
}

extern "C" {

// Runs now on `threads` threads; `instructions` -1: the best. Returns -1 without memory.
int zero_inference_attention(const Attention* attention, int32_t instructions, int64_t threads) {
  try {
    attend_all(*attention, instructions < 0 ? best_instructions() : static_cast<Instructions>(instructions), threads);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

int64_t zero_inference_cpu_pool_add_attention(void* pool, const Attention* layer, int32_t instructions) {
  return add_task(pool, std::make_unique<AttentionTask>(*layer, static_cast<Instructions>(instructions)));
}

}  // extern "C"

}  // namespace zero_inference::cpu
