// Attention of a decoder layer as a task of the cores: the new keys and values are stored, then attended with all before them.

#pragma once

#include "attention.h"
#include "task.h"

namespace zero_inference::cpu {

// The input of a call is the queries [batch, heads, tokens, key_dim], behind them the new keys [batch, kv_heads, tokens,
// key_dim], behind them the new values [batch, kv_heads, tokens, value_dim]; the output is [batch, tokens, heads, value_dim].
// `extra` of a call is the number of new tokens, the positions with them, and the window. There is no mask.
class AttentionTask : public Task {
 public:
  // Of `layer`, what a call brings (queries, out, tokens, positions, window) is not read.
  AttentionTask(const Attention& layer, Instructions instructions) : attention_(layer), instructions_(instructions) {}

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  void run(const Call& call, ThreadPool& pool, int thread) override;

 private:
  void store_new_rows(const Call& call, int64_t first, int64_t last) const;

  Attention attention_;
  const Instructions instructions_;
  // of the call under way
  int64_t splits_ = 1;
  size_t scratch_bytes_ = 0;
  char* scratch_ = nullptr;
  void* partials_ = nullptr;
};

}  // namespace zero_inference::cpu
