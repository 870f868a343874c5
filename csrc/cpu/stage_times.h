// Times of each thread and stage of a block, with -DZERO_INFERENCE_STAGE_TIMES (benchmarks/cores_blocks.py --stages); else
// empty.

#pragma once

#include <chrono>
#include <cstdint>

namespace zero_inference::cpu {

constexpr int kTimedThreads = 64, kTimedStages = 2, kTimedParts = 5;

// In order of execution.
enum class Timed : int32_t { input = 0, wait_for_input = 1, own_rows = 2, shared_rows = 3, wait_for_rows = 4 };

#if defined(ZERO_INFERENCE_STAGE_TIMES)

// Nanoseconds over all calls; each thread writes its own row.
inline int64_t stage_times[kTimedThreads][kTimedStages][kTimedParts];

class StageWatch {
 public:
  StageWatch(int thread, int stage) : thread_(thread), stage_(stage), since_(Clock::now()) {}

  void ends(Timed part) {
    const Clock::time_point now = Clock::now();
    if (thread_ < kTimedThreads && stage_ < kTimedStages) {
      stage_times[thread_][stage_][static_cast<int>(part)] +=
          std::chrono::duration_cast<std::chrono::nanoseconds>(now - since_).count();
    }
    since_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const int thread_, stage_;
  Clock::time_point since_;
};

#else

class StageWatch {
 public:
  StageWatch(int, int) {}
  void ends(Timed) {}
};

#endif

}  // namespace zero_inference::cpu
