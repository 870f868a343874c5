// The experts of a mixture: of each row of the input only those that it chose are read.

#pragma once

#include <vector>

#include "block.h"

namespace zero_inference::cpu {

// down(f(gate(x)) * up(x)), or down(f(gate(x))) where `up.values` is null. Filled by Python. Experts of a task are of one form.
struct Expert {
  Matrix gate, up, down;
  const void *gate_bias, *up_bias, *down_bias;  // [rows] of `ExpertActivation::bias_dtype`, or null
};

// What is made of the first products: f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset). Filled by Python.
struct ExpertActivation {
  Activation activation;
  Dtype bias_dtype;
  int32_t interleaved;  // whether rows of gate and up alternate in `Expert::gate`, gate's first
  float limit, up_offset;
};

// The input of a call is x [count, columns]. Its `extra` says what each row chose:
//   0   k, the experts of a row
//   1   address of their numbers, int64 [count, k]. ~e stands for an expert e that the device has, and ~(e + experts) for
//       one that it fetches: these are counted and not read. Any other number that is no expert's counts nothing
//   2   address of their weights [count, k]
//   3   dtype of the weights
// The output is [count, rows of down]: the sum of weight x expert, in float32 and in ascending order of the experts.
//
// What was chosen is counted in `use`, int64 [4], which Python reads at any time: choices, those of experts that the device
// has, the experts that no call had to read for that reason (one counts once a call), and those that the device fetched
// (likewise).
class Experts : public Task {
 public:
  // `dtype`: of input and output. `use` may be null; whoever gives it keeps its memory.
  Experts(std::vector<Expert> experts, ExpertActivation activation, Dtype dtype, Instructions instructions, int64_t* use);

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  // For any choice of `extra[0]` experts a row.
  void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) override;
  void run(const Call& call, ThreadPool& pool, int thread) override;
  int64_t chosen_bytes() const override { return chosen_bytes_; }

 private:
  // Rows of x that make one prepared input.
  struct Input {
    int64_t first, count;  // in `rows_`
    size_t offset;         // in bytes, of the prepared input
  };
  // An expert that rows chose.
  struct Chosen {
    int64_t expert, first, count;  // its pairs in `rows_` and `weights_`
    int64_t input;                 // index in `inputs_` of what gate and up multiply
    size_t hidden_offset;          // in bytes, of the prepared input of down
  };
  // Rows [first, last) of gate and up, which are as many columns of down, or rows of down, of an expert.
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
  // of the call under way
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
