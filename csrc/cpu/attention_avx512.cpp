// Attention with AVX-512 (F, BW, DQ, VL).

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")

#include "attention_kernel.h"

namespace zero_inference::cpu {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16, kTile = 16;
  using Register = __m512;

  static inline __mmask16 first(int64_t count) {
    return count >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1);
  }

  static inline Register zero() { return _mm512_setzero_ps(); }
  static inline Register all(float value) { return _mm512_set1_ps(value); }

  static inline Register widen_float16(__m256i bits) { return _mm512_cvtph_ps(bits); }
  static inline Register widen_bfloat16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static inline Register load(const float* from) { return _mm512_loadu_ps(from); }
  static inline Register load(const Float16* from) {
    return widen_float16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static inline Register load(const BFloat16* from) {
    return widen_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static inline Register load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first(count), from); }
  static inline Register load(const Float16* from, int64_t count) {
    return widen_float16(_mm256_maskz_loadu_epi16(first(count), from));
  }
  static inline Register load(const BFloat16* from, int64_t count) {
    return widen_bfloat16(_mm256_maskz_loadu_epi16(first(count), from));
  }

  static inline __m256i narrow_float16(Register x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static inline __m256i narrow_bfloat16(Register x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(nearest, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static inline void store(float* to, Register x) { _mm512_storeu_ps(to, x); }
  static inline void store(Float16* to, Register x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_float16(x)); }
  static inline void store(BFloat16* to, Register x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_bfloat16(x));
  }
  static inline void store(float* to, Register x, int64_t count) { _mm512_mask_storeu_ps(to, first(count), x); }
  static inline void store(Float16* to, Register x, int64_t count) {
    _mm256_mask_storeu_epi16(to, first(count), narrow_float16(x));
  }
  static inline void store(BFloat16* to, Register x, int64_t count) {
    _mm256_mask_storeu_epi16(to, first(count), narrow_bfloat16(x));
  }

  static inline Register add(Register x, Register y) { return _mm512_add_ps(x, y); }
  static inline Register sub(Register x, Register y) { return _mm512_sub_ps(x, y); }
  static inline Register mul(Register x, Register y) { return _mm512_mul_ps(x, y); }
  static inline Register div(Register x, Register y) { return _mm512_div_ps(x, y); }
  static inline Register max(Register x, Register y) { return _mm512_max_ps(x, y); }
  static inline Register fma(Register x, Register y, Register z) { return _mm512_fmadd_ps(x, y, z); }
  static inline Register below(Register x, float limit, Register then, Register otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_LT_OQ), otherwise, then);
  }
  static inline Register round(Register x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static inline Register times_two_to(Register x, Register whole) { return _mm512_scalef_ps(x, whole); }

  static inline float sum(Register x) { return _mm512_reduce_add_ps(x); }
  static inline float largest(Register x) { return _mm512_reduce_max_ps(x); }

  // Four sums in each 128-bit lane, of that lane's part of four registers.
  static inline Register lane_sums(const Register* x) {
    const Register low = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const Register high = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    return add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  }
  static inline Register add_lanes(Register x, Register y) {
    return add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  static inline void sums(const Register* x, float* to) {
    store(to, add_lanes(add_lanes(lane_sums(x), lane_sums(x + 4)), add_lanes(lane_sums(x + 8), lane_sums(x + 12))));
  }
};

}  // namespace

const AttentionKernels kAvx512Attention = {attend_with<Avx512>, merge_group<Avx512>};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
