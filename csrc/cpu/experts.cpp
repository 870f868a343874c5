// MoE experts as a task: reads only the routed ones.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "elementwise.h"
#include "task.h"

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

namespace {

constexpr int64_t kMinRows = 16;  // rows of a tile
constexpr int64_t kMaxRows = 256;
// Starting a part waits for memory: one Zen 5 core reached 5.5 GB/s in parts of 64 rows of 384 bytes, 9.5 in 256. So parts
// begin large and end this small.
constexpr int64_t kMinBytes = 32 << 10;
// Bytes of the next product to prefetch: parts of 64 rows then reached 8 GB/s, of 256 10.
constexpr int64_t kBytesAhead = 4096;
constexpr float kNoLimit = std::numeric_limits<float>::infinity();

int64_t bytes_of(const Matrix& matrix) { return matrix.values == nullptr ? 0 : stored_bytes(matrix); }

void prefetch(const Matrix& matrix, int64_t row) {
  for_tensors(matrix, row, matrix.rows, [&](const void* data, int64_t at, int64_t) {
    const char* const p = static_cast<const char*>(data) + at;
    const int64_t bytes = data == matrix.values ? kBytesAhead : kBytesAhead / 8;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  });
}

// Divides items * columns, in steps of `step`, evenly among threads; calls work(item, begin, end).
template <typename Work>
void share_columns(int64_t items, int64_t columns, int64_t step, int threads, int thread, const Work& work) {
  const int64_t steps = parts_of(columns, step);
  const int64_t end = items * steps * (thread + 1) / threads;
  for (int64_t unit = items * steps * thread / threads; unit < end;) {
    const int64_t item = unit / steps, first = unit % steps;
    const int64_t last = std::min(steps, first + end - unit);
    work(item, first * step, std::min(last * step, columns));
    unit += last - first;
  }
}

// Totals of the calls of a task (zero_inference/cpu/experts.py).
struct ExpertCounts {
  int64_t choices;  // pairs of a token and an expert
  int64_t hits;     // choices whose expert is in the device's cache
  int64_t saved;    // experts that a call did not read because of hits
  int64_t fetched;  // experts that the device fetched for a call
};

// The input of a call is x [count, columns]; `extra` is the routing:
//   0   k, experts per token
//   1   address of expert ids, int64 [count, k]. ~e: expert e is in the device's cache; ~(e + experts): the device fetches it.
//       Both are counted and not computed. Other ids out of range are ignored.
//   2   address of weights [count, k]
//   3   dtype of the weights
// The output is [count, rows of down]: sum of weight x expert, in float32, experts in ascending order.
//
// `counts` may be null, and be read at any time.
class Experts : public Task {
 public:
  Experts(std::vector<Expert> experts, ExpertActivation activation, Dtype dtype, Instructions instructions,
          ExpertCounts* counts)
      : experts_(std::move(experts)),
        expert_activation_(activation),
        inner_(experts_[0].down.columns),
        dtype_(dtype),
        instructions_(instructions),
        counts_(counts) {}

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override {
    group_pairs(call);
    if (counts_ != nullptr) count_choices(call);
    const Matrix &first = experts_[0].gate, &last = experts_[0].down;
    size_t inputs = 0, hidden = 0;
    int64_t most_rows = 0;
    for (Input& input : inputs_) {
      input.offset = inputs;
      inputs += input_bytes(first, input.count, instructions_);
    }
    chosen_bytes_ = 0;
    for (Chosen& chosen : chosen_) {
      chosen.hidden_offset = hidden;
      hidden += input_bytes(last, chosen.count, instructions_);
      most_rows = std::max(most_rows, chosen.count);
      const Expert& expert = experts_[chosen.expert];
      chosen_bytes_ += bytes_of(expert.gate) + bytes_of(expert.up) + bytes_of(expert.down);
    }
    const int products = experts_[0].up.values == nullptr ? 1 : 2;
    divide(inner_, products * bytes_of(first) / inner_, pool.threads(), &first_parts_);
    divide(last.rows, bytes_of(last) / last.rows, pool.threads(), &last_parts_);
    allocate(std::max(inputs, hidden), static_cast<int64_t>(rows_.size()), most_rows, call.count, pool, workspace);
  }

