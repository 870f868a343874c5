// The kernel of products with quantized weights (product.cu), for each `Format` in a file of its own.
//
//   out[m, n] = round(row_scale[n] * sum_k x[m, k] * weight[n, k] + bias[n])
//
// Integers: weight = round(code * scale + minimum) or round((code - zero point) * scale), rounded to 16 bits once
// (dequantize_groups: in float32 first, which differs in ties). e2m1 with its scale and e4m3 are exact in bfloat16; float
// scales multiply float32 sums. Products are exact and sums float32: compared with dequantizing and a matrix product only the
// order of sums differs. No atomics: the same bits in every run.
//
// The warps of a block share its rows of the weight and their columns. Each lane streams its own codes through a ring in shared
// memory; tokens and scales are a chunk of columns ahead. Sums of warps, then of the blocks of a cluster, are added in order.

#pragma once

#include <cooperative_groups.h>

#include "product_task.cuh"

namespace zero_inference::quantization {

// Layout of a block's sums: four extra elements per token avoid bank conflicts between the stores of a warp.
constexpr int kSumsPad = 4;

// f, as `ACTIVATION_NUMBERS` of zero_inference/cpu/pool.py.
enum Activation : int { kRelu, kSilu, kGelu, kGeluTanh, kReluSquared, kGeluSigmoid, kIdentity };

// NaN stays NaN, as in PyTorch.
__device__ __forceinline__ float activated(int activation, float x) {
  switch (activation) {
    case kRelu:
      return x < 0.0f ? 0.0f : x;
    case kSilu:
      return x / (1.0f + expf(-x));
    case kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case kGeluTanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case kReluSquared:
      return x < 0.0f ? 0.0f : x * x;
    case kGeluSigmoid:
      return x / (1.0f + expf(-1.702f * x));
    default:
      return x;
  }
}

template <int kTokenTiles>
using Sums = float[kProductTiles][kTokenTiles][4];

// One step of a warp: 32 rows times 64 bytes of codes times all tokens. `ring`: the lane's first vector of the stage; `step`:
// within the chunk that begins at column `chunk_first`. phases: as of `phase` of the lane's four rows, a byte each.
template <typename T, typename F, int kTokenTiles>
__device__ __forceinline__ void multiply_step(const Task& task, const Place<F>& place, const uint4* ring, const uint8_t* chunk,
                                              int step, int chunk_first, uint32_t phases, Sums<kTokenTiles>& sums) {
  constexpr int kHalfTile = kTileRows / 2;
  uint32_t codes[kProductTiles][2][4];
  LaneGroups<T, F> groups[kProductTiles][2];
  const int stride = task.template stride<F, F::kScaleBytes>();
  const int row = place.row_warp * kWarpRows + place.row_lane;
  const int group = (step * F::kElements + place.column_lane * F::kLaneElements) >> task.group_shift;
  const int first_group = chunk_first >> task.group_shift;
  const uint8_t* scales = chunk + task.template input_bytes<F>() + row * stride + group * F::kScaleBytes;
  const int minima_behind = task.block_rows * stride;
  const int zero_stride = task.template stride<F, 1>();
  const uint8_t* zeros = chunk + task.template input_bytes<F>() + minima_behind + row * zero_stride + group;
  if constexpr (F::kOffsetBytes == 1) zeros += first_group % kWordBytes;
#pragma unroll
  for (int tile = 0; tile < kProductTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 packed = ring[(tile * 2 + half) * kWarp];
      codes[tile][half][0] = packed.x;
      codes[tile][half][1] = packed.y;
      codes[tile][half][2] = packed.z;
      codes[tile][half][3] = packed.w;
      LaneGroups<T, F>& own = groups[tile][half];
      const int line = tile * kTileRows + half * kHalfTile;
      const uint8_t* first = scales + line * stride;
      const uint32_t in_word = __byte_perm(phases, 0u, 0x4440 + tile * 2 + half);
      if constexpr (F::kScaleBytes == 2) own.load_wide(first, first + minima_behind);
      if constexpr (F::kScales == Scales::kZeroPoints && F::kCodes == kInt4) {
        own.set_zero(task.offset != nullptr ? zeros[line * zero_stride + in_word] : kInt4Center);
      }
      // What lies after the last group is no number, unlike what e4m3 makes of any byte.
      if constexpr (F::kScales == Scales::kE8M0) own.load_power(first_group + group < task.row_groups ? first[in_word] : 0u);
      if constexpr (F::kScales == Scales::kE4M3) own.load_floats(*reinterpret_cast<const uint16_t*>(first + in_word));
    }
  }
  Sums<kTokenTiles> of_step = {};  // of `Scales::kSums`
  Sums<kTokenTiles>& into = F::kScales == Scales::kSums ? of_step : sums;
  const uint4* x = reinterpret_cast<const uint4*>(chunk) + step * F::kInputs * task.tokens * kRowShares + place.column_lane;
#pragma unroll
  for (int part = 0; part < F::kInputs; ++part) {
    uint32_t tokens[kTokenTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {  // lanes after the last token repeat it: their sums are thrown away
      const int token = min(tile * kTileTokens + place.row_lane, task.tokens - 1);
      input_pairs<F::kCodes>(x[(part * task.tokens + token) * kRowShares], tokens[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < kProductTiles; ++tile) {
      uint32_t upper[4], lower[4];
      weight_pairs<T, F>(codes[tile][0], part, groups[tile][0], upper);
      weight_pairs<T, F>(codes[tile][1], part, groups[tile][1], lower);
#pragma unroll
      for (int product = 0; product < F::kProducts; ++product) {
        const uint32_t weight[4] = {upper[2 * product], lower[2 * product], upper[2 * product + 1], lower[2 * product + 1]};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          Pair<T>::multiply(into[tile][t], weight, tokens[t][2 * product], tokens[t][2 * product + 1]);
        }
      }
    }
  }
  if constexpr (F::kScales == Scales::kSums) {
#pragma unroll
    for (int tile = 0; tile < kProductTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint8_t* of_row = scales + (tile * kTileRows + half * kHalfTile) * stride;
        const float scale = task.scale == nullptr ? 1.0f : *reinterpret_cast<const float*>(of_row);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) sums[tile][t][i] = fmaf(of_step[tile][t][i], scale, sums[tile][t][i]);
        }
      }
    }
  }
}

