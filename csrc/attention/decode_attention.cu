// zero_inference::decode_attention: attention of the few queries of a decode step over all keys.
//
//   out[b, q, h] = sum_k p[k] * value[b, h / group, k]
//   p = softmax_k(scale * query[b, h, q] . key[b, h / group, k] + mask[b, h, q, k])
//
// `sinks` [heads], if there are any, are one more logit of each softmax, without a value; it joins where a row is written.
//
// A block has 8 or 16 rows: queries of heads that share a key head, so keys and values are read once for all. The warps of a
// block and of its cluster share steps of 8 or 16 keys, each with an online softmax; a step that the mask hides from all rows
// (the unfilled end of a static cache, positions before a sliding window) is skipped. Results of warps, then of blocks, are
// added in a fixed order: the same bits in every run. Sums are float32. p is rounded to float16 or bfloat16 inputs' dtype;
// float32 is multiplied as three tf32 products. Rows without a visible key are zeros.

#include <cooperative_groups.h>

#include <cfloat>
#include <optional>

#include "../operators.cuh"
#include "../quantization/product.cuh"

namespace zero_inference::attention {
namespace {

using quantization::Pair;

constexpr int kTile = 8;    // rows, keys or columns of a tensor core's product
constexpr int kShares = 4;  // lanes that have parts of one row
constexpr float kMasked = -INFINITY;
constexpr float kLog2E = 1.44269504088896340736f;

enum class Mask : int { kBoolean, kAdded };

// Strides in elements: [sequence, head, position].
struct Strides {
  int64_t sequence, head, position;
};

struct Task {
  const void *query, *key, *value, *mask;
  const void* sinks;  // [heads], in the dtype of the query; null: none
  void* out;
  Strides query_strides, key_strides, value_strides, mask_strides;  // the mask's position is that of a query
  Mask mask_kind;
  int positions, queries, heads, group;  // group: heads that share a key head
  int key_width, value_width;
  int row_blocks;  // blocks that divide the group * queries rows of a key head
  int splits;      // blocks that divide the keys, one cluster
  float scale;     // times log2(e)
  float masking;   // values of the mask up to this one hide a key
};

// Tensor-core layout: lane L has rows L / 4 and L / 4 + 8 of `a` and of the sums, column L / 4 of `b`, and columns 2 (L % 4)
// and the next of the sums. Summed columns may be permuted if `a` and `b` agree.
template <typename T>
struct Product {
  static constexpr int kKeyTiles = 2;  // of keys, in a product with values
  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Pair<T>::multiply(sum, a, b0, b1);
  }
  // p [tile][row L / 4 or + 8][key] -> operand `a`; p is rounded to it.
  static __device__ __forceinline__ void pack(float (&p)[kKeyTiles][2][2], uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Element<T>::pack(p[i / 2][i % 2]);
      Element<T>::unpack(a[i], p[i / 2][i % 2]);
    }
  }
  // Column `index` of four keys' vectors, [tile][key] -> operand `b`.
  static __device__ __forceinline__ uint2 column(const uint32_t (&words)[kKeyTiles][2][4], int index) {
    const int selected = index % 2 == 0 ? 0x5410 : 0x7632;
    return make_uint2(__byte_perm(words[0][0][index / 2], words[0][1][index / 2], selected),
                      __byte_perm(words[1][0][index / 2], words[1][1][index / 2], selected));
  }
};

template <>
struct Product<float> {
  static constexpr int kKeyTiles = 1;
  static __device__ __forceinline__ void split(uint32_t value, uint32_t& upper, uint32_t& lower) {
    upper = (value + 0x1000u) & 0xffffe000u;
    lower = __float_as_uint(__uint_as_float(value) - __uint_as_float(upper));
  }
  static __device__ __forceinline__ void multiply_upper(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t upper[4], lower[4], upper0, lower0, upper1, lower1;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(a[i], upper[i], lower[i]);
    split(b0, upper0, lower0);
    split(b1, upper1, lower1);
    multiply_upper(sum, lower, upper0, upper1);
    multiply_upper(sum, upper, lower0, lower1);
    multiply_upper(sum, upper, upper0, upper1);
  }
  static __device__ __forceinline__ void pack(float (&p)[kKeyTiles][2][2], uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(p[0][i % 2][i / 2]);
  }
  static __device__ __forceinline__ uint2 column(const uint32_t (&words)[kKeyTiles][2][4], int index) {
    return make_uint2(words[0][0][index], words[0][1][index]);
  }
};

