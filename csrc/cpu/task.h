// A task of the CPU backend, and a call of it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "product.h"
#include "thread_pool.h"

namespace zero_inference::cpu {

// Pointers stay valid until it is done.
struct Call {
  int64_t task;   // from add_task
  int64_t count;  // rows of the input
  const void* input;
  void* output;
  int64_t extra[4];  // of the kind of task
};

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline int64_t parts_of(int64_t rows, int64_t rows_of_part) { return (rows + rows_of_part - 1) / rows_of_part; }

// 64-byte aligned memory that only grows.
class Buffer {
 public:
  explicit Buffer(size_t bytes = 0) { reserve(bytes); }

  // Throws std::bad_alloc.
  void* reserve(size_t bytes) {
    if (bytes > bytes_) {
      data_.reset();
      bytes_ = 0;
      data_.reset(std::aligned_alloc(64, aligned(bytes)));
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = aligned(bytes);
    }
    return data_.get();
  }
  void* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

// Shared by tasks, which run one after the other.
struct Workspace {
  Buffer input;    // prepared for products
  Buffer hidden;   // float32 between the stages of a block
  Buffer threads;  // a part for each thread
};

class Task {
 public:
  virtual ~Task() = default;
  // Allocates for the call; one thread, before `run`.
  virtual void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) = 0;
  // Allocates for calls of up to call.count rows.
  virtual void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) { prepare(call, pool, workspace); }
  // Prefetches some weights that the thread reads first, before the input arrives. False when done. On every thread, before
  // `prepare`.
  virtual bool read_ahead(int) { return false; }
  // On every thread.
  virtual void run(const Call& call, ThreadPool& pool, int thread) = 0;
  // Bytes of weights that the prepared call reads where its input decides; else 0.
  virtual int64_t chosen_bytes() const { return 0; }
};

// Adds a task to a CpuPool; returns its number.
int64_t add_task(void* pool, std::unique_ptr<Task> task);

}  // namespace zero_inference::cpu