// Stores a lane's sums: [column warp][token][row].
template <typename F, int kTokenTiles>
__device__ __forceinline__ void store_sums(const Task& task, const Place<F>& place, const Sums<kTokenTiles>& sums,
                                           float* shared) {
  const int pitch = task.block_rows + kSumsPad;
  float* mine = shared + place.column_warp * kTokenTiles * kTileTokens * pitch + place.row_warp * kWarpRows + place.row_lane;
#pragma unroll
  for (int tile = 0; tile < kProductTiles; ++tile) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = t * kTileTokens + place.column_lane * 2 + i % 2;
        mine[token * pitch + tile * kTileRows + i / 2 * (kTileRows / 2)] = sums[tile][t][i];
      }
    }
  }
}

// Result element `index` of the block that starts at row `first`; `sum_of(row)` returns a row's sum.
template <typename T, typename F, typename AnyTask, typename SumOf>
__device__ __forceinline__ void store_result(const AnyTask& task, int64_t first, int token, int index, SumOf sum_of) {
  const int64_t rows = task.rows >> task.halved();
  const int64_t row = (first >> task.halved()) + index;
  if (row >= rows) return;
  const auto biased = [&](int local) {
    float sum = sum_of(local);
    if constexpr (F::kCodes == kE2M1) sum *= kE2M1Factor;
    if constexpr (!F::kWide) {
      if (task.row_scale != nullptr) {
        const float scale = task.row_scale[task.weight_row(first, local)];
        sum = task.divides ? sum / scale : sum * scale;
      }
    }
    if (task.bias == nullptr) return sum;
    return sum + Element<T>::to_float(static_cast<const T*>(task.bias)[task.weight_row(first, local)]);
  };
  float value;
  if constexpr (std::is_same_v<AnyTask, Task>) {
    value = biased(index);
  } else if (task.halved() == 0) {
    value = biased(index);
    if (task.form == kActivated) value = activated(task.activation, value);
  } else {
    const int one = task.form == kInterleaved ? 2 * index : index;
    const int other = task.form == kInterleaved ? one + 1 : index + task.block_rows / 2;
    float gate = biased(task.form == kUpFirst ? other : one);
    float up = biased(task.form == kUpFirst ? one : other);
    gate = gate > task.limit ? task.limit : gate;
    up = up > task.limit ? task.limit : up < -task.limit ? -task.limit : up;
    value = activated(task.activation, gate) * (up + task.up_offset);
  }
  static_cast<T*>(task.out)[task.out_row(token) * rows + row] = Element<T>::round(value);
}