// Sizes of a block with kHalves * 8 rows and head dimensions up to kWidth.
template <typename T, int kWidth, int kHalves>
struct Shape {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements
  static constexpr int kKeyVectors = kWidth / (kShares * kVector);  // of a row of queries or keys, a lane
  static constexpr int kValueVectors = kWidth / (kTile * kVector);  // of a row of values, a lane
  static constexpr int kRows = kHalves * kTile;
  static constexpr int kStep = Product<T>::kKeyTiles * kTile;  // keys
  // Vectors of keys, and of keys and values, per lane and step.
  static constexpr int kKeyCopies = Product<T>::kKeyTiles * kKeyVectors;
  static constexpr int kCopies = kKeyCopies + Product<T>::kKeyTiles * 2 * kValueVectors;
  // Shared memory: queries; keys and values of two steps of each warp, later its sums; maximum and total of each row and warp,
  // then of the block.
  static constexpr int kQueries = kKeyVectors * kHalves * kWarp;
  static constexpr int kRing = 2 * kCopies * kWarp;
  static constexpr int kSums = kHalves * (kWidth / 16) * kWarp;
  static_assert(kSums <= kRing);
  static constexpr int shared_bytes(int warps) { return (kQueries + warps * kRing) * 16 + 2 * (warps + 1) * kRows * 4; }
};

__device__ __forceinline__ float larger(float one, float other) { return one > other ? one : other; }

// The maximum that exponents subtract; finite without visible keys.
__device__ __forceinline__ float finite(float maximum) { return maximum == kMasked ? 0.0f : maximum; }

// Key index of a lane in a step, in the layout of the scores.
template <typename T>
__device__ __forceinline__ int key_of(int step, int i) {
  return step * Product<T>::kKeyTiles * kTile + i / 2 * kTile + 2 * (threadIdx.x % kShares) + i % 2;
}

// Mask words for rows [half] and keys [tile][0, 1] of a lane; after the last key they repeat.
template <typename T, int kHalves>
__device__ __forceinline__ void load_mask(const Task& task, const int64_t (&rows)[kHalves], int step,
                                          uint32_t (&mask)[kHalves][Product<T>::kKeyTiles * 2]) {
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < Product<T>::kKeyTiles * 2; ++i) {
      const int64_t at = rows[half] + min(key_of<T>(step, i), task.positions - 1);
      mask[half][i] = task.mask_kind == Mask::kAdded ? static_cast<uint32_t>(static_cast<const Word*>(task.mask)[at])
                                                     : static_cast<uint32_t>(static_cast<const uint8_t*>(task.mask)[at]);
    }
  }
}

// Mask value times log2(e).
template <typename T>
__device__ __forceinline__ float added(const Task& task, int key, uint32_t mask) {
  if (key >= task.positions) return kMasked;
  if (task.mask_kind == Mask::kBoolean) return mask != 0 ? 0.0f : kMasked;
  float values[2];
  Element<T>::unpack(mask, values);
  return values[0] > task.masking ? values[0] * kLog2E : kMasked;
}

template <typename T>
__device__ __forceinline__ void store(T* out, const float (&values)[4]) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(out) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    *reinterpret_cast<uint2*>(out) = make_uint2(Element<T>::pack(values), Element<T>::pack(values + 2));
  }
}

