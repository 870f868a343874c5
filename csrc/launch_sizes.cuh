// Every launch size of every kernel: threads a block, rows a block, vectors a thread, blocks a launch, shared memory of a ring.
//
// Measured on H200s; tables lie in benchmarks/results/h200 unless a line says otherwise, reasons in benchmarks/LOG.md. Sizes
// without a number were not swept. A row's size depends on the row's length alone, so that a row has the same bits whatever it
// is batched with; sizes that change the order of sums say so.
#pragma once

#include <cstdint>

#include "elements.cuh"

namespace zero_inference::norms {

template <typename T, int kThreads, int kVectors>
struct RowShape;  // kThreads threads share a row, kVectors 16-byte vectors each, in registers (rows.cuh)
template <typename T, int kThreads, int kVectors, int kTensors>
struct RingShape;  // the same threads, with rows of kTensors tensors passing through shared memory (rows.cuh)

// Threads of a block whose rows have one warp each: an SM holds 32 blocks at most, half of its 64 warps.
constexpr int kOneWarpRowThreads = 4 * kWarp;

// --- Forward passes of all norms ---
//
// A row is held in registers, with a block a row: 4090 GB/s; through a ring 3790 (rms, 65536 x 4096 in bfloat16); fewer blocks
// an SM cost 10% and up (norm_occupancy.tsv).

// Calls `visit` with the shape for rows of `columns` elements, or is false if there is none. Chosen from those that
// benchmarks/norm_shapes.cu times (norm_shapes_bf16.tsv, norm_shapes_fp32.tsv).
//
// kReads: tensors as large as x that are read. kHeavy: PolyNorm, and layer_norm of one tensor, whose second sum waits for the
// first; with eight elements a vector these want fewer threads a row where one tensor is read.
template <typename T, int kReads, bool kHeavy, typename Visit>
bool with_forward_shape(int64_t columns, Visit visit) {
  const int64_t vectors = columns / kVector<T>;
  if (vectors <= 32) return visit(RowShape<T, 32, 1>{});
  if (vectors <= 64) return visit(RowShape<T, 32, 2>{});
  if constexpr (kReads == 1 && kHeavy && kVector<T> == 8) {
    if (vectors <= 128) return visit(RowShape<T, 32, 4>{});
    if (vectors <= 160) return visit(RowShape<T, 32, 5>{});
    if (vectors <= 192) return visit(RowShape<T, 64, 3>{});
    if (vectors <= 256) return visit(RowShape<T, 64, 4>{});
    if (vectors <= 512) return visit(RowShape<T, 128, 4>{});
  } else {
    if (vectors <= 128) return visit(RowShape<T, 64, 2>{});
    if (vectors <= 192) return visit(RowShape<T, 64, 3>{});
    if (vectors <= 256) return visit(RowShape<T, 128, 2>{});
    if (vectors <= 384) return visit(RowShape<T, kReads == 1 ? 128 : 256, kReads == 1 ? 4 : 2>{});
    if constexpr (kReads == 1) {
      if (vectors <= 512) return visit(RowShape<T, 256, 2>{});
    } else if constexpr (!kHeavy) {
      if (vectors <= 512) return visit(RowShape<T, 512, 1>{});
    }
  }
  if (vectors <= 640) return visit(RowShape<T, 160, 4>{});
  if constexpr (kReads > 1 && !kHeavy) {
    if (vectors <= 1024) return visit(RowShape<T, 512, 2>{});
  }
  if (vectors <= 1024) return visit(RowShape<T, 256, 4>{});
  if constexpr (kReads == 1 && !kHeavy) {
    if (vectors <= 1536) return visit(RowShape<T, 256, 8>{});
  }
  if (vectors <= 2048) return visit(RowShape<T, 512, 4>{});
  if constexpr (kReads == 1) {
    if (vectors <= 4096) return visit(RowShape<T, 512, 8>{});
  }
  if (vectors <= 4096) return visit(RowShape<T, 1024, 4>{});
  return false;
}

// --- Rings in shared memory (backward passes) ---

// Bytes of a block's ring with two stages (an H100's block can have 227 KB, and the sums need some), and bytes of a stage up to
// which there are three, because a short one covers less of the memory's latency.
constexpr int kRingBudget = 200 << 10;
constexpr int kThreeStages = 16 << 10;
constexpr int ring_stages(int stage_bytes) { return stage_bytes <= kThreeStages ? 3 : 2 * stage_bytes <= kRingBudget ? 2 : 1; }

// --- Backward passes of rms_norm and layer_norm ---

// By elements, not vectors: a thread holds an accumulator in registers for each element's weight and bias gradient. rms: 3978
// GB/s (65536 x 4096 in bfloat16; 26_11_21_19_14).
template <typename T, int kTensors, typename Visit>
bool with_norm_backward_shape(int64_t columns, Visit visit) {
  constexpr int kEight = 8 / kVector<T>;  // vectors of eight elements
  if (columns <= 256) return visit(RingShape<T, 32, kEight, kTensors>{});
  if (columns <= 512) return visit(RingShape<T, 32, 2 * kEight, kTensors>{});
  if (columns <= 1024) return visit(RingShape<T, 32, 4 * kEight, kTensors>{});
  if (columns <= 2048) return visit(RingShape<T, 128, 2 * kEight, kTensors>{});
  if (columns <= 4096) return visit(RingShape<T, 256, 2 * kEight, kTensors>{});
  if (columns <= 8192) return visit(RingShape<T, 512, 2 * kEight, kTensors>{});
  if (columns <= 16384) return visit(RingShape<T, 512, 4 * kEight, kTensors>{});
  return false;
}

// Blocks that an SM should hold, for __launch_bounds__: 768 threads of the common shapes, which leaves each 80 registers.
// Larger blocks, and those with several rows, are left to the compiler.
constexpr int kBackwardThreads = 768;
constexpr int kLargestBounded = 256;
constexpr int bounded_blocks(int block, int threads_of_row) {
  return block <= kLargestBounded && threads_of_row > kWarp ? kBackwardThreads / block : 1;
}

// The least rows of a part of a weight gradient (times the rows that a block takes at once), where that fills the device: a
// part of rms_norm costs 8 bytes a column, each of its rows 6 or more. Sets the order of sums.
constexpr int kRowsOfPart = 16;

// The second kernel, which sums the parts: 32 columns a block, so that a warp reads 128 contiguous bytes, and 16 threads for
// each. Sets the order of sums.
constexpr int kColumnLanes = 32;
constexpr int kPartLanes = 16;
constexpr int kColumnThreads = kColumnLanes * kPartLanes;

// --- Backward pass of PolyNorm ---

// In registers as long as what two passes over the row need of them fits, through the ring beyond (norm_shapes_*.tsv, poly_bwd
// and mul_poly_bwd; at 65536 x 4096 in bfloat16 the held 128 x 4 takes 402 us and the best ring 414, with a factor the ring of
// 64 x 8 649 and the best held shape 667).
template <typename T, bool kMul, typename Visit>
bool with_poly_backward_shape(int64_t columns, Visit visit) {
  const int64_t vectors = columns / kVector<T>;
  if (vectors <= 32) return visit(RowShape<T, 32, 1>{});
  if (vectors <= 64) return visit(RowShape<T, 32, 2>{});
  if (vectors <= 128) return visit(RowShape<T, 32, 4>{});
  if constexpr (kMul) {
    if (vectors <= 192) return visit(RowShape<T, 64, 3>{});
    if (vectors <= 256) return visit(RowShape<T, 64, 4>{});
    if (vectors <= 512) return visit(RingShape<T, 64, 8, 3>{});
    if (vectors <= 640) return visit(RingShape<T, 128, 5, 3>{});
    if (vectors <= 1024) return visit(RingShape<T, 128, 8, 3>{});
    if (vectors <= 2048) return visit(RingShape<T, 256, 8, 3>{});
    if (vectors <= 4096) return visit(RingShape<T, 512, 8, 3>{});
  } else {
    if (vectors <= 160) return visit(RowShape<T, 32, 5>{});
    if (vectors <= 256) return visit(RowShape<T, 64, 4>{});
    if (vectors <= 512) return visit(RowShape<T, 128, 4>{});
    if (vectors <= 640) return visit(RowShape<T, 128, 5>{});
    if (vectors <= 1024) return visit(RowShape<T, 256, 4>{});
    if (vectors <= 2048) return visit(RowShape<T, 512, 4>{});
    if (vectors <= 4096) return visit(RingShape<T, 512, 8, 2>{});
  }
  return false;
}

// Blocks of a held backward pass, over those that the device holds at once: rows of a block share a sum, so a block a row
// writes more (420.7 us at 65536 x 4096 in bfloat16), and one wave waits for its slowest block (404.1 us, against 401.7 with
// four; norm_shapes_bf16.tsv, poly_bwd). A ring is one wave: its blocks are persistent. Sets the order of sums.
constexpr int kPolyWaves = 4;
constexpr int kRingWaves = 1;

// The second kernel, which sums the weight gradients of the rows, a block an expert or one for all: few experts are few blocks.
// 3660 GB/s grouped (65536 x 1280, 26_11_21_19_14). Sets the order of sums.
constexpr int kSegmentThreads = 1024;

// --- Rows that are too long for the registers, or not aligned: no model has them ---

// A block a row, which is read again for each sum. More threads would leave no room for a second block where a thread needs
// more than 32 registers.
constexpr int kLoopThreads = 512;
constexpr int kLoopBlocks = 4;  // of an SM, all that fit of its 2048 threads; rows go round

// Parts of their weight gradient, which bound the scratch memory. Set the order of sums.
constexpr int kLoopRowsOfPart = 64;
constexpr int kLoopParts = 256;

}  // namespace zero_inference::norms

