// A block of a decoder layer as a task: products with weights in host memory and the elementwise steps between them.

#pragma once

#include <vector>

#include "task.h"

namespace zero_inference::cpu {

constexpr int kMaxProducts = 8;

enum class Combine : int32_t {
  none = 0,        // each is an output of the block: the last stage
  activation = 1,  // f(first) is the input of the next stage
  gated = 2,       // f(first) * second
};

enum class Activation : int32_t {
  relu = 0,
  silu = 1,
  gelu = 2,
  gelu_tanh = 3,
  relu_squared = 4,
  gelu_sigmoid = 5,
  identity = 6
};

// Products of one input, all of the same bits, group, dtype and columns, and of as many rows where combined. Layout:
// zero_inference/cpu/pool.py.
struct Stage {
  Matrix matrices[kMaxProducts];
  const void* biases[kMaxProducts];  // [rows] of `bias_dtype`, or null
  int32_t products;
  Combine combine;
  Activation activation;
  Dtype bias_dtype;
};

// Prefetches the weights that a thread reads first into its L2 cache, while it waits for the input. On its own cache lines.
class alignas(64) ReadAhead {
 public:
  // Appends rows [first, last) with scales and minima, as far as the cache holds them.
  void add(const Matrix& matrix, int64_t first, int64_t last);
  void restart();
  // Prefetches some lines; false at the end.
  bool prefetch();

 private:
  struct Run {
    const char *at, *end;
  };

  void add(const void* data, int64_t first, int64_t bytes);

  std::vector<Run> runs_;
  int64_t bytes_ = 0;
  size_t run_ = 0;  // current, from `at_` on
  const char* at_ = nullptr;
};

// The output holds the products of the last stage one after the other, each [count, rows] in `dtype`.
class Block : public Task {
 public:
  Block(std::vector<Stage> stages, Dtype dtype, Instructions instructions);

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  void run(const Call& call, ThreadPool& pool, int thread) override;
  bool read_ahead(int thread) override;

 private:
  void find_first_rows(int threads);
  void prepare_stage(const Stage& stage, const Call& call, ThreadPool& pool, int thread);
  void multiply_combined(const Stage& stage, const Call& call, ThreadPool& pool, int thread);
  void multiply_outputs(const Stage& stage, const Call& call, ThreadPool& pool, int thread);
  void multiply_part(const Stage& stage, int index, const Call& call, int64_t first, int64_t last, float* results,
                     char* scratch);

  const std::vector<Stage> stages_;
  const Dtype dtype_;
  const Instructions instructions_;
  std::vector<ReadAhead> ahead_;  // of threads, once there was a call
  // of the running call
  char* input_ = nullptr;
  float* hidden_ = nullptr;
  char* thread_memory_ = nullptr;
  size_t thread_bytes_ = 0, scratch_bytes_ = 0;
};

}  // namespace zero_inference::cpu
