// CPU backend: tasks that are registered once and called at once or when a device has raised its flag; its C interface for
// zero_inference/cpu/pool.py (-1: out of memory).

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "task.h"

namespace zero_inference::cpu {

struct Statistics {
  int64_t calls;
  int64_t busy_ns;       // from the arrival of the input to the output
  int64_t late_ns;       // of the first thread: waiting for the input of a submitted call
  int64_t chosen_bytes;  // of weights that routed tasks read
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kNap = std::chrono::microseconds(50);

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

// In memory that devices read and write.
struct alignas(64) Flag {
  std::atomic<uint32_t> number;
};

// Of one device, which numbers its calls: `done` is set to a call's number by the CPU when the output is written, `arrived` by
// the device when the input is. `stop` releases the device where it waits.
struct DeviceFlags {
  Flag done, stop, arrived;
};

class CpuPool {
 public:
  // `flags`: of `devices` devices; null and 0 where calls only use `run`.
  CpuPool(const std::vector<int>& cpus, int64_t spin_us, DeviceFlags* flags, int64_t devices)
      : pool_(cpus, spin_us), spin_us_(spin_us), flags_(flags), devices_(devices) {
    if (devices_ == 0) return;
    for (int64_t device = 0; device < devices_; ++device) {
      for (Flag* flag : {&flags_[device].done, &flags_[device].stop, &flags_[device].arrived}) flag->number.store(0);
    }
    leader_ = std::thread([this] { lead(); });
  }

  // Waits for the running call, drops those without input.
  ~CpuPool() {
    if (!leader_.joinable()) return;
    for (int64_t device = 0; device < devices_; ++device) flags_[device].stop.number.store(1);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_.store(true);
    }
    woken_.notify_all();
    leader_.join();
  }

  int64_t add(std::unique_ptr<Task> task) {
    const std::lock_guard<std::mutex> lock(tasks_mutex_);
    tasks_.push_back(std::move(task));
    return static_cast<int64_t>(tasks_.size()) - 1;
  }

  // Allocates for calls with up to call.count rows, after all submitted calls; throws std::bad_alloc.
  void reserve(const Call& call) {
    while (done_.load() != submitted_.load()) std::this_thread::sleep_for(kNap);
    task_of(call).reserve(call, pool_, workspace_);
  }

  // Runs now, the caller as thread 0; only while no submitted call is pending.
  void run(const Call& call) { execute(call, task_of(call), now_ns()); }

