// How rows are read from memory and written to it, 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zero_inference::norms {

// For what is read: everything else leaves the L2 cache before it. Where rows come from memory, and not from the cache, passes
// that write as much as they read are up to 4% faster with it, and faster than a copy; why was not found. A matrix product that
// reads their results is as fast as without (benchmarks/LOG.md).
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Rows of more 16-byte vectors are read so: shorter ones gain 1%, and lose up to 10% where they are in the cache.
constexpr int kEvictLastAbove = 256;

template <bool kEvictLast>
__device__ __forceinline__ uint4 load_vector(const void* from) {
  if constexpr (!kEvictLast) return *reinterpret_cast<const uint4*>(from);
  uint4 vector;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
               : "l"(from), "l"(evict_last_policy()));
  return vector;
}

__device__ __forceinline__ void store_vector(void* to, const uint4& value) { *reinterpret_cast<uint4*>(to) = value; }

}  // namespace zero_inference::norms
