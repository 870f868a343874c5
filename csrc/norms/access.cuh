// How rows are read from memory and written to it, 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

namespace zero_inference::norms {

__device__ __forceinline__ uint4 load_vector(const void* from) { return *reinterpret_cast<const uint4*>(from); }

__device__ __forceinline__ void store_vector(void* to, const uint4& value) { *reinterpret_cast<uint4*>(to) = value; }

}  // namespace zero_inference::norms