template <typename T, int kWidth, int kHalves>
__global__ void __launch_bounds__(kMostThreads) attend(const Task task) {
  using S = Shape<T, kWidth, kHalves>;
  constexpr int kVector = S::kVector;
  constexpr int kKeyTiles = Product<T>::kKeyTiles;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const int tile_row = lane / kShares;  // of the tensor cores' products
  const int share = lane % kShares;
  const int64_t sequence = blockIdx.z;
  const int64_t key_head = blockIdx.y / task.row_blocks;
  const int first_row = static_cast<int>(blockIdx.y) % task.row_blocks * S::kRows;
  const int rows = min(task.group * task.queries - first_row, S::kRows);
  // Row r of this block is query `first_row + r` % queries of head `first_row + r` / queries of the group.
  const auto head_of = [&](int row) { return key_head * task.group + (first_row + row) / task.queries; };
  const auto query_of = [&](int row) { return (first_row + row) % task.queries; };

  uint4* const queries = dynamic_shared();
  uint4* const ring = queries + S::kQueries + warp * S::kRing;
  float4* const sums_of_warps = reinterpret_cast<float4*>(queries + S::kQueries);
  float* const maximum_of_warps = reinterpret_cast<float*>(sums_of_warps + warps * S::kRing);
  float* const total_of_warps = maximum_of_warps + warps * S::kRows;
  float* const maximum_of_block = total_of_warps + warps * S::kRows;
  float* const total_of_block = maximum_of_block + S::kRows;

  for (int index = threadIdx.x; index < S::kQueries; index += blockDim.x) {
    const int row = index / kWarp % kHalves * kTile + index % kWarp / kShares;
    const int column = (index / (kWarp * kHalves) * kShares + index % kShares) * kVector;
    const bool there = row < rows && column < task.key_width;
    const T* const from = static_cast<const T*>(task.query) + sequence * task.query_strides.sequence +
                          head_of(there ? row : 0) * task.query_strides.head +
                          query_of(there ? row : 0) * task.query_strides.position;
    queries[index] = there ? *reinterpret_cast<const uint4*>(from + column) : make_uint4(0, 0, 0, 0);
  }

  int64_t mask_rows[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = min(half * kTile + tile_row, rows - 1);
    mask_rows[half] = sequence * task.mask_strides.sequence + head_of(row) * task.mask_strides.head +
                      query_of(row) * task.mask_strides.position;
  }
  const T* const keys =
      static_cast<const T*>(task.key) + sequence * task.key_strides.sequence + key_head * task.key_strides.head;
  const T* const values =
      static_cast<const T*>(task.value) + sequence * task.value_strides.sequence + key_head * task.value_strides.head;

  float sums[kHalves][S::kValueVectors][kVector][2] = {};
  float maximum[kHalves], total[kHalves];  // total: of this lane's keys
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    maximum[half] = kMasked;
    total[half] = 0.0f;
  }

  // Positions past the end read the last one and are masked; columns past the width read the first one, and meet zeros of the
  // query or are not stored. A lane reads only what it copied.
  const auto copy = [&](int step, uint4* to) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const int64_t position = min(step * S::kStep + tile * kTile + tile_row, task.positions - 1);
#pragma unroll
      for (int j = 0; j < S::kKeyVectors; ++j) {
        const int column = (j * kShares + share) * kVector;
        copy_async(to + (tile * S::kKeyVectors + j) * kWarp + lane,
                   keys + position * task.key_strides.position + (column < task.key_width ? column : 0));
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles * 2; ++i) {
      const int64_t position = min(key_of<T>(step, i), task.positions - 1);
#pragma unroll
      for (int j = 0; j < S::kValueVectors; ++j) {
        const int column = (j * kTile + tile_row) * kVector;
        copy_async(to + (S::kKeyCopies + i * S::kValueVectors + j) * kWarp + lane,
                   values + position * task.value_strides.position + (column < task.value_width ? column : 0));
      }
    }
  };

  // The next visible step and its mask; `mask` is prefetched for the step after.
  const int steps = (task.positions + S::kStep - 1) / S::kStep;
  const int stride = task.splits * warps;
  int candidate = static_cast<int>(blockIdx.x) * warps + warp;
  uint32_t mask[kHalves][kKeyTiles * 2] = {};
  float next[kHalves][kKeyTiles * 2];
  const auto find = [&]() {
    for (; candidate < steps; candidate += stride) {
      bool seen = false;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < kKeyTiles * 2; ++i) {
          next[half][i] = added<T>(task, key_of<T>(candidate, i), mask[half][i]);
          seen |= next[half][i] != kMasked;
        }
      }
      load_mask<T, kHalves>(task, mask_rows, candidate + stride, mask);
      if (__any_sync(~0u, seen)) break;
    }
  };

  load_mask<T, kHalves>(task, mask_rows, candidate, mask);
  find();
  int stage = 0;
  if (candidate < steps) copy(candidate, ring);
  copy_commit();
  __syncthreads();  // for the queries
  while (candidate < steps) {
    float scores[kHalves][kKeyTiles * 2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 2; ++i) scores[half][i] = next[half][i];
    }
    const uint4* const copied = ring + stage * S::kCopies * kWarp + lane;
    candidate += stride;
    find();
    stage = 1 - stage;
    if (candidate < steps) copy(candidate, ring + stage * S::kCopies * kWarp);
    copy_commit();
    copy_wait<1>();

    float products[kKeyTiles][4] = {};
