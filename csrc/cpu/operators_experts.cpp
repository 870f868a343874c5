// The C interface of `Experts`, for zero_inference/cpu/pool.py; calls are those of operators_cores.cpp.

#include "cores.h"
#include "experts.h"

using namespace zero_inference::cpu;

extern "C" int64_t zero_inference_cores_add_experts(void* cores, const Expert* experts, int64_t count, const Between* between,
                                                    int32_t dtype, int32_t instructions, int64_t* use) {
  return static_cast<Cores*>(cores)->add(std::make_unique<Experts>(std::vector<Expert>(experts, experts + count), *between,
                                                                   static_cast<Dtype>(dtype),
                                                                   static_cast<Instructions>(instructions), use));
}
