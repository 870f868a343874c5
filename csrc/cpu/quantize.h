// Quantization of groups to int8 or int4, one group a lane of a vector.

#pragma once

#include <cstdint>

#include "product.h"

namespace zero_inference::cpu {

struct GroupQuantizer {
  int lanes;  // groups that one call quantizes
  // `values`: [size, lanes], of float16 their bits; `scratch`: as much memory. Fills codes [size, lanes], scales and minima
  // [lanes]. Returns whether all groups can be stored.
  bool (*quantize)(float* values, float* scratch, int64_t size, int bits, Dtype dtype, bool divides, uint8_t* codes,
                   float* scales, float* minima);
};
extern const GroupQuantizer kPortableQuantizer, kAvx2Quantizer, kAvx512Quantizer;

}  // namespace zero_inference::cpu
