// C interface of product.h with threads of its own: tests, measurements and operators outside of an engine.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <new>
#include <thread>
#include <vector>

#include "product.h"
#include "task.h"

namespace {

using namespace zero_inference::cpu;

constexpr int64_t kTaskBytes = 131072;  // of a weight: 13 us at 10 GB/s
constexpr int64_t kTaskRows = 32;       // whole multiples of this
constexpr int64_t kMeasuredRows = 256;  // of a task where products are measured, as a thread's parts in csrc/cpu/block.cpp

constexpr double kNotMeasured = -2;  // threads or memory are missing

int64_t task_rows(const Matrix& matrix) {
  return std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, row_bytes(matrix)) / kTaskRows) * kTaskRows;
}

// Repeats tasks until the time is up. Returns the seconds from the first start to the last end; kNotMeasured without threads.
template <typename Work>
double take_for(double seconds, int threads, const int32_t* cpus, int64_t tasks, const Work& work) {
  using Clock = std::chrono::steady_clock;
  const size_t count = static_cast<size_t>(threads);
  std::vector<Clock::time_point> begun(count), ended(count);
  std::atomic<int64_t> next{0};
  bool measured = false;
  const auto measure = [&] {
    try {
      ThreadPool pool(cpus == nullptr ? std::vector<int>(count, -1) : std::vector<int>(cpus, cpus + threads), 0);
      pool.pin(0);
      pool.run([&](int thread) {
        pool.barrier();
        const Clock::time_point begin = begun[static_cast<size_t>(thread)] = Clock::now();
        const auto most = std::chrono::duration<double>(seconds);
        while (Clock::now() - begin < most) work(thread, next.fetch_add(1, std::memory_order_relaxed) % tasks);
        ended[static_cast<size_t>(thread)] = Clock::now();
      });
      measured = true;
    } catch (const std::exception&) {
    }
  };
  try {
    std::thread(measure).join();  // so that the caller's thread is not pinned
  } catch (const std::exception&) {
  }
  if (!measured) return kNotMeasured;
  return std::chrono::duration<double>(*std::max_element(ended.begin(), ended.end()) -
                                       *std::min_element(begun.begin(), begun.end()))
      .count();
}

}  // namespace

