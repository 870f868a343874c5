// float <-> element, and whole words of elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace zero_inference {

template <typename T>
struct Element;

template <>
struct Element<float> {
  static __device__ __forceinline__ float load(float value) { return value; }
  static __device__ __forceinline__ float round(float value) { return value; }
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
  static __device__ __forceinline__ uint32_t pack(const float* values) { return __float_as_uint(values[0]); }
};

template <>
struct Element<__half> {
  static __device__ __forceinline__ float load(__half value) { return __half2float(value); }
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
  static __device__ __forceinline__ float load(__nv_bfloat16 value) { return __bfloat162float(value); }
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
  return Element<T>::load(Element<T>::round(value));
}

}  // namespace zero_inference