namespace zero_inference::quantization {

// int8 and int4 groups back to weights: 3340 to 3500 GB/s, 83 to 87% of a copy inside the device (h200-shared/dequantize.txt).
constexpr int kThreads = 256;
constexpr int kUnroll = 4;        // loads in flight a thread: the latency of HBM wants several
constexpr int kBlocksPerSm = 32;  // four waves of full occupancy; what is left goes round the grid-stride loop

// --- Products of a few tokens with codes (product_kernel.cuh) ---

// Eight warps a block, which share its rows and its columns between them, each with 32 rows at once: tokens read from shared
// memory serve two tiles of 16 rows. Three stages of 2 KB a warp, of which two are on their way: with two blocks an SM
// 64 KB, twice what 4.2 TB/s times a microsecond asks of each.
constexpr int kProductThreads = 256;
constexpr int kProductTiles = 2;
constexpr int kProductStages = 3;
constexpr int kProductTokens = 32;  // the most of one call

// Blocks of an SM, for __launch_bounds__: three where 80 registers a thread are enough but for a few words.
constexpr int product_blocks(int token_tiles) { return token_tiles == 1 ? 3 : 2; }

// Of a block's eight warps, those that share rows and split columns. Two rather than eight with one token take 15% off the
// products of a layer of Llama-2-13B in int4 (105 us for 123), two rather than four with eight tokens 24% (131 for 172;
// h200-graphs/quantized_products_sweep.tsv). Sets the order of sums.
constexpr int product_column_warps(int64_t tokens) { return tokens <= 16 ? 2 : 1; }

// A warp's steps between two barriers, at which the block's next tokens and scales have to be there: four where three blocks
// still fit an SM's 227 KB, else two, which is the fewest that bring those in time through the ring of stages.
constexpr int kProductChunk = 4;
constexpr int kProductLeastChunk = kProductStages - 1;
constexpr int kProductSharedBytes = 74 << 10;

// Blocks of one cluster, which split columns and add their sums through each other's shared memory: doubled until the launch
// `fills` the device, as long as each warp has two steps. Eight is what every device with clusters allows. Sets the order of
// sums.
constexpr int kProductSplits = 8;
constexpr int kProductLeastSteps = 2;

// Pairs of the same weight that a block multiplies at once: single ones where few meet, as those of one token never do, and two
// tiles of tokens where one would often not hold them all.
constexpr int product_pairs(int64_t pairs, int64_t weights) { return 4 * pairs <= weights ? 1 : pairs <= 4 * weights ? 8 : 16; }

}  // namespace zero_inference::quantization

