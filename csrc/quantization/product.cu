// zero_inference::linear_groups: a few tokens times a weight of int8 / int4 groups, read in its stored format.
// zero_inference::linear_groups_indexed: pairs of a row of x and one of several weights; pairs of one weight share a block. The
// activation of an expert (`Form`, `Activation`) is applied to the float32 sums.
//
//   out[m, n] = round(sum_k x[m, k] * weight[n, k] + bias[n]),   weight[n, k] = round(code * scale + minimum)
//
// The weight is rounded to 16 bits once (dequantize_groups: twice, which differs in ties), products are exact and sums float32:
// compared with dequantizing and a matrix product only the order of sums differs. No atomics: the same bits in every run.
//
// The warps of a block share its rows of the weight and their columns. Each lane streams its own codes through a ring in shared
// memory; tokens and scales are a chunk of columns ahead. Sums of warps, then of the blocks of a cluster, are added in order.

#include <cooperative_groups.h>

#include <cmath>
#include <optional>

#include "../operators.cuh"
#include "product.cuh"

namespace zero_inference::quantization {
namespace {

constexpr int kWarps = kProductThreads / kWarp;
constexpr int kWarpRows = kProductTiles * kTileRows;
constexpr int kSlice = 128;  // columns: the unit in which blocks of a cluster split them, whole steps and whole groups
constexpr int kLargestGroup = 128;
constexpr int kPairsWindow = 1024;  // pairs among which a block looks for those of its weight
constexpr int kFoundBytes = 128;    // of shared memory for those, at most
constexpr int kRingVectors = kWarps * kProductStages * kProductTiles * 2 * kWarp;

// Layout of a block's sums: four extra elements per token avoid bank conflicts between the stores of a warp.
constexpr int kSumsPad = 4;

// Result of a pair: all rows; f of each; or f(gate) * up, with rows of gate first, up first, or interleaved. As in
// zero_inference/kernels/products.py.
enum Form : int { kPlain, kActivated, kGateFirst, kUpFirst, kInterleaved };

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

struct Task {
  const void* x;
  const uint8_t* codes;
  const void* scale;
  const void* minimum;
  const void* bias;  // or null
  void* out;
  int64_t rows;
  int columns, tokens, group_shift;
  int column_warps, splits, chunk_steps;
  // of linear_groups_indexed; `tokens` is the maximum of pairs in a block, the first one is blockIdx.y
  int pairs;         // 1 otherwise
  int pairs_of_row;  // of x, one after the other
  int64_t weights;
  const int64_t* slot;  // [pairs], of which weight; others than 0 to `weights` - 1 are of none
  int form, activation;
  float limit, up_offset;  // f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

  __device__ int64_t x_row(int token) const { return token; }
  __device__ int64_t out_row(int token) const { return token; }
  // Row `local` of the block that starts at `first`; after the last row it repeats and is not stored.
  __device__ int64_t weight_row(int64_t first, int local) const { return min(first + local, rows - 1); }
  // log2 of the weight rows per result element.
  __device__ int halved() const { return 0; }
  __host__ __device__ int block_rows() const { return kWarps / column_warps * kWarpRows; }
  __host__ __device__ int chunk_columns(int step) const { return column_warps * chunk_steps * step; }
  __host__ __device__ int slices() const { return (columns + kSlice - 1) / kSlice; }
  // Bytes of a row's scales of a chunk: an odd number of vectors avoids bank conflicts.
  __host__ __device__ int scale_stride(int step) const {
    return ((chunk_columns(step) >> group_shift) * 2 + kVectorBytes - 1) / kVectorBytes * kVectorBytes | kVectorBytes;
  }
  __host__ __device__ int input_bytes(int step) const { return tokens * chunk_columns(step) * 2; }
  __host__ __device__ int chunk_bytes(int step) const { return input_bytes(step) + 2 * block_rows() * scale_stride(step); }
  // One buffer suffices without a second chunk.
  int shared_bytes(int step) const {
    const int most = (slices() + splits - 1) / splits * kSlice;
    return kRingVectors * kVectorBytes + chunk_bytes(step) * (most > chunk_columns(step) ? 2 : 1);
  }
};

// One pair. Gate and up in two halves of the weight: a block has as many rows of each, the first half's first.
struct Alone : Task {
  __device__ int halved() const { return form >= kGateFirst ? 1 : 0; }
  __device__ bool in_two_parts() const { return form == kGateFirst || form == kUpFirst; }
  __device__ int64_t weight_row(int64_t first, int local) const {
    if (!in_two_parts()) return min(first + local, rows - 1);
    const int half = block_rows() / 2;
    const int64_t inner = rows / 2;
    return min(first / 2 + (local & (half - 1)), inner - 1) + (local < half ? 0 : inner);
  }
};

// Pairs of one weight, the tokens of a block.
struct Together : Alone {
  const int* pair;    // [tokens], in shared memory
  const int* row_of;  // of x, likewise

