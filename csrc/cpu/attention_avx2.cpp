// Attention with AVX2, FMA and F16C.

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

ZI_TARGET_BEGIN("avx2,fma,f16c")

#include "attention_kernel.h"

namespace zero_inference::cpu {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8, kTile = 8;
  using Register = __m256;

  static inline Register zero() { return _mm256_setzero_ps(); }
  static inline Register all(float value) { return _mm256_set1_ps(value); }

  static inline Register load(const float* from) { return _mm256_loadu_ps(from); }
  static inline Register load(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static inline Register load(const BFloat16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  template <typename T>
  static inline Register load(const T* from, int64_t count) {
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < count && i < kLanes; ++i) lanes[i] = from[i];
    return load(lanes);
  }

  static inline void store(float* to, Register x) { _mm256_storeu_ps(to, x); }
  static inline void store(Float16* to, Register x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static inline void store(BFloat16* to, Register x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, is_nan), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }
  template <typename T>
  static inline void store(T* to, Register x, int64_t count) {
    T lanes[kLanes];
    store(lanes, x);
    for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
  }

  static inline Register add(Register x, Register y) { return _mm256_add_ps(x, y); }
  static inline Register sub(Register x, Register y) { return _mm256_sub_ps(x, y); }
  static inline Register mul(Register x, Register y) { return _mm256_mul_ps(x, y); }
  static inline Register div(Register x, Register y) { return _mm256_div_ps(x, y); }
  static inline Register max(Register x, Register y) { return _mm256_max_ps(x, y); }
  static inline Register fma(Register x, Register y, Register z) { return _mm256_fmadd_ps(x, y, z); }
  static inline Register below(Register x, float limit, Register then, Register otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, all(limit), _CMP_LT_OQ));
  }
  static inline Register round(Register x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // `whole` within [-125, 127]; others are right only where the result is not used.
  static inline Register times_two_to(Register x, Register whole) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }

  static inline float sum(Register x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_hadd_ps(half, half);
    return _mm_cvtss_f32(_mm_hadd_ps(half, half));
  }
  static inline float largest(Register x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static inline void sums(const Register* x, float* to) {
    const Register low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const Register high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    store(to, add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
  }
};

}  // namespace

const AttentionKernels kAvx2Attention = {attend_with<Avx2>, merge_group<Avx2>};

}  // namespace zero_inference::cpu

ZI_TARGET_END

#endif
