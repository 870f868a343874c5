// The host's cores as a device: tasks that are registered once, and calls of them, at once or when the devices of one rank or
// of several have brought the input.

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

// In memory that devices and other processes see too. The cores raise `done` to a call's number when the output is there.
// `stop` lets devices go on without an output. From `arrived` on each rank has a flag, which its device raises when the rank's
// input is there.
struct alignas(64) Flag {
  std::atomic<uint32_t> number;
};
enum Flags { kDone, kStop, kArrived };

struct Statistics {
  int64_t calls;
  int64_t busy_ns;       // from the arrival of the input to the output
  int64_t late_ns;       // of the first thread: waiting for the input of a call that was already asked for
  int64_t chosen_bytes;  // of weights read by tasks whose input decides which they read
};

class CpuPool {
 public:
  // `flags` is null where calls are made at once only; otherwise there are `kArrived` + `ranks`.
  CpuPool(const std::vector<int>& cpus, int64_t spin_us, Flag* flags, int64_t ranks);
  // Waits for the call under way, and forgets those whose input has not arrived.
  ~CpuPool();

  int64_t add(std::unique_ptr<Task> task);
  // Takes the memory that calls with up to so many rows need; throws std::bad_alloc.
  void reserve(const Call& call);
  // At once, with the calling thread as one of the pool's; while no call that was submitted is under way.
  void run(const Call& call);
  // When the input of all ranks has arrived, in the order of submission; `number` rises from call to call. Returns at once.
  void submit(const Call& call, uint32_t number);
  Statistics statistics() const;

 private:
  struct Submitted {
    Call call;
    uint32_t number;
  };
  class OnPool;
  class ReadingAhead;

  void lead();
  bool next(Submitted& submitted);
  Task& task_of(const Call& call);
  bool all_arrived(uint32_t number) const;
  int64_t wait_for_input(uint32_t number, Task& task);
  void execute(const Call& call, Task& task, int64_t since_ns);

  static constexpr uint64_t kPlaces =
      4096;  // more than a pass of any model has calls, so that Python is never held up for long

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