  // Queues a call that runs after those before it, when the input of `device` has arrived. A device's numbers ascend. Returns
  // at once.
  void submit(const Call& call, int64_t device, uint32_t number) {
    const uint64_t place = submitted_.load();
    while (place - taken_.load() >= kPlaces) std::this_thread::sleep_for(kNap);
    queue_[place % kPlaces] = {call, &flags_[device], number};
    submitted_.store(place + 1);
    if (sleeps_.load()) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }
      woken_.notify_one();
    }
  }

  Statistics statistics() const { return {calls_.load(), busy_ns_.load(), late_ns_.load(), chosen_bytes_.load()}; }

 private:
  struct Submitted {
    Call call;
    DeviceFlags* flags;  // of its device
    uint32_t number;

    // Numbers may wrap at 2^32.
    bool has_input() const { return static_cast<int32_t>(flags->arrived.number.load(std::memory_order_acquire) - number) >= 0; }
  };

  void lead() {
    pool_.pin(0);
    Submitted submitted;
    while (next(submitted)) {
      const int64_t taken_ns = now_ns();
      Task& task = task_of(submitted.call);
      const int64_t arrived_ns = wait_for_input(submitted, task);
      if (arrived_ns == 0) return;
      late_ns_.fetch_add(arrived_ns - taken_ns);
      execute(submitted.call, task, arrived_ns);
      submitted.flags->done.number.store(submitted.number, std::memory_order_release);
      done_.fetch_add(1);
    }
  }

  // False at the end.
  bool next(Submitted& submitted) {
    const uint64_t place = taken_.load();
    const int64_t until = now_ns() + spin_us_ * 1000;
    for (int spins = 1; submitted_.load(std::memory_order_acquire) == place; ++spins) {
      if (ends_.load()) return false;
      pause_core();
      if (spins % 64 == 0 && now_ns() >= until) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeps_.store(true);
        woken_.wait(lock, [&] { return ends_.load() || submitted_.load() != place; });
        sleeps_.store(false);
      }
    }
    submitted = queue_[place % kPlaces];
    taken_.store(place + 1);
    return true;
  }

  Task& task_of(const Call& call) {
    const std::lock_guard<std::mutex> lock(tasks_mutex_);
    return *tasks_[call.task];
  }

  // Reads weights of a call ahead until its input arrives or the cache is full. Returns the time of arrival; 0: not yet.
  int64_t read_ahead(const Submitted& submitted, Task& task) {
    int64_t arrived_ns = 0;
    std::atomic<bool> over{false};
    std::atomic<int> others{pool_.threads() - 1};  // that still prefetch
    pool_.run([&](int thread) {
      if (thread > 0) {
        while (!over.load(std::memory_order_acquire) && task.read_ahead(thread)) {
        }
        others.fetch_sub(1);
        return;
      }
      for (bool more = true; (more || others.load() > 0) && !ends_.load(std::memory_order_relaxed);) {
        if (submitted.has_input()) {
          arrived_ns = now_ns();
          break;
        }
        more = more && task.read_ahead(0);
        pause_core();
      }
      over.store(true, std::memory_order_release);
    });
    return arrived_ns;
  }

  // Returns the time of arrival; 0 at the end. A pool that does not spin does not read ahead.
  int64_t wait_for_input(const Submitted& submitted, Task& task) {
    if (submitted.has_input()) return now_ns();
    const int64_t until = now_ns() + spin_us_ * 1000;
    if (spin_us_ > 0 && task.read_ahead(0)) {
      const int64_t arrived_ns = read_ahead(submitted, task);
      if (arrived_ns != 0) return arrived_ns;
    }
    for (int spins = 1; !submitted.has_input(); ++spins) {
      if (ends_.load(std::memory_order_relaxed)) return 0;
      pause_core();
      if (spins % 64 == 0 && now_ns() >= until) std::this_thread::sleep_for(kNap);
    }
    return now_ns();
  }

  void execute(const Call& call, Task& task, int64_t since_ns) {
    task.prepare(call, pool_, workspace_);
    pool_.run([&](int thread) { task.run(call, pool_, thread); });
    busy_ns_.fetch_add(now_ns() - since_ns);
    chosen_bytes_.fetch_add(task.chosen_bytes());
    calls_.fetch_add(1);
  }

  static constexpr uint64_t kPlaces = 4096;  // more calls than a step of any model has, so that Python does not wait

  ThreadPool pool_;
  const int64_t spin_us_;
  DeviceFlags* const flags_;
  const int64_t devices_;
  Workspace workspace_;
  std::vector<std::unique_ptr<Task>> tasks_;
  std::mutex tasks_mutex_;  // Python adds tasks while the leader runs others
  std::array<Submitted, kPlaces> queue_;
  std::atomic<uint64_t> submitted_{0}, taken_{0}, done_{0};  // calls
  std::atomic<bool> sleeps_{false}, ends_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<int64_t> calls_{0}, busy_ns_{0}, late_ns_{0}, chosen_bytes_{0};
  std::thread leader_;  // last: it uses all of the above
};

// A call of the C interface that allocates.
template <typename Work>
int unless_out_of_memory(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace

int64_t add_task(void* pool, std::unique_ptr<Task> task) { return static_cast<CpuPool*>(pool)->add(std::move(task)); }

extern "C" {

// Null where threads or memory are not available.
void* zero_inference_cpu_pool_new(const int32_t* cpus, int64_t threads, int64_t spin_us, void* flags, int64_t devices) {
  try {
    return new CpuPool(std::vector<int>(cpus, cpus + threads), spin_us, static_cast<DeviceFlags*>(flags), devices);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void zero_inference_cpu_pool_delete(void* pool) { delete static_cast<CpuPool*>(pool); }

int zero_inference_cpu_pool_reserve(void* pool, const Call* call) {
  return unless_out_of_memory([&] { static_cast<CpuPool*>(pool)->reserve(*call); });
}

int zero_inference_cpu_pool_run(void* pool, const Call* call) {
  return unless_out_of_memory([&] { static_cast<CpuPool*>(pool)->run(*call); });
}

void zero_inference_cpu_pool_submit(void* pool, const Call* call, int64_t device, uint32_t number) {
  static_cast<CpuPool*>(pool)->submit(*call, device, number);
}

void zero_inference_cpu_pool_statistics(const void* pool, Statistics* statistics) {
  *statistics = static_cast<const CpuPool*>(pool)->statistics();
}

}  // extern "C"

}  // namespace zero_inference::cpu
