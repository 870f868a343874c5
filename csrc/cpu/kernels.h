// The kernels of one instruction set. Each set has a source file (portable.cpp, avx2.cpp, avx512.cpp) that includes its vectors
// and then the headers that are written for any; amx.cpp has products in tiles.
#pragma once

#include "attention.h"
#include "product_layout.h"

namespace zero_inference::cpu {

// The functions of product.h, with a layout.
using PrepareInput = void(const Layout& layout, int64_t count, const char* x, Dtype x_dtype, int64_t stride, int64_t first,
                          int64_t last, int64_t columns, char* input);
using Product = void(const Matrix& matrix, const Layout& layout, int64_t count, const char* input, int64_t first, int64_t last,
                     float* out, int64_t stride, char* scratch);

struct Kernels {
  PrepareInput* prepare_input;
  Product* product;
  uint64_t (*read_sum)(const char* data, int64_t bytes);
  // Items [first, last) of attention; the parts of a group (sequence, head).
  void (*attend)(const Attention& attention, int64_t splits, int64_t first, int64_t last, float* scratch, float* partials);
  void (*merge)(const Attention& attention, int64_t splits, int64_t group, float* partials);
  // Quantizes `lanes` groups, one a lane. `values`: [size, lanes], of float16 their bits; `scratch`: as much memory. Fills
  // codes [size, lanes], scales and minima [lanes]. Returns whether all groups can be stored.
  int lanes;
  bool (*quantize)(float* values, float* scratch, int64_t size, int bits, Dtype dtype, bool divides, uint8_t* codes,
                   float* scales, float* minima);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
PrepareInput prepare_input_in_tiles;
Product product_in_tiles;

static inline const Kernels& kernels_of(Instructions instructions) {
  return instructions >= Instructions::avx512 ? kAvx512 : instructions == Instructions::avx2 ? kAvx2 : kPortable;
}
#else
static inline const Kernels& kernels_of(Instructions) { return kPortable; }
#endif

}  // namespace zero_inference::cpu
