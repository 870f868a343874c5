// Prefetches the weights that a thread reads first into its L2 cache, while it waits for the input.

#pragma once

#include <vector>

#include "product.h"

namespace zero_inference::cpu {

// Of one thread, on its own cache lines.
class alignas(64) ReadAhead {
 public:
  // Appends rows [first, last) with scales and minima, as far as the cache holds them.
  void add(const Matrix& matrix, int64_t first, int64_t last);
  void restart();
  // Prefetches some lines; false at the end.
  bool prefetch();

 private:
  struct Run {
    const char *at, *end;
  };

  void add(const void* data, int64_t first, int64_t bytes);

  std::vector<Run> runs_;
  int64_t bytes_ = 0;
  size_t run_ = 0;  // current, from `at_` on
  const char* at_ = nullptr;
};

}  // namespace zero_inference::cpu
