#include "read_ahead.h"

#include <unistd.h>

#include <algorithm>

namespace zero_inference::cpu {

namespace {

constexpr uintptr_t kLineBytes = 64;
constexpr int kLinesAtOnce = 32;  // half a microsecond between two polls for input

// Three quarters of L2: x and intermediate results need the rest. 0 where its size is unknown. Others: CXX="g++
// -DZERO_INFERENCE_AHEAD_BYTES=1048576".
int64_t most_bytes() {
#if defined(ZERO_INFERENCE_AHEAD_BYTES)
  return ZERO_INFERENCE_AHEAD_BYTES;
#elif defined(_SC_LEVEL2_CACHE_SIZE)
  return std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE)) / 4 * 3;
#else
  return 0;
#endif
}

}  // namespace

void ReadAhead::add(const Matrix& matrix, int64_t first, int64_t last) {
  const int64_t size = matrix.dtype == Dtype::float32 ? 4 : 2;
  const int64_t before = first * matrix.columns, elements = (last - first) * matrix.columns;
  if (matrix.bits == 0) {
    add(matrix.values, before * size, elements * size);
  } else {
    add(matrix.scales, before / matrix.group * size, elements / matrix.group * size);
    add(matrix.minima, before / matrix.group * size, elements / matrix.group * size);
    add(matrix.values, before * matrix.bits / 8, elements * matrix.bits / 8);
  }
  restart();
}

void ReadAhead::add(const void* data, int64_t first, int64_t bytes) {
  const int64_t some = std::min(bytes, most_bytes() - bytes_);
  if (some <= 0) return;
  const char* const at = static_cast<const char*>(data) + first;
  runs_.push_back({at - reinterpret_cast<uintptr_t>(at) % kLineBytes, at + some});
  bytes_ += some;
}

void ReadAhead::restart() {
  run_ = 0;
  at_ = runs_.empty() ? nullptr : runs_[0].at;
}

bool ReadAhead::prefetch() {
  for (int lines = 0; lines < kLinesAtOnce; ++lines) {
    if (run_ == runs_.size()) return false;
    __builtin_prefetch(at_, 0, 2);
    at_ += kLineBytes;
    if (at_ < runs_[run_].end) continue;
    ++run_;
    if (run_ < runs_.size()) at_ = runs_[run_].at;
  }
  return true;
}

}  // namespace zero_inference::cpu
