// How long the instructions take that the cores' products are made of (csrc/cpu), one thread alone and all CPUs at once.
//
//   g++ -O2 -std=c++17 -pthread -mavx512f benchmarks/cpu_instructions.cpp -o cpu_instructions && ./cpu_instructions
//
// Each line: nanoseconds of one, of many that do not wait for each other (eight accumulators, or four tiles, in turn), from the
// L1 cache where they read. Needs AVX-512 with BF16 and VNNI; lines about tiles need AMX and are left out without it.

#include <cpuid.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

alignas(4096) thread_local char memory[1 << 16];

struct Test {
  const char* name;
  int instructions;  // of one repetition
  bool tiles;
  void (*repeat)();  // a thousand times
};

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#define REGISTERS "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "memory"
#define TEST(name, instructions, tiles, code)                                                          \
  {name, instructions, tiles, [] {                                                                     \
     for (int i = 0; i < 1000; ++i) __asm__ volatile(code::"r"(memory), "r"(int64_t{64}) : REGISTERS); \
   }}
#define TO(n) "%%zmm" #n "\n"
#define EIGHT(op) op TO(0) op TO(1) op TO(2) op TO(3) op TO(4) op TO(5) op TO(6) op TO(7)
#define VECTORS(name, op) TEST(name, 8, false, EIGHT(op))
#define TILES(name, instructions, code) TEST(name, instructions, true, code)
#define ZERO(tile) "tilezero %%tmm" #tile "\n"
#define LOAD(tile, at) "tileloadd " #at "(%0,%1,1),%%tmm" #tile "\n"
#define STORE(tile, at) "tilestored %%tmm" #tile "," #at "(%0,%1,1)\n"
#define PRODUCT(op, sums, rows, x) op " %%tmm" #x ",%%tmm" #rows ",%%tmm" #sums "\n"
#define PRODUCTS(op) PRODUCT(op, 0, 4, 6) PRODUCT(op, 1, 4, 7) PRODUCT(op, 2, 5, 6) PRODUCT(op, 3, 5, 7)
#define BYTES(sums, rows, x) PRODUCT("tdpbusd", sums, rows, x)

const Test kTests[] = {
    VECTORS("vfmadd231ps", "vfmadd231ps %%zmm8,%%zmm9,"),
    VECTORS("vdpbf16ps", "vdpbf16ps %%zmm8,%%zmm9,"),
    VECTORS("vdpbf16ps from memory", "vdpbf16ps (%0),%%zmm9,"),
    VECTORS("vpdpbusd", "vpdpbusd %%zmm8,%%zmm9,"),
    VECTORS("vpdpbusd from memory", "vpdpbusd (%0),%%zmm9,"),
    VECTORS("vpternlogd", "vpternlogd $0xea,%%zmm8,%%zmm9,"),
    VECTORS("vprorvd", "vprorvd %%zmm8,%%zmm9,"),
    VECTORS("vpsrlw", "vpsrlw $4,%%zmm9,"),
    VECTORS("vpermps", "vpermps %%zmm8,%%zmm9,"),
    VECTORS("vpermw", "vpermw %%zmm8,%%zmm9,"),
    VECTORS("vcvtdq2ps", "vcvtdq2ps %%zmm9,"),
    VECTORS("load", "vmovups (%0),"),
    VECTORS("load across two lines", "vmovups 32(%0),"),
    VECTORS("load of one for all lanes", "vbroadcastss (%0),"),
    TEST("store", 4, false, "vmovaps %%zmm0,(%0)\nvmovaps %%zmm0,64(%0)\nvmovaps %%zmm0,128(%0)\nvmovaps %%zmm0,192(%0)\n"),
    TILES("tileloadd", 4, LOAD(4, 0) LOAD(5, 0) LOAD(6, 0) LOAD(7, 0)),
    TILES("tilestored", 4, STORE(0, 0) STORE(1, 1024) STORE(2, 2048) STORE(3, 3072)),
    TILES("tdpbf16ps", 4, PRODUCTS("tdpbf16ps")),
    TILES("tdpbusd", 4, PRODUCTS("tdpbusd")),
    TILES("tdpbusd, all to one tile of sums", 4, BYTES(0, 4, 6) BYTES(0, 4, 7) BYTES(0, 5, 6) BYTES(0, 5, 7)),
    TILES("tilezero, tdpbusd and tilestored", 2, ZERO(0) BYTES(0, 4, 6) STORE(0, 0) ZERO(1) BYTES(1, 4, 7) STORE(1, 1024)),
    TILES("the same behind two tileloadd", 2,
          ZERO(0) LOAD(4, 4096) LOAD(6, 5120) BYTES(0, 4, 6) STORE(0, 0) ZERO(1) LOAD(5, 6144) LOAD(7, 7168) BYTES(1, 5, 7)
              STORE(1, 1024)),
};

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Mean nanoseconds of an instruction over threads on these CPUs, which begin together and go on until all were timed.
double nanoseconds(const Test& test, const std::vector<int>& cpus, double seconds) {
  std::vector<double> found(cpus.size());
  std::atomic<size_t> there{0};
  std::vector<std::thread> threads;
  for (size_t index = 0; index < cpus.size(); ++index) {
    threads.emplace_back([&, index] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[index], &set);
      pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
      std::memset(memory, 0, sizeof(memory));
      TileShapes shapes;
      for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = 64, shapes.rows[tile] = 16;
      if (test.tiles) __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
      __asm__ volatile("vpxord %%zmm8,%%zmm8,%%zmm8\nvpxord %%zmm9,%%zmm9,%%zmm9\n" ::: "zmm8", "zmm9");
      there.fetch_add(1);
      while (there.load() < cpus.size()) {
      }
      for (const auto start = Clock::now(); since(start) < seconds / 2;) test.repeat();
      const auto start = Clock::now();
      int64_t count = 0;
      while (since(start) < seconds) {
        test.repeat();
        count += 1000 * test.instructions;
      }
      found[index] = since(start) / static_cast<double>(count) * 1e9;
      for (const auto end = Clock::now(); since(end) < seconds / 2;) test.repeat();
      if (test.tiles) __asm__ volatile("tilerelease");
    });
  }
  double sum = 0;
  for (size_t index = 0; index < cpus.size(); ++index) {
    threads[index].join();
    sum += found[index];
  }
  return sum / static_cast<double>(cpus.size());
}

bool has_tiles() {
  uint32_t a, b, c, d;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

int main() {
  std::vector<int> all;
  cpu_set_t set;
  sched_getaffinity(0, sizeof(set), &set);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) all.push_back(cpu);
  }
  const bool tiles = has_tiles();
  std::printf("%-36s %12s %12s\n", "ns of one", "one CPU", "all CPUs");
  for (const Test& test : kTests) {
    if (test.tiles && !tiles) continue;
    std::printf("%-36s %12.3f %12.3f\n", test.name, nanoseconds(test, {all.back()}, 0.01), nanoseconds(test, all, 0.02));
  }
  return 0;
}
