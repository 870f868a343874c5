// C interface of `CpuPool` for zero_inference/cpu/pool.py (-1: out of memory), and of flags.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <new>
#include <thread>

#include "block.h"
#include "cpu_pool.h"
#include "experts.h"

using namespace zero_inference::cpu;

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);  // a core for longer than that could be what another rank waits for
constexpr auto kFirstNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::microseconds(1000);

}  // namespace

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

int64_t zero_inference_cpu_pool_add_block(void* pool, const Stage* stages, int64_t count, int32_t dtype, int32_t instructions) {
  return static_cast<CpuPool*>(pool)->add(std::make_unique<Block>(
      std::vector<Stage>(stages, stages + count), static_cast<Dtype>(dtype), static_cast<Instructions>(instructions)));
}

int64_t zero_inference_cpu_pool_add_experts(void* pool, const Expert* experts, int64_t count,
                                            const ExpertActivation* activation, int32_t dtype, int32_t instructions,
                                            int64_t* use) {
  return static_cast<CpuPool*>(pool)->add(std::make_unique<Experts>(std::vector<Expert>(experts, experts + count), *activation,
                                                                    static_cast<Dtype>(dtype),
                                                                    static_cast<Instructions>(instructions), use));
}

int zero_inference_cpu_pool_reserve(void* pool, const Call* call) {
  try {
    static_cast<CpuPool*>(pool)->reserve(*call);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

int zero_inference_cpu_pool_run(void* pool, const Call* call) {
  try {
    static_cast<CpuPool*>(pool)->run(*call);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
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
  auto nap = kFirstNap;
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