  // For any routing with extra[0] experts a token.
  void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) override {
    const int64_t pairs = call.count * call.extra[0];
    size_t of_row = 0;
    for (int64_t count = 1; count <= call.count; ++count) {
      for (const Matrix* matrix : {&experts_[0].gate, &experts_[0].down}) {
        of_row = std::max(of_row, input_bytes(*matrix, count, instructions_) / static_cast<size_t>(count) + 1);
      }
    }
    places_.reserve(experts_.size() + 1);
    elsewhere_.reserve(experts_.size());
    rows_.reserve(pairs);
    weights_.reserve(pairs);
    single_.reserve(call.count);
    inputs_.reserve(pairs);
    chosen_.reserve(std::min<size_t>(pairs, experts_.size()));
    allocate(aligned(of_row * pairs), pairs, call.count, call.count, pool, workspace);
  }

  void run(const Call& call, ThreadPool& pool, int thread) override {
    prepare_inputs(call, pool, thread);
    pool.barrier();
    multiply_first(pool, thread);
    pool.barrier();
    if (thread == 0) pool.restart_parts();  // the barrier after the next preparation lies between this and the next use
    prepare_hidden(pool, thread);
    pool.barrier();
    multiply_last(pool, thread);
    pool.barrier();
    add_up(call, pool, thread);
  }

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

  void allocate(size_t input, int64_t pairs, int64_t most_rows, int64_t count, ThreadPool& pool, Workspace& workspace) {
    const Expert& one = experts_[0];
    const int64_t rows = std::max<int64_t>(1, most_rows);
    scratch_bytes_ = 0;
    for (int64_t of = 1; of <= rows; ++of) {  // fewer rows may need more: another layout
      for (const Matrix* matrix : {&one.gate, &one.down}) {
        scratch_bytes_ = std::max(scratch_bytes_, aligned(scratch_bytes(*matrix, of, instructions_)));
      }
    }
    const size_t factors = aligned(rows * kMaxRows * (expert_activation_.interleaved ? 2 : 1) * sizeof(float)),
                 sums = aligned(count * columns_to_add(pool) * sizeof(float));
    thread_bytes_ = std::max(scratch_bytes_ + factors, sums);
    prepared_ = static_cast<char*>(workspace.input.reserve(input + aligned(pairs * one.gate.columns * bytes_of(dtype_))));
    gathered_ = prepared_ + input;
    const int64_t floats = std::max<int64_t>(1, pairs * (inner_ + one.down.rows));
    hidden_ = static_cast<float*>(workspace.hidden.reserve(floats * sizeof(float)));
    results_ = hidden_ + pairs * inner_;
    thread_memory_ = static_cast<char*>(workspace.threads.reserve(thread_bytes_ * pool.threads()));
  }

  // Sorts (token, expert) pairs by expert. Experts of a single token share its prepared row.
  void group_pairs(const Call& call) {
    const int64_t k = call.extra[0], experts = static_cast<int64_t>(experts_.size());
    const int64_t* numbers = reinterpret_cast<const int64_t*>(call.extra[1]);
    const char* weights = reinterpret_cast<const char*>(call.extra[2]);
    const Dtype weights_dtype = static_cast<Dtype>(call.extra[3]);
    const auto is_expert = [&](int64_t number) { return number >= 0 && number < experts; };
    places_.assign(experts + 1, 0);
    for (int64_t pair = 0; pair < call.count * k; ++pair) {
      if (is_expert(numbers[pair])) ++places_[numbers[pair] + 1];
    }
    chosen_.clear();
    inputs_.clear();
    for (int64_t expert = 0; expert < experts; ++expert) {
      if (places_[expert + 1] > 0) chosen_.push_back({expert, places_[expert], places_[expert + 1], 0, 0});
      places_[expert + 1] += places_[expert];
    }
    rows_.resize(places_[experts]);
    weights_.resize(places_[experts]);
    for (int64_t pair = 0; pair < call.count * k; ++pair) {
      if (!is_expert(numbers[pair])) continue;
      const int64_t place = places_[numbers[pair]]++;
      rows_[place] = pair / k;
      weights_[place] = element(weights, weights_dtype, pair);
    }
    single_.assign(call.count, -1);
    for (Chosen& chosen : chosen_) {
      int64_t* const single = chosen.count == 1 ? &single_[rows_[chosen.first]] : nullptr;
      if (single != nullptr && *single >= 0) {
        chosen.input = *single;
        continue;
      }
      chosen.input = static_cast<int64_t>(inputs_.size());
      if (single != nullptr) *single = chosen.input;
      inputs_.push_back({chosen.first, chosen.count, 0});
    }
  }

