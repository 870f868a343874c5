// Times the norm kernels in every launch shape, for the tables in csrc/launch_sizes.cuh: which threads share a row, and how
// many 16-byte vectors each of them holds.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -I csrc/norms benchmarks/norm_shapes.cu -o norm_shapes
//   ./norm_shapes > norm_shapes_bf16.tsv
//
// A line a launch: op, columns, rows, kernel, threads, vectors, blocks a processor, waves, median, 20th and 80th percentile
// (us), and GB/s over the bytes that have to move. The L2 cache is overwritten before each launch.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "norm_forward.cuh"
#include "poly_backward.cuh"

using namespace zero_inference;
using namespace zero_inference::norms;
#ifndef ELEMENT
#define ELEMENT __nv_bfloat16
#endif
using T = ELEMENT;  // float with -DELEMENT=float

constexpr size_t kTensorBytes = (size_t{512} << 20) * (sizeof(T) / 2);
constexpr int kRepeats = 25;

__global__ void fill(uint32_t* words, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    // magnitudes from 0.5 to 1, either sign: one float or two bfloat16
    words[i] = sizeof(T) == 4 ? (x & 0x807fffffu) | 0x3f000000u : (x & 0x807f807fu) | 0x3f003f00u;
  }
}

struct Bench {
  T* tensor[5];
  T* weight;
  float* sums;
  int32_t* offsets;
  char* flush;
  cudaEvent_t start, stop;
  Device device{0, nullptr};
  int64_t rows;
  int columns;
  const char* op;
  int tensors;

  template <typename Launch>
  void time(const char* kernel, int threads, int vectors, int resident, int waves, Launch launch_it) {
    std::vector<float> us;
    for (int i = 0; i < kRepeats + 3; ++i) {
      check_cuda(cudaMemsetAsync(flush, i, 256 << 20));
      check_cuda(cudaEventRecord(start));
      launch_it();
      check_cuda(cudaEventRecord(stop));
      check_cuda(cudaEventSynchronize(stop));
      float ms = 0.0f;
      check_cuda(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 3) us.push_back(ms * 1e3f);
    }
    std::sort(us.begin(), us.end());
    const double bytes = double(tensors) * rows * columns * sizeof(T);
    std::printf("%s\t%d\t%lld\t%s\t%d\t%d\t%d\t%d\t%.2f\t%.2f\t%.2f\t%.0f\n", op, columns, static_cast<long long>(rows), kernel,
                threads, vectors, resident, waves, us[kRepeats / 2], us[kRepeats / 5], us[kRepeats * 4 / 5],
                bytes / us[kRepeats / 2] / 1e3);
    std::fflush(stdout);
  }
};

template <typename Kernel>
int blocks_of(Kernel kernel, int threads, int shared) {
  int blocks = 0;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared));
  return blocks;
}

// Calls visit with every shape that fits rows of `columns` without leaving more than half of its threads idle.
template <typename Visit>
void each_shape(int columns, Visit visit) {
  const int needed = columns / kVector<T>;
  const auto maybe = [&](auto shape) {
    using S = decltype(shape);
    const int room = S::kThreads * S::kVectors;
    if (room >= needed && 3 * needed > 2 * (room - S::kThreads) && room < 2 * needed) visit(shape);
  };
  maybe(RowShape<T, 32, 1>{});
  maybe(RowShape<T, 32, 2>{});
  maybe(RowShape<T, 32, 4>{});
  maybe(RowShape<T, 32, 5>{});
  maybe(RowShape<T, 32, 8>{});
  maybe(RowShape<T, 64, 1>{});
  maybe(RowShape<T, 64, 2>{});
  maybe(RowShape<T, 64, 3>{});
  maybe(RowShape<T, 64, 4>{});
  maybe(RowShape<T, 64, 8>{});
  maybe(RowShape<T, 128, 1>{});
  maybe(RowShape<T, 128, 2>{});
  maybe(RowShape<T, 128, 4>{});
  maybe(RowShape<T, 128, 5>{});
  maybe(RowShape<T, 128, 8>{});
  maybe(RowShape<T, 160, 1>{});
  maybe(RowShape<T, 160, 4>{});
  maybe(RowShape<T, 256, 1>{});
  maybe(RowShape<T, 256, 2>{});
  maybe(RowShape<T, 256, 3>{});
  maybe(RowShape<T, 256, 4>{});
  maybe(RowShape<T, 256, 8>{});
  maybe(RowShape<T, 512, 1>{});
  maybe(RowShape<T, 512, 2>{});
  maybe(RowShape<T, 512, 4>{});
  maybe(RowShape<T, 512, 8>{});
  maybe(RowShape<T, 1024, 1>{});
  maybe(RowShape<T, 1024, 2>{});
  maybe(RowShape<T, 1024, 4>{});
}

template <bool kLayer, bool kAdd>
void norm(Bench& b, const char* op) {
  b.op = op;
  b.tensors = kAdd ? 4 : 2;
  NormForward<T> a = {};
  a.x = b.tensor[0];
  a.residual = kAdd ? b.tensor[1] : nullptr;
  a.weight = b.weight;
  a.bias = b.weight;
  a.out = b.tensor[2];
  a.sum = kAdd ? b.tensor[3] : nullptr;
  a.rows = b.rows;
  a.columns = b.columns;
  a.eps = 1e-6f;
  each_shape(b.columns, [&](auto shape) {
    using S = decltype(shape);
    const auto kernel = norm_forward_rows<S, kLayer, kAdd>;
    b.time("held", S::kThreads, S::kVectors, blocks_of(kernel, S::kBlock, 0), 0,
           [&] { launch(kernel, dim3(divided_up(a.rows, S::kRows)), S::kBlock, 0, b.device, a); });
  });
}

