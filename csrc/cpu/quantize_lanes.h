// Quantization of groups, one a lane. One source file per instruction set instantiates it with its lanes.

#pragma once

#include "product.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are not passed between files
#pragma GCC optimize("no-trapping-math")
#pragma GCC optimize("fp-contract=off")  // product and sum are rounded one after the other where weights are dequantized
#else
#pragma STDC FP_CONTRACT OFF
#endif

namespace zero_inference::cpu {
namespace {

// Clipped shares of a group's range, and refits of the best; reasons in zero_inference/kernels/quantization.py.
constexpr float kClipped[] = {0.0f, 0.03f, 0.06f};
constexpr int kRefits = 2;
// Neighbouring codes that are tried where quotients are rounded.
constexpr int kNeighbours4 = 1, kNeighbours8 = 2;

template <int kLanes>
struct QuantizeLanes {
  typedef float Vector __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
  typedef uint8_t Codes __attribute__((vector_size(kLanes)));

  static inline Vector all(float value) { return Vector{} + value; }
  static inline Bits bits_of(Vector value) { return (Bits)value; }
  static inline Vector absolute(Vector value) { return (Vector)(bits_of(value) & 0x7fffffffu); }
  static inline Vector whole(Vector value) { return (value + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23: the sum is rounded

  // To nearest even.
  ZI_INLINE Vector rounded(Vector value, Dtype dtype) {
    const Bits bits = bits_of(value);
    if (dtype == Dtype::bfloat16) return (Vector)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    if (dtype == Dtype::float32) return value;
    const Vector size = absolute(value);
    const Vector normal = (Vector)((bits_of(size) + 0xfffu + ((bits_of(size) >> 13) & 1u)) & 0xffffe000u);
    const Vector small = (size + 0.5f) - 0.5f;  // below 2^-14 half's numbers are 2^-24 apart, as float's are from 0.5 on
    Vector found = size < 6.103515625e-05f ? small : normal;
    found = size >= 65520.0f ? all(__builtin_inff()) : found;
    return (Vector)(bits_of(found) | (bits & 0x80000000u));
  }

  static inline Vector from_float16(Bits half) {
    const Vector value = (Vector)((half & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112, by which the exponents differ
    const Vector found = (half & 0x7c00u) == 0x7c00u ? (Vector)(0x7f800000u | (half & 0x3ffu) << 13) : value;
    return (Vector)(bits_of(found) | (half & 0x8000u) << 16);
  }

  // A stored scale and minimum. `divides`: values are multiplied by the scale, as in DeepSpeed.
  struct Line {
    Vector scale, minimum;

    [[gnu::always_inline]] inline Vector code(Vector value, float largest, bool divides) const {
      Vector found = value - minimum;
      found = divides ? found * scale : found / (scale == 0.0f ? all(1.0f) : scale);
      found = found > 0.0f ? found : all(0.0f);  // also where the group is constant and its scale infinite
      return whole(found < largest ? found : all(largest));
    }
    [[gnu::always_inline]] inline Vector dequantized(Vector code, Dtype dtype, bool divides) const {
      return rounded((divides ? rounded(code / scale, dtype) : code * scale) + minimum, dtype);
    }
    // Also tries neighbours, because a rounded quotient may make one nearer.
    [[gnu::always_inline]] inline Vector best_code(Vector value, Dtype dtype, float largest, bool divides,
                                                   Vector& error) const {
      Vector found = code(value, largest, divides), difference = dequantized(found, dtype, divides) - value;
      error = difference * difference;
      const int neighbours = !divides ? 0 : largest > 15.0f ? kNeighbours8 : kNeighbours4;
      for (int i = 0; i < neighbours; ++i) {
        Vector other = found + (difference < 0.0f ? all(1.0f) : all(-1.0f));
        other = other > 0.0f ? other : all(0.0f);
        other = other < largest ? other : all(largest);
        difference = dequantized(other, dtype, divides) - value;
        const Integers better = difference * difference < error;
        found = better ? other : found;
        error = better ? difference * difference : error;
      }
      return found;
    }
  };

  // Finite unless the range is 0.
  static inline Vector finite_factor(Vector factor, Vector range, Dtype dtype) {
    const Vector most = all(dtype == Dtype::float16 ? 65504.0f : dtype == Dtype::bfloat16 ? 3.3895314e38f : 3.4028235e38f);
    return range > 0.0f && factor > most ? most : factor;
  }

  // Below float16's normal numbers a scale is rounded up: nearest could halve it or make it 0.
  static inline Vector stored_scale(Vector step, Dtype dtype, bool divides) {
    if (divides) return finite_factor(rounded(1.0f / step, dtype), step, dtype);
    if (dtype == Dtype::float16) {
      const Vector steps = step * 16777216.0f;  // 2^24
      const Vector up = whole(steps < 1024.0f ? steps : all(0.0f));
      step = step < 6.103515625e-05f ? (up < steps ? up + 1.0f : up) / 16777216.0f : step;
    }
    return rounded(step, dtype);
  }

  struct Sums {
    Vector codes = {}, squares = {}, products = {};  // products: with the group's values less their mean

    void add(Vector code, Vector centered) {
      codes += code;
      squares += code * code;
      products += code * centered;
    }
  };

  struct Fit {
    Vector step, mean_code;
    Vector gain;  // by which it lowers the sum of the squared centered values; 0 where all codes are the same

    Fit(const Sums& sums, int64_t size) {
      mean_code = sums.codes / static_cast<float>(size);
      const Vector variance = sums.squares - sums.codes * mean_code;
      step = sums.products / variance;
      gain = variance > 0.0f ? sums.products * step : all(0.0f);
    }
    Line stored(Vector mean, Dtype dtype, bool divides) const {
      const Vector scale = stored_scale(step, dtype, divides);
      return {scale, rounded(mean - (divides ? mean_code / scale : mean_code * scale), dtype)};
    }
  };

  // Fit to the codes that `inverse * centered + shift` rounds to.
  static inline Fit fit_to(const Vector* centered, int64_t size, Vector inverse, Vector shift, float largest) {
    Sums sums;
    for (int64_t i = 0; i < size; ++i) {
      Vector code = centered[i] * inverse + shift;
      code = code > 0.0f ? code : all(0.0f);
      code = whole(code < largest ? code : all(largest));
      sums.add(code, centered[i]);
    }
    return Fit(sums, size);
  }

  static inline void keep_better(Fit& best, const Fit& found) {
    const Integers better = found.gain > best.gain;
    best.step = better ? found.step : best.step;
    best.mean_code = better ? found.mean_code : best.mean_code;
    best.gain = better ? found.gain : best.gain;
  }

  // See Kernels::quantize.
  static bool quantize(float* memory, float* scratch, int64_t size, int bits, Dtype dtype, bool divides, uint8_t* codes,
                       float* scales, float* minima) {
    Vector* const values = reinterpret_cast<Vector*>(memory);
    Vector* const centered = reinterpret_cast<Vector*>(scratch);
    const float largest = static_cast<float>((1 << bits) - 1);

    if (dtype == Dtype::float16)
      for (int64_t i = 0; i < size; ++i) values[i] = from_float16(bits_of(values[i]));

    Vector low = values[0], high = values[0], sum = {}, finite = {};
    for (int64_t i = 0; i < size; ++i) {
      const Vector value = values[i];
      low = value < low ? value : low;
      high = value > high ? value : high;
      sum += value;
      finite += value * 0.0f;  // NaN of an infinity too
    }
    const Vector mean = sum / static_cast<float>(size), range = high - low;
    for (int64_t i = 0; i < size; ++i) centered[i] = values[i] - mean;

    Line best = {stored_scale(range / largest, dtype, divides), rounded(low, dtype)};
    if (divides) {  // DeepSpeed's own, computed in the stored dtype
      const Vector factor = rounded(rounded(1.0f / rounded(range, dtype), dtype) * largest, dtype);
      best.scale = finite_factor(factor, range, dtype);
    }
    const Vector top = best.dequantized(all(largest), dtype, divides);
    finite += (divides ? rounded(range, dtype) : top) * 0.0f;
    float lanes[kLanes];
    __builtin_memcpy(lanes, &finite, sizeof(lanes));
    for (const float lane : lanes)
      if (lane != 0.0f) return false;

    Sums sums;
    Vector error = {};
    for (int64_t i = 0; i < size; ++i) {
      Vector of_value;
      sums.add(best.best_code(values[i], dtype, largest, divides, of_value), centered[i]);
      error += of_value;
    }
    const auto try_line = [&](const Line& line) {
      Vector found = {};
      for (int64_t i = 0; i < size; ++i) {
        const Vector difference = line.dequantized(line.code(values[i], largest, divides), dtype, divides) - values[i];
        found += difference * difference;
      }
      const Integers better = found < error;  // false for NaN
      best.scale = better ? line.scale : best.scale;
      best.minimum = better ? line.minimum : best.minimum;
      error = better ? found : error;
    };
    Fit fit(sums, size);
    try_line(fit.stored(mean, dtype, divides));

    if (bits == 4) {
      for (const float below : kClipped) {
        for (const float above : kClipped) {
          if (below == 0.0f && above == 0.0f) continue;
          const Vector inverse = largest / (range * (1.0f - below - above));
          keep_better(fit, fit_to(centered, size, inverse, (mean - low - range * below) * inverse, largest));
        }
      }
      for (int i = 0; i < kRefits; ++i) keep_better(fit, fit_to(centered, size, 1.0f / fit.step, fit.mean_code, largest));
      try_line(fit.stored(mean, dtype, divides));
    }

    for (int64_t i = 0; i < size; ++i) {
      Vector of_value;
      const Codes found = __builtin_convertvector(best.best_code(values[i], dtype, largest, divides, of_value), Codes);
      __builtin_memcpy(codes + i * kLanes, &found, kLanes);
    }
    __builtin_memcpy(scales, &best.scale, sizeof(Vector));
    __builtin_memcpy(minima, &best.minimum, sizeof(Vector));
    return true;
  }
};

}  // namespace
}  // namespace zero_inference::cpu

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#else
#pragma STDC FP_CONTRACT DEFAULT
#endif
