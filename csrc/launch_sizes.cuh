// Every launch size of every kernel: threads a block, rows a block, vectors a thread, blocks a launch, shared memory of a ring.
// A kernel's file names them and has none of its own.
//
// "Measured" are H200s; tables lie in benchmarks/results/h200 unless a line says otherwise, and what was learned from them is
// in benchmarks/LOG.md. A size that says "not swept" was chosen by the reason that stands beside it and measured as part of
// its kernel alone. A size may change the order of sums, and so bits, only where it says so: a row's own size depends on the
// row's length and on nothing else, so that a row has the same bits whatever it is batched with.
#pragma once

#include <cstdint>

namespace zero_inference::norms {

// The units of the tables below.
constexpr int kWarp = 32;
template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte access

template <typename T, int kThreads, int kVectors>
struct RowShape;  // kThreads threads share a row, kVectors 16-byte vectors each, in registers (rows.cuh)
template <typename T, int kThreads, int kVectors, int kTensors>
struct RingShape;  // the same threads, with rows of kTensors tensors passing through shared memory (rows.cuh)

// Rows that a warp shares come several to a block of four warps: a block of one warp would leave half of a processor's 64 warps
// empty, because it holds 32 blocks at most. Rows of more than a warp have a block each. Measured with every RowShape of one
// warp in norm_shapes_*.tsv; other numbers of warps were not swept.
constexpr int kOneWarpRowsBlock = 4 * kWarp;

// --- Forward passes of all norms ---
//
// A row is held in registers; a block a row (or a block for the rows of four warps), so that the hardware's scheduler keeps
// loads in flight: the ring gave 3790 GB/s (a table that was not kept) where this gave 4090 with plain loads (rms, 65536 x
// 4096 in bfloat16), and fewer blocks a processor cost 10% and up (norm_occupancy.tsv).

// Calls `visit` with the shape for rows of `columns` elements, or is false if there is none. Chosen from those that
// benchmarks/norm_shapes.cu times (norm_shapes_bf16.tsv, norm_shapes_fp32.tsv).
//
// kReads: tensors as large as x that are read. kHeavy: PolyNorm, and layer_norm of one tensor, whose second sum waits for the
// first; with eight elements a vector these want fewer threads a row where one tensor is read.
// So rms_norm is kReads 1 and not heavy; add_rms_norm and add_layer_norm are kReads 2 and not heavy.
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

// Stages of a ring; one is what a block works on at once, `stage_bytes` over all tensors. Not swept on their own; measured as
// part of the backward passes (rms 3978 GB/s, 65536 x 4096 in bfloat16; 26_11_21_19_14).
constexpr int ring_stages(int stage_bytes) { return stage_bytes <= kThreeStages ? 3 : 2 * stage_bytes <= kRingBudget ? 2 : 1; }

// --- Backward passes of rms_norm and layer_norm ---

// By elements, not vectors: a thread holds accumulators of weight gradients in registers, a float an element for the weight and
// one for the bias, which outlive a row. Not in norm_shapes_*.tsv, which have no backward pass of these; measured as they are
// here in 26_11_21_19_14 (rms, add_rms, layer and add_layer, bwd).
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

// Blocks that a processor should hold, for __launch_bounds__: 768 threads of the common shapes, which leaves each 80 registers.
// Larger blocks, and those with several rows, are left to the compiler. Not swept.
constexpr int kBackwardThreads = 768;
constexpr int kLargestBounded = 256;
constexpr int bounded_blocks(int block, int threads_of_row) {
  return block <= kLargestBounded && threads_of_row > kWarp ? kBackwardThreads / block : 1;
}

// The least rows of a part of a weight gradient (times the rows that a block takes at once), where that fills the device: a
// part of rms_norm costs 8 bytes a column, written and read, where each of its rows costs 6 or more, so that 16 rows make it a
// twelfth or less (layer_norm: a sixth). It sets the number of parts, and so the order of the sums over rows. Not swept.
constexpr int kRowsOfPart = 16;

// The second kernel, which sums the parts column by column in a fixed order: a block has 32 columns, so that a warp reads 128
// contiguous bytes, and 16 threads for each, over the parts. The order of the sums depends on it. Not
// swept.
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
// four; norm_shapes_bf16.tsv, poly_bwd). A ring is one wave: its blocks are persistent. Sets the order of the weights' sums.
constexpr int kPolyWaves = 4;
constexpr int kRingWaves = 1;

// The second kernel, which sums the weight gradients of the rows, a block an expert (grouped) or one for all: as many threads
// as a block can have, because few experts are few blocks. The order of the sums depends on it. Not swept on its own; the
// grouped backward pass has 3660 GB/s with it (65536 x 1280, 26_11_21_19_14).
constexpr int kSegmentThreads = 1024;

// --- Rows that are too long for the registers, or not aligned ---

// A block a row, which is read again for each sum: few threads would leave a long row's loads waiting for each other, and more
// than 512 would leave no room for a second block where a thread needs more than 32 registers. Not swept: no model has such
// rows.
constexpr int kLoopThreads = 512;
constexpr int kLoopBlocks = 4;  // of a processor, all that fit of its 2048 threads; rows go round

// Parts of their weight gradient: 64 rows each and 256 at most, which bounds the scratch memory. Set the order of the sums. Not
// swept.
constexpr int kLoopRowsOfPart = 64;
constexpr int kLoopParts = 256;

}  // namespace zero_inference::norms

