// zero_inference::quantize_groups: float16, bfloat16 or float32 to int8 / int4 groups.
//
// What `_quantize_in_chunks` in zero_inference/quantization/groups.py does: codes for the group's extremes, then scale and
// minimum that fit these codes in the least squares, and codes for them; the try with the smaller squared error stays. A warp
// adds in another order than PyTorch does, so that of two tries that are as good as each other the other one may stay.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../elements.cuh"
#include "../launch_sizes.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using namespace zero_inference::quantization;  // launch sizes
using zero_inference::Element;
using zero_inference::rounded;

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
  return value;
}

// A scale as it is stored. Below float16's normal numbers it is rounded up, where nearest could halve it or make it 0.
template <typename T>
__device__ __forceinline__ float stored_scale(float scale) {
  if constexpr (std::is_same_v<T, __half>) {
    if (scale < 6.103515625e-05f) scale = ceilf(scale * 16777216.0f) / 16777216.0f;  // 2^-14, 2^24
  }
  return rounded<T>(scale);
}

// A stored scale and minimum. Product and sum are rounded one after the other, as where weights are restored.
template <typename T>
struct Line {
  float scale, minimum, largest;

  __device__ __forceinline__ float code(float value) const {
    const float step = scale == 0.0f ? 1.0f : scale;
    return fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(value, minimum), step)), 0.0f), largest);
  }
  __device__ __forceinline__ float restored(float code) const { return rounded<T>(__fadd_rn(__fmul_rn(code, scale), minimum)); }
  __device__ __forceinline__ float squared_error(float value) const {  // NaN where scale or minimum is
    const float error = restored(code(value)) - value;
    return error * error;
  }
};

// A warp a group. A lane has neighbouring elements that share a byte of codes, as far as they do (`kTogether`), and reads them
// again for each of the passes: they are in the first cache then.
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    quantize_warps(const T* __restrict__ weight, uint8_t* __restrict__ codes, T* __restrict__ scale, T* __restrict__ minimum,
                   int* __restrict__ refused, int64_t groups, int64_t group_size) {
  constexpr int kTogether = 8 / kBits;
  constexpr float kLargest = (1 << kBits) - 1;
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int64_t group = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; group < groups;
       group += int64_t{gridDim.x} * kWarps) {
    const T* const values = weight + group * group_size;
    const auto for_each = [&](auto visit) {
      for (int64_t byte = lane; byte < group_size / kTogether; byte += kWarp) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) visit(Element<T>::load(values[byte * kTogether + i]));
      }
    };

    float low = INFINITY, high = -INFINITY, sum = 0.0f;
    bool finite = true;
    for_each([&](float value) {
      low = fminf(low, value);
      high = fmaxf(high, value);
      sum += value;
      finite = finite && isfinite(value);
    });
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      low = fminf(low, __shfl_xor_sync(kAllLanes, low, mask));
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, mask));
    }
    const Line<T> extremes{stored_scale<T>(__fdiv_rn(__fsub_rn(high, low), kLargest)), rounded<T>(low), kLargest};
    finite = finite && isfinite(extremes.restored(kLargest));
    if (!__all_sync(kAllLanes, finite)) {
      if (lane == 0) *refused = 1;
      continue;
    }

    float error = 0.0f, code_sum = 0.0f;
    for_each([&](float value) {
      error += extremes.squared_error(value);
      code_sum += extremes.code(value);
    });
    error = warp_sum(error);
    const float mean_code = warp_sum(code_sum) / group_size;
    const float mean_value = warp_sum(sum) / group_size;

    float covariance = 0.0f, variance = 0.0f;
    for_each([&](float value) {
      const float centered = extremes.code(value) - mean_code;
      covariance += centered * (value - mean_value);
      variance += centered * centered;
    });
    const float fitted_scale = stored_scale<T>(warp_sum(covariance) / warp_sum(variance));  // NaN where codes agree
    const Line<T> fitted{fitted_scale, rounded<T>(__fsub_rn(mean_value, __fmul_rn(fitted_scale, mean_code))), kLargest};
    float fitted_error = 0.0f;
    for_each([&](float value) { fitted_error += fitted.squared_error(value); });

    const Line<T> best = warp_sum(fitted_error) < error ? fitted : extremes;
    for (int64_t byte = lane; byte < group_size / kTogether; byte += kWarp) {
      uint32_t packed = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float value = Element<T>::load(values[byte * kTogether + i]);
        packed |= static_cast<uint32_t>(best.code(value)) << (kBits * i);
      }
      codes[group * (group_size / kTogether) + byte] = static_cast<uint8_t>(packed);
    }
    if (lane == 0) {
      scale[group] = Element<T>::round(best.scale);
      minimum[group] = Element<T>::round(best.minimum);
    }
  }
}

