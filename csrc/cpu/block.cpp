// A block of a decoder layer as a task: products with weights in host memory and the elementwise steps between them.

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "elementwise.h"
#include "task.h"

namespace zero_inference::cpu {

constexpr int kMaxProducts = 8;

enum class Combine : int32_t {
  none = 0,        // each is an output of the block: the last stage
  activation = 1,  // f(first) is the input of the next stage
  gated = 2,       // f(first) * second
};

// Products of one input, all of the same format and columns, and of as many rows where combined. Layout:
// zero_inference/cpu/pool.py.
struct Stage {
  Matrix matrices[kMaxProducts];
  const void* biases[kMaxProducts];  // [rows] of `bias_dtype`, or null
  int32_t products;
  Combine combine;
  Activation activation;
  Dtype bias_dtype;
};

namespace {

constexpr int64_t kMinRows = 16;   // of a part, whole strips
constexpr int64_t kMaxRows = 256;  // of a part: a thread has memory for its results
// Share of the rows that threads take in contiguous runs, which read faster; small parts of the rest balance the load.
constexpr double kOwnShare = 0.75;
constexpr uintptr_t kLineBytes = 64;
constexpr int kLinesAtOnce = 32;  // half a microsecond between two polls for input

// Three quarters of L2: x and intermediate results need the rest. 0 where its size is unknown.
int64_t bytes_to_read_ahead() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  return std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE)) / 4 * 3;
#else
  return 0;
#endif
}

// Calls work(first, last) for the thread's contiguous run; returns its length.
template <typename Function>
int64_t for_own_rows(int64_t rows, int threads, int thread, const Function& work) {
  const int64_t own = static_cast<int64_t>(kOwnShare * static_cast<double>(rows) / threads) / kMinRows * kMinRows;
  for (int64_t first = thread * own, end = first + own; first < end; first += kMaxRows) {
    work(first, std::min(first + kMaxRows, end));
  }
  return own;
}

// Calls work(first, last) so that all threads together cover `rows` once.
template <typename Function>
void share_out(int64_t rows, ThreadPool& pool, int thread, const Function& work) {
  const int64_t shared = for_own_rows(rows, pool.threads(), thread, work) * pool.threads();
  for (int64_t first; (first = shared + pool.next_part() * kMinRows) < rows;) work(first, std::min(first + kMinRows, rows));
}

// Rows that are shared out: of all products, or of one where they are combined.
int64_t rows_of(const Stage& stage) {
  int64_t rows = 0;
  for (int i = 0; i < (stage.combine == Combine::none ? stage.products : 1); ++i) rows += stage.matrices[i].rows;
  return rows;
}

// Calls work(product, first, last, before) for the rows of each product in [begin, end) of the concatenated rows; `before`:
// rows of earlier products.
template <typename Function>
void for_products(const Stage& stage, int64_t begin, int64_t end, const Function& work) {
  int64_t before = 0;
  for (int i = 0; i < stage.products; ++i) {
    const int64_t rows = stage.matrices[i].rows;
    const int64_t first = std::max<int64_t>(begin - before, 0), last = std::min(end - before, rows);
    if (first < last) work(i, first, last, before);
    before += rows;
  }
}

// Prefetches the weights that a thread reads first into its L2 cache, while it waits for the input. On its own cache lines.
class alignas(64) ReadAhead {
 public:
  // Appends rows [first, last) with scales and offsets, as far as the cache holds them.
  void add(const Matrix& matrix, int64_t first, int64_t last) {
    for_tensors(matrix, first, last, [&](const void* data, int64_t at, int64_t bytes) { add(data, at, bytes); });
    restart();
  }

  void restart() {
    run_ = 0;
    at_ = runs_.empty() ? nullptr : runs_[0].at;
  }

  // Prefetches some lines; false at the end.
  bool prefetch() {
    for (int lines = 0; lines < kLinesAtOnce; ++lines) {
      if (run_ == runs_.size()) return false;
      __builtin_prefetch(at_, 0, 2);
      at_ += kLineBytes;
      if (at_ < runs_[run_].end) continue;
      ++run_;
      if (run_ < runs_.size()) at_ = runs_[run_].at;
    }
    return true;
  }

 private:
  struct Run {
    const char *at, *end;
  };

  void add(const void* data, int64_t first, int64_t bytes) {
    const int64_t some = std::min(bytes, bytes_to_read_ahead() - bytes_);
    if (some <= 0) return;
    const char* const at = static_cast<const char*>(data) + first;
    runs_.push_back({at - reinterpret_cast<uintptr_t>(at) % kLineBytes, at + some});
    bytes_ += some;
  }

  std::vector<Run> runs_;
  int64_t bytes_ = 0;
  size_t run_ = 0;  // current, from `at_` on
  const char* at_ = nullptr;
};

// The output holds the products of the last stage one after the other, each [count, rows] in `dtype`.
class Block : public Task {
 public:
  Block(std::vector<Stage> stages, Dtype dtype, Instructions instructions)
      : stages_(std::move(stages)), dtype_(dtype), instructions_(instructions) {}

