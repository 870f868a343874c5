// Backward passes of PolyNorm (poly_norm.cuh), and the sums of its weight gradients.
#pragma once

#include "poly_norm.cuh"

namespace zero_inference::norms {

// What the elements of a row need to be turned into gradients: dx = h up(x) - down(x).
struct PolyRow {
  PolyWeights poly;
  float up0, up1, up2;        // up = up0 + x (up1 + x up2)
  float down1, down3, down5;  // down = x (down1 + x^2 (down3 + x^2 down5))
  float4 sums;                // r_p S_p in the order of the weights, and the sum of h
};

constexpr int kPolySums = 7;  // x^2, x^4, x^6, h x, h x^2, h x^3, h

__device__ __forceinline__ void add_poly_sums(float (&total)[kPolySums], float x, float h) {
  add_powers(total, x);
  total[3] += h * x;
  total[4] += h * (x * x);
  total[5] += h * (x * x * x);
  total[6] += h;
}

__device__ __forceinline__ PolyRow poly_row(const PolyWeights& weights, const float (&total)[kPolySums], float count,
                                            float eps) {
  const float inverse = 1.0f / count;
  const float scale1 = rsqrtf(total[0] * inverse + eps);
  const float scale2 = rsqrtf(total[1] * inverse + eps);
  const float scale3 = rsqrtf(total[2] * inverse + eps);
  PolyRow row;
  row.poly = scaled(weights, scale3, scale2, scale1);
  row.up0 = row.poly.line;
  row.up1 = 2.0f * row.poly.square;
  row.up2 = 3.0f * row.poly.cube;
  row.sums = make_float4(scale3 * total[5], scale2 * total[4], scale1 * total[3], total[6]);
  row.down1 = row.up0 * (scale1 * (row.sums.z * inverse));
  row.down3 = row.up1 * (scale2 * (row.sums.y * inverse));
  row.down5 = row.up2 * (scale3 * (row.sums.x * inverse));
  if (count == 1.0f) {
    row.up0 *= eps * scale1 * scale1;
    row.up1 *= eps * scale2 * scale2;
    row.up2 *= eps * scale3 * scale3;
    row.down1 = row.down3 = row.down5 = 0.0f;
  }
  return row;
}

__device__ __forceinline__ float poly_gradient(const PolyRow& row, float x, float h) {
  const float square = x * x;
  return h * (row.up0 + x * (row.up1 + x * row.up2)) - x * (row.down1 + square * (row.down3 + square * row.down5));
}

// What a thread's vector adds to the sums of its row.
template <bool kMul, typename Vector>
__device__ __forceinline__ void add_poly_vector(float (&total)[kPolySums], const Vector& x, Vector h, const Vector& mul) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(x.value) / sizeof(float)); ++i) {
    if constexpr (kMul) h.value[i] *= mul.value[i];
    add_poly_sums(total, x.value[i], h.value[i]);
  }
}

// The gradients of a vector, written at element `at`.
template <bool kMul, typename T, typename Vector>
__device__ __forceinline__ void store_poly_gradients(const Poly<T>& a, const PolyRow& stats, bool padding, Vector x,
                                                     const Vector& grad, Vector mul, int64_t at) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(x.value) / sizeof(float)); ++i) {
    const float value = x.value[i];
    const float h = kMul ? grad.value[i] * mul.value[i] : grad.value[i];
    if constexpr (kMul) mul.value[i] = padding ? 0.0f : grad.value[i] * poly_of(stats.poly, value);
    x.value[i] = padding ? 0.0f : poly_gradient(stats, value, h);
  }
  x.store(a.grad_x + at);
  if constexpr (kMul) mul.store(a.grad_mul + at);
}

