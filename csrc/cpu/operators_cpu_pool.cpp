// C interface of `CpuPool` for zero_inference/cpu/pool.py. -1: out of memory.

#include <cstring>
#include <exception>
#include <new>

#include "block.h"
#include "cpu_pool.h"
#include "experts.h"

using namespace zero_inference::cpu;

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

#if defined(ZERO_INFERENCE_STAGE_TIMES)
// Copies `stage_times` [threads][stages][parts] and clears it; between calls.
void zero_inference_take_stage_times(int64_t* out) {
  std::memcpy(out, stage_times, sizeof(stage_times));
  std::memset(stage_times, 0, sizeof(stage_times));
}
#endif

}  // extern "C"
