// What a thread will read first, asked for into its L2 cache while it waits for the input.

#pragma once

#include <vector>

#include "product.h"

namespace zero_inference::cpu {

// Of one thread, on cache lines of its own.
class alignas(64) ReadAhead {
 public:
  // Rows [first, last) of a weight are read next, with their scales and minima. What the cache does not hold is left out.
  void add(const Matrix& matrix, int64_t first, int64_t last);
  // From the first line on again.
  void restart();
  // Asks for some lines more; false where none is left.
  bool prefetch();

 private:
  struct Run {
    const char *at, *end;
  };

  void add(const void* data, int64_t first, int64_t bytes);

  std::vector<Run> runs_;
  int64_t bytes_ = 0;
  size_t run_ = 0;  // that is asked for next, from `at_` on
  const char* at_ = nullptr;
};

}  // namespace zero_inference::cpu