template <typename S, bool kMul>
__global__ void __launch_bounds__(S::kBlock) poly_backward_rows(const Poly<typename S::Type> a) {
  using Vector = Chunk<typename S::Type, S::kVec>;
  using Held = RowOf<S, (!kMul && S::kThreads * S::kVectors > kEvictLastAbove)>;
  __shared__ float scratch[kSumScratch<S::kThreads, kPolySums> + 1];
  int turn = 0;
  const float count = static_cast<float>(a.columns);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int64_t row = S::first_row(); row < a.rows; row += S::row_stride()) {
    const int64_t start = row * a.columns;
    const Held held(a.x + start, a.columns);
    const Held upstream(a.grad + start, a.columns);
    const Held gate(kMul ? a.mul + start : nullptr, kMul ? a.columns : 0);
    const int expert = expert_of(a.offsets, a.experts, row);
    const bool padding = expert == a.experts;
    const PolyWeights weights = padding ? PolyWeights{} : weights_of(a, expert);
    float total[kPolySums] = {};
    S::for_padded(a.columns,
                  [&](int v) { add_poly_vector<kMul>(total, held.at(v), upstream.at(v), kMul ? gate.at(v) : Vector{}); });
    row_sum<S::kThreads>(total, scratch, turn);
    const PolyRow stats = poly_row(weights, total, count, a.eps);
    if (a.offsets == nullptr) {
      sums = make_float4(sums.x + stats.sums.x, sums.y + stats.sums.y, sums.z + stats.sums.z, sums.w + stats.sums.w);
    } else if (S::thread() == 0) {
      a.sums[row] = stats.sums;
    }
    S::for_each(a.columns, [&](int v) {
      store_poly_gradients<kMul>(a, stats, padding, held.at(v), upstream.at(v), kMul ? gate.at(v) : Vector{},
                                 start + S::column(v));
    });
  }
  if (a.offsets == nullptr && S::thread() == 0) a.sums[S::first_row()] = sums;
}

template <typename S, bool kMul>
__global__ void __launch_bounds__(S::kBlock) poly_backward_ring(const Poly<typename S::Type> a) {
  using T = typename S::Type;
  using Vector = Chunk<T, kVector<T>>;
  float* scratch = reinterpret_cast<float*>(dynamic_shared() + S::kRingBytes / 16);
  int turn = 0;
  RowRing<S, !kMul> ring;
  ring.sources[0] = a.x;
  ring.sources[1] = a.grad;
  if constexpr (kMul) ring.sources[2] = a.mul;
  ring.rows = a.rows;
  ring.columns = a.columns;
  ring.start(S::first_row());
  PolyWeights weights = {};
  if (a.offsets == nullptr) weights = weights_of(a, 0);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float count = static_cast<float>(a.columns);
  for (int64_t row = S::first_row(); row < a.rows; row += S::row_stride()) {
    bool padding = false;
    if (a.offsets != nullptr) {
      const int expert = expert_of(a.offsets, a.experts, row);
      padding = expert == a.experts;
      if (!padding) weights = weights_of(a, expert);
    }
    ring.wait();
    float total[kPolySums] = {};
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      Vector x, h, mul = {};
      x.from(ring.at(0, v));
      h.from(ring.at(1, v));
      if constexpr (kMul) mul.from(ring.at(2, v));
      add_poly_vector<kMul>(total, x, h, mul);
    }
    row_sum<S::kThreads>(total, scratch, turn);
    const PolyRow stats = poly_row(weights, total, count, a.eps);
    if (a.offsets == nullptr) {
      sums = make_float4(sums.x + stats.sums.x, sums.y + stats.sums.y, sums.z + stats.sums.z, sums.w + stats.sums.w);
    } else if (S::thread() == 0) {
      a.sums[row] = stats.sums;
    }
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      if (S::column(v) >= a.columns) continue;
      Vector x, grad, mul = {};
      x.from(ring.at(0, v));
      grad.from(ring.at(1, v));
      if constexpr (kMul) mul.from(ring.at(2, v));
      ring.refill(row, v);
      store_poly_gradients<kMul>(a, stats, padding, x, grad, mul, row * a.columns + S::column(v));
    }
    ring.advance();
  }
  if (a.offsets == nullptr && S::thread() == 0) a.sums[S::first_row()] = sums;
}

