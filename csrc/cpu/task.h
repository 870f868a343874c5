// What the cores can be asked to do for a pass of the model, and how it is asked.

#pragma once

#include <cstddef>
#include <cstdint>

#include "product.h"
#include "thread_pool.h"

namespace zero_inference::cpu {

// One request. The pointers stay valid until it is done.
struct Call {
  int64_t task;   // its number in `CpuPool`
  int64_t count;  // rows of the input
  const void* input;
  void* output;
  int64_t extra[4];  // of the kind of task
};

// 64-byte aligned memory that grows when it has to and is kept.
class Buffer {
 public:
  ~Buffer();
  void* reserve(size_t bytes);

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory that tasks share, because they run one after the other.
struct Workspace {
  Buffer input;    // prepared for products
  Buffer hidden;   // float32 between the stages of a block
  Buffer threads;  // a part for each thread
};

class Task {
 public:
  virtual ~Task() = default;
  // Takes what memory the call needs. On one thread, before `run`.
  virtual void prepare(const Call& call, ThreadPool& pool, Workspace& workspace) = 0;
  // Takes what memory calls of up to as many rows need.
  virtual void reserve(const Call& call, ThreadPool& pool, Workspace& workspace) { prepare(call, pool, workspace); }
  // Asks for some of what the thread will read first, whatever the input, while the input of the next call is waited for. False
  // where nothing is left to ask for. On every thread of the pool, before `prepare`.
  virtual bool read_ahead(int) { return false; }
  // On every thread of the pool.
  virtual void run(const Call& call, ThreadPool& pool, int thread) = 0;
  // Of the weights that the call prepared last reads, where its input decides that; 0 for tasks that always read all of theirs.
  virtual int64_t chosen_bytes() const { return 0; }
};

}  // namespace zero_inference::cpu
