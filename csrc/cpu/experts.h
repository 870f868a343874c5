// MoE experts as a task: reads only the routed ones.

#pragma once

#include <vector>

#include "block.h"

namespace zero_inference::cpu {

// down(f(gate(x)) * up(x)), or down(f(gate(x))) where `up.values` is null. All experts of a task have one format.
struct Expert {
  Matrix gate, up, down;
  const void *gate_bias, *up_bias, *down_bias;  // [rows] of `ExpertActivation::bias_dtype`, or null
};

// f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset).
struct ExpertActivation {
  Activation activation;
  Dtype bias_dtype;
  int32_t interleaved;  // whether rows of gate and up alternate in `Expert::gate`, gate's first
  float limit, up_offset;
};

// The input of a call is x [count, columns]; `extra` is the routing:
//   0   k, experts per token
//   1   address of expert ids, int64 [count, k]. ~e: expert e is in the device's cache; ~(e + experts): the device fetches it.
//       Both are counted and not computed. Other ids out of range are ignored.
//   2   address of weights [count, k]
//   3   dtype of the weights
// The output is [count, rows of down]: sum of weight x expert, in float32, experts in ascending order.
//
// `use`, int64 [4], may be read at any time: routed pairs, hits in the device's cache, experts not read for hits (once a call),
// experts fetched by the device (once a call).
class Experts : public Task {
 public:
  // `use` may be null.
  Experts(std::vector<Expert> experts, ExpertActivation activation, Dtype dtype, Instructions instructions, int64_t* use);

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  // For any routing with extra[0] experts a token.
  void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  void run(const Call& call, ThreadPool& pool, int thread) override;
  int64_t chosen_bytes() const override { return chosen_bytes_; }

 private:
  // Rows of x that are one prepared input.
  struct Input {
    int64_t first, count;  // in `rows_`
    size_t offset;         // in bytes, of the prepared input
  };
  // A routed expert.
  struct Chosen {
    int64_t expert, first, count;  // its pairs in `rows_` and `weights_`
    int64_t input;                 // index in `inputs_` of what gate and up multiply
    size_t hidden_offset;          // in bytes, of the prepared input of down
  };
  // Rows [first, last) of gate and up (columns of down), or rows of down.
  struct Part {
    int64_t chosen, first, last;  // `chosen` is its index in `chosen_`
  };

  void take(size_t input, int64_t pairs, int64_t most_rows, int64_t count, ThreadPool& pool, Workspace& workspace);
  void group(const Call& call);
  void count(const Call& call);
  void gather(const Call& call, const Input& input, int64_t first, int64_t last);
  void divide(int64_t rows, int64_t row_bytes, int threads, std::vector<Part>* parts);
  template <typename Work>
  void take_parts(const std::vector<Part>& parts, ThreadPool& pool, const Work& work);
  void prepare_inputs(const Call& call, ThreadPool& pool, int thread);
  void multiply_first(ThreadPool& pool, int thread);
  void prepare_hidden(ThreadPool& pool, int thread);
  void multiply_last(ThreadPool& pool, int thread);
  void add_bias_to_rows(const void* bias, int64_t first, float* rows, int64_t count, int64_t width, int64_t stride) const;
  void add_up(const Call& call, ThreadPool& pool, int thread);
  int64_t columns_to_add(ThreadPool& pool) const;

  const std::vector<Expert> experts_;
  const ExpertActivation expert_activation_;
  const int64_t inner_;  // columns of down
  const Dtype dtype_;
  const Instructions instructions_;
  int64_t* const use_;
  // of the running call
  std::vector<int64_t> elsewhere_;  // choices of each expert that is computed elsewhere
  std::vector<int64_t> places_;     // in `rows_` of each expert's next pair, while they are sorted
  std::vector<int64_t> rows_;       // of x, of each pair of a row and an expert, by expert and then by row
  std::vector<float> weights_;      // of each pair
  std::vector<int64_t> single_;     // of each row of x: the input that is this row alone, or -1
  std::vector<Input> inputs_;
  std::vector<Chosen> chosen_;
  std::vector<Part> first_parts_, last_parts_;
  int64_t chosen_bytes_ = 0;
  char* prepared_ = nullptr;  // inputs of gate and up, and then those of down
  char* gathered_ = nullptr;  // rows of x of inputs with several
  float* hidden_ = nullptr;   // [pairs, columns of down]
  float* results_ = nullptr;  // [pairs, rows of down]
  char* thread_memory_ = nullptr;
  size_t thread_bytes_ = 0, scratch_bytes_ = 0;
};

}  // namespace zero_inference::cpu
