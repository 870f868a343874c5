// float <-> element, vectors of elements, and asynchronous copies to shared memory (sm_80 on).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace zero_inference {

constexpr int kWarp = 32;
template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte access

template <typename T>
struct Element;

template <>
struct Element<float> {
  static __device__ __forceinline__ float to_float(float value) { return value; }
  static __device__ __forceinline__ float round(float value) { return value; }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
  static __device__ __forceinline__ uint32_t pack(const float* values) { return __float_as_uint(values[0]); }
};

template <>
struct Element<__half> {
  static __device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
  static __device__ __forceinline__ __half round(float value) { return __float2half_rn(value); }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const __half2 pair = __floats2half2_rn(values[0], values[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Element<__nv_bfloat16> {
  static __device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __device__ __forceinline__ __nv_bfloat16 round(float value) { return __float2bfloat16_rn(value); }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {  // a bfloat16 is the upper half of a float
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return Element<T>::to_float(Element<T>::round(value));
}

// kVec neighbouring elements: one 16-byte access, or a single element where rows are not aligned.
template <typename T, int kVec>
struct Chunk {
  static_assert(kVec == 1 || kVec == kVector<T>);
  using Packed = std::conditional_t<kVec == 1, T, uint4>;
  float value[kVec];

  __device__ __forceinline__ void from(const Packed& packed) {
    if constexpr (kVec == 1) {
      value[0] = Element<T>::to_float(packed);
    } else {
      const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) Element<T>::unpack(words[i], value + i * (kVec / 4));
    }
  }
  __device__ __forceinline__ Packed packed() const {
    if constexpr (kVec == 1) {
      return Element<T>::round(value[0]);
    } else {
      return make_uint4(Element<T>::pack(value), Element<T>::pack(value + kVec / 4), Element<T>::pack(value + kVec / 2),
                        Element<T>::pack(value + 3 * kVec / 4));
    }
  }
  __device__ __forceinline__ void load(const T* memory) { from(*reinterpret_cast<const Packed*>(memory)); }
  __device__ __forceinline__ void store(T* memory) const { *reinterpret_cast<Packed*>(memory) = packed(); }
};

// Copies vectors `begin`, `begin` + `stride` ..., kUnroll reads by `load` in flight.
template <int kUnroll, typename Vector, typename Load>
__device__ __forceinline__ void copy_vectors(const Vector* source, Vector* __restrict__ target, int64_t vectors, int64_t begin,
                                             int64_t stride, Load load) {
  for (int64_t first = begin; first < vectors; first += stride * kUnroll) {
    Vector values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) values[i] = load(source + first + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) target[first + i * stride] = values[i];
    }
  }
}

__device__ __forceinline__ uint4* dynamic_shared() {
  extern __shared__ uint4 shared_memory[];
  return shared_memory;
}

// 16 bytes, past the L1 cache: every byte is used once.
__device__ __forceinline__ void copy_async(uint4* to_shared, const void* from_global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from_global) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's committed groups of copies, but not for the newest kNewest.
template <int kNewest>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace zero_inference
