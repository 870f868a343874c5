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

#include "product_panel.h"

#include "product_direct.h"

}  // namespace
