// Codes in registers as operands of m16n8k16 tensor-core products, and copies to shared memory with zero fill. Defines the map
// from lanes to elements, which tests/test_quantized_products.py repeats on a CPU.
#pragma once

#include "../elements.cuh"

namespace zero_inference::quantization {

// A product: 16 rows of the weight, 8 tokens, 16 columns. Lane L holds weight rows L / 4 and L / 4 + 8, token L / 4, result
// tokens 2 (L % 4) and the next; columns L % 4 of both operands. Columns may be permuted if the operands agree, so a lane uses
// 16 contiguous bytes of codes.
constexpr int kTileRows = 16;
constexpr int kTileTokens = 8;
constexpr int kRowShares = 4;   // lanes with columns of one row
constexpr int kStepBytes = 64;  // of a row's codes, 16 a lane: what a warp multiplies at once
constexpr int kVectorBytes = 16;

template <int kBits>
struct Step {
  static constexpr int kElements = kStepBytes * 8 / kBits;  // columns of a step: 128 or 64
  static constexpr int kLaneElements = kElements / kRowShares;
  static constexpr int kInputs = kLaneElements / 8;  // 16-byte vectors of x a lane and token
  static constexpr int kCodeWords = 4 / kInputs;     // of a row, that one such vector is multiplied with
  static constexpr int kProducts = 2;                // m16n8k16, of one such vector
};

// Two elements of 16 bits in a word. `fused` is a * b + c in both halves, rounded once.
template <typename T>
struct Pair {
  static constexpr bool kHalf = std::is_same_v<T, __half>;

  static __device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    if constexpr (kHalf) {
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    } else {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    }
    return d;
  }
  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&weight)[4], uint32_t x0, uint32_t x1) {
    if constexpr (kHalf) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
          : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "r"(x0), "r"(x1));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
          : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "r"(x0), "r"(x1));
    }
  }
};

// (word & mask) | bits in one instruction; of two constants the compiler makes two, on the busiest units.
__device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(bits));
  return d;
}

// Codes of a word as exact float pairs: int4 elements 0-4, 1-5, 2-6, 3-7, int8 0-1, 2-3. A code in the low bits of a number
// with known exponent adds its value (1024 in float16 has ten bits for it, 128 in bfloat16 seven); subtracting that number is
// exact.
template <typename T, int kBits>
__device__ __forceinline__ void code_pairs(uint32_t word, uint32_t (&pairs)[kBits == 4 ? 4 : 2]) {
  using P = Pair<T>;
  if constexpr (P::kHalf && kBits == 4) {  // 1 and 3 as sixteen times the code, brought back by an exact 1 / 16
#pragma unroll
    for (int i = 0; i < 4; i += 2, word >>= 8) {
      pairs[i] = P::fused(masked(word, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe400e400u);
      pairs[i + 1] = P::fused(masked(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd400d400u);
    }
  } else if constexpr (kBits == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = P::fused(masked(word >> (4 * i), 0x000f000fu, 0x43004300u), 0x3f803f80u, 0xc300c300u);
    }
  } else if constexpr (P::kHalf) {
    pairs[0] = P::fused(__byte_perm(word, 0x64646464u, 0x4140), 0x3c003c00u, 0xe400e400u);
    pairs[1] = P::fused(__byte_perm(word, 0x64646464u, 0x4342), 0x3c003c00u, 0xe400e400u);
  } else {  // the code's upper bit decides whether the 128 has to go: -128 is 0x80 * 0x186
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t codes = __byte_perm(word, 0u, i == 0 ? 0x4140 : 0x4342);
      const uint32_t without = (~codes & 0x00800080u) * 0x186u;
      pairs[i] = P::fused(masked(codes, 0x007f007fu, 0x43004300u), 0x3f803f80u, without);
    }
  }
}

// The same columns of x: int4 elements i and i + 4 as a pair, int8 in order.
template <int kBits>
__device__ __forceinline__ void input_pairs(const uint4& x, uint32_t (&pairs)[4]) {
  if constexpr (kBits == 4) {
    pairs[0] = __byte_perm(x.x, x.z, 0x5410);
    pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410);
    pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  } else {
    pairs[0] = x.x;
    pairs[1] = x.y;
    pairs[2] = x.z;
    pairs[3] = x.w;
  }
}

// 16 bytes of codes, not through L1; the row's next 64 bytes are prefetched to L2.
__device__ __forceinline__ void copy_codes(uint4* to_shared, const void* from_global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from_global) : "memory");
}

// Copies kBytes (16 or 4) if `there`, else writes zeros without reading.
template <int kBytes>
__device__ __forceinline__ void copy_or_zeros(void* to_shared, const void* from_global, bool there) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  const int bytes = there ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from_global), "r"(bytes) : "memory");
  }
}

}  // namespace zero_inference::quantization
