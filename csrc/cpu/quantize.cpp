// Quantizes float32, float16 or bfloat16 to int8 / int4 groups, as `_quantize_rows` in zero_inference/kernels/quantization.py.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "elementwise.h"
#include "kernels.h"
#include "task.h"

namespace zero_inference::cpu {

namespace {

constexpr int64_t kTaskElements = 1 << 16;  // that a thread takes at a time

constexpr int kMaxLanes = 16;

// One group to every `stride`-th element of `out`; float16 as bits.
void load(const void* weight, Dtype dtype, int64_t first, int64_t size, float* out, int stride) {
  if (dtype == Dtype::float32) {
    const float* from = static_cast<const float*>(weight) + first;
    for (int64_t i = 0; i < size; ++i) out[i * stride] = from[i];
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(weight) + first;
  const int shift = dtype == Dtype::bfloat16 ? 16 : 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << shift;
    std::memcpy(out + i * stride, &bits, sizeof(bits));
  }
}

void pack(const uint8_t* codes, int64_t size, int bits, uint8_t* out, int stride) {
  if (bits == 8) {
    for (int64_t i = 0; i < size; ++i) out[i] = codes[i * stride];
  } else {
    for (int64_t i = 0; i < size / 2; ++i)
      out[i] = static_cast<uint8_t>(codes[2 * i * stride] | codes[(2 * i + 1) * stride] << 4);
  }
}

}  // namespace
}  // namespace zero_inference::cpu

extern "C" {

// Groups of `size` elements. Returns 0; 1 where a group holds NaN, an infinity or too large a range; -1 without memory; -2
// where the processor lacks `instructions` (negative: the best).
int32_t zero_inference_quantize(const void* weight, int32_t dtype_number, int64_t groups, int64_t size, int32_t bits,
                                int32_t divides, uint8_t* codes, void* scale, void* minimum, int32_t threads,
                                int32_t instructions) {
  using namespace zero_inference::cpu;
  const Dtype dtype = static_cast<Dtype>(dtype_number);
  const Instructions best = best_instructions();
  if (instructions > static_cast<int32_t>(best)) return -2;
  const Kernels& kernels = kernels_of(instructions < 0 ? best : static_cast<Instructions>(instructions));
  const int lanes = kernels.lanes;
  const int64_t element = bytes_of(dtype);
  const int64_t task = std::max<int64_t>(1, kTaskElements / (size * lanes)) * lanes;  // groups
  const int64_t tasks = (groups + task - 1) / task;
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> result{0};
  const int64_t used = std::max<int64_t>(1, std::min<int64_t>(threads, tasks));
  const size_t floats = static_cast<size_t>(size) * lanes * sizeof(float);
  const size_t thread_bytes = aligned(2 * floats + static_cast<size_t>(size) * lanes);
  Buffer memory;
  try {
    memory.reserve(thread_bytes * used);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  const auto work = [&](int64_t thread) {
    float* const values = reinterpret_cast<float*>(static_cast<char*>(memory.get()) + thread * thread_bytes);
    float* const centered = values + size * lanes;
    uint8_t* const lane_codes = reinterpret_cast<uint8_t*>(centered + size * lanes);
    float scales[kMaxLanes], minima[kMaxLanes];
    for (int64_t index = next++; index < tasks && result == 0; index = next++) {
      const int64_t end = std::min(groups, (index + 1) * task);
      for (int64_t first = index * task; first < end; first += lanes) {
        const int64_t count = std::min<int64_t>(lanes, end - first);
        if (count < lanes) std::memset(values, 0, floats);
        for (int64_t lane = 0; lane < count; ++lane) load(weight, dtype, (first + lane) * size, size, values + lane, lanes);
        if (!kernels.quantize(values, centered, size, bits, dtype, divides != 0, lane_codes, scales, minima)) {
          result = 1;
          return;
        }
        for (int64_t lane = 0; lane < count; ++lane)
          pack(lane_codes + lane, size, bits, codes + (first + lane) * size * bits / 8, lanes);
        store(scales, static_cast<char*>(scale) + first * element, dtype, count);
        store(minima, static_cast<char*>(minimum) + first * element, dtype, count);
      }
    }
  };
  on_threads(used, work);
  return result;
}

}  // extern "C"