  __device__ int64_t x_row(int token) const { return row_of[token]; }
  __device__ int64_t out_row(int token) const { return pair[token]; }
};

// log2 of a power of two.
__device__ __forceinline__ int log2_of(int value) { return __ffs(value) - 1; }

// The block's columns, and a thread's rows and columns.
template <int kBits>
struct Place {
  int64_t first_row;
  int first, last;  // columns
  int steps;        // of the block
  int row_warp, column_warp, row_lane, column_lane;

  __device__ explicit Place(const Task& task) {
    const int split = static_cast<int>(blockIdx.x % task.splits);
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    first_row = static_cast<int64_t>(blockIdx.x / task.splits) * task.block_rows();
    first = static_cast<int>(int64_t{task.slices()} * split / task.splits) * kSlice;
    last = min(task.columns, static_cast<int>(int64_t{task.slices()} * (split + 1) / task.splits) * kSlice);
    steps = (last - first + Step<kBits>::kElements - 1) / Step<kBits>::kElements;
    column_warp = warp % task.column_warps;
    row_warp = warp / task.column_warps;
    row_lane = lane / kRowShares;
    column_lane = lane % kRowShares;
  }
};

// Tokens of a chunk, in the order in which lanes of a warp read them. Zeros after the last column.
template <int kBits, typename AnyTask>
__device__ __forceinline__ void stage_input(const AnyTask& task, const Place<kBits>& place, int chunk_first, uint4* to) {
  using S = Step<kBits>;
  constexpr int kStepVectors = S::kElements / 8;
  const int shift = log2_of(task.chunk_columns(S::kElements) / 8);
  const int stop = place.first + place.steps * S::kElements;
  const uint16_t* x = static_cast<const uint16_t*>(task.x);
#pragma unroll 1  // nothing waits for these copies
  for (int index = threadIdx.x; index < task.tokens << shift; index += kProductThreads) {
    const int token = index >> shift;
    const int vector = index - (token << shift);
    const int column = chunk_first + vector * 8;
    if (column >= stop) continue;
    const int of_step = vector % kStepVectors;
    const int part = vector / kStepVectors * S::kInputs + of_step % S::kInputs;
    const bool there = column < task.columns;
    const uint16_t* from = x + (there ? task.x_row(token) * task.columns + column : 0);
    copy_or_zeros<kVectorBytes>(to + (part * task.tokens + token) * kRowShares + of_step / S::kInputs, from, there);
  }
}

// Scales and minima of a chunk, kBytes at a time (2: not asynchronous). Zeros after the last group of a row.
template <int kBits, int kBytes, typename AnyTask>
__device__ __forceinline__ void stage_groups(const AnyTask& task, const Place<kBits>& place, int chunk_first, uint8_t* to) {
  using S = Step<kBits>;
  constexpr int kInUnit = kBytes / 2;
  const int row_groups = task.columns >> task.group_shift;
  const int first = chunk_first >> task.group_shift;
  const int stop = min(chunk_first + task.chunk_columns(S::kElements), place.first + place.steps * S::kElements);
  const int shift = log2_of((task.chunk_columns(S::kElements) >> task.group_shift) / kInUnit);
  const int rows = task.block_rows();
  const int stride = task.scale_stride(S::kElements);
#pragma unroll 1
  for (int index = threadIdx.x; index < 2 * rows << shift; index += kProductThreads) {
    const int line = index >> shift;  // the rows of the scales, then those of the minima
    const int unit = index - (line << shift);
    const int group = first + unit * kInUnit;
    if (group << task.group_shift >= stop) continue;
    const uint16_t* from = static_cast<const uint16_t*>(line < rows ? task.scale : task.minimum);
    const int64_t row = task.weight_row(place.first_row, line & (rows - 1));
    const bool there = group < row_groups;
    from += row * row_groups + (there ? group : 0);
    uint8_t* slot = to + line * stride + unit * kBytes;
    if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(slot) = there ? *from : 0;
    } else {
      copy_or_zeros<kBytes>(slot, from, there);
    }
  }
}

template <int kBits, typename AnyTask>
__device__ __forceinline__ void stage_chunk(const AnyTask& task, const Place<kBits>& place, int chunk, uint8_t* to) {
  using S = Step<kBits>;
  const int chunk_first = place.first + chunk * task.chunk_columns(S::kElements);
  stage_input<kBits>(task, place, chunk_first, reinterpret_cast<uint4*>(to));
  // Offsets: groups in a row, before this chunk, and in a chunk.
  const int groups = ((task.columns >> task.group_shift) | (chunk_first >> task.group_shift) |
                      (task.chunk_columns(S::kElements) >> task.group_shift));
  to += task.input_bytes(S::kElements);
  if (groups % 8 == 0) {
    stage_groups<kBits, 16>(task, place, chunk_first, to);
  } else if (groups % 2 == 0) {
    stage_groups<kBits, 4>(task, place, chunk_first, to);
  } else {
    stage_groups<kBits, 2>(task, place, chunk_first, to);
  }
}

// Scale and minimum of kGroups groups of a lane's row and step, each twice in a word.
template <int kGroups>
struct LaneGroups {
  uint32_t scale[kGroups], minimum[kGroups];

