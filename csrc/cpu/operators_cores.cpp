// The C interface of `Cores`, for zero_inference/cpu/pool.py. A call that cannot take memory returns -1, all others 0 or
// what they say.

#include <cstring>
#include <exception>
#include <new>

#include "block.h"
#include "cores.h"

using namespace zero_inference::cpu;

extern "C" {

// Null where the system allows no such number of threads, or has no memory for them.
void* zero_inference_cores_new(const int32_t* cpus, int64_t threads, int64_t spin_us, void* flags, int64_t ranks) {
  try {
    return new Cores(std::vector<int>(cpus, cpus + threads), spin_us, static_cast<Flag*>(flags), ranks);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void zero_inference_cores_delete(void* cores) { delete static_cast<Cores*>(cores); }

int64_t zero_inference_cores_add_block(void* cores, const Stage* stages, int64_t count, int32_t dtype, int32_t instructions) {
  return static_cast<Cores*>(cores)->add(std::make_unique<Block>(
      std::vector<Stage>(stages, stages + count), static_cast<Dtype>(dtype), static_cast<Instructions>(instructions)));
}

int zero_inference_cores_reserve(void* cores, const Call* call) {
  try {
    static_cast<Cores*>(cores)->reserve(*call);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

int zero_inference_cores_run(void* cores, const Call* call) {
  try {
    static_cast<Cores*>(cores)->run(*call);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

void zero_inference_cores_submit(void* cores, const Call* call, uint32_t number) {
  static_cast<Cores*>(cores)->submit(*call, number);
}

void zero_inference_cores_statistics(const void* cores, Statistics* statistics) {
  *statistics = static_cast<const Cores*>(cores)->statistics();
}

#if defined(ZERO_INFERENCE_STAGE_TIMES)
// Copies all of `stage_times` [threads][stages][parts] and begins with zeros again. Between calls.
void zero_inference_take_stage_times(int64_t* out) {
  std::memcpy(out, stage_times, sizeof(stage_times));
  std::memset(stage_times, 0, sizeof(stage_times));
}
#endif

}  // extern "C"