  void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) override {
    if (ahead_.empty()) find_first_rows(pool.threads());
    size_t input = 0, scratch = 0;
    int64_t hidden = 0;
    for (const Stage& stage : stages_) {
      input = std::max(input, input_bytes(stage.matrices[0], call.count, instructions_));
      if (stage.combine != Combine::none) hidden = std::max(hidden, stage.matrices[0].rows);
      for (int i = 0; i < stage.products; ++i) {
        scratch = std::max(scratch, scratch_bytes(stage.matrices[i], call.count, instructions_));
      }
    }
    scratch_bytes_ = aligned(scratch);
    thread_bytes_ = scratch_bytes_ + 2 * aligned(call.count * kMaxRows * sizeof(float));  // the results of a part, or of two
    input_ = static_cast<char*>(workspace.input.reserve(input));
    hidden_ = static_cast<float*>(workspace.hidden.reserve(std::max<int64_t>(1, call.count * hidden) * sizeof(float)));
    thread_memory_ = static_cast<char*>(workspace.threads.reserve(thread_bytes_ * pool.threads()));
  }

  void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) override {
    Call some = call;
    for (some.count = 1; some.count <= call.count; ++some.count) {  // fewer rows may need more: another layout
      prepare(some, pool, workspace);
    }
  }

  void run(const Call& call, ThreadPool& pool, int thread) override {
    ahead_[static_cast<size_t>(thread)].restart();
    for (const Stage& stage : stages_) {
      prepare_stage(stage, call, pool, thread);
      pool.barrier();
      if (stage.combine == Combine::none) {
        multiply_outputs(stage, call, pool, thread);
      } else {
        multiply_combined(stage, call, pool, thread);
        pool.barrier();
        if (thread == 0) pool.restart_parts();  // the barrier after the next preparation lies between this and the next use
      }
    }
  }

  bool read_ahead(int thread) override { return !ahead_.empty() && ahead_[static_cast<size_t>(thread)].prefetch(); }

 private:
  void find_first_rows(int threads) {
    const Stage& stage = stages_.front();
    ahead_ = std::vector<ReadAhead>(static_cast<size_t>(threads));
    for (int thread = 0; thread < threads; ++thread) {
      ReadAhead& ahead = ahead_[static_cast<size_t>(thread)];
      for_own_rows(rows_of(stage), threads, thread, [&](int64_t begin, int64_t end) {
        if (stage.combine == Combine::none) {
          for_products(stage, begin, end,
                       [&](int i, int64_t first, int64_t last, int64_t) { ahead.add(stage.matrices[i], first, last); });
        } else {
          for (int i = 0; i < stage.products; ++i) ahead.add(stage.matrices[i], begin, end);
        }
      });
    }
  }

  void prepare_stage(const Stage& stage, const Call& call, ThreadPool& pool, int thread) {
    const Matrix& matrix = stage.matrices[0];
    const bool first = &stage == &stages_.front();
    const int64_t step = input_step(matrix);
    const int64_t steps = parts_of(matrix.columns, step);
    const int64_t begin = steps * thread / pool.threads() * step;
    const int64_t end = std::min(steps * (thread + 1) / pool.threads() * step, matrix.columns);
    if (begin < end) {
      prepare_input(matrix, call.count, instructions_, first ? call.input : hidden_, first ? dtype_ : Dtype::float32,
                    matrix.columns, begin, end, input_);
    }
  }

  // A part is the same rows of all products: columns of the next input.
  void multiply_combined(const Stage& stage, const Call& call, ThreadPool& pool, int thread) {
    const int64_t rows = rows_of(stage);
    char* scratch = thread_memory_ + thread * thread_bytes_;
    float* results[2];
    results[0] = reinterpret_cast<float*>(scratch + scratch_bytes_);
    results[1] = results[0] + call.count * kMaxRows;
    share_out(rows, pool, thread, [&](int64_t first, int64_t last) {
      const int64_t width = last - first;
      for (int i = 0; i < stage.products; ++i) {
        multiply_part(stage, i, call, first, last, results[i], scratch);
      }
      activate(stage.activation, results[0], call.count * width);
      if (stage.combine == Combine::gated) multiply(results[0], results[1], 0.0f, call.count * width);
      for (int64_t m = 0; m < call.count; ++m) {
        std::copy_n(results[0] + m * width, width, hidden_ + m * rows + first);
      }
    });
  }

  // Rows of all products are shared out as one range.
  void multiply_outputs(const Stage& stage, const Call& call, ThreadPool& pool, int thread) {
    char* scratch = thread_memory_ + thread * thread_bytes_;
    float* results = reinterpret_cast<float*>(scratch + scratch_bytes_);
    share_out(rows_of(stage), pool, thread, [&](int64_t begin, int64_t end) {
      for_products(stage, begin, end, [&](int i, int64_t first, int64_t last, int64_t before) {
        const int64_t rows = stage.matrices[i].rows;
        char* const output = static_cast<char*>(call.output) + call.count * before * bytes_of(dtype_);
        multiply_part(stage, i, call, first, last, results, scratch);
        for (int64_t m = 0; m < call.count; ++m) {
          store(results + m * (last - first), output + (m * rows + first) * bytes_of(dtype_), dtype_, last - first);
        }
      });
    });
  }

  // results[m * (last - first) + r - first], with bias.
  void multiply_part(const Stage& stage, int index, const Call& call, int64_t first, int64_t last, float* results,
                     char* scratch) {
    const int64_t width = last - first;
    product(stage.matrices[index], call.count, instructions_, input_, first, last, results, width, scratch);
    if (stage.biases[index] == nullptr) return;
    const char* bias = static_cast<const char*>(stage.biases[index]) + first * bytes_of(stage.bias_dtype);
    for (int64_t m = 0; m < call.count; ++m) add_bias(results + m * width, bias, stage.bias_dtype, width);
  }

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

}  // namespace

extern "C" int64_t zero_inference_cpu_pool_add_block(void* pool, const Stage* stages, int64_t count, int32_t dtype,
                                                     int32_t instructions) {
  return add_task(pool, std::make_unique<Block>(std::vector<Stage>(stages, stages + count), static_cast<Dtype>(dtype),
                                                static_cast<Instructions>(instructions)));
}

}  // namespace zero_inference::cpu
