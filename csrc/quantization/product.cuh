// Codes in registers as operands of m16n8k16 tensor-core products, and copies to shared memory with zero fill.
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
constexpr uint32_t kInt4Center = 8;            // the zero point of symmetric codes
constexpr uint32_t kMinusZeros = 0x80008000u;  // added to a product it changes no bit of it

// Number formats of codes, as `Codes` in zero_inference/kernels/formats.py.
enum Codes : int { kInt4, kInt8, kE2M1, kE4M3 };
__host__ __device__ constexpr int bits_of(Codes codes) { return codes == kInt4 || codes == kE2M1 ? 4 : 8; }

// How a number becomes a weight.
enum class Scales {
  kMinima,      // code * scale + minimum, both 16 bits
  kZeroPoints,  // (code - zero point) * scale; zero points are bytes or, symmetric, one constant
  kE8M0,        // number * 2^(byte - 127)
  kE4M3,        // number * scale of a byte
  kSums,        // float scales multiply sums of a step
};

// kGroups: groups of a lane's row and step.
template <Codes codes, Scales scales, int groups>
struct Format {
  static constexpr Codes kCodes = codes;
  static constexpr Scales kScales = scales;
  static constexpr int kGroups = groups;
  static constexpr int kBits = bits_of(codes);
  static constexpr bool kWide = scales == Scales::kMinima || scales == Scales::kZeroPoints;
  static constexpr int kScaleBytes = kWide ? 2 : scales == Scales::kSums ? 4 : 1;
  static constexpr int kOffsetBytes = scales == Scales::kMinima ? 2 : scales == Scales::kZeroPoints && codes == kInt4 ? 1 : 0;

  // Steps of a warp
  static constexpr int kElements = kStepBytes * 8 / kBits;  // columns: 128 or 64
  static constexpr int kLaneElements = kElements / kRowShares;
  static constexpr int kInputs = kLaneElements / 8;  // 16-byte vectors of x a lane and token
  static constexpr int kCodeWords = 4 / kInputs;     // of a row, that one such vector is multiplied with
  static constexpr int kProducts = 2;                // m16n8k16, of one such vector
};

// Two elements of 16 bits in a word. `fused` is a * b + c in both halves, rounded once.
template <typename T>
struct Pair {
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr uint32_t kInt4Base = kHalf ? 0xe400e400u : 0xc300c300u;  // -1024 or -128

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

// Numbers of the codes of a word as exact pairs, of columns as in `input_pairs`. A code in the low bits of a number with known
// exponent adds its value (1024 in float16 has ten bits for it, 128 in bfloat16 seven); subtracting that number is exact, and
// so is subtracting a zero point with it (int4 only): `base` is -(1024 + zero) or -(128 + zero), zeros below 128.
template <typename T, bool kZeros>
__device__ __forceinline__ void int4_pairs(uint32_t word, uint32_t base, uint32_t (&pairs)[4]) {
  using P = Pair<T>;
  if constexpr (P::kHalf) {  // 1 and 3 as sixteen times the code, brought back by an exact 1 / 16; -(64 + zero) is base + 960
    const uint32_t sixteenth = kZeros ? P::fused(base, 0x3c003c00u, 0x63806380u) : 0xd400d400u;
#pragma unroll
    for (int i = 0; i < 4; i += 2, word >>= 8) {
      pairs[i] = P::fused(masked(word, 0x000f000fu, 0x64006400u), 0x3c003c00u, base);
      pairs[i + 1] = P::fused(masked(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, sixteenth);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = P::fused(masked(word >> (4 * i), 0x000f000fu, 0x43004300u), 0x3f803f80u, base);
    }
  }
}

// kCentered: less 128, the zero point of symmetric codes.
template <typename T, bool kCentered>
__device__ __forceinline__ void int8_pairs(uint32_t word, uint32_t (&pairs)[2]) {
  using P = Pair<T>;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (P::kHalf) {
      constexpr uint32_t kBase = kCentered ? 0xe480e480u : 0xe400e400u;
      pairs[i] = P::fused(__byte_perm(word, 0x64646464u, i == 0 ? 0x4140 : 0x4342), 0x3c003c00u, kBase);
    } else {  // 128 and the code's lower bits, less 128 or 256, or 0 or 128, as the code's upper bit says
      const uint32_t codes = __byte_perm(word, 0u, i == 0 ? 0x4140 : 0x4342);
      // -128 is 0x80 * 0x186; -256 has one more bit than -128
      const uint32_t base = kCentered ? masked(~codes, 0x00800080u, 0xc300c300u) : (~codes & 0x00800080u) * 0x186u;
      pairs[i] = P::fused(masked(codes, 0x007f007fu, 0x43004300u), 0x3f803f80u, base);
    }
  }
}

// Times 2^-126: the code's bits as exponent and mantissa of a bfloat16, subnormal where the code is. The product with 0x1040
// has the code at bits 6 and 12 (with 0x104 that of a code at bit 4), of which the masks keep the magnitude and the sign.
__device__ __forceinline__ void e2m1_pairs(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2, word >>= 8) {
    pairs[i] = (word & 0x000f000fu) * 0x1040u & 0x81c081c0u;
    pairs[i + 1] = (word & 0x00f000f0u) * 0x104u & 0x81c081c0u;
  }
}