// Adds sums of the block's warps, then of the cluster's blocks, each of which writes a part.
template <typename T, typename F, int kTokenTiles, typename AnyTask>
__device__ __forceinline__ void finish(const AnyTask& task, int64_t first_row, float* shared) {
  const int rows = task.block_rows;
  const int pitch = rows + kSumsPad;
  const int shift = log2_of(rows);
  const int out_shift = shift - task.halved();
  const auto of_warps = [&](const float* slot) {
    float sum = slot[0];
    for (int warp = 1; warp < task.column_warps; ++warp) sum += slot[warp * kTokenTiles * kTileTokens * pitch];
    return sum;
  };
  if (task.splits == 1) {
#pragma unroll 1
    for (int index = threadIdx.x; index < task.tokens << out_shift; index += kProductThreads) {
      const int token = index >> out_shift;
      store_result<T, F>(task, first_row, token, index - (token << out_shift),
                         [&](int row) { return of_warps(shared + token * pitch + row); });
    }
    return;
  }
#pragma unroll 1
  for (int index = threadIdx.x; index < task.tokens << shift; index += kProductThreads) {
    const int token = index >> shift;
    float* slot = shared + token * pitch + index - (token << shift);
    slot[0] = of_warps(slot);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int part_shift = out_shift - log2_of(task.splits);
  const int first = static_cast<int>(blockIdx.x % task.splits) << part_shift;
#pragma unroll 1
  for (int index = threadIdx.x; index < task.tokens << part_shift; index += kProductThreads) {
    const int token = index >> part_shift;
    store_result<T, F>(task, first_row, token, first + index - (token << part_shift), [&](int row) {
      float sum = 0.0f;
      for (int block = 0; block < task.splits; ++block) {
        sum += cluster.map_shared_rank(shared, static_cast<unsigned int>(block))[token * pitch + row];
      }
      return sum;
    });
  }
  cluster.sync();  // no block may end while another reads its shared memory
#endif
}

template <typename T, typename F, int kTokenTiles, typename AnyTask>
__device__ __forceinline__ void multiply_rows(const AnyTask& task) {
  static_assert(kProductStages >= 2 && kProductLeastChunk >= kProductStages - 1);
  static_assert(kWarps * kTokenTiles * kTileTokens * (kWarpRows + kSumsPad) * 4 <= kRingVectors * kVectorBytes,
                "sums take the place of the ring");
  constexpr int kStageVectors = kProductTiles * 2 * kWarp;
  const Place<F> place(task);
  uint4* ring = dynamic_shared() + threadIdx.x / kWarp * (kProductStages * kStageVectors) + threadIdx.x % kWarp;
  uint8_t* chunks = reinterpret_cast<uint8_t*>(dynamic_shared() + kRingVectors);
  const int chunk_bytes = task.template chunk_bytes<F>();

  const int64_t row_bytes = int64_t{task.columns} * F::kBits / 8;
  const uint8_t* from[kProductTiles * 2];
  uint32_t phases = 0;  // of these rows, a byte each
#pragma unroll
  for (int half = 0; half < kProductTiles * 2; ++half) {
    const int row = place.row_warp * kWarpRows + half * (kTileRows / 2) + place.row_lane;
    const int64_t of_weight = task.weight_row(place.first_row, row);
    from[half] = task.codes + of_weight * row_bytes + place.column_lane * kVectorBytes;
    if constexpr (F::kScaleBytes == 1) phases |= phase(task, task.scale, of_weight) << half * 8;
    if constexpr (F::kOffsetBytes == 1) phases |= phase(task, task.offset, of_weight) << half * 8;
  }
  // Copies step `turn` into stage `stage`; every turn commits one group, even if empty.
  const auto fetch = [&](int turn, int stage) {
    const int step = turn * task.column_warps + place.column_warp;
    const int column = place.first + step * F::kElements;
    if (step < place.steps && column + place.column_lane * F::kLaneElements < task.columns) {
      const int64_t offset = int64_t{column} * F::kBits / 8;
#pragma unroll
      for (int half = 0; half < kProductTiles * 2; ++half) {
        copy_codes(ring + stage * kStageVectors + half * kWarp, from[half] + offset);
      }
    }
  };

  const int turns = (place.steps + task.column_warps - 1) / task.column_warps;
  if (turns > 0) stage_chunk<F>(task, place, 0, chunks);
#pragma unroll
  for (int turn = 0; turn < kProductStages - 1; ++turn) {
    fetch(turn, turn);
    copy_commit();
  }
  Sums<kTokenTiles> sums = {};
  int stage = 0, of_chunk = 0, chunk = 0;
  for (int turn = 0; turn < turns; ++turn) {
    copy_wait<kProductStages - 2>();
    if (of_chunk == 0) {
      __syncthreads();  // the chunk is loaded, and no thread still reads the previous one
      if ((chunk + 1) * task.chunk_steps < turns)
        stage_chunk<F>(task, place, chunk + 1, chunks + (chunk + 1) % 2 * chunk_bytes);
    }
    fetch(turn + kProductStages - 1, stage == 0 ? kProductStages - 1 : stage - 1);  // read a turn ago
    copy_commit();
    if (turn * task.column_warps + place.column_warp < place.steps) {
      multiply_step<T, F, kTokenTiles>(task, place, ring + stage * kStageVectors, chunks + chunk % 2 * chunk_bytes,
                                       of_chunk * task.column_warps + place.column_warp,
                                       place.first + chunk * task.template chunk_columns<F>(), phases, sums);
    }
    stage = stage + 1 == kProductStages ? 0 : stage + 1;
    if (++of_chunk == task.chunk_steps) {
      of_chunk = 0;
      ++chunk;
    }
  }
  copy_wait<0>();
  __syncthreads();  // the ring is free
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  store_sums<F, kTokenTiles>(task, place, sums, shared);
  __syncthreads();
  finish<T, F, kTokenTiles>(task, place.first_row, shared);
}

// Finds up to task.tokens pairs of the weight of `pair`, and their rows of x. Returns their number, or 0 where the block of an
// earlier pair has this one. Pairs are searched in windows; each warp searches for itself, so only blocks that multiply use
// barriers.
__device__ __forceinline__ int find_together(const Task& task, int pair, int64_t slot, int* found, int* row_of) {
  const int first = pair / kPairsWindow * kPairsWindow;
  const int words = (min(task.pairs - first, kPairsWindow) + kWarp - 1) / kWarp;
  const int own = (pair - first) / kWarp;
  const int lane = threadIdx.x % kWarp;
  int before = 0, number = 0;
#pragma unroll 2
  for (int word = 0; word < words && number < task.tokens; ++word) {
    const int other = first + word * kWarp + lane;
    uint32_t same = __ballot_sync(~0u, other < task.pairs && task.slot[other] == slot);
    if (word <= own) {
      const uint32_t earlier = word < own ? ~0u : (1u << (pair - first) % kWarp) - 1;
      before += __popc(same & earlier);
      same &= ~earlier;
      if (word == own && before % task.tokens != 0) return 0;
    }
    const int place = number + __popc(same & ((1u << lane) - 1));
    if (threadIdx.x < kWarp && (same >> lane & 1) != 0 && place < task.tokens) {
      found[place] = other;
      row_of[place] = other / task.pairs_of_row;
    }
    number += __popc(same);
  }
  __syncthreads();
  return min(number, task.tokens);
}

// Zeros for the block's result; the first block of a cluster writes them.
template <typename T>
__device__ __forceinline__ void store_zeros(const Alone& task) {
  if (blockIdx.x % task.splits != 0) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x / task.splits) * (task.block_rows >> task.halved());
  const int64_t last = min(first + (task.block_rows >> task.halved()), task.rows >> task.halved());
  for (int64_t row = first + threadIdx.x; row < last; row += kProductThreads) {
    static_cast<T*>(task.out)[row] = Element<T>::round(0.0f);
  }
}

