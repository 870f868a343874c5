// Attention of a decoder layer as a task: stores the new keys and values, then attends.

#pragma once

#include "attention.h"
#include "task.h"

namespace zero_inference::cpu {

// Input of a call: queries [batch, heads, tokens, key_dim], then new keys [batch, kv_heads, tokens, key_dim], then new values
// [batch, kv_heads, tokens, value_dim]. Output: [batch, tokens, heads, value_dim]. `extra`: tokens, positions with them,
// window. No mask.
class AttentionTask : public Task {
 public:
  // queries, out, tokens, positions and window of `layer` are ignored: they come with a call.
  AttentionTask(const Attention& layer, Instructions instructions) : attention_(layer), instructions_(instructions) {}

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  void run(const Call& call, ThreadPool& pool, int thread) override;

 private:
  void store_new_rows(const Call& call, int64_t first, int64_t last) const;

  Attention attention_;
  const Instructions instructions_;
  // of the running call
  int64_t splits_ = 1;
  size_t scratch_bytes_ = 0;
  char* scratch_ = nullptr;
  void* partials_ = nullptr;
};

}  // namespace zero_inference::cpu
