// Accesses to memory 16 bytes at a time, vectors of elements, and sums over the threads that share a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../elements.cuh"
#include "../launch_sizes.cuh"

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

// kVec neighbouring elements: one 16-byte access, or a single element where rows are not aligned.
template <typename T, int kVec>
struct Chunk {
  static_assert(kVec == 1 || kVec == kVector<T>);
  float value[kVec];

  __device__ __forceinline__ void from(const uint4& packed) {
    constexpr int kInWord = kVec / 4;
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) Element<T>::unpack(words[i], value + i * kInWord);
  }

  __device__ __forceinline__ uint4 packed() const {
    constexpr int kInWord = kVec / 4;
    return make_uint4(Element<T>::pack(value), Element<T>::pack(value + kInWord), Element<T>::pack(value + 2 * kInWord),
                      Element<T>::pack(value + 3 * kInWord));
  }

  __device__ __forceinline__ void load(const T* from_memory) {
    if constexpr (kVec == 1) {
      value[0] = Element<T>::load(*from_memory);
    } else {
      from(*reinterpret_cast<const uint4*>(from_memory));
    }
  }

  __device__ __forceinline__ void store(T* to_memory) const {
    if constexpr (kVec == 1) {
      *to_memory = Element<T>::round(value[0]);
    } else {
      store_vector(to_memory, packed());
    }
  }

  __device__ __forceinline__ void round_to_element() {
#pragma unroll
    for (int i = 0; i < kVec; ++i) value[i] = rounded<T>(value[i]);
  }
};

// Floats that row_sum needs in shared memory for kCount sums: two halves that take turns, so that one barrier a sum is enough.
template <int kThreads, int kCount>
constexpr int kSumScratch = kThreads > kWarp ? 2 * kCount * (kThreads / kWarp) : 0;

__host__ __device__ constexpr int power_of_two_from(int count) {
  return count <= 1 ? 1 : 2 * power_of_two_from((count + 1) / 2);
}

// Lanes that hold the same one of kCount sums after gather_sums.
template <int kCount>
constexpr int kLanesOfSum = kWarp / power_of_two_from(kCount);

// Sums of kCount values over a warp; lane L gets the total of value L / kLanesOfSum<kCount>. Each exchange halves the number of
// values that a lane still carries: 7 sums take 9 shuffles instead of the 35 of as many butterflies, and shuffles issue at a
// quarter of the rate of arithmetic.
template <int kCount>
__device__ __forceinline__ float gather_sums(const float (&value)[kCount]) {
  constexpr int kPadded = power_of_two_from(kCount);
  float carried[kPadded];
#pragma unroll
  for (int i = 0; i < kPadded; ++i) carried[i] = i < kCount ? value[i < kCount ? i : 0] : 0.0f;
  const int lane = threadIdx.x % kWarp;
  int mask = kWarp / 2;
#pragma unroll
  for (int width = kPadded; width > 1; width /= 2, mask /= 2) {
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      const float sent = upper ? carried[i] : carried[i + width / 2];
      const float kept = upper ? carried[i + width / 2] : carried[i];
      carried[i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
    }
  }
#pragma unroll
  for (int rest = kLanesOfSum<kCount> / 2; rest > 0; rest /= 2) carried[0] += __shfl_xor_sync(0xffffffffu, carried[0], rest);
  return carried[0];
}

// Sums of kCount values over the kThreads threads of a row, in every one of them and with the same bits: all read the same
// totals, added in the same order. `turn` alternates between 0 and 1 from call to call; where the row has more than a warp, all
// threads of the block call this together.
template <int kThreads, int kCount>
__device__ __forceinline__ void row_sum(float (&value)[kCount], float* scratch, int& turn) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kLanes = kLanesOfSum<kCount>;
  float sum = gather_sums(value);
  if constexpr (kWarps > 1) {
    float* half = scratch + turn * (kSumScratch<kThreads, kCount> / 2);
    turn ^= 1;
    const int lane = threadIdx.x % kWarp;
    const int which = lane / kLanes;
    if (lane % kLanes == 0 && which < kCount) half[which * kWarps + threadIdx.x / kWarp] = sum;
    __syncthreads();
    constexpr int kReaders = kLanes < power_of_two_from(kWarps) ? kLanes : power_of_two_from(kWarps);
    sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kWarps; first += kReaders) {
      const int warp = first + lane % kReaders;
      if (which < kCount && warp < kWarps) sum += half[which * kWarps + warp];
    }
#pragma unroll
    for (int rest = kReaders / 2; rest > 0; rest /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, rest);
  }
  if constexpr (kCount == 1) {
    value[0] = sum;  // every lane has it
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = __shfl_sync(0xffffffffu, sum, i * kLanes);
  }
}

}  // namespace zero_inference::norms