extern "C" {

int32_t zero_inference_best_instructions() { return static_cast<int32_t>(best_instructions()); }

// Rows [first, last) of the product, in float32: out[m * out_stride + r - first]. Returns 0; 1 where the processor lacks the
// instructions; -1 without memory.
int32_t zero_inference_product(const Matrix* matrix, int64_t count, int32_t instructions, const void* x, int32_t x_dtype,
                               int64_t stride, int64_t first, int64_t last, float* out, int64_t out_stride, int32_t threads) {
  const Instructions set = static_cast<Instructions>(instructions);
  if (instructions < 0 || set > best_instructions()) return 1;
  if (count < 1 || first >= last) return 0;
  try {
    const Buffer input(input_bytes(*matrix, count, set));
    const int64_t step = input_step(*matrix);
    const int64_t steps = (matrix->columns + step - 1) / step;
    const int64_t rows = task_rows(*matrix);
    const int64_t tasks = (last - first + rows - 1) / rows;
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(threads, tasks));
    std::vector<Buffer> scratch;
    for (int64_t thread = 0; thread < wanted; ++thread) scratch.emplace_back(scratch_bytes(*matrix, count, set));
    std::atomic<int64_t> parts{0}, prepared{0}, next{0};
    on_threads(wanted, [&](int64_t thread) {
      for (int64_t part; (part = parts.fetch_add(1)) < wanted; prepared.fetch_add(1, std::memory_order_acq_rel)) {
        const int64_t from = steps * part / wanted * step;
        const int64_t to = std::min(matrix->columns, steps * (part + 1) / wanted * step);
        if (from < to) {
          prepare_input(*matrix, count, set, x, static_cast<Dtype>(x_dtype), stride, from, to, input.get());
        }
      }
      while (prepared.load(std::memory_order_acquire) < wanted) std::this_thread::yield();
      for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
        const int64_t begin = first + task * rows;
        product(*matrix, count, set, input.get(), begin, std::min(last, begin + rows), out + begin - first, out_stride,
                scratch[static_cast<size_t>(thread)].get());
      }
    });
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Repeats products with `number` weights of one format on pinned threads (where `cpus` are given). x: as many columns as the
// widest weight. Returns seconds, and the weight bytes read; -1 where the processor lacks the instructions, -2 without threads
// or memory.
double zero_inference_measure_products(const Matrix* matrices, int64_t number, int64_t count, int32_t instructions,
                                       const void* x, int32_t x_dtype, int32_t threads, const int32_t* cpus, double seconds,
                                       int64_t* bytes) {
  const Instructions set = static_cast<Instructions>(instructions);
  if (instructions < 0 || set > best_instructions()) return -1;
  try {
    struct Part {
      const Matrix* matrix;
      const void* input;
      int64_t first, last;
    };
    std::vector<Part> parts;
    std::map<int64_t, Buffer> inputs;  // by columns
    int64_t columns = 0;
    size_t scratch_size = 0;
    for (const Matrix* matrix = matrices; matrix < matrices + number; ++matrix) columns = std::max(columns, matrix->columns);
    for (const Matrix* matrix = matrices; matrix < matrices + number; ++matrix) {
      Buffer& input = inputs[matrix->columns];
      if (input.get() == nullptr) {
        input.reserve(input_bytes(*matrix, count, set));
        prepare_input(*matrix, count, set, x, static_cast<Dtype>(x_dtype), columns, 0, matrix->columns, input.get());
        scratch_size = std::max(scratch_size, scratch_bytes(*matrix, count, set));
      }
      for (int64_t row = 0; row < matrix->rows; row += kMeasuredRows) {
        parts.push_back({matrix, input.get(), row, std::min(matrix->rows, row + kMeasuredRows)});
      }
    }
    std::vector<Buffer> scratch, out;
    for (int index = 0; index < threads; ++index) {
      scratch.emplace_back(scratch_size);
      out.emplace_back(static_cast<size_t>(count * kMeasuredRows * 4));
    }
    std::atomic<int64_t> bytes_read{0};
    const double taken = take_for(seconds, threads, cpus, static_cast<int64_t>(parts.size()), [&](int index, int64_t task) {
      const Part& part = parts[static_cast<size_t>(task)];
      const size_t thread = static_cast<size_t>(index);
      product(*part.matrix, count, set, part.input, part.first, part.last, static_cast<float*>(out[thread].get()),
              kMeasuredRows, scratch[thread].get());
      bytes_read.fetch_add((part.last - part.first) * row_bytes(*part.matrix), std::memory_order_relaxed);
    });
    *bytes = bytes_read.load();
    return taken;
  } catch (const std::bad_alloc&) {
    return kNotMeasured;
  }
}

// Reads `size` bytes over and over: the bandwidth that products can reach.
double zero_inference_measure_reads(const void* data, int64_t size, int32_t instructions, int32_t threads, const int32_t* cpus,
                                    double seconds, int64_t* bytes) {
  const Instructions set = static_cast<Instructions>(instructions);
  if (instructions < 0 || set > best_instructions()) return -1;
  const int64_t tasks = (size + kTaskBytes - 1) / kTaskBytes;
  std::atomic<int64_t> read{0};
  std::atomic<uint64_t> total{0};
  const double taken = take_for(seconds, threads, cpus, tasks, [&](int, int64_t task) {
    const int64_t part = std::min(kTaskBytes, size - task * kTaskBytes);
    total.fetch_add(read_bytes_sum(static_cast<const char*>(data) + task * kTaskBytes, part, set), std::memory_order_relaxed);
    read.fetch_add(part, std::memory_order_relaxed);
  });
  *bytes = read.load();
  return taken;
}

uint64_t zero_inference_read_bytes_sum(const void* data, int64_t size, int32_t instructions) {
  return read_bytes_sum(data, size, static_cast<Instructions>(instructions));
}

}  // extern "C"