#pragma unroll
    for (int j = 0; j < S::kKeyVectors; ++j) {
      const uint4 low = queries[j * kHalves * kWarp + lane];
      const uint4 high = kHalves == 2 ? queries[(j * kHalves + 1) * kWarp + lane] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        const uint4 key = copied[(tile * S::kKeyVectors + j) * kWarp];
        Product<T>::multiply(products[tile], {low.x, high.x, low.y, high.y}, key.x, key.y);
        Product<T>::multiply(products[tile], {low.z, high.z, low.w, high.w}, key.z, key.w);
      }
    }

    float p[kKeyTiles][2][2] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float most = maximum[half];
#pragma unroll
      for (int i = 0; i < kKeyTiles * 2; ++i) {
        float& score = scores[half][i];
        score += products[i / 2][2 * half + i % 2] * task.scale;
        most = larger(most, score);
      }
      most = larger(most, __shfl_xor_sync(~0u, most, 1));
      most = larger(most, __shfl_xor_sync(~0u, most, 2));
      const float factor = exp2f(maximum[half] - finite(most));
      maximum[half] = most;
      total[half] *= factor;
#pragma unroll
      for (int i = 0; i < S::kValueVectors * kVector * 2; ++i) {
        sums[half][i / (kVector * 2)][i / 2 % kVector][i % 2] *= factor;
      }
#pragma unroll
      for (int i = 0; i < kKeyTiles * 2; ++i) p[i / 2][half][i % 2] = exp2f(scores[half][i] - finite(most));
    }
    uint32_t packed[4];
    Product<T>::pack(p, packed);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 2; ++i) total[half] += p[i / 2][half][i % 2];
    }

