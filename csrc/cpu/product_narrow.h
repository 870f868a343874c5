// What the sets without masks have in common. Included by each set's .cpp inside its namespace, behind what product_vectors.h
// takes.

namespace {

#include "product_vectors.h"

template <Dtype kDtype>
inline Vector from_part(const char* p, int64_t count) {
  char part[kVectorBytes] = {};
  __builtin_memcpy(part, p, static_cast<size_t>(count * bytes_of(kDtype)));
  return from<kDtype>(part);
}

#include "product_direct.h"

}  // namespace

void prepare_input(const Layout& layout, int64_t count, const void* x, Dtype x_dtype, int64_t stride, int64_t first,
                   int64_t last, int64_t columns, void* input) {
  prepare_float32(layout, count, static_cast<const char*>(x), x_dtype, stride, first, last, columns, static_cast<char*>(input));
}

void product(const Matrix& matrix, const Layout& layout, int64_t count, const void* input, int64_t first, int64_t last,
             float* out, int64_t stride, void* scratch) {
  product_float32(matrix, layout, count, static_cast<const char*>(input), first, last, out, stride,
                  static_cast<char*>(scratch));
}