template <bool kMul>
void poly(Bench& b, const char* forward, const char* backward, bool grouped) {
  Poly<T> a = {};
  a.x = b.tensor[0];
  a.grad = b.tensor[1];
  a.mul = kMul ? b.tensor[2] : nullptr;
  a.out = a.grad_x = b.tensor[3];
  a.grad_mul = b.tensor[4];
  a.weight = b.weight;
  a.bias = b.weight;
  a.offsets = grouped ? b.offsets : nullptr;
  a.experts = grouped ? 48 : 1;
  a.rows = b.rows;
  a.columns = b.columns;
  a.eps = 1e-6f;
  a.sums = reinterpret_cast<float4*>(b.sums);
  b.op = forward;
  b.tensors = kMul ? 3 : 2;
  each_shape(b.columns, [&](auto shape) {
    using S = decltype(shape);
    const auto kernel = poly_forward_rows<S, kMul>;
    b.time("held", S::kThreads, S::kVectors, blocks_of(kernel, S::kBlock, 0), 0,
           [&] { launch(kernel, dim3(divided_up(a.rows, S::kRows)), S::kBlock, 0, b.device, a); });
  });
  b.op = backward;
  b.tensors = kMul ? 5 : 3;
  each_shape(b.columns, [&](auto shape) {
    using S = decltype(shape);
    if constexpr (S::kVectors <= 5) {
      const auto kernel = poly_backward_rows<S, kMul>;
      const int resident = blocks_of(kernel, S::kBlock, 0);
      for (int waves : {1, 4, 1 << 20}) {
        const int64_t blocks =
            std::min<int64_t>(divided_up(a.rows, S::kRows), int64_t{b.device.multiprocessors()} * resident * waves);
        b.time("held", S::kThreads, S::kVectors, resident, waves,
               [&] { launch(kernel, dim3(blocks), S::kBlock, 0, b.device, a); });
      }
    }
    using Ring = RingShape<T, S::kThreads, S::kVectors, kMul ? 3 : 2>;
    if constexpr (Ring::kRingBytes <= kRingBudget && Ring::kStages > 1) {
      const auto kernel = poly_backward_ring<Ring, kMul>;
      constexpr int kShared = Ring::kRingBytes + kSumScratch<S::kThreads, kPolySums> * 4;
      const int resident = blocks_of(kernel, S::kBlock, kShared);
      const int64_t blocks = std::min<int64_t>(divided_up(a.rows, S::kRows), int64_t{b.device.multiprocessors()} * resident);
      b.time("ring", S::kThreads, S::kVectors, resident, 1,
             [&] { launch(kernel, dim3(blocks), S::kBlock, kShared, b.device, a); });
    }
  });
}

int main(int argc, char** argv) {
  Bench b = {};
  for (auto& tensor : b.tensor) {
    check_cuda(cudaMalloc(&tensor, kTensorBytes));
    fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(tensor), kTensorBytes / 4, static_cast<uint32_t>(&tensor - b.tensor));
  }
  check_cuda(cudaMalloc(&b.weight, 1 << 20));
  fill<<<64, 256>>>(reinterpret_cast<uint32_t*>(b.weight), 1 << 18, 9);
  check_cuda(cudaMalloc(&b.sums, size_t{64} << 20));
  check_cuda(cudaMalloc(&b.flush, 256 << 20));
  check_cuda(cudaMalloc(&b.offsets, 48 * 4));
  check_cuda(cudaEventCreate(&b.start));
  check_cuda(cudaEventCreate(&b.stop));
  std::printf("op\tcolumns\trows\tkernel\tthreads\tvectors\tblocks\twaves\tus\tus_p20\tus_p80\tgb_per_s\n");
  std::vector<int> columns = {256, 512, 1024, 1280, 2048, 4096, 5120, 8192, 16384};
  if (argc > 1) {
    columns.clear();
    for (int i = 1; i < argc; ++i) columns.push_back(std::atoi(argv[i]));
  }
  for (int count : columns) {
    for (int64_t rows : {int64_t{8192}, std::min<int64_t>(65536, kTensorBytes / sizeof(T) / count)}) {
      b.columns = count;
      b.rows = rows;
      std::vector<int32_t> ends(48);
      for (int expert = 0; expert < 48; ++expert) ends[expert] = static_cast<int32_t>(rows * (expert + 1) / 48);
      check_cuda(cudaMemcpy(b.offsets, ends.data(), 48 * 4, cudaMemcpyHostToDevice));
      norm<false, false>(b, "rms");
      norm<false, true>(b, "add_rms");
      norm<true, false>(b, "layer");
      norm<true, true>(b, "add_layer");
      poly<false>(b, "poly", "poly_bwd", false);
      poly<true>(b, "mul_poly", "mul_poly_bwd", false);
      if (count == 1280) poly<true>(b, "grouped", "grouped_bwd", true);
      b.op = "copy";
      b.tensors = 2;
      b.time("memcpy", 0, 0, 0, 0, [&] {
        check_cuda(cudaMemcpyAsync(b.tensor[2], b.tensor[0], size_t(rows) * count * sizeof(T), cudaMemcpyDeviceToDevice));
      });
    }
  }
  return 0;
}