// Rows of x of a block: all, that of a pair, or those of several pairs.
enum class Rows { kAll, kPair, kPairs };

template <typename T, typename F, int kTokenTiles, Rows kRows>
__global__ void __launch_bounds__(kProductThreads, product_blocks(kTokenTiles)) multiply(const Task task) {
  if constexpr (kRows == Rows::kAll) {
    multiply_rows<T, F, kTokenTiles>(task);
  } else {
    // All blocks of a cluster have the same pairs, so they exit together.
    const int64_t pair = blockIdx.y;
    const int64_t slot = task.slot[pair];
    Together own = {{task}, nullptr, nullptr};
    own.codes = task.codes + slot * task.rows * (int64_t{task.columns} * F::kBits / 8);
    const int64_t groups = slot * (F::kScales == Scales::kSums ? task.rows / task.group_rows : task.rows) * task.row_groups;
    const auto of_slot = [&](const void* tensor, int bytes) {
      return tensor == nullptr ? nullptr : static_cast<const uint8_t*>(tensor) + groups * bytes;
    };
    own.scale = of_slot(task.scale, F::kScaleBytes);
    own.offset = of_slot(task.offset, F::kOffsetBytes);
    if (!F::kWide && task.row_scale != nullptr) own.row_scale = task.row_scale + slot * task.rows;
    if (task.bias != nullptr) own.bias = static_cast<const T*>(task.bias) + slot * task.rows;
    const bool none = slot < 0 || slot >= task.weights;
    if (none || kRows == Rows::kPair) {
      own.x = static_cast<const T*>(task.x) + pair / task.pairs_of_row * task.columns;
      own.out = static_cast<T*>(task.out) + pair * (task.rows >> own.halved());
    }
    if (none) return store_zeros<T>(own);
    if constexpr (kRows == Rows::kPair) {
      multiply_rows<T, F, kTokenTiles>(static_cast<const Alone&>(own));
    } else {
      constexpr int kMost = kTokenTiles * kTileTokens;
      __shared__ int found[2 * kMost];
      static_assert(sizeof(found) <= kFoundBytes);
      own.pair = found;
      own.row_of = found + kMost;
      own.tokens = find_together(task, static_cast<int>(pair), slot, found, found + kMost);
      if (own.tokens > 0) multiply_rows<T, F, kTokenTiles>(own);
    }
  }
}

