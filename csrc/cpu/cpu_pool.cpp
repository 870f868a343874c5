// CPU backend: tasks that are registered once and called at once or when the devices of all ranks have raised their flags; its
// C interface for zero_inference/cpu/pool.py (-1: out of memory), and that of flags.

#include <algorithm>
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

constexpr auto kNap = std::chrono::microseconds(50), kLongestNap = std::chrono::microseconds(1000);
constexpr auto kSpin = std::chrono::microseconds(50);  // a core for longer than that could be what another rank waits for

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

// In memory shared with devices and other processes. Set to a call's number: `kDone` by the CPU when the output is written,
// `kArrived` + rank by the rank's device when its input is. `kStop` releases waiting devices.
struct alignas(64) Flag {
  std::atomic<uint32_t> number;
};
enum Flags { kDone, kStop, kArrived };

class CpuPool {
 public:
  // `flags`: kArrived + ranks of them, or null where calls only use `run`.
  CpuPool(const std::vector<int>& cpus, int64_t spin_us, Flag* flags, int64_t ranks)
      : pool_(cpus, spin_us), spin_us_(spin_us), flags_(flags), ranks_(ranks) {
    if (flags_ == nullptr) return;
    for (int64_t flag = 0; flag < kArrived + ranks_; ++flag) flags_[flag].number.store(0);
    leader_ = std::thread([this] { lead(); });
  }

  // Waits for the running call, drops those without input.
  ~CpuPool() {
    if (!leader_.joinable()) return;
    flags_[kStop].number.store(1);
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

  // Allocates for calls with up to call.count rows; throws std::bad_alloc.
  void reserve(const Call& call) {
    while (leader_.joinable() && flags_[kDone].number.load() != last_.load()) std::this_thread::sleep_for(kNap);
    task_of(call).reserve(call, pool_, workspace_);
  }

  // Runs now, the caller as thread 0; only while no submitted call is pending.
  void run(const Call& call) { execute(call, task_of(call), now_ns()); }

  // Queues a call that runs when the inputs of all ranks have arrived. Numbers ascend. Returns at once.
  void submit(const Call& call, uint32_t number) {
    const uint64_t place = submitted_.load();
    while (place - taken_.load() >= kPlaces) std::this_thread::sleep_for(kNap);
    queue_[place % kPlaces] = {call, number};
    last_.store(number);
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
    uint32_t number;
  };

  void lead() {
    pool_.pin(0);
    Submitted submitted;
    while (next(submitted)) {
      const int64_t taken_ns = now_ns();
      Task& task = task_of(submitted.call);
      const int64_t arrived_ns = wait_for_input(submitted.number, task);
      if (arrived_ns == 0) return;
      late_ns_.fetch_add(arrived_ns - taken_ns);
      execute(submitted.call, task, arrived_ns);
      flags_[kDone].number.store(submitted.number, std::memory_order_release);
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

  // Numbers may wrap at 2^32.
  bool all_arrived(uint32_t number) const {
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (static_cast<int32_t>(flags_[kArrived + rank].number.load(std::memory_order_acquire) - number) < 0) return false;
    }
    return true;
  }

  // Reads weights of a call ahead until its input arrives or the cache is full. Returns the time of arrival; 0: not yet.
  int64_t read_ahead(uint32_t number, Task& task) {
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
        if (all_arrived(number)) {
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
  int64_t wait_for_input(uint32_t number, Task& task) {
    if (all_arrived(number)) return now_ns();
    const int64_t until = now_ns() + spin_us_ * 1000;
    if (spin_us_ > 0 && task.read_ahead(0)) {
      const int64_t arrived_ns = read_ahead(number, task);
      if (arrived_ns != 0) return arrived_ns;
    }
    for (int spins = 1; !all_arrived(number); ++spins) {
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
  Flag* const flags_;
  const int64_t ranks_;
  Workspace workspace_;
  std::vector<std::unique_ptr<Task>> tasks_;
  std::mutex tasks_mutex_;  // Python adds tasks while the leader runs others
  std::array<Submitted, kPlaces> queue_;
  std::atomic<uint64_t> submitted_{0}, taken_{0};
  std::atomic<uint32_t> last_{0};  // number of the last call that was submitted
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
void* zero_inference_cpu_pool_new(const int32_t* cpus, int64_t threads, int64_t spin_us, void* flags, int64_t ranks) {
  try {
    return new CpuPool(std::vector<int>(cpus, cpus + threads), spin_us, static_cast<Flag*>(flags), ranks);
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

void zero_inference_cpu_pool_submit(void* pool, const Call* call, uint32_t number) {
  static_cast<CpuPool*>(pool)->submit(*call, number);
}

void zero_inference_cpu_pool_statistics(const void* pool, Statistics* statistics) {
  *statistics = static_cast<const CpuPool*>(pool)->statistics();
}

// Flags in shared memory, for models on the CPU and between ranks (zero_inference/cpu/hand_off.py); kernels of csrc/hand_off do
// the same on a GPU stream.

// Release: earlier writes are visible to a reader of the number.
void zero_inference_raise_flag(std::atomic<uint32_t>* flag, uint32_t number) { flag->store(number, std::memory_order_release); }

// Returns 1 when the flag has reached the number (which may wrap), -1 when `stop` is raised first, 0 after `most_us`.
int32_t zero_inference_await_flag(const std::atomic<uint32_t>* flag, const std::atomic<uint32_t>* stop, uint32_t number,
                                  int64_t most_us) {
  const auto start = Clock::now();
  std::chrono::microseconds nap = kNap;
  while (static_cast<int32_t>(flag->load(std::memory_order_acquire) - number) < 0) {
    const auto waited = Clock::now() - start;
    if (stop->load(std::memory_order_acquire) != 0) {  // the flag may have been raised just before it
      return static_cast<int32_t>(flag->load(std::memory_order_acquire) - number) >= 0 ? 1 : -1;
    }
    if (waited >= std::chrono::microseconds(most_us)) return 0;
    if (waited < kSpin) {
      pause_core();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
  return 1;
}

}  // extern "C"

}  // namespace zero_inference::cpu
