#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

namespace zero_inference::cpu {

namespace {

// About 0.1 ms: longer than a barrier takes where each thread has a core.
constexpr int kSpinsBeforeYield = 4096;

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

ThreadPool::ThreadPool(const std::vector<int>& cpus, int64_t spin_us) : cpus_(cpus), spin_us_(spin_us) {
  try {
    for (int thread = 1; thread < threads(); ++thread) others_.emplace_back([this, thread] { follow(thread); });
  } catch (...) {
    end();
    throw;
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    call_.fetch_add(1);
  }
  woken_.notify_all();
  for (std::thread& other : others_) other.join();
}

void ThreadPool::pin(int thread) const {
  if (cpus_[thread] < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpus_[thread], &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // runs elsewhere if the core was taken away in the meantime
}

void ThreadPool::run(const std::function<void(int)>& work) {
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

void ThreadPool::barrier() {
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

void ThreadPool::follow(int thread) {
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

}  // namespace zero_inference::cpu
