// MoE routing of each token from router logits: softmax over all experts, then the normalized top k; or top k, then softmax.
// The schema is in zero_inference/models/mlp.py. PyTorch needs seven kernels, 18 us of a layer's decode step.
//
// A warp has a token, lane l experts l, l + 32, ...; sums have PyTorch's order. Experts are sorted by value, ties by id; NaN is
// the largest, as in torch.topk.

#include <tuple>

#include "../operators.cuh"

namespace zero_inference::fused {
namespace {

constexpr unsigned int kAll = 0xffffffffu;
constexpr int kMostExperts = 1024;

// Sum over the warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = __fadd_rn(value, __shfl_xor_sync(kAll, value, offset));
  return value;
}

// Order-preserving unsigned int of a float: NaN is the largest, never 0.
__device__ __forceinline__ uint32_t order_of(float value) {
  if (value != value) return ~0u;
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// Softmax of a row in a warp; lanes without an expert have -infinity.
template <int kEach>
__device__ __forceinline__ void softmax(float (&value)[kEach]) {
  float most = value[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i) most = fmaxf(most, value[i]);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, offset));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    value[i] = expf(value[i] - most);
    sum = __fadd_rn(sum, value[i]);
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kEach; ++i) value[i] = __fdiv_rn(value[i], sum);
}

// Sum over the first k lanes, in every lane. Lanes from the largest power of two up to k are added to the first ones, then
// neighbours pairwise.
__device__ __forceinline__ float sum_of_chosen(float value, int k, int lane) {
  const int width = 1 << (kWarp - 1 - __clz(k));
  const float beyond = __shfl_down_sync(kAll, value, width % kWarp);
  float sum = lane + width < k ? __fadd_rn(value, beyond) : value;
  for (int offset = 1; offset < width; offset *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, offset));
  return __shfl_sync(kAll, sum, 0);
}

template <typename T, int kEach>
__global__ void __launch_bounds__(kRoutingThreads)
    choose(const T* __restrict__ logits, int64_t tokens, int experts, int k, bool softmax_first, bool normalized,
           bool in_float32, void* __restrict__ weights, int64_t* __restrict__ numbers) {
  const int lane = threadIdx.x % kWarp;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kRoutingThreads / kWarp) + threadIdx.x / kWarp;
  if (token >= tokens) return;  // a whole warp
  const T* const row = logits + token * experts;
  float value[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane + i * kWarp;
    value[i] = expert < experts ? Element<T>::to_float(row[expert]) : -INFINITY;
  }
  if (softmax_first) softmax(value);
  uint32_t order[kEach];  // 0: no expert, or chosen already
#pragma unroll
  for (int i = 0; i < kEach; ++i) order[i] = lane + i * kWarp < experts ? order_of(value[i]) : 0;

  float mine = 0.0f;  // of lane c the c-th chosen expert
  int number = 0;
  for (int c = 0; c < k; ++c) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (order[i] > best) {
        best = order[i];
        at = i;
      }
    }
    // the larger value wins, of equal ones the lower id
    unsigned long long key =
        static_cast<unsigned long long>(best) << 32 | (kAll - static_cast<unsigned int>(lane + at * kWarp));
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const unsigned long long other = __shfl_xor_sync(kAll, key, offset);
      key = other > key ? other : key;
    }
    const int winner = static_cast<int>(kAll - static_cast<unsigned int>(key));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (winner == lane + i * kWarp) order[i] = 0;
    }
    if (lane == c) {
      mine = value_of(static_cast<uint32_t>(key >> 32));
      number = winner;
    }
  }
  if (!softmax_first) {
    const float most = __shfl_sync(kAll, mine, 0);
    mine = lane < k ? expf(mine - most) : 0.0f;
    mine = __fdiv_rn(mine, warp_sum(mine));
  } else if (normalized) {
    mine = __fdiv_rn(mine, sum_of_chosen(mine, k, lane));
  }
  if (lane >= k) return;
  const int64_t out = token * k + lane;
  numbers[out] = number;
  if (in_float32) {
    static_cast<float*>(weights)[out] = mine;
  } else {
    static_cast<T*>(weights)[out] = Element<T>::round(mine);
  }
}

// logits [tokens, experts], contiguous -> weights and int64 ids, [tokens, k].
std::tuple<Tensor, Tensor> choose_experts(const Tensor& logits, int64_t k, bool softmax_first, bool normalized,
                                          bool in_float32) {
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  STD_TORCH_CHECK(experts <= kMostExperts && k <= experts && k <= kWarp, "choose_experts: 1 to ", kWarp, " of up to ",
                  kMostExperts, " experts can be chosen; found ", k, " of ", experts);
  const TensorDevice device(logits);
  const int64_t sizes[] = {tokens, k};
  const Tensor weights = torch::stable::new_empty(logits, sizes, in_float32 ? ScalarType::Float : logits.scalar_type());
  const Tensor numbers = torch::stable::new_empty(logits, sizes, ScalarType::Long);
  if (tokens == 0) return {weights, numbers};
  with_element(logits.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = experts <= kWarp        ? choose<T, 1>
                        : experts <= 2 * kWarp  ? choose<T, 2>
                        : experts <= 4 * kWarp  ? choose<T, 4>
                        : experts <= 8 * kWarp  ? choose<T, 8>
                        : experts <= 16 * kWarp ? choose<T, 16>
                                                : choose<T, 32>;
    launch(kernel, dim3(divided_up(tokens, kRoutingThreads / kWarp)), kRoutingThreads, 0, device, read<T>(logits), tokens,
           static_cast<int>(experts), static_cast<int>(k), softmax_first, normalized, in_float32, weights.mutable_data_ptr(),
           write<int64_t>(numbers));
  });
  return {weights, numbers};
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("choose_experts", TORCH_BOX(&choose_experts)); }

}  // namespace
}  // namespace zero_inference::fused
