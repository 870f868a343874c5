// Products in plain C++: vectors of four, which every 64-bit processor has.

#include "product_direct.h"
#include "product_layout.h"
#include "simd_portable.h"

namespace zero_inference::cpu::portable {

void prepare_input(const Layout& layout, int64_t count, const void* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, void* input) {
  prepare_float32(layout, count, static_cast<const char*>(x), x_dtype, stride, first, last, columns, static_cast<char*>(input));
}

void product(const Matrix& matrix, const Layout& layout, int64_t count, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch) {
  product_float32(matrix, layout, count, static_cast<const char*>(input), first, last, out, stride,
                  static_cast<char*>(scratch));
}

uint64_t read_bytes_sum(const void* data, int64_t bytes) { return words_sum(static_cast<const char*>(data), bytes); }

}  // namespace zero_inference::cpu::portable
