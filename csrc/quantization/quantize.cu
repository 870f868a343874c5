// zero_inference::quantize_groups: float16, bfloat16 or float32 to int8 / int4 groups.
//
// Same algorithm as `_quantize_in_chunks` in zero_inference/kernels/quantization.py. Sums have another order than PyTorch's, so
// of equally good candidates another may be chosen.

#include "../operators.cuh"

namespace zero_inference::quantization {
namespace {

constexpr int kElementsOfLane = 8;  // of a group, at most; more lanes where it is longer
constexpr unsigned int kAllLanes = 0xffffffffu;

// 8, 16 or 32 neighbouring lanes that share a group.
template <int kLanes>
struct Team {
  const unsigned int lanes = (kAllLanes >> (kWarp - kLanes)) << (threadIdx.x % kWarp / kLanes * kLanes);

  template <typename Combine>
  __device__ __forceinline__ float all(float value, Combine combine) const {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(lanes, value, mask));
    return value;
  }
  __device__ __forceinline__ float sum(float value) const {
    return all(value, [](float a, float b) { return a + b; });
  }
};

// Clipped shares of a group's range, and refits of the best; reasons in zero_inference/kernels/quantization.py.
__device__ constexpr float kClipped[] = {0.0f, 0.03f, 0.06f};
constexpr int kRefits = 2;
// Neighbouring codes that are tried where quotients are rounded.
constexpr int kNeighbours4 = 1, kNeighbours8 = 2;

template <typename T>
constexpr float kMost = std::is_same_v<T, __half>  ? 65504.0f
                        : std::is_same_v<T, float> ? 3.4028234663852886e38f
                                                   : 3.3895313892515355e38f;

// Finite unless the range is 0.
template <typename T>
__device__ __forceinline__ float finite_factor(float factor, float range) {
  return range > 0.0f && isinf(factor) ? kMost<T> : factor;
}

// The stored scale. Below float16's normal numbers it is rounded up: nearest could halve it or make it 0.
template <typename T>
__device__ __forceinline__ float stored_scale(float step, bool divides) {
  if (divides) return finite_factor<T>(rounded<T>(__fdiv_rn(1.0f, step)), step);
  if constexpr (std::is_same_v<T, __half>) {
    if (step < 6.103515625e-05f) step = ceilf(step * 16777216.0f) / 16777216.0f;  // 2^-14, 2^24
  }
  return rounded<T>(step);
}

__device__ __forceinline__ float nearest_code(float value, float largest) {
  return fminf(fmaxf(rintf(value), 0.0f), largest);  // NaN becomes 0: a constant group of an infinite scale
}

// A stored scale and minimum. Product and sum are rounded separately, as in dequantizing; `divides`: quotient and sum are
// rounded to T, as in DeepSpeed.
template <typename T>
struct Line {
  float scale, minimum, largest;
  bool divides;

  __device__ __forceinline__ float code(float value) const {
    const float shifted = __fsub_rn(value, minimum);
    return nearest_code(divides ? __fmul_rn(shifted, scale) : __fdiv_rn(shifted, scale == 0.0f ? 1.0f : scale), largest);
  }
  __device__ __forceinline__ float restored(float code) const {
    const float product = divides ? rounded<T>(__fdiv_rn(code, scale)) : __fmul_rn(code, scale);
    return rounded<T>(__fadd_rn(product, minimum));
  }
  // `code` and its squared error (NaN where scale or minimum is). Tries neighbours, because a rounded quotient may make one
  // nearer.
  __device__ __forceinline__ float best_code(float value, float& error) const {
    float found = code(value), difference = restored(found) - value;
    error = difference * difference;
    const int neighbours = !divides ? 0 : largest > 15.0f ? kNeighbours8 : kNeighbours4;
    for (int i = 0; i < neighbours; ++i) {
      const float other = fminf(fmaxf(found + (difference < 0.0f ? 1.0f : -1.0f), 0.0f), largest);
      difference = restored(other) - value;
      if (difference * difference < error) {
        found = other;
        error = difference * difference;
      }
    }
    return found;
  }
};

// Sums over a group's codes, and their least-squares step and mean.
struct Fit {
  float codes = 0.0f, squares = 0.0f, products = 0.0f;
  float step = 0.0f, mean_code = 0.0f;
  float gain = 0.0f;  // decrease of the sum of squares; 0 for equal codes