namespace zero_inference::hand_off {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte accesses of a thread in flight
// Fills a link of 64 GB/s and 8 us: 32 * 256 * 4 * 16 bytes. All must be resident, because they wait for the first one.
constexpr int kMostBlocks = 32;
// One block copies 8 KB at once: a token of 3840 elements in 16 bits and its routing. Of several the last to finish raises the
// flag.
constexpr int kPushThreads = 512;
constexpr int kMostParts = 4;  // tensors of a call
// weighted_rows, 16 bytes a thread: four blocks for a token of 2048 elements, because each thread waits for a read per expert.
constexpr int kSumThreads = 64;
// Per fetched piece of an expert. 4 to 132 blocks copied one expert of 2.65 MB at 44 to 47 GB/s, four experts at 50 (H100).
constexpr int kFetchBlocks = 16;
// expert_fill, beside kernels that compute the previous block: 32 * 256 * 4 * 16 bytes in flight.
constexpr int kFillBlocks = 32;
// Per piece of all experts: few experts are copied by several blocks each, because one does not fill the link.
constexpr int kFillTurns = 128;
// Rows of an embedding table: 128 * 256 * 16 bytes in flight, as with kMostBlocks.
constexpr int kMostRowBlocks = 128;
constexpr int kMostExperts = 4096;  // of a layer: 8 bytes each in shared memory

}  // namespace zero_inference::hand_off

namespace zero_inference::fused {

// For decode steps, where a launch and what waits for it count.
constexpr int kRotaryThreads = 256;
constexpr int kRoutingThreads = 128;  // four tokens, a warp each

}  // namespace zero_inference::fused

namespace zero_inference::attention {

// Threads of a block, four or eight warps: eight where half of the SMs have no block, since the time of one step of a
// warp is then all that it takes. A warp copies two steps ahead, 8 KB each with rows of 128 elements of 16 bits; so three
// blocks of four warps an SM have on their way eight times what 3.35 TB/s times a microsecond asks of each.
constexpr int kLeastThreads = 128;
constexpr int kMostThreads = 256;
constexpr bool are_few(int64_t blocks, int multiprocessors) { return 2 * blocks <= multiprocessors; }

// Blocks of one cluster, which divide the keys, as kProductSplits; each warp has a step. Sets the order of sums.
constexpr int kSplits = 8;

constexpr int64_t kMostPositions = int64_t{1} << 30;

}  // namespace zero_inference::attention
