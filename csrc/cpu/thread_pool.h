// Threads of the host's cores that work together: each on a core of its own, spinning between calls that follow closely and
// asleep otherwise.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace zero_inference::cpu {

// Tells the core that this is a loop that waits.
void pause_core();

class ThreadPool {
 public:
  // What all threads do together: called on each, with its number.
  class Work {
   public:
    virtual ~Work() = default;
    virtual void run(ThreadPool& pool, int thread) = 0;
  };

  // One thread fewer than `cpus` is started: the caller of `run` is thread 0, and pins itself with `pin`. A negative cpu leaves
  // its thread where the system puts it. Threads spin for `spin_us` after a call, then sleep. Throws std::system_error where
  // the system does not allow so many.
  ThreadPool(const std::vector<int>& cpus, int64_t spin_us);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(cpus_.size()); }
  void pin(int thread) const;
  // Returns when all threads have done their part. From one thread at a time.
  void run(Work& work);
  // Waits until all threads are here. Within a `Work` only, by all of them.
  void barrier();
  // The next of the numbers from 0 on, which the threads share out; for parts of a work that are not equally long.
  int64_t next_part() { return parts_.fetch_add(1, std::memory_order_relaxed); }
  // Begin with 0 again. By one thread, between two barriers.
  void restart_parts() { parts_.store(0, std::memory_order_relaxed); }

 private:
  void follow(int thread);
  void end();

  const std::vector<int> cpus_;
  const int64_t spin_us_;
  std::vector<std::thread> others_;
  std::mutex mutex_;
  std::condition_variable woken_;
  // each on a cache line of its own: one thread writes what all others watch
  alignas(64) std::atomic<uint64_t> call_{0};
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> parts_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  Work* work_ = nullptr;
  bool ends_ = false;
};

}  // namespace zero_inference::cpu
