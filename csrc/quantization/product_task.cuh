// What a block of a product (product_kernel.cuh) does: its rows of the weight, columns and tokens, and how tokens and scales
// come into shared memory.
#pragma once

#include "../operators.cuh"
#include "product.cuh"

namespace zero_inference::quantization {

constexpr int kWarps = kProductThreads / kWarp;
constexpr int kWarpRows = kProductTiles * kTileRows;
constexpr int kSlice = 128;  // columns: the unit in which blocks of a cluster split them, whole steps and whole groups
constexpr int kLargestGroup = 128;
constexpr int kWordBytes = 4;
constexpr int kPairsWindow = 1024;  // pairs among which a block looks for those of its weight
constexpr int kFoundBytes = 128;    // of shared memory for those, at most
constexpr int kRingVectors = kWarps * kProductStages * kProductTiles * 2 * kWarp;

// Result of a pair: all rows; f of each; or f(gate) * up, with rows of gate first, up first, or interleaved. As in
// zero_inference/kernels/products.py.
enum Form : int { kPlain, kActivated, kGateFirst, kUpFirst, kInterleaved };

struct Task {
  const void* x;
  const uint8_t* codes;
  const void* scale;       // [rows / group_rows, row_groups], or null
  const void* offset;      // minima, or zero points or null
  const float* row_scale;  // or null
  const void* bias;        // or null
  void* out;
  int64_t rows;
  int columns, tokens, group_shift, row_groups;
  int group_rows;  // of `Scales::kSums`, 1 otherwise
  bool divides;    // row scales divide
  int column_warps, block_rows, splits, chunk_steps;
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
  void split_columns(int warps) {
    column_warps = warps;
    block_rows = kWarps / warps * kWarpRows;
  }
  template <typename F>
  __host__ __device__ int chunk_columns() const {
    return column_warps * chunk_steps * F::kElements;
  }
  __host__ __device__ int slices() const { return (columns + kSlice - 1) / kSlice; }
  // Bytes of a row's scales of a chunk, kBytes each: an odd number of vectors avoids bank conflicts. Single bytes are copied in
  // words, wherever in one the first of them is.
  template <typename F, int kBytes>
  __host__ __device__ int stride() const {
    if (kBytes == 0) return 0;
    const int bytes = (chunk_columns<F>() >> group_shift) * kBytes + (kBytes == 1 ? 2 * (kWordBytes - 1) : 0);
    return (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes | kVectorBytes;
  }
  template <typename F>
  __host__ __device__ int input_bytes() const {
    return tokens * chunk_columns<F>() * 2;
  }
  template <typename F>
  __host__ __device__ int scale_bytes() const {
    return block_rows * stride<F, F::kScaleBytes>();
  }
  template <typename F>
  __host__ __device__ int chunk_bytes() const {
    return input_bytes<F>() + scale_bytes<F>() + block_rows * stride<F, F::kOffsetBytes>();
  }
  // One buffer suffices without a second chunk.
  template <typename F>
  int shared_bytes() const {
    const int most = (slices() + splits - 1) / splits * kSlice;
    return kRingVectors * kVectorBytes + chunk_bytes<F>() * (most > chunk_columns<F>() ? 2 : 1);
  }
};

// One pair. Gate and up in two halves of the weight: a block has as many rows of each, the first half's first.
struct Alone : Task {
  __device__ int halved() const { return form >= kGateFirst ? 1 : 0; }
  __device__ bool in_two_parts() const { return form == kGateFirst || form == kUpFirst; }
  __device__ int64_t weight_row(int64_t first, int local) const {
    if (!in_two_parts()) return min(first + local, rows - 1);
    const int half = block_rows / 2;
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
template <typename F>
struct Place {
  int64_t first_row;
  int first, last;  // columns
  int steps;        // of the block
  int row_warp, column_warp, row_lane, column_lane;

  __device__ explicit Place(const Task& task) {
    const int split = static_cast<int>(blockIdx.x % task.splits);
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    first_row = static_cast<int64_t>(blockIdx.x / task.splits) * task.block_rows;
    first = static_cast<int>(int64_t{task.slices()} * split / task.splits) * kSlice;
    last = min(task.columns, static_cast<int>(int64_t{task.slices()} * (split + 1) / task.splits) * kSlice);
    steps = (last - first + F::kElements - 1) / F::kElements;
    column_warp = warp % task.column_warps;
    row_warp = warp / task.column_warps;
    row_lane = lane / kRowShares;
    column_lane = lane % kRowShares;
  }
};

// Tokens of a chunk, in the order in which lanes of a warp read them. Zeros after the last column.
template <typename F, typename AnyTask>
__device__ __forceinline__ void stage_input(const AnyTask& task, const Place<F>& place, int chunk_first, uint4* to) {
  constexpr int kStepVectors = F::kElements / 8;
  const int shift = log2_of(task.template chunk_columns<F>() / 8);
  const int stop = place.first + place.steps * F::kElements;
  const uint16_t* x = static_cast<const uint16_t*>(task.x);
#pragma unroll 1  // nothing waits for these copies
  for (int index = threadIdx.x; index < task.tokens << shift; index += kProductThreads) {
    const int token = index >> shift;
    const int vector = index - (token << shift);
    const int column = chunk_first + vector * 8;
    if (column >= stop) continue;
    const int of_step = vector % kStepVectors;
    const int part = vector / kStepVectors * F::kInputs + of_step % F::kInputs;
    const bool there = column < task.columns;
    const uint16_t* from = x + (there ? task.x_row(token) * task.columns + column : 0);
    copy_or_zeros<kVectorBytes>(to + (part * task.tokens + token) * kRowShares + of_step / F::kInputs, from, there);
  }
}

// Scales of a chunk, and minima after them, kBytes at a time (2: not asynchronous). Zeros after the last group of a row.
template <typename F, int kBytes, typename AnyTask>
__device__ __forceinline__ void stage_groups(const AnyTask& task, const Place<F>& place, int chunk_first, uint8_t* to) {
  constexpr int kItem = F::kScaleBytes;
  constexpr int kInUnit = kBytes / kItem;
  constexpr bool kMinima = F::kScales == Scales::kMinima;
  const int first = chunk_first >> task.group_shift;
  const int stop = min(chunk_first + task.template chunk_columns<F>(), place.first + place.steps * F::kElements);
  const int shift = log2_of((task.template chunk_columns<F>() >> task.group_shift) / kInUnit);
  const int rows = task.block_rows;
  const int stride = task.template stride<F, kItem>();
#pragma unroll 1
  for (int index = threadIdx.x; index < (kMinima ? 2 * rows : rows) << shift; index += kProductThreads) {
    const int line = index >> shift;  // the rows of the scales, then those of the minima
    const int unit = index - (line << shift);
    const int group = first + unit * kInUnit;
    if (group << task.group_shift >= stop) continue;
    const uint8_t* from = static_cast<const uint8_t*>(kMinima && line >= rows ? task.offset : task.scale);
    int64_t row = task.weight_row(place.first_row, line & (rows - 1));
    if constexpr (F::kScales == Scales::kSums) row = static_cast<uint32_t>(row) / static_cast<uint32_t>(task.group_rows);
    const bool there = group < task.row_groups;
    from += (row * task.row_groups + (there ? group : 0)) * kItem;
    uint8_t* slot = to + line * stride + unit * kBytes;
    if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(slot) = there ? *reinterpret_cast<const uint16_t*>(from) : 0;
    } else {
      copy_or_zeros<kBytes>(slot, from, there);
    }
  }
}

// Address of a row's first scale or zero point within its word, where these are bytes: rows begin anywhere.
__device__ __forceinline__ uint32_t phase(const Task& task, const void* source, int64_t row) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(source) + row * task.row_groups) % kWordBytes;
}

// Single bytes of a chunk, in whole words around them, the first one at phase + first group % 4. After a row's last group lie
// bytes of others.
template <typename F, typename AnyTask>
__device__ __forceinline__ void stage_bytes(const AnyTask& task, const Place<F>& place, int chunk_first, const void* source,
                                            uint8_t* to) {
  constexpr int kThreadsOfLine = 8;
  const int first = chunk_first >> task.group_shift;
  const int bytes = min(task.template chunk_columns<F>() >> task.group_shift, task.row_groups - first);
  const int stride = task.template stride<F, 1>();
#pragma unroll 1
  for (int line = threadIdx.x / kThreadsOfLine; line < task.block_rows; line += kProductThreads / kThreadsOfLine) {
    const int64_t row = task.weight_row(place.first_row, line);
    const int before = static_cast<int>(phase(task, source, row)) + first % kWordBytes;
    const uint8_t* from = static_cast<const uint8_t*>(source) + row * task.row_groups + first - before;
    const int begin = before / kWordBytes * kWordBytes;  // the words before have none of the chunk
#pragma unroll 1
    for (int at = begin + threadIdx.x % kThreadsOfLine * kWordBytes; at < before + bytes; at += kThreadsOfLine * kWordBytes) {
      copy_or_zeros<kWordBytes>(to + line * stride + at, from + at, true);
    }
  }
}

template <typename F, typename AnyTask>
__device__ __forceinline__ void stage_chunk(const AnyTask& task, const Place<F>& place, int chunk, uint8_t* to) {
  const int chunk_first = place.first + chunk * task.template chunk_columns<F>();
  stage_input<F>(task, place, chunk_first, reinterpret_cast<uint4*>(to));
  to += task.template input_bytes<F>();
  if constexpr (F::kScaleBytes == 1) stage_bytes<F>(task, place, chunk_first, task.scale, to);
  if constexpr (F::kOffsetBytes == 1) {
    if (task.offset != nullptr) stage_bytes<F>(task, place, chunk_first, task.offset, to + task.template scale_bytes<F>());
  }
  if constexpr (F::kScales == Scales::kSums) {
    if (task.scale != nullptr) stage_groups<F, 4>(task, place, chunk_first, to);
  } else if constexpr (F::kScaleBytes == 2) {
    // Offsets: groups in a row, before this chunk, and in a chunk.
    const int groups =
        task.row_groups | (chunk_first >> task.group_shift) | (task.template chunk_columns<F>() >> task.group_shift);
    if (groups % 8 == 0) {
      stage_groups<F, 16>(task, place, chunk_first, to);
    } else if (groups % 2 == 0) {
      stage_groups<F, 4>(task, place, chunk_first, to);
    } else {
      stage_groups<F, 2>(task, place, chunk_first, to);
    }
  }
}

// Launch the kernel of a format, for x in __half or else __nv_bfloat16: product_minima.cu, product_zero_points.cu and
// product_floats.cu.
void multiply_minima(const Task& task, Codes codes, bool half, const Device& device);
void multiply_zero_points(const Task& task, Codes codes, bool half, const Device& device);
void multiply_floats(const Task& task, Codes codes, const Device& device);  // e2m1 in groups of 32 and 16, e4m3

}  // namespace zero_inference::quantization
