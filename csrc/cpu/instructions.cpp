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

constexpr uint64_t kVectors = 0x6;      // bits of XCR0 for xmm and ymm,
constexpr uint64_t kVectors512 = 0xe0;  // for masks and zmm,
constexpr uint64_t kTiles = 0x60000;    // and for the tiles' configuration and data

bool bit(uint32_t word, int index) { return (word >> index & 1) != 0; }

uint64_t saved_by_system() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Tile data is saved only for processes that request it; applies to all threads.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Instructions find_best() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Instructions::portable;
  const bool vectors = bit(c, 12) && bit(c, 27) && bit(c, 28) && bit(c, 29);  // FMA, OSXSAVE, AVX, F16C
  if (!vectors || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Instructions::portable;
  const uint64_t saved = saved_by_system();
  if ((saved & kVectors) != kVectors || !bit(b, 5)) return Instructions::portable;       // AVX2
  const bool wide = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);  // AVX512 F, DQ, BW, VL, VNNI
  const bool tiles = bit(d, 22) && bit(d, 24) && bit(d, 25);                             // AMX-BF16, AMX-TILE, AMX-INT8
  const bool bfloat16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && bit(a, 5);            // AVX512-BF16
  if (!wide || !bfloat16 || (saved & kVectors512) != kVectors512) return Instructions::avx2;
#if defined(ZERO_INFERENCE_EMULATED_TILES)
  return Instructions::amx;
#endif
  return tiles && (saved & kTiles) == kTiles && tiles_permitted() ? Instructions::amx : Instructions::avx512;
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