#pragma unroll
    for (int j = 0; j < S::kValueVectors; ++j) {
      uint32_t value[kKeyTiles][2][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles * 2; ++i) {
        const uint4 found = copied[(S::kKeyCopies + i * S::kValueVectors + j) * kWarp];
        value[i / 2][i % 2][0] = found.x;
        value[i / 2][i % 2][1] = found.y;
        value[i / 2][i % 2][2] = found.z;
        value[i / 2][i % 2][3] = found.w;
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const uint2 column = Product<T>::column(value, i);
        float (&low)[2] = sums[0][j][i];
        float (&high)[2] = sums[kHalves - 1][j][i];
        float sum[4] = {low[0], low[1], kHalves == 2 ? high[0] : 0.0f, kHalves == 2 ? high[1] : 0.0f};
        Product<T>::multiply(sum, packed, column.x, column.y);
        if (kHalves == 2) {
          high[0] = sum[2];
          high[1] = sum[3];
        }
        low[0] = sum[0];
        low[1] = sum[1];
      }
    }
  }

  __syncwarp();  // sums take the place of what lanes have read
  // A lane has four contiguous columns: vector v of a half is column `column_of(v, lane)`.
  const auto column_of = [](int vector, int of_lane) {
    constexpr int kFours = kVector / 4;
    return (vector / (2 * kFours) * kTile + 2 * (of_lane % kShares) + vector / kFours % 2) * kVector + vector % kFours * 4;
  };
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = half * kTile + tile_row;
#pragma unroll
    for (int vector = 0; vector < kWidth / 16; ++vector) {
      constexpr int kFours = kVector / 4;
      const auto& from = sums[half][vector / (2 * kFours)];
      const int first = vector % kFours * 4;
      const int which = vector / kFours % 2;
      if (row < rows) {
        sums_of_warps[warp * S::kRing + (half * (kWidth / 16) + vector) * kWarp + lane] =
            make_float4(from[first][which], from[first + 1][which], from[first + 2][which], from[first + 3][which]);
      }
    }
    total[half] += __shfl_xor_sync(~0u, total[half], 1);
    total[half] += __shfl_xor_sync(~0u, total[half], 2);
    if (share == 0) {
      maximum_of_warps[warp * S::kRows + row] = maximum[half];
      total_of_warps[warp * S::kRows + row] = total[half];
    }
  }
  __syncthreads();

  // Adds vector `index` of `parts`, each relative to its own maximum; returns maximum and total of the row.
  const auto add = [&](int parts, auto part, float (&sum)[4], float& most, float& all) {
    most = kMasked;
    for (int i = 0; i < parts; ++i) most = larger(most, *part(i).maximum);
    all = 0.0f;
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
    for (int i = 0; i < parts; ++i) {
      const float factor = exp2f(*part(i).maximum - finite(most));
      const float4 found = *part(i).sums;
      all += factor * *part(i).total;
      sum[0] += factor * found.x;
      sum[1] += factor * found.y;
      sum[2] += factor * found.z;
      sum[3] += factor * found.w;
    }
  };
  const auto write = [&](int row, int column, float (&sum)[4], float most, float all) {
    float shrink = 1.0f;
    if (task.sinks != nullptr) {
      const float sink = Element<T>::to_float(static_cast<const T*>(task.sinks)[head_of(row)]) * kLog2E;
      const float joint = finite(larger(most, sink));
      shrink = exp2f(most - joint);
      all = all * shrink + exp2f(sink - joint);
    }
    const float factor = all > 0.0f ? shrink / all : 0.0f;
    for (int i = 0; i < 4; ++i) sum[i] *= factor;
    T* const out =
        static_cast<T*>(task.out) + ((sequence * task.queries + query_of(row)) * task.heads + head_of(row)) * task.value_width;
    store(out + column, sum);
  };
  struct Part {
    const float *maximum, *total;
    const float4* sums;
  };
  const auto row_of = [](int index) { return index / (kWarp * (kWidth / 16)) * kTile + index % kWarp / kShares; };
  for (int index = threadIdx.x; index < S::kSums; index += blockDim.x) {
    const int row = row_of(index);
    const int column = column_of(index / kWarp % (kWidth / 16), index % kWarp);
    if (row >= rows || column >= task.value_width) continue;
    const auto of_warp = [&](int i) {
      return Part{maximum_of_warps + i * S::kRows + row, total_of_warps + i * S::kRows + row,
                  sums_of_warps + i * S::kRing + index};
    };
    float sum[4], most, all;
    add(warps, of_warp, sum, most, all);
    if (task.splits == 1) {
      write(row, column, sum, most, all);
    } else {
      sums_of_warps[index] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      maximum_of_block[row] = most;  // the same from each thread of the row
      total_of_block[row] = all;
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (task.splits == 1) return;
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  cluster.sync();
  for (int index = blockIdx.x * blockDim.x + threadIdx.x; index < S::kSums; index += task.splits * blockDim.x) {
    const int row = row_of(index);
    const int column = column_of(index / kWarp % (kWidth / 16), index % kWarp);
    if (row >= rows || column >= task.value_width) continue;
    const auto of_block = [&](int i) {
      const unsigned int block = static_cast<unsigned int>(i);
      return Part{cluster.map_shared_rank(maximum_of_block, block) + row, cluster.map_shared_rank(total_of_block, block) + row,
                  cluster.map_shared_rank(sums_of_warps, block) + index};
    };
    float sum[4], most, all;
    add(task.splits, of_block, sum, most, all);
    write(row, column, sum, most, all);
  }
  cluster.sync();  // no block may end while another reads its shared memory
#endif
}

template <typename T, int kWidth, int kHalves>
void launch_kernel(Task task, int64_t sequences, int64_t key_heads, const Device& device) {
  using S = Shape<T, kWidth, kHalves>;
  const auto kernel = attend<T, kWidth, kHalves>;
  static std::atomic<int> known[kDevices];
  const int multiprocessors = device.multiprocessors(), most_shared_bytes = device.block_shared_bytes();
  const bool clusters = has_clusters(kernel, most_shared_bytes, device, known);
  task.row_blocks = static_cast<int>(divided_up(task.group * task.queries, S::kRows));
  const int64_t steps = divided_up(task.positions, S::kStep);
  const int64_t blocks = sequences * key_heads * task.row_blocks;
  task.splits = 1;
  int warps = kLeastThreads / kWarp;
  while (clusters && task.splits < kSplits && !fills(blocks * task.splits, multiprocessors) && steps > task.splits * warps) {
    task.splits *= 2;
  }
  if (are_few(blocks * task.splits, multiprocessors) && steps > task.splits * warps) warps = kMostThreads / kWarp;
  while (warps > 1 && S::shared_bytes(warps) > most_shared_bytes) warps /= 2;
  launch_clusters(kernel, dim3(task.splits, key_heads * task.row_blocks, sequences), warps * kWarp, S::shared_bytes(warps),
                  task.splits, device, task);
}

template <typename T>
void launch_width(const Task& task, int64_t sequences, int64_t key_heads, const Device& device) {
  const int width = std::max(task.key_width, task.value_width);
  const bool few = task.group * task.queries <= kTile;
  const auto run = width <= 64    ? (few ? launch_kernel<T, 64, 1> : launch_kernel<T, 64, 2>)
                   : width <= 128 ? (few ? launch_kernel<T, 128, 1> : launch_kernel<T, 128, 2>)
                                  : (few ? launch_kernel<T, 256, 1> : launch_kernel<T, 256, 2>);
  run(task, sequences, key_heads, device);
}

// Strides of dimensions of size one are ignored.
Strides strides_of(const Tensor& tensor) {
  const auto stride = [&](int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : 0; };
  return {stride(0), stride(1), stride(2)};
}

// query [sequences, heads, queries, width], key and value [sequences, key heads, positions, width] of one dtype: rows of whole,
// aligned vectors. mask: Bool or of that dtype, expandable to [sequences, heads, queries, positions]. sinks [heads],
// contiguous, of that dtype.
Tensor decode_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale,
                        const std::optional<Tensor>& sinks) {
  const int64_t sequences = query.size(0), heads = query.size(1), queries = query.size(2);
  const int64_t key_heads = key.size(1), positions = key.size(2);
  STD_TORCH_CHECK(positions > 0 && positions < kMostPositions && heads * queries < kMostPositions,
                  "decode_attention: there must be positions; they, and heads times queries, must be fewer than ",
                  kMostPositions);
  const TensorDevice device(query);
  const int64_t sizes[] = {sequences, queries, heads, value.size(3)};
  Tensor out = torch::stable::new_empty(query, sizes);
  if (out.numel() == 0) return out;
  Task task = {};
  task.query = query.const_data_ptr();
  task.key = key.const_data_ptr();
  task.value = value.const_data_ptr();
  task.mask = mask.const_data_ptr();
  task.sinks = sinks.has_value() ? sinks->const_data_ptr() : nullptr;
  task.out = out.mutable_data_ptr();
  task.query_strides = strides_of(query);
  task.key_strides = strides_of(key);
  task.value_strides = strides_of(value);
  task.mask_strides = strides_of(mask);
  task.mask_kind = mask.scalar_type() == ScalarType::Bool ? Mask::kBoolean : Mask::kAdded;
  task.positions = static_cast<int>(positions);
  task.queries = static_cast<int>(queries);
  task.heads = static_cast<int>(heads);
  task.group = static_cast<int>(heads / key_heads);
  task.key_width = static_cast<int>(key.size(3));
  task.value_width = static_cast<int>(value.size(3));
  task.scale = static_cast<float>(scale) * kLog2E;
  with_element(query.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    task.masking = std::is_same_v<T, float> ? -FLT_MAX : std::is_same_v<T, __half> ? -65504.0f : -3.3895313892515355e38f;
    launch_width<T>(task, sequences, key_heads, device);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("decode_attention", TORCH_BOX(&decode_attention)); }

}  // namespace
}  // namespace zero_inference::attention
