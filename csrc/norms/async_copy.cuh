// Shared memory and the copies into it that a thread need not wait for (sm_80 on).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zero_inference::norms {

__device__ __forceinline__ uint4* dynamic_shared() {
  extern __shared__ uint4 shared_memory[];
  return shared_memory;
}

// 16 bytes, past the L1 cache: every byte is used once.
__device__ __forceinline__ void copy_async(uint4* to_shared, const void* from_global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from_global) : "memory");
}

// The same with a policy of the L2 cache (device.cuh).
__device__ __forceinline__ void copy_async(uint4* to_shared, const void* from_global, uint64_t policy) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the newest kNewest committed groups of this thread are there.
template <int kNewest>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace zero_inference::norms
