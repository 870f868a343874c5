// Detects what the processor has and the operating system saves.

#include "product.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace zero_inference::cpu {

namespace {

#if defined(__x86_64__)

// AMX-BF16, AMX-TILE and AMX-INT8, whose tiles are saved only for processes that request it; applies to all threads.
bool have_tiles() {
#if defined(ZERO_INFERENCE_EMULATED_TILES)
  return true;
#elif defined(__linux__)
  constexpr uint32_t kBits = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBits) == kBits &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// GCC 10's __builtin_cpu_supports does not know F16C. Processors with AVX2 have it, but a virtual machine may hide it.
bool have_f16c() {
  uint32_t a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

Instructions find_best() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !have_f16c()) return Instructions::portable;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vbmi");
  if (!wide) return Instructions::avx2;
  return have_tiles() ? Instructions::amx : Instructions::avx512;
}

#else

Instructions find_best() { return Instructions::portable; }

#endif

}  // namespace

Instructions best_instructions() {
  static const Instructions best = find_best();
  return best;
}

}  // namespace zero_inference::cpu
