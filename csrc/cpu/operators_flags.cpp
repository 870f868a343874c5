// Flags in shared memory, for models on the CPU and between ranks (zero_inference/cpu/hand_off.py); kernels of csrc/hand_off do
// the same on a GPU stream.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);  // a core for longer than that could be what another rank waits for
constexpr auto kFirstNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::microseconds(1000);

}  // namespace

extern "C" {

// Release: earlier writes are visible to a reader of the number.
void zero_inference_raise_flag(std::atomic<uint32_t>* flag, uint32_t number) { flag->store(number, std::memory_order_release); }

// Returns 1 when the flag has reached the number (which may wrap), -1 when `stop` is raised first, 0 after `most_us`.
int32_t zero_inference_await_flag(const std::atomic<uint32_t>* flag, const std::atomic<uint32_t>* stop, uint32_t number,
                                  int64_t most_us) {
  const auto start = Clock::now();
  auto nap = kFirstNap;
  while (static_cast<int32_t>(flag->load(std::memory_order_acquire) - number) < 0) {
    const auto waited = Clock::now() - start;
    if (stop->load(std::memory_order_acquire) != 0) {  // the flag may have been raised just before it
      return static_cast<int32_t>(flag->load(std::memory_order_acquire) - number) >= 0 ? 1 : -1;
    }
    if (waited >= std::chrono::microseconds(most_us)) return 0;
    if (waited < kSpin) {
      zero_inference::cpu::pause_core();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
  return 1;
}

}  // extern "C"