// One block an expert: sums[begin, end) in a fixed order, with 0 <= begin <= end <= rows whatever offsets hold.
template <typename T>
__global__ void __launch_bounds__(kSegmentThreads)
    sum_segments(const float4* sums, int64_t rows, const int32_t* offsets, T* grad_weight, T* grad_bias) {
  float* scratch = reinterpret_cast<float*>(dynamic_shared());
  int turn = 0;
  const int expert = blockIdx.x;
  const auto within = [](int64_t row, int64_t least, int64_t most) { return row < least ? least : row < most ? row : most; };
  const int64_t begin = offsets == nullptr || expert == 0 ? 0 : within(offsets[expert - 1], 0, rows);
  const int64_t end = offsets == nullptr ? rows : within(offsets[expert], begin, rows);
  float total[4] = {};
#pragma unroll 8
  for (int64_t row = begin + threadIdx.x; row < end; row += kSegmentThreads) {
    const float4 one = sums[row];
    total[0] += one.x;
    total[1] += one.y;
    total[2] += one.z;
    total[3] += one.w;
  }
  row_sum<kSegmentThreads>(total, scratch, turn);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) grad_weight[3 * expert + i] = Element<T>::round(total[i]);
    grad_bias[expert] = Element<T>::round(total[3]);
  }
}

template <typename T, bool kMul, typename Allocate>
int64_t launch_poly_backward(Poly<T>& a, const Device& device, Allocate allocate) {
  int64_t sums = 0;
  const auto run = [&](auto shape) {
    using S = decltype(shape);
    static std::atomic<int> resident[kDevices];
    const auto kernel = [] {
      if constexpr (S::kRing)
        return poly_backward_ring<S, kMul>;
      else
        return poly_backward_rows<S, kMul>;
    }();
    constexpr int kShared = S::kRing ? S::kRingBytes + kSumScratch<S::kThreads, kPolySums> * 4 : 0;
    if (kShared > device.block_shared_bytes()) return false;
    constexpr int kWaves = S::kRing ? kRingWaves : kPolyWaves;
    const int64_t most =
        S::kLoop ? loop_blocks(a.rows, device)
                 : int64_t{device.multiprocessors()} * kWaves * resident_blocks(kernel, S::kBlock, kShared, device, resident);
    const int64_t blocks = std::min(divided_up(a.rows, S::kRows), most);
    sums = a.offsets != nullptr ? a.rows : blocks * S::kRows;
    a.sums = reinterpret_cast<float4*>(allocate(4 * sums));
    launch(kernel, dim3(blocks), S::kBlock, kShared, device, a);
    return true;
  };
  const bool vectors = poly_vectors(a);
  if (vectors && with_poly_backward_shape<T, kMul>(a.columns, run)) return sums;
  vectors ? run(LoopShape<T, kVector<T>>{}) : run(LoopShape<T, 1>{});
  return sums;
}

// `allocate(count)` gives float32 device memory, 16-byte aligned, that lives until the kernels are queued.
template <typename T, typename Allocate>
void poly_backward(Poly<T> a, const Device& device, Allocate allocate) {
  int64_t sums = 0;
  if (a.rows > 0 && a.columns > 0) {
    sums = a.mul != nullptr ? launch_poly_backward<T, true>(a, device, allocate)
                            : launch_poly_backward<T, false>(a, device, allocate);
  }
  if (a.experts > 0) {
    launch(sum_segments<T>, dim3(a.experts), kSegmentThreads, kSumScratch<kSegmentThreads, 4> * 4, device, a.sums, sums,
           a.offsets, a.grad_weight, a.grad_bias);
  }
}

}  // namespace zero_inference::norms
