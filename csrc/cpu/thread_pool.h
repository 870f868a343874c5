// Pinned threads that work together: they spin between calls in close succession and sleep otherwise.

#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace zero_inference::cpu {

// Spin-loop hint.
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  // Starts one thread fewer than `cpus`: the caller of `run` is thread 0 and calls `pin`. A negative cpu is not pinned. Threads
  // spin for `spin_us` after a call. Throws std::system_error.
  ThreadPool(const std::vector<int>& cpus, int64_t spin_us) : cpus_(cpus), spin_us_(spin_us) {
    try {
      for (int thread = 1; thread < threads(); ++thread) others_.emplace_back([this, thread] { follow(thread); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~ThreadPool() { end(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(cpus_.size()); }
  void pin(int thread) const {
    if (cpus_[thread] < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus_[thread], &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // runs elsewhere if the core was taken away in the meantime
  }

  // Calls work(thread) on each; returns when all are done. One caller at a time.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    parts_.store(0, std::memory_order_relaxed);
    call_.fetch_add(1);  // in order with `sleepers_`: either this sees a sleeper, or the sleeper sees this
    if (sleepers_.load() > 0) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }
      woken_.notify_all();
    }
    work(0);
    barrier();
  }

  // Within `run`, by all threads.
  void barrier() {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads()) {
      waiting_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      pause_core();
      if (spins >= kSpinsBeforeYield) sched_yield();
    }
  }

  // Shared counter from 0 on, for parts of unequal length.
  int64_t next_part() { return parts_.fetch_add(1, std::memory_order_relaxed); }
  // By one thread, between two barriers.
  void restart_parts() { parts_.store(0, std::memory_order_relaxed); }

 private:
  void follow(int thread) {
    pin(thread);
    uint64_t seen = 0;
    for (;;) {
      const int64_t until = now_us() + spin_us_;
      for (int spins = 1; call_.load(std::memory_order_acquire) == seen; ++spins) {
        pause_core();
        if (spins % 64 == 0 && now_us() >= until) {
          std::unique_lock<std::mutex> lock(mutex_);
          sleepers_.fetch_add(1);
          woken_.wait(lock, [&] { return call_.load() != seen; });
          sleepers_.fetch_sub(1);
        }
      }
      ++seen;  // a call ends only when all threads have passed its barrier, so none is missed
      if (ends_) return;
      (*work_)(thread);
      barrier();
    }
  }

  void end() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
      call_.fetch_add(1);
    }
    woken_.notify_all();
    for (std::thread& other : others_) other.join();
  }

  // About 0.1 ms: longer than a barrier takes where each thread has a core.
  static constexpr int kSpinsBeforeYield = 4096;

  static int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

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
// 0. The system may allow fewer, so `work` takes parts from a counter and waits for no other thread to start.
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
