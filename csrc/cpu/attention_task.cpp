#include "attention_task.h"

#include <algorithm>
#include <cstring>

namespace zero_inference::cpu {

namespace {

constexpr int64_t kAlignment = 64;
// Each thread takes a contiguous run of items, then small parts of the rest; shares as for products (block.cpp).
constexpr double kOwnShare = 0.75;
constexpr int64_t kPartsOfThread = 32;  // the size of those parts: a core that is slower delays the others by 1/32 at most

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// New rows [(sequence, head), tokens, dim] to the cache, for groups [first, last).
void store_rows(const Attention& a, const CachedRows& rows, const char* from, int64_t dim, int64_t first, int64_t last) {
  const size_t bytes = dim * size_of(a.dtype);
  char* const data = static_cast<char*>(const_cast<void*>(rows.data));
  for (int64_t group = first; group < last; ++group) {
    const int64_t start = rows.batch * (group / a.kv_heads) + rows.head * (group % a.kv_heads);
    for (int64_t token = 0; token < a.tokens; ++token) {
      const int64_t position = a.positions - a.tokens + token;
      const int64_t at = start + rows.block * (position / a.block_positions) + rows.position * (position % a.block_positions);
      std::memcpy(data + at * size_of(a.dtype), from + (group * a.tokens + token) * bytes, bytes);
    }
  }
}

}  // namespace

void AttentionTask::prepare(const Call& call, ThreadPool& pool, Workspace& workspace) {
  Attention& a = attention_;
  a.tokens = call.extra[0], a.positions = call.extra[1], a.window = call.extra[2];
  a.queries = call.input, a.out = call.output;
  a.query_strides = {a.heads * a.tokens * a.key_dim, a.tokens * a.key_dim, a.key_dim};
  a.out_strides = {a.tokens * a.heads * a.value_dim, a.value_dim, a.heads * a.value_dim};
  splits_ = attention_splits(a, pool.threads());
  scratch_bytes_ = aligned(attention_scratch_bytes(a));
  scratch_ = static_cast<char*>(workspace.threads.reserve(scratch_bytes_ * pool.threads()));
  partials_ = workspace.hidden.reserve(std::max<size_t>(kAlignment, attention_partial_bytes(a, splits_)));
}

// With one split a thread stores the new rows of its own items. With more there is a barrier, because another thread may attend
// the last part.
void AttentionTask::run(const Call& call, ThreadPool& pool, int thread) {
  const Attention& a = attention_;
  const int64_t groups = a.batch * a.kv_heads, items = attention_items(a, splits_);
  if (splits_ > 1) {
    store_new_rows(call, groups * thread / pool.threads(), groups * (thread + 1) / pool.threads());
    pool.barrier();
  }
  const auto take = [&](int64_t first, int64_t last) {
    if (splits_ == 1) store_new_rows(call, first, last);
    attend(a, instructions_, splits_, first, last, scratch_ + thread * scratch_bytes_, partials_);
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

void AttentionTask::store_new_rows(const Call& call, int64_t first, int64_t last) const {
  const Attention& a = attention_;
  const int64_t size = size_of(a.dtype), rows = a.batch * a.tokens;
  const char* const keys = static_cast<const char*>(call.input) + rows * a.heads * a.key_dim * size;
  store_rows(a, a.keys, keys, a.key_dim, first, last);
  store_rows(a, a.values, keys + rows * a.kv_heads * a.key_dim * size, a.value_dim, first, last);
}

}  // namespace zero_inference::cpu