namespace zero_inference::quantization {

// int8 and int4 groups back to weights: 3340 to 3500 GB/s, 83 to 87% of a copy inside the device, with these three
// (h200-shared/dequantize.txt); other values were not kept.
constexpr int kThreads = 256;
constexpr int kUnroll = 4;              // loads in flight a thread: the latency of HBM wants several
constexpr int kBlocksOfProcessor = 32;  // four waves of full occupancy; what is left goes round the grid-stride loop

// --- Products of a few tokens with codes (product.cu) ---

// Eight warps a block, which share its rows and its columns between them, each with 32 rows at once: tokens read from shared
// memory serve two tiles of 16 rows. Three stages of 2 KB a warp, of which two are on their way: with two blocks a processor
// 64 KB, twice what 4.2 TB/s times a microsecond asks of each. None of these was swept.
constexpr int kProductThreads = 256;
constexpr int kProductTiles = 2;
constexpr int kProductStages = 3;
constexpr int kProductTokens = 32;  // the most of one call

// Blocks of a processor, for __launch_bounds__: three where 80 registers a thread are enough but for a few words, which is with
// the accumulators of eight tokens.
constexpr int product_blocks(int token_tiles) { return token_tiles == 1 ? 3 : 2; }

// Of a block's eight warps, those that share rows and split columns. Two rather than eight with one token take 15% off the
// products of a layer of Llama-2-13B in int4 (105 us for 123), two rather than four with eight tokens 24% (131 for 172; 17 to
// 32 tokens were not swept; h200-graphs/quantized_products_sweep.tsv). Sets the order of sums.
constexpr int product_column_warps(int64_t tokens) { return tokens <= 16 ? 2 : 1; }

// A warp's steps between two barriers, at which the block's next tokens and scales have to be there: four where three blocks
// still fit a processor's 227 KB, else two, which is the fewest that bring those in time through the ring of stages.
constexpr int kProductChunk = 4;
constexpr int kProductLeastChunk = kProductStages - 1;
constexpr int kProductSharedBytes = 74 << 10;

// Blocks of one cluster, which split columns and add their sums through each other's shared memory: doubled until there are
// three blocks for two processors, as long as each warp has two steps. Eight is what every device with clusters allows. Sets
// the order of sums.
constexpr int kProductSplits = 8;
constexpr int kProductLeastSteps = 2;
constexpr bool product_fills(int64_t blocks, int processors) { return 2 * blocks >= 3 * int64_t{processors}; }

// How many pairs of the same weight a block multiplies at once, where it has `weights` to find them of: single ones where few
// meet, as those of one token never do, and two tiles of tokens where one would often not hold them all. Not swept.
constexpr int product_pairs(int64_t pairs, int64_t weights) { return 4 * pairs <= weights ? 1 : pairs <= 4 * weights ? 8 : 16; }

}  // namespace zero_inference::quantization

namespace zero_inference::hand_off {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte accesses of a thread in flight
// Fills a link of 64 GB/s and 8 us: 32 * 256 * 4 * 16 bytes. All must be resident, because they wait for the first one.
constexpr int kMostBlocks = 32;
// One block copies 8 KB at once: a token of 3840 elements in 16 bits and its routing. Of several the last to finish raises
// the flag. Not swept.
constexpr int kPushThreads = 512;
constexpr int kMostParts = 4;  // tensors of a call
// weighted_rows, 16 bytes a thread: four blocks for a token of 2048 elements, because each thread waits for a read per expert.
// Not swept.
constexpr int kSumThreads = 64;
// Per fetched piece of an expert. 4 to 132 blocks copied one expert of 2.65 MB at 44 to 47 GB/s, four experts at 50 (H100).
constexpr int kFetchBlocks = 16;
// expert_fill, beside kernels that compute the previous block: 32 * 256 * 4 * 16 bytes in flight. Not swept.
constexpr int kFillBlocks = 32;
// Per piece of all experts: few experts are copied by several blocks each, because one does not fill the link. Not swept.
constexpr int kFillTurns = 128;
// Rows of an embedding table: 128 * 256 * 16 bytes in flight, as with kMostBlocks. Not swept: a decode step reads 16 KB a
// token, four blocks.
constexpr int kMostRowBlocks = 128;
constexpr int kMostExperts = 4096;  // of a layer: 8 bytes each in shared memory

}  // namespace zero_inference::hand_off

namespace zero_inference::fused {

// Both kernels are for decode steps, where a launch and what waits for it count and not their threads. Not swept.
constexpr int kRotaryThreads = 256;
constexpr int kRoutingThreads = 128;  // four tokens, a warp each

}  // namespace zero_inference::fused

namespace zero_inference::attention {

// Threads of a block, four or eight warps: eight where half of the processors have no block, since the time of one step of a
// warp is then all that it takes. A warp copies two steps ahead, 8 KB each with rows of 128 elements of 16 bits; so three
// blocks of four warps a processor have on their way eight times what 3.35 TB/s times a microsecond asks of each. Not swept.
constexpr int kLeastThreads = 128;
constexpr int kMostThreads = 256;
constexpr bool are_few(int64_t blocks, int processors) { return 2 * blocks <= processors; }

// Blocks of one cluster, which divide the keys: doubled until there are three blocks for two processors, as long as each warp
// has a step. Eight is what every device with clusters allows. Sets the order of sums. Not swept.
constexpr int kSplits = 8;
constexpr bool fills(int64_t blocks, int processors) { return 2 * blocks >= 3 * int64_t{processors}; }

constexpr int kMostWidth = 256;  // of a row of keys or values, whose sums a warp has in registers
constexpr int64_t kMostPositions = int64_t{1} << 30;
constexpr int64_t kMostBlocks = 1 << 16;  // fewer than these: blocks of a grid in its second and third dimension

}  // namespace zero_inference::attention