struct Limits {
  int multiprocessors, shared_bytes;  // shared_bytes: of a block, for what `Task::shared_bytes` counts
};

// Fills parameters that are 0 from the table of launch sizes; if shared memory does not suffice, one warp per row range, which
// needs least.
template <typename F>
void choose(Task& task, const Limits& device, bool clusters) {
  if (task.column_warps > 0) {
    task.split_columns(task.column_warps);
  } else {
    task.split_columns(product_column_warps(task.tokens));
    Task least = task;
    least.splits = 1;
    least.chunk_steps = kProductLeastChunk;
    if (least.template shared_bytes<F>() > device.shared_bytes) task.split_columns(1);
  }
  const int64_t blocks = divided_up(task.rows, task.block_rows) * task.pairs;
  if (task.splits == 0) {
    const int64_t turns = divided_up(task.columns, F::kElements) / task.column_warps;
    task.splits = 1;
    while (clusters && task.splits < kProductSplits && !fills(blocks * task.splits, device.multiprocessors) &&
           turns >= 2 * task.splits * kProductLeastSteps) {
      task.splits *= 2;
    }
  }
  if (task.chunk_steps == 0) {
    task.chunk_steps = kProductChunk;
    while (task.chunk_steps > kProductLeastChunk && task.template shared_bytes<F>() > kProductSharedBytes)
      task.chunk_steps /= 2;
  }
  // one that was asked for, too
  while (task.chunk_steps > kProductLeastChunk && task.template shared_bytes<F>() > device.shared_bytes) task.chunk_steps /= 2;
}

template <typename T, typename F, int kTokenTiles, Rows kRows = Rows::kAll>
void launch_kernel(Task task, const Device& device) {
  static std::atomic<int> known[kDevices];
  const auto kernel = multiply<T, F, kTokenTiles, kRows>;
  const Limits limits = {device.multiprocessors(), device.block_shared_bytes() - kFoundBytes};
  const bool clusters = has_clusters(kernel, limits.shared_bytes, device, known);
  STD_TORCH_CHECK(clusters || task.splits <= 1, "linear_groups: splits must be 1 on a device without clusters, found ",
                  task.splits);
  choose<F>(task, limits, clusters);
  const int shared_bytes = task.template shared_bytes<F>();
  STD_TORCH_CHECK(shared_bytes <= limits.shared_bytes, "linear_groups: needs ", shared_bytes,
                  " bytes of shared memory a block, this device has ", limits.shared_bytes, "; use dequantize_groups");
  const int64_t blocks = divided_up(task.rows, task.block_rows) * task.splits;
  launch_clusters(kernel, dim3(blocks, task.pairs), kProductThreads, shared_bytes, task.splits, device, task);
}

template <typename T, typename F>
void launch_tokens(const Task& task, const Device& device) {
  if (task.slot == nullptr) {
    const auto run = task.tokens <= kTileTokens       ? launch_kernel<T, F, 1>
                     : task.tokens <= 2 * kTileTokens ? launch_kernel<T, F, 2>
                                                      : launch_kernel<T, F, 4>;
    return run(task, device);
  }
  const auto run = task.tokens == 1             ? launch_kernel<T, F, 1, Rows::kPair>
                   : task.tokens <= kTileTokens ? launch_kernel<T, F, 1, Rows::kPairs>
                                                : launch_kernel<T, F, 2, Rows::kPairs>;
  run(task, device);
}

}  // namespace zero_inference::quantization