// Columns 0 and 2, then 1 and 3. The code's bits as a bfloat16 are its number times 2^-120, brought back exactly. NaN becomes
// 480 or -480: also what lies in shared memory after the last column is finite.
__device__ __forceinline__ void e4m3_pairs(uint32_t word, uint32_t (&pairs)[2]) {
  const uint32_t even = masked(word << 4, 0x07f007f0u, (word << 8) & 0x80008000u);
  const uint32_t odd = masked(word >> 4, 0x07f007f0u, word & 0x80008000u);
  pairs[0] = Pair<__nv_bfloat16>::fused(even, 0x7b807b80u, kMinusZeros);
  pairs[1] = Pair<__nv_bfloat16>::fused(odd, 0x7b807b80u, kMinusZeros);
}

// Factors and addends of kGroups groups of a lane's row and step, each twice in a word.
template <typename T, typename F>
struct LaneGroups {
  using P = Pair<T>;
  uint32_t scale[F::kGroups], offset[F::kGroups];

  // 16-bit scales; minima follow at the same offset.
  __device__ __forceinline__ void load_wide(const uint8_t* scales, const uint8_t* minima) {
    if constexpr (F::kGroups == 1) {
      scale[0] = *reinterpret_cast<const uint16_t*>(scales) * 0x10001u;
      if constexpr (F::kOffsetBytes == 2) offset[0] = *reinterpret_cast<const uint16_t*>(minima) * 0x10001u;
    } else {
      const uint32_t two_scales = *reinterpret_cast<const uint32_t*>(scales);
      scale[0] = __byte_perm(two_scales, 0u, 0x1010);
      scale[1] = __byte_perm(two_scales, 0u, 0x3232);
      if constexpr (F::kOffsetBytes == 2) {
        const uint32_t two_minima = *reinterpret_cast<const uint32_t*>(minima);
        offset[0] = __byte_perm(two_minima, 0u, 0x1010);
        offset[1] = __byte_perm(two_minima, 0u, 0x3232);
      }
    }
  }
  // Zero points below 128 are the lower bits of -(1024 + zero) and -(128 + zero).
  __device__ __forceinline__ void set_zero(uint32_t zero) { offset[0] = zero * 0x10001u + P::kInt4Base; }

  // e2m1 times 2^-126 (`e2m1_pairs`) times `scale` is the weight times 2^-63, which is normal, so factors are scales times
  // 2^63. Exact for powers from 2^-62 to 2^64; those above are infinity or NaN, others lose bits.
  __device__ __forceinline__ void load_power(uint32_t byte) { scale[0] = min(byte * 0x80u + 63 * 0x80u, 0x7fc0u) * 0x10001u; }
  // Two e4m3 bytes; 0x7f becomes 480.
  __device__ __forceinline__ void load_floats(uint32_t bytes) {
    const uint32_t apart = __byte_perm(bytes, 0u, 0x4140);
    const uint32_t small = masked(apart << 4, 0x07f007f0u, (apart << 8) & 0x80008000u);                   // times 2^-120
    const uint32_t both = P::fused(P::fused(small, 0x7e807e80u, kMinusZeros), 0x5c005c00u, kMinusZeros);  // 2^126, 2^57
    scale[0] = __byte_perm(both, 0u, 0x1010);
    scale[F::kGroups - 1] = __byte_perm(both, 0u, 0x3232);
  }
};
constexpr float kE2M1Factor = 9223372036854775808.0f;  // 2^63, of the sums

// Weights of one row that multiply vector `part` of x, as pairs.
template <typename T, typename F>
__device__ __forceinline__ void weight_pairs(const uint32_t (&words)[4], int part, const LaneGroups<T, F>& groups,
                                             uint32_t (&pairs)[4]) {
  constexpr int kInWord = 4 / F::kCodeWords;
  const int group = F::kGroups == 1 ? 0 : part * F::kGroups / F::kInputs;
#pragma unroll
  for (int word = 0; word < F::kCodeWords; ++word) {
    const uint32_t codes = words[part * F::kCodeWords + word];
    uint32_t numbers[kInWord];
    if constexpr (F::kCodes == kInt4) {
      constexpr bool kZeros = F::kScales == Scales::kZeroPoints;
      int4_pairs<T, kZeros>(codes, kZeros ? groups.offset[group] : Pair<T>::kInt4Base, numbers);
    } else if constexpr (F::kCodes == kInt8) {
      int8_pairs<T, F::kScales == Scales::kZeroPoints>(codes, numbers);
    } else if constexpr (F::kCodes == kE2M1) {
      e2m1_pairs(codes, numbers);
    } else {
      e4m3_pairs(codes, numbers);
    }
#pragma unroll
    for (int i = 0; i < kInWord; ++i) {
      if constexpr (F::kScales == Scales::kSums) {
        pairs[word * kInWord + i] = numbers[i];
      } else {
        const uint32_t addend = F::kScales == Scales::kMinima ? groups.offset[group] : kMinusZeros;
        pairs[word * kInWord + i] = Pair<T>::fused(numbers[i], groups.scale[group], addend);
      }
    }
  }
}

// Columns of x in the order of pairs of codes: int4 and e2m1 have elements i and i + 4 as a pair, int8 neighbours, e4m3 see
// there.
template <Codes kCodes>
__device__ __forceinline__ void input_pairs(const uint4& x, uint32_t (&pairs)[4]) {
  if constexpr (bits_of(kCodes) == 4) {
    pairs[0] = __byte_perm(x.x, x.z, 0x5410);
    pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410);
    pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  } else if constexpr (kCodes == kE4M3) {
    pairs[0] = __byte_perm(x.x, x.y, 0x5410);
    pairs[1] = __byte_perm(x.x, x.y, 0x7632);
    pairs[2] = __byte_perm(x.z, x.w, 0x5410);
    pairs[3] = __byte_perm(x.z, x.w, 0x7632);
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
