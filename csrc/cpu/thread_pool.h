// Pinned threads that work together: they spin between calls in close succession and sleep otherwise.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace zero_inference::cpu {

// Spin-loop hint.
void pause_core();

class ThreadPool {
 public:
  // Starts one thread fewer than `cpus`: the caller of `run` is thread 0 and calls `pin`. A negative cpu is not pinned. Threads
  // spin for `spin_us` after a call. Throws std::system_error.
  ThreadPool(const std::vector<int>& cpus, int64_t spin_us);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(cpus_.size()); }
  void pin(int thread) const;
  // Calls work(thread) on each; returns when all are done. One caller at a time.
  void run(const std::function<void(int)>& work);
  // Within `run`, by all threads.
  void barrier();
  // Shared counter from 0 on, for parts of unequal length.
  int64_t next_part() { return parts_.fetch_add(1, std::memory_order_relaxed); }
  // By one thread, between two barriers.
  void restart_parts() { parts_.store(0, std::memory_order_relaxed); }

 private:
  void follow(int thread);
  void end();

  const std::vector<int> cpus_;
  const int64_t spin_us_;
  std::vector<std::thread> others_;
  std::mutex mutex_;
  std::condition_variable woken_;
  // A cache line each: one thread writes what all others watch.
  alignas(64) std::atomic<uint64_t> call_{0};
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> parts_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  const std::function<void(int)>* work_ = nullptr;
  bool ends_ = false;
};

// Calls work(thread) on up to `threads` threads of this call alone, so that a process may fork between two calls; the caller is
// 0. The system may allow fewer, so `work` takes parts from a
// counter and waits for no other thread to start.
template <typename Work>
void on_threads(int64_t threads, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  for (int64_t thread = 1; thread < threads; ++thread) {
    try {
      others.emplace_back([&work, thread] { work(thread); });
    } catch (const std::exception&) {
      break;
    }
  }
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace zero_inference::cpu
