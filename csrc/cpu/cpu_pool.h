// CPU backend: tasks that are registered once and called at once or when the devices of all ranks have raised their flags.

#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "task.h"

namespace zero_inference::cpu {

// In memory shared with devices and other processes. Set to a call's number: `kDone` by the CPU when the output is written,
// `kArrived` + rank by the rank's device when its input is. `kStop` releases waiting devices.
struct alignas(64) Flag {
  std::atomic<uint32_t> number;
};
enum Flags { kDone, kStop, kArrived };

struct Statistics {
  int64_t calls;
  int64_t busy_ns;       // from the arrival of the input to the output
  int64_t late_ns;       // of the first thread: waiting for the input of a submitted call
  int64_t chosen_bytes;  // of weights that routed tasks read
};

class CpuPool {
 public:
  // `flags`: kArrived + ranks of them, or null where calls only use `run`.
  CpuPool(const std::vector<int>& cpus, int64_t spin_us, Flag* flags, int64_t ranks);
  // Waits for the running call, drops those without input.
  ~CpuPool();

  int64_t add(std::unique_ptr<Task> task);
  // Allocates for calls with up to call.count rows; throws std::bad_alloc.
  void reserve(const Call& call);
  // Runs now, the caller as thread 0; only while no submitted call is pending.
  void run(const Call& call);
  // Queues a call that runs when the inputs of all ranks have arrived. Numbers ascend. Returns at once.
  void submit(const Call& call, uint32_t number);
  Statistics statistics() const;

 private:
  struct Submitted {
    Call call;
    uint32_t number;
  };

  void lead();
  bool next(Submitted& submitted);
  Task& task_of(const Call& call);
  bool all_arrived(uint32_t number) const;
  int64_t read_ahead(uint32_t number, Task& task);
  int64_t wait_for_input(uint32_t number, Task& task);
  void execute(const Call& call, Task& task, int64_t since_ns);

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

}  // namespace zero_inference::cpu