  // After `group_pairs`. Python may read at the same time.
  void count_choices(const Call& call) {
    const int64_t pairs = call.count * call.extra[0], experts = static_cast<int64_t>(experts_.size());
    const int64_t* numbers = reinterpret_cast<const int64_t*>(call.extra[1]);
    const auto add = [](int64_t* total, int64_t more) { __atomic_fetch_add(total, more, __ATOMIC_RELAXED); };
    elsewhere_.assign(experts, 0);
    int64_t hits = 0, fetched_pairs = 0, saved = 0, fetched = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t number = ~numbers[pair];
      if (number < 0 || number >= 2 * experts) continue;
      const bool is_fetched = number >= experts;
      const bool is_first = elsewhere_[number % experts]++ == 0;
      ++(is_fetched ? fetched_pairs : hits);
      if (is_first) ++(is_fetched ? fetched : saved);
    }
    add(&counts_->choices, hits + fetched_pairs + static_cast<int64_t>(rows_.size()));
    add(&counts_->hits, hits);
    add(&counts_->saved, saved);
    add(&counts_->fetched, fetched);
  }

  void gather(const Call& call, const Input& input, int64_t first, int64_t last) {
    const int64_t size = bytes_of(dtype_), row_bytes = experts_[0].gate.columns * size;
    for (int64_t i = input.first; i < input.first + input.count; ++i) {
      std::memcpy(gathered_ + i * row_bytes + first * size,
                  static_cast<const char*>(call.input) + rows_[i] * row_bytes + first * size, (last - first) * size);
    }
  }

  // Parts of all routed experts; each takes half of a thread's remaining share.
  void divide(int64_t rows, int64_t row_bytes, int threads, std::vector<Part>* parts) {
    const int64_t least = std::max(kMinRows, kMinBytes / row_bytes / kMinRows * kMinRows);
    int64_t left = static_cast<int64_t>(chosen_.size()) * rows;
    parts->clear();
    for (int64_t chosen = 0; chosen < static_cast<int64_t>(chosen_.size()); ++chosen) {
      for (int64_t first = 0; first < rows;) {
        const int64_t wanted = std::max(least, left / (2 * threads) / kMinRows * kMinRows);
        const int64_t last = std::min(first + std::min(wanted, kMaxRows), rows);
        parts->push_back({chosen, first, last});
        left -= last - first;
        first = last;
      }
    }
  }

  // Calls work(part, next part or null).
  template <typename Work>
  void take_parts(const std::vector<Part>& parts, ThreadPool& pool, const Work& work) {
    const int64_t count = static_cast<int64_t>(parts.size());
    for (int64_t part = pool.next_part(); part < count;) {
      const int64_t next = pool.next_part();
      work(parts[part], next < count ? &parts[next] : nullptr);
      part = next;
    }
  }

  void prepare_inputs(const Call& call, ThreadPool& pool, int thread) {
    const Matrix& matrix = experts_[0].gate;
    const int64_t columns = matrix.columns, row_bytes = columns * bytes_of(dtype_);
    const auto prepare = [&](int64_t item, int64_t first, int64_t last) {
      const Input& input = inputs_[item];
      const char* x = static_cast<const char*>(call.input) + rows_[input.first] * row_bytes;
      if (input.count > 1) {
        gather(call, input, first, last);
        x = gathered_ + input.first * row_bytes;
      }
      prepare_input(matrix, input.count, instructions_, x, dtype_, columns, first, last, prepared_ + input.offset);
    };
    share_columns(static_cast<int64_t>(inputs_.size()), columns, input_step(matrix), pool.threads(), thread, prepare);
  }

  // A part is the same rows of gate and up: columns of down's input.
  void multiply_first(ThreadPool& pool, int thread) {
    const int64_t each = expert_activation_.interleaved ? 2 : 1;  // rows of `gate` for one of the input of down
    char* const scratch = thread_memory_ + thread * thread_bytes_;
    float* const factors = reinterpret_cast<float*>(scratch + scratch_bytes_);
    take_parts(first_parts_, pool, [&](const Part& part, const Part* next) {
      const Chosen& chosen = chosen_[part.chosen];
      const Expert& expert = experts_[chosen.expert];
      const char* const input = prepared_ + inputs_[chosen.input].offset;
      const int64_t width = part.last - part.first;
      float* const results = hidden_ + chosen.first * inner_ + part.first;
      const bool two = expert.up.values != nullptr;
      if (two) prefetch(expert.up, part.first);
      float* const firsts = expert_activation_.interleaved ? factors : results;
      const int64_t stride = expert_activation_.interleaved ? 2 * width : inner_;
      product(expert.gate, chosen.count, instructions_, input, each * part.first, each * part.last, firsts, stride, scratch);
      add_bias_to_rows(expert.gate_bias, each * part.first, firsts, chosen.count, each * width, stride);
      if (next != nullptr) prefetch(experts_[chosen_[next->chosen].expert].gate, each * next->first);
      if (two) {
        product(expert.up, chosen.count, instructions_, input, part.first, part.last, factors, width, scratch);
        add_bias_to_rows(expert.up_bias, part.first, factors, chosen.count, width, width);
      }
      for (int64_t m = 0; m < chosen.count; ++m) {
        float *const gate = results + m * inner_, *const up = factors + m * each * width;
        if (expert_activation_.interleaved) deinterleave(up, gate, width);
        if (!two && !expert_activation_.interleaved) {
          activate(expert_activation_.activation, gate, width);
          continue;
        }
        if (expert_activation_.limit < kNoLimit) {
          limit_values(gate, -kNoLimit, expert_activation_.limit, width);
          limit_values(up, -expert_activation_.limit, expert_activation_.limit, width);
        }
        activate(expert_activation_.activation, gate, width);
        multiply(gate, up, expert_activation_.up_offset, width);
      }
    });
  }

  void prepare_hidden(ThreadPool& pool, int thread) {
    const Matrix& matrix = experts_[0].down;
    const auto prepare = [&](int64_t item, int64_t first, int64_t last) {
      const Chosen& chosen = chosen_[item];
      const float* hidden = hidden_ + chosen.first * matrix.columns;
      char* input = prepared_ + chosen.hidden_offset;
      prepare_input(matrix, chosen.count, instructions_, hidden, Dtype::float32, matrix.columns, first, last, input);
    };
    share_columns(static_cast<int64_t>(chosen_.size()), matrix.columns, input_step(matrix), pool.threads(), thread, prepare);
  }

  void multiply_last(ThreadPool& pool, int thread) {
    const int64_t rows = experts_[0].down.rows;
    char* const scratch = thread_memory_ + thread * thread_bytes_;
    take_parts(last_parts_, pool, [&](const Part& part, const Part* next) {
      const Chosen& chosen = chosen_[part.chosen];
      if (next != nullptr) prefetch(experts_[chosen_[next->chosen].expert].down, next->first);
      float* const results = results_ + chosen.first * rows + part.first;
      product(experts_[chosen.expert].down, chosen.count, instructions_, prepared_ + chosen.hidden_offset, part.first,
              part.last, results, rows, scratch);
      add_bias_to_rows(experts_[chosen.expert].down_bias, part.first, results, chosen.count, part.last - part.first, rows);
    });
  }

  void add_bias_to_rows(const void* bias, int64_t first, float* rows, int64_t count, int64_t width, int64_t stride) const {
    if (bias == nullptr) return;
    const char* const own = static_cast<const char*>(bias) + first * bytes_of(expert_activation_.bias_dtype);
    for (int64_t m = 0; m < count; ++m) add_bias(rows + m * stride, own, expert_activation_.bias_dtype, width);
  }

  void add_up(const Call& call, ThreadPool& pool, int thread) {
    const int64_t rows = experts_[0].down.rows;
    const int64_t step = columns_to_add(pool);
    const int64_t first = std::min(thread * step, rows), width = std::min(step, rows - first);
    float* const sums = reinterpret_cast<float*>(thread_memory_ + thread * thread_bytes_);
    std::fill_n(sums, call.count * width, 0.0f);
    for (size_t pair = 0; pair < rows_.size(); ++pair) {
      add_scaled(sums + rows_[pair] * width, results_ + static_cast<int64_t>(pair) * rows + first, weights_[pair], width);
    }
    for (int64_t m = 0; m < call.count; ++m) {
      store(sums + m * width, static_cast<char*>(call.output) + (m * rows + first) * bytes_of(dtype_), dtype_, width);
    }
  }

  // Whole cache lines of a 16-bit output, not shared by threads.
  int64_t columns_to_add(ThreadPool& pool) const {
    constexpr int64_t kLine = 32;
    return parts_of(experts_[0].down.rows, kLine * pool.threads()) * kLine;
  }

  const std::vector<Expert> experts_;
  const ExpertActivation expert_activation_;
  const int64_t inner_;  // columns of down
  const Dtype dtype_;
  const Instructions instructions_;
  ExpertCounts* const counts_;
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

}  // namespace

extern "C" int64_t zero_inference_cpu_pool_add_experts(void* pool, const Expert* experts, int64_t count,
                                                       const ExpertActivation* activation, int32_t dtype, int32_t instructions,
                                                       ExpertCounts* counts) {
  return add_task(pool, std::make_unique<Experts>(std::vector<Expert>(experts, experts + count), *activation,
                                                  static_cast<Dtype>(dtype), static_cast<Instructions>(instructions), counts));
}

}  // namespace zero_inference::cpu
