// The C interface of attention, for zero_inference/cpu/attention.py.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "attention.h"
#include "attention_task.h"
#include "cpu_pool.h"
#include "threads.h"

using namespace zero_inference::cpu;

namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kPartsOfThread = 32;  // so that a core that is slower than the others delays them by 1/32 at most

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory reserve(size_t bytes) {
  Memory memory(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void attend_all(const Attention& attention, Instructions instructions, int64_t threads) {
  const int64_t splits = attention_splits(attention, threads), items = attention_items(attention, splits);
  const int64_t step = std::max<int64_t>(1, items / (threads * kPartsOfThread)), parts = (items + step - 1) / step;
  const size_t scratch_bytes = (attention_scratch_bytes(attention) / kAlignment + 1) * kAlignment;
  const Memory partials = reserve(attention_partial_bytes(attention, splits));
  const Memory scratch = reserve(scratch_bytes * threads);
  std::atomic<int64_t> next{0};
  on_threads(std::min(threads, parts), [&](int64_t thread) {
    for (int64_t part; (part = next.fetch_add(1)) < parts;) {
      const int64_t first = part * step, last = std::min(first + step, items);
      attend(attention, instructions, splits, first, last, static_cast<char*>(scratch.get()) + thread * scratch_bytes,
             partials.get());
    }
  });
  merge(attention, instructions, splits, 0, attention.batch * attention.kv_heads, partials.get());
}

}  // namespace

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
  return static_cast<CpuPool*>(pool)->add(std::make_unique<AttentionTask>(*layer, static_cast<Instructions>(instructions)));
}

}  // extern "C"
