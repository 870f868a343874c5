// The one test of whether memory can be accessed in vectors of several elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zero_inference {

// Whether `pointer` may be accessed in units of `bytes`. A null pointer may: nothing is there to be accessed.
inline bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether rows of `length` elements, one after the other from each of `pointers`, are whole 16-byte vectors that begin on 16
// bytes.
template <typename T, typename... Pointers>
bool in_vectors(int64_t length, Pointers... pointers) {
  return length % static_cast<int64_t>(16 / sizeof(T)) == 0 && (aligned(pointers, 16) && ...);
}

}  // namespace zero_inference