  __device__ __forceinline__ void add(float code, float centered) {
    codes += code;
    squares += code * code;
    products += code * centered;
  }
  template <int kLanes>
  __device__ __forceinline__ void finish(int64_t size, const Team<kLanes>& team) {  // by all of its lanes
    codes = team.sum(codes);
    squares = team.sum(squares);
    products = team.sum(products);
    mean_code = codes / size;
    const float variance = __fsub_rn(squares, __fmul_rn(codes, mean_code));
    step = products / variance;
    gain = variance > 0.0f ? products * step : 0.0f;
  }
  template <typename T>
  __device__ __forceinline__ Line<T> stored(float mean, float largest, bool divides) const {
    const float scale = stored_scale<T>(step, divides);
    const float offset = divides ? __fdiv_rn(mean_code, scale) : __fmul_rn(mean_code, scale);
    return {scale, rounded<T>(__fsub_rn(mean, offset)), largest, divides};
  }
};

// Few lanes per group with several elements each, because each pass ends in sums over the lanes. Elements that share a byte of
// codes are in one lane (`kTogether`); passes read them again from L1.
template <typename T, int kBits, int kLanes>
__global__ void __launch_bounds__(kThreads)
    quantize_teams(const T* __restrict__ weight, uint8_t* __restrict__ codes, T* __restrict__ scale, T* __restrict__ minimum,
                   int* __restrict__ refused, int64_t groups, int64_t group_size, bool divides) {
  constexpr int kTogether = 8 / kBits;
  constexpr float kLargest = (1 << kBits) - 1;
  constexpr int kTeams = kThreads / kLanes;
  const Team<kLanes> team;
  const int lane = threadIdx.x % kLanes;
  for (int64_t group = int64_t{blockIdx.x} * kTeams + threadIdx.x / kLanes; group < groups;
       group += int64_t{gridDim.x} * kTeams) {
    const T* const values = weight + group * group_size;
    const auto for_each = [&](auto visit) {
      for (int64_t byte = lane; byte < group_size / kTogether; byte += kLanes) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) visit(Element<T>::to_float(values[byte * kTogether + i]));
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
    low = team.all(low, [](float a, float b) { return fminf(a, b); });
    high = team.all(high, [](float a, float b) { return fmaxf(a, b); });
    const float mean = team.sum(sum) / group_size;
    const float range = __fsub_rn(high, low);
    Line<T> best{stored_scale<T>(__fdiv_rn(range, kLargest), divides), rounded<T>(low), kLargest, divides};
    if (divides) {  // DeepSpeed's own, computed in the stored dtype
      const float factor = rounded<T>(__fmul_rn(rounded<T>(__fdiv_rn(1.0f, rounded<T>(range))), kLargest));
      best.scale = finite_factor<T>(factor, range);
    }
    finite = finite && isfinite(divides ? rounded<T>(range) : best.restored(kLargest));
    if (!__all_sync(team.lanes, finite)) {
      if (lane == 0) *refused = 1;
      continue;
    }

    float error = 0.0f;
    Fit fit;
    for_each([&](float value) {
      float of_value;
      fit.add(best.best_code(value, of_value), value - mean);
      error += of_value;
    });
    error = team.sum(error);
    fit.finish(group_size, team);
    const auto try_line = [&](const Line<T>& line) {
      float found = 0.0f;
      for_each([&](float value) {
        const float difference = line.restored(line.code(value)) - value;
        found += difference * difference;
      });
      found = team.sum(found);
      if (found < error) {  // false for NaN
        best = line;
        error = found;
      }
    };
    try_line(fit.stored<T>(mean, kLargest, divides));

    if constexpr (kBits == 4) {
      const auto fit_to = [&](float inverse, float shift) {  // the fit to the codes that inverse * centered + shift rounds to
        Fit found;
        for_each([&](float value) {
          const float centered = value - mean;
          found.add(nearest_code(centered * inverse + shift, kLargest), centered);
        });
        found.finish(group_size, team);
        if (found.gain > fit.gain) fit = found;
      };
      for (const float below : kClipped) {
        for (const float above : kClipped) {
          if (below == 0.0f && above == 0.0f) continue;
          const float inverse = kLargest / (range * (1.0f - below - above));
          fit_to(inverse, (mean - low - range * below) * inverse);
        }
      }
      for (int i = 0; i < kRefits; ++i) fit_to(1.0f / fit.step, fit.mean_code);
      try_line(fit.stored<T>(mean, kLargest, divides));
    }

    for (int64_t byte = lane; byte < group_size / kTogether; byte += kLanes) {
      uint32_t packed = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float value = Element<T>::to_float(values[byte * kTogether + i]);
        float of_value;
        packed |= static_cast<uint32_t>(best.best_code(value, of_value)) << (kBits * i);
      }
      codes[group * (group_size / kTogether) + byte] = static_cast<uint8_t>(packed);
    }
    if (lane == 0) {
      scale[group] = Element<T>::round(best.scale);
      minimum[group] = Element<T>::round(best.minimum);
    }
  }
}

// Contiguous: codes uint8, scale and minimum in the dtype of weight, one for each `group_size` of its elements. `refused`, one
// int, becomes 1 where a group holds NaN, an infinity or too large a range; results of that group are unspecified.
void quantize_groups(const Tensor& weight, int64_t bits, int64_t group_size, bool divides, const Tensor& codes,
                     const Tensor& scale, const Tensor& minimum, const Tensor& refused) {
  const int64_t groups = weight.numel() / group_size;
  if (groups == 0) return;
  const TensorDevice device(weight);
  with_element(weight.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      const int64_t blocks = std::min(divided_up(groups, kThreads / kLanes), int64_t{device.multiprocessors()} * kBlocksPerSm);
      launch(bits == 8 ? quantize_teams<T, 8, kLanes> : quantize_teams<T, 4, kLanes>, dim3(blocks), kThreads, 0, device,
             read<T>(weight), write<uint8_t>(codes), write<T>(scale), write<T>(minimum), write<int>(refused), groups,
             group_size, divides);
    };
    if (group_size <= kElementsOfLane * 8) {
      run(std::integral_constant<int, 8>{});
    } else if (group_size <= kElementsOfLane * 16) {
      run(std::integral_constant<int, 16>{});
    } else {
      run(std::integral_constant<int, 32>{});
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def(
      "quantize_groups(Tensor weight, int bits, int group_size, bool divides, Tensor(a!) codes, Tensor(b!) scale, "
      "Tensor(c!) minimum, Tensor(d!) refused) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("quantize_groups", TORCH_BOX(&quantize_groups)); }

}  // namespace
}  // namespace zero_inference::quantization