  __device__ __forceinline__ void load(const uint8_t* scales, int minima_behind) {
    if constexpr (kGroups == 1) {
      scale[0] = *reinterpret_cast<const uint16_t*>(scales) * 0x10001u;
      minimum[0] = *reinterpret_cast<const uint16_t*>(scales + minima_behind) * 0x10001u;
    } else {
      const uint32_t two_scales = *reinterpret_cast<const uint32_t*>(scales);
      const uint32_t two_minima = *reinterpret_cast<const uint32_t*>(scales + minima_behind);
      scale[0] = __byte_perm(two_scales, 0u, 0x1010);
      scale[1] = __byte_perm(two_scales, 0u, 0x3232);
      minimum[0] = __byte_perm(two_minima, 0u, 0x1010);
      minimum[1] = __byte_perm(two_minima, 0u, 0x3232);
    }
  }
};

// Weights of one row that multiply vector `part` of x, as pairs.
template <typename T, int kBits, int kGroups>
__device__ __forceinline__ void weight_pairs(const uint32_t (&words)[4], int part, const LaneGroups<kGroups>& groups,
                                             uint32_t (&pairs)[4]) {
  using S = Step<kBits>;
  constexpr int kInWord = 4 / S::kCodeWords;
  const int group = kGroups == 1 ? 0 : part * kGroups / S::kInputs;
#pragma unroll
  for (int word = 0; word < S::kCodeWords; ++word) {
    uint32_t numbers[kInWord];
    code_pairs<T, kBits>(words[part * S::kCodeWords + word], numbers);
#pragma unroll
    for (int i = 0; i < kInWord; ++i) {
      pairs[word * kInWord + i] = Pair<T>::fused(numbers[i], groups.scale[group], groups.minimum[group]);
    }
  }
}

template <int kTokenTiles>
using Sums = float[kProductTiles][kTokenTiles][4];

// One step of a warp: 32 rows times 64 bytes of codes times all tokens. `ring`: the lane's first vector of the stage; `step`:
// within the chunk.
template <typename T, int kBits, int kTokenTiles, int kGroups>
__device__ __forceinline__ void multiply_step(const Task& task, const Place<kBits>& place, const uint4* ring,
                                              const uint8_t* chunk, int step, Sums<kTokenTiles>& sums) {
  using S = Step<kBits>;
  uint32_t codes[kProductTiles][2][4];
  LaneGroups<kGroups> groups[kProductTiles][2];
  const int stride = task.scale_stride(S::kElements);
  const int minima_behind = task.block_rows() * stride;
  const int row = place.row_warp * kWarpRows + place.row_lane;
  const int group = (step * S::kElements + place.column_lane * S::kLaneElements) >> task.group_shift;
  const uint8_t* scales = chunk + task.input_bytes(S::kElements) + row * stride + group * 2;
#pragma unroll
  for (int tile = 0; tile < kProductTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 packed = ring[(tile * 2 + half) * kWarp];
      codes[tile][half][0] = packed.x;
      codes[tile][half][1] = packed.y;
      codes[tile][half][2] = packed.z;
      codes[tile][half][3] = packed.w;
      groups[tile][half].load(scales + (tile * kTileRows + half * (kTileRows / 2)) * stride, minima_behind);
    }
  }
  const uint4* x = reinterpret_cast<const uint4*>(chunk) + step * S::kInputs * task.tokens * kRowShares + place.column_lane;
#pragma unroll
  for (int part = 0; part < S::kInputs; ++part) {
    uint32_t tokens[kTokenTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {  // lanes after the last token repeat it: their sums are thrown away
      const int token = min(tile * kTileTokens + place.row_lane, task.tokens - 1);
      input_pairs<kBits>(x[(part * task.tokens + token) * kRowShares], tokens[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < kProductTiles; ++tile) {
      uint32_t upper[4], lower[4];
      weight_pairs<T, kBits, kGroups>(codes[tile][0], part, groups[tile][0], upper);
      weight_pairs<T, kBits, kGroups>(codes[tile][1], part, groups[tile][1], lower);
#pragma unroll
      for (int product = 0; product < S::kProducts; ++product) {
        const uint32_t weight[4] = {upper[2 * product], lower[2 * product], upper[2 * product + 1], lower[2 * product + 1]};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          Pair<T>::multiply(sums[tile][t], weight, tokens[t][2 * product], tokens[t][2 * product + 1]);
        }
      }
    }
  }
}

// Stores a lane's sums: [column warp][token][row].
template <int kBits, int kTokenTiles>
__device__ __forceinline__ void store_sums(const Task& task, const Place<kBits>& place, const Sums<kTokenTiles>& sums,
                                           float* shared) {
  const int pitch = task.block_rows() + kSumsPad;
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
template <typename T, typename AnyTask, typename SumOf>
__device__ __forceinline__ void store_result(const AnyTask& task, int64_t first, int token, int index, SumOf sum_of) {
  const int64_t rows = task.rows >> task.halved();
  const int64_t row = (first >> task.halved()) + index;
  if (row >= rows) return;
  const auto biased = [&](int local) {
    const float sum = sum_of(local);
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
    const int other = task.form == kInterleaved ? one + 1 : index + task.block_rows() / 2;
    float gate = biased(task.form == kUpFirst ? other : one);
    float up = biased(task.form == kUpFirst ? one : other);
    gate = gate > task.limit ? task.limit : gate;
    up = up > task.limit ? task.limit : up < -task.limit ? -task.limit : up;
    value = activated(task.activation, gate) * (up + task.up_offset);
  }
  static_cast<T*>(task.out)[task.out_row(token) * rows + row] = Element<T>::round(value);
}

// Adds sums of the block's warps, then of the cluster's blocks, each of which writes a part.
template <typename T, int kTokenTiles, typename AnyTask>
__device__ __forceinline__ void finish(const AnyTask& task, int64_t first_row, float* shared) {
  const int rows = task.block_rows();
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
      store_result<T>(task, first_row, token, index - (token << out_shift),
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
    store_result<T>(task, first_row, token, first + index - (token << part_shift), [&](int row) {
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

template <typename T, int kBits, int kTokenTiles, int kGroups, typename AnyTask>
__device__ __forceinline__ void multiply_rows(const AnyTask& task) {
  using S = Step<kBits>;
  static_assert(kProductStages >= 2 && kProductLeastChunk >= kProductStages - 1);
  static_assert(kWarps * kTokenTiles * kTileTokens * (kWarpRows + kSumsPad) * 4 <= kRingVectors * kVectorBytes,
                "sums take the place of the ring");
  constexpr int kStageVectors = kProductTiles * 2 * kWarp;
  const Place<kBits> place(task);
  uint4* ring = dynamic_shared() + threadIdx.x / kWarp * (kProductStages * kStageVectors) + threadIdx.x % kWarp;
  uint8_t* chunks = reinterpret_cast<uint8_t*>(dynamic_shared() + kRingVectors);
  const int chunk_bytes = task.chunk_bytes(S::kElements);

  const int64_t row_bytes = int64_t{task.columns} * kBits / 8;
  const uint8_t* from[kProductTiles * 2];
#pragma unroll
  for (int half = 0; half < kProductTiles * 2; ++half) {
    const int row = place.row_warp * kWarpRows + half * (kTileRows / 2) + place.row_lane;
    from[half] = task.codes + task.weight_row(place.first_row, row) * row_bytes + place.column_lane * kVectorBytes;
  }
  // Copies step `turn` into stage `stage`; every turn commits one group, even if empty.
  const auto fetch = [&](int turn, int stage) {
    const int step = turn * task.column_warps + place.column_warp;
    const int column = place.first + step * S::kElements;
    if (step < place.steps && column + place.column_lane * S::kLaneElements < task.columns) {
      const int64_t offset = int64_t{column} * kBits / 8;
#pragma unroll
      for (int half = 0; half < kProductTiles * 2; ++half) {
        copy_codes(ring + stage * kStageVectors + half * kWarp, from[half] + offset);
      }
    }
  };

  const int turns = (place.steps + task.column_warps - 1) / task.column_warps;
  if (turns > 0) stage_chunk<kBits>(task, place, 0, chunks);
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
        stage_chunk<kBits>(task, place, chunk + 1, chunks + (chunk + 1) % 2 * chunk_bytes);
    }
    fetch(turn + kProductStages - 1, stage == 0 ? kProductStages - 1 : stage - 1);  // read a turn ago
    copy_commit();
    if (turn * task.column_warps + place.column_warp < place.steps) {
      multiply_step<T, kBits, kTokenTiles, kGroups>(task, place, ring + stage * kStageVectors, chunks + chunk % 2 * chunk_bytes,
                                                    of_chunk * task.column_warps + place.column_warp, sums);
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
  store_sums<kBits, kTokenTiles>(task, place, sums, shared);
  __syncthreads();
  finish<T, kTokenTiles>(task, place.first_row, shared);
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
  const int64_t first = static_cast<int64_t>(blockIdx.x / task.splits) * (task.block_rows() >> task.halved());
  const int64_t last = min(first + (task.block_rows() >> task.halved()), task.rows >> task.halved());
  for (int64_t row = first + threadIdx.x; row < last; row += kProductThreads) {
    static_cast<T*>(task.out)[row] = Element<T>::round(0.0f);
  }
}

// Rows of x of a block: all, that of a pair, or those of several pairs.
enum class Rows { kAll, kPair, kPairs };

template <typename T, int kBits, int kTokenTiles, int kGroups, Rows kRows>
__global__ void __launch_bounds__(kProductThreads, product_blocks(kTokenTiles)) multiply(const Task task) {
  if constexpr (kRows == Rows::kAll) {
    multiply_rows<T, kBits, kTokenTiles, kGroups>(task);
  } else {
    // Offsets of weight s: s * rows * columns * bits / 8 bytes of codes, s * rows * columns / group scales and minima. All
    // blocks of a cluster have the same pairs, so they exit together.
    const int64_t pair = blockIdx.y;
    const int64_t slot = task.slot[pair];
    Together own = {{task}, nullptr, nullptr};
    own.codes = task.codes + slot * task.rows * (int64_t{task.columns} * kBits / 8);
    const int64_t groups = slot * task.rows * (task.columns >> task.group_shift);
    own.scale = static_cast<const T*>(task.scale) + groups;
    own.minimum = static_cast<const T*>(task.minimum) + groups;
    if (task.bias != nullptr) own.bias = static_cast<const T*>(task.bias) + slot * task.rows;
    const bool none = slot < 0 || slot >= task.weights;
    if (none || kRows == Rows::kPair) {
      own.x = static_cast<const T*>(task.x) + pair / task.pairs_of_row * task.columns;
      own.out = static_cast<T*>(task.out) + pair * (task.rows >> own.halved());
    }
    if (none) return store_zeros<T>(own);
    if constexpr (kRows == Rows::kPair) {
      multiply_rows<T, kBits, kTokenTiles, kGroups>(static_cast<const Alone&>(own));
    } else {
      constexpr int kMost = kTokenTiles * kTileTokens;
      __shared__ int found[2 * kMost];
      static_assert(sizeof(found) <= kFoundBytes);
      own.pair = found;
      own.row_of = found + kMost;
      own.tokens = find_together(task, static_cast<int>(pair), slot, found, found + kMost);
      if (own.tokens > 0) multiply_rows<T, kBits, kTokenTiles, kGroups>(own);
    }
  }
}

struct Limits {
  int multiprocessors, shared_bytes;  // shared_bytes: of a block, for what `Task::shared_bytes` counts
};

// Fills parameters that are 0 from the table of launch sizes; if shared memory does not suffice, one warp per row range, which
// needs least.
void choose(Task& task, int step, const Limits& device, bool clusters) {
  if (task.column_warps == 0) {
    task.column_warps = product_column_warps(task.tokens);
    Task least = task;
    least.splits = 1;
    least.chunk_steps = kProductLeastChunk;
    if (least.shared_bytes(step) > device.shared_bytes) task.column_warps = 1;
  }
  const int64_t blocks = divided_up(task.rows, task.block_rows()) * task.pairs;
  if (task.splits == 0) {
    const int turns = (task.columns + step - 1) / step / task.column_warps;
    task.splits = 1;
    while (clusters && task.splits < kProductSplits && !fills(blocks * task.splits, device.multiprocessors) &&
           turns >= 2 * task.splits * kProductLeastSteps) {
      task.splits *= 2;
    }
  }
  if (task.chunk_steps == 0) {
    task.chunk_steps = kProductChunk;
    while (task.chunk_steps > kProductLeastChunk && task.shared_bytes(step) > kProductSharedBytes) task.chunk_steps /= 2;
  }
  // one that was asked for, too
  while (task.chunk_steps > kProductLeastChunk && task.shared_bytes(step) > device.shared_bytes) task.chunk_steps /= 2;
}

template <typename T, int kBits, int kTokenTiles, int kGroups, Rows kRows = Rows::kAll>
void launch_kernel(Task task, const Device& device) {
  constexpr int kStep = Step<kBits>::kElements;
  static std::atomic<int> known[kDevices];
  const auto kernel = multiply<T, kBits, kTokenTiles, kGroups, kRows>;
  const Limits limits = {device.multiprocessors(), device.block_shared_bytes() - kFoundBytes};
  const bool clusters = has_clusters(kernel, limits.shared_bytes, device, known);
  STD_TORCH_CHECK(clusters || task.splits <= 1, "linear_groups: splits must be 1 on a device without clusters, found ",
                  task.splits);
  choose(task, kStep, limits, clusters);
  const int shared_bytes = task.shared_bytes(kStep);
  STD_TORCH_CHECK(shared_bytes <= limits.shared_bytes, "linear_groups: needs ", shared_bytes,
                  " bytes of shared memory a block, this device has ", limits.shared_bytes, "; use dequantize_groups");
  const int64_t blocks = divided_up(task.rows, task.block_rows()) * task.splits;
  launch_clusters(kernel, dim3(blocks, task.pairs), kProductThreads, shared_bytes, task.splits, device, task);
}

template <typename T, int kBits, int kGroups>
void launch_tokens(const Task& task, const Device& device) {
  if (task.slot == nullptr) {
    const auto run = task.tokens <= kTileTokens       ? launch_kernel<T, kBits, 1, kGroups>
                     : task.tokens <= 2 * kTileTokens ? launch_kernel<T, kBits, 2, kGroups>
                                                      : launch_kernel<T, kBits, 4, kGroups>;
    return run(task, device);
  }
  const auto run = task.tokens == 1             ? launch_kernel<T, kBits, 1, kGroups, Rows::kPair>
                   : task.tokens <= kTileTokens ? launch_kernel<T, kBits, 1, kGroups, Rows::kPairs>
                                                : launch_kernel<T, kBits, 2, kGroups, Rows::kPairs>;
  run(task, device);
}

template <typename T>
void launch_bits(const Task& task, int64_t bits, const Device& device) {
  const auto run = bits == 8                                         ? launch_tokens<T, 8, 1>
                   : 1 << task.group_shift >= Step<4>::kLaneElements ? launch_tokens<T, 4, 1>
                                                                     : launch_tokens<T, 4, 2>;
  run(task, device);
}

const void* checked(const char* name, const Tensor& tensor, ScalarType dtype, int64_t numel, const Tensor& x) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "linear_groups: ", name,
                  " must be on CUDA device ", x.get_device_index());
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous() &&
                      aligned(tensor.const_data_ptr(), kVectorBytes),
                  "linear_groups: ", name, " must be ", torch::headeronly::toString(dtype), ", contiguous, of ", numel,
                  " elements from an address of whole vectors of ", kVectorBytes, " bytes, found ",
                  torch::headeronly::toString(tensor.scalar_type()), " of ", tensor.numel());
  return tensor.const_data_ptr();
}

bool power_of_two_up_to(int64_t value, int64_t most) { return value > 0 && value <= most && (value & (value - 1)) == 0; }

Tensor launch_on(const Tensor& x, Task task, int64_t bits, int64_t rows, int64_t columns) {
  const TensorDevice device(x);
  const int64_t sizes[] = {rows, columns};
  Tensor out = torch::stable::new_empty(x, sizes);
  if (out.numel() == 0) return out;
  task.out = out.mutable_data_ptr();
  x.scalar_type() == ScalarType::Half ? launch_bits<__half>(task, bits, device)
                                      : launch_bits<__nv_bfloat16>(task, bits, device);
  return out;
}

// A task of `weights` weights of `rows` rows, checked.
Task task_of(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& scale, const std::optional<Tensor>& minimum,
             const std::optional<Tensor>& row_scale, int64_t codes_kind, int64_t group_size, int64_t group_rows, int64_t rows,
             int64_t weights) {
  STD_TORCH_CHECK(codes_kind <= 1 && scale.has_value() && minimum.has_value() && !row_scale.has_value() && group_rows == 1,
                  "linear_groups: this format is to be dequantized");
  const int64_t bits = codes_kind == 0 ? 4 : 8;
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "linear_groups: x must be Half or BFloat16, found ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2, "linear_groups: x must be [tokens, columns] on a CUDA device");
  const int64_t columns = x.size(1);
  STD_TORCH_CHECK(group_size >= 16 && power_of_two_up_to(group_size, kLargestGroup),
                  "linear_groups: group_size must be 16, 32, 64 or 128, found ", group_size);
  STD_TORCH_CHECK(rows >= 0 && columns < (int64_t{1} << 30) && columns % group_size == 0 && columns * bits % 128 == 0,
                  "linear_groups: columns must be whole groups and whole vectors of 16 bytes, found ", columns);
  const int64_t groups = weights * rows * (columns / group_size);
  Task task = {};
  task.x = checked("x", x, dtype, x.size(0) * columns, x);
  task.codes = static_cast<const uint8_t*>(checked("codes", codes, ScalarType::Byte, weights * rows * columns * bits / 8, x));
  task.scale = checked("scale", *scale, dtype, groups, x);
  task.minimum = checked("offset", *minimum, dtype, groups, x);
  task.rows = rows;
  task.columns = static_cast<int>(columns);
  task.group_shift = 0;
  while (1 << task.group_shift < group_size) ++task.group_shift;
  return task;
}

// column_warps, splits, chunk_steps: 0 for the table of launch sizes.
Tensor linear_groups(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& scale,
                     const std::optional<Tensor>& offset, const std::optional<Tensor>& row_scale, int64_t codes_kind,
                     int64_t group_size, int64_t group_rows, bool, int64_t rows, const Tensor& bias, int64_t column_warps,
                     int64_t splits, int64_t chunk_steps) {
  Task task = task_of(x, codes, scale, offset, row_scale, codes_kind, group_size, group_rows, rows, 1);
  const int64_t tokens = x.size(0);
  STD_TORCH_CHECK(tokens <= kProductTokens, "linear_groups: ", kProductTokens, " tokens at most, found ", tokens);
  STD_TORCH_CHECK((column_warps == 0 || power_of_two_up_to(column_warps, kWarps)) &&
                      (splits == 0 || power_of_two_up_to(splits, kProductSplits)) &&
                      (chunk_steps == 0 || (chunk_steps >= kProductLeastChunk && power_of_two_up_to(chunk_steps, 64))),
                  "linear_groups: no such launch: column_warps ", column_warps, ", splits ", splits, ", chunk_steps ",
                  chunk_steps);
  task.bias =
      bias.numel() > 0 || rows == 0 ? checked("bias", bias, x.scalar_type(), rows, x) : nullptr;  // empty: there is none
  task.tokens = static_cast<int>(tokens);
  task.column_warps = static_cast<int>(column_warps);
  task.splits = static_cast<int>(splits);
  task.chunk_steps = static_cast<int>(chunk_steps);
  task.pairs = 1;

  return launch_on(x, task, codes_kind == 0 ? 4 : 8, tokens, rows);
}

// x [tokens, columns]; codes, scale, minimum and bias of `weights` weights of `rows` rows, concatenated; slot int64 [pairs], as
// many for each row of x in order. limit: see `Task`, 0 for none. of_tokens: number of tokens of the pairs, none of which has a
// weight twice; 0: the rows of x.
Tensor linear_groups_indexed(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& scale,
                             const std::optional<Tensor>& offset, const std::optional<Tensor>& row_scale, int64_t codes_kind,
                             int64_t group_size, int64_t group_rows, bool, int64_t rows, const Tensor& slot,
                             const std::optional<Tensor>& bias, int64_t form, int64_t activation, double limit,
                             double up_offset, int64_t of_tokens) {
  const int64_t bits = codes_kind == 0 ? 4 : 8;
  STD_TORCH_CHECK(rows > 0 && x.dim() == 2 && x.size(1) * bits >= 8,
                  "linear_groups_indexed: x and the weights must not be empty");
  const int64_t weights = codes.numel() / (rows * x.size(1) * bits / 8);
  Task task = task_of(x, codes, scale, offset, row_scale, codes_kind, group_size, group_rows, rows, weights);
  const int64_t tokens = x.size(0);
  const int64_t pairs = slot.numel();
  const bool halved = form >= kGateFirst;
  task.slot = static_cast<const int64_t*>(checked("slot", slot, ScalarType::Long, pairs, x));
  task.bias = bias.has_value() ? checked("bias", *bias, x.scalar_type(), weights * rows, x) : nullptr;
  const int64_t most = of_tokens > 0 ? of_tokens : std::max<int64_t>(1, tokens);  // pairs of one weight
  task.tokens = static_cast<int>(std::min<int64_t>(product_pairs(pairs, weights), most));
  task.pairs = static_cast<int>(pairs);
  task.pairs_of_row = static_cast<int>(pairs / std::max<int64_t>(1, tokens));
  task.weights = weights;
  task.form = static_cast<int>(form);
  task.activation = static_cast<int>(activation);
  task.limit = limit > 0 ? static_cast<float>(limit) : INFINITY;
  task.up_offset = static_cast<float>(up_offset);

  return launch_on(x, task, bits, pairs, halved ? rows / 2 : rows);
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("linear_groups", TORCH_BOX(&linear_groups));
  library.impl("linear_groups_indexed", TORCH_BOX(&linear_groups_indexed));
}

}  // namespace
}  // namespace zero_inference::quantization
