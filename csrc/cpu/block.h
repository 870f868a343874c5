// A block of a decoder layer as a task: products with weights in host memory and the elementwise steps between them.

#pragma once

#include <vector>

#include "read_ahead.h"
#include "stage_times.h"
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
  void multiply_combined(const Stage& stage, const Call& call, ThreadPool& pool, int thread, StageWatch& watch);
  void multiply_outputs(const Stage& stage, const Call& call, ThreadPool& pool, int thread, StageWatch& watch);
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