template <typename T, int kBits>
void launch(const Tensor& weight, int64_t group_size, const Tensor& codes, const Tensor& scale, const Tensor& minimum,
            const Tensor& refused) {
  const int32_t device = weight.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  int processors = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t groups = weight.numel() / group_size;
  const int64_t wanted = (groups + kThreads / kWarp - 1) / (kThreads / kWarp);
  const auto grid = static_cast<unsigned int>(std::min<int64_t>(wanted, int64_t{processors} * kBlocksOfProcessor));
  quantize_warps<T, kBits><<<grid, kThreads, 0, static_cast<cudaStream_t>(current)>>>(
      static_cast<const T*>(weight.const_data_ptr()), static_cast<uint8_t*>(codes.mutable_data_ptr()),
      static_cast<T*>(scale.mutable_data_ptr()), static_cast<T*>(minimum.mutable_data_ptr()),
      static_cast<int*>(refused.mutable_data_ptr()), groups, group_size);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, int64_t numel, const Tensor& weight) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == weight.get_device_index(), "quantize_groups: ", name,
                  " must be on CUDA device ", weight.get_device_index(), " like weight");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous(), "quantize_groups: ", name,
                  " must be ", torch::headeronly::toString(dtype), ", contiguous, of ", numel, " elements, found ",
                  torch::headeronly::toString(tensor.scalar_type()), " of ", tensor.numel());
}

// `refused`, one int, becomes 1 where a group holds NaN, an infinity, or a range that its dtype cannot hold; codes, scale and
// minimum of that group are left as they were.
void quantize_groups(const Tensor& weight, int64_t bits, int64_t group_size, const Tensor& codes, const Tensor& scale,
                     const Tensor& minimum, const Tensor& refused) {
  const ScalarType dtype = weight.scalar_type();
  const int64_t numel = weight.numel();
  STD_TORCH_CHECK(bits == 8 || bits == 4, "quantize_groups: bits must be 8 or 4, found ", bits);
  STD_TORCH_CHECK(group_size > 0 && (bits == 8 || group_size % 2 == 0),
                  "quantize_groups: group_size must be positive, and even ", "for 4 bits, found ", group_size, " for ", bits,
                  " bits");
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
                  "quantize_groups: weight must be Half, BFloat16 or Float, found ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(numel % group_size == 0, "quantize_groups: weight must hold whole groups of ", group_size, ", found ", numel,
                  " elements");
  check_tensor("weight", weight, dtype, numel, weight);
  check_tensor("codes", codes, ScalarType::Byte, numel * bits / 8, weight);
  check_tensor("scale", scale, dtype, numel / group_size, weight);
  check_tensor("minimum", minimum, dtype, numel / group_size, weight);
  check_tensor("refused", refused, ScalarType::Int, 1, weight);
  if (numel == 0) return;

  const auto by_bits = [&](auto zero) {
    using T = decltype(zero);
    bits == 8 ? launch<T, 8>(weight, group_size, codes, scale, minimum, refused)
              : launch<T, 4>(weight, group_size, codes, scale, minimum, refused);
  };
  if (dtype == ScalarType::Half) {
    by_bits(__half{});
  } else if (dtype == ScalarType::BFloat16) {
    by_bits(__nv_bfloat16{});
  } else {
    by_bits(float{});
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def(
      "quantize_groups(Tensor weight, int bits, int group_size, Tensor(a!) codes, Tensor(b!) scale, Tensor(c!) minimum, "
      "Tensor(d!) refused) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("quantize_groups", TORCH_BOX(&quantize_groups)); }
