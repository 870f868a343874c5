// Threads of one call, which end with it, so that a process may fork between two calls.

#pragma once

#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace zero_inference::cpu {

// Calls work(thread) on up to `threads` threads, the caller is 0. The system may allow fewer, so `work` takes parts from a
// counter and waits for no other thread to start.
template <typename Work>
void on_threads(int64_t threads, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  for (int64_t thread = 1; thread < threads; ++thread) {
    try {
      others.emplace_back([&work, thread] { work(thread); });
    } catch (const std::exception&) {
      break;
    }
  }
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace zero_inference::cpu
