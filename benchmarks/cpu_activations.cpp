// How long the cores take for what lies between the products of a feed-forward (csrc/cpu/elementwise.h), one thread alone.
//
//   g++ -O3 -std=c++17 benchmarks/cpu_activations.cpp csrc/cpu/elementwise.cpp -o cpu_activations && ./cpu_activations
//
// Each line: nanoseconds of an element, of 8192 that lie in the caches; the median of 101 calls.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "../csrc/cpu/elementwise.h"

using namespace zero_inference::cpu;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kCount = 8192;
constexpr int kCalls = 101;

void measure(const char* name, const std::vector<float>& start, const std::function<void(float*)>& work) {
  std::vector<float> values;
  std::vector<double> spent;
  for (int i = 0; i < kCalls; ++i) {
    values = start;
    const auto begin = Clock::now();
    work(values.data());
    spent.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / kCount);
  }
  std::nth_element(spent.begin(), spent.begin() + kCalls / 2, spent.end());
  std::printf("%-22s %7.3f\n", name, spent[kCalls / 2]);
}

}  // namespace

int main() {
  std::vector<float> start(kCount), factors(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    start[i] = static_cast<float>(i % 977) / 100 - 5;
    factors[i] = static_cast<float>(i % 13);
  }
  std::vector<uint16_t> rounded(kCount);
  const struct {
    const char* name;
    Activation activation;
  } activations[] = {
      {"relu", Activation::relu}, {"silu", Activation::silu}, {"gelu", Activation::gelu}, {"gelu_tanh", Activation::gelu_tanh}};
  for (const auto& each : activations) {
    measure(each.name, start, [&](float* values) { activate(each.activation, values, kCount); });
  }
  measure("multiply", start, [&](float* values) { multiply(values, factors.data(), 0.0f, kCount); });
  measure("store as bfloat16", start, [&](float* values) { store(values, rounded.data(), Dtype::bfloat16, kCount); });
  measure("store as float16", start, [&](float* values) { store(values, rounded.data(), Dtype::float16, kCount); });
}
