// The functions that Python calls, compiled for the oldest CPU. VARIANTS lists the compiled variants: V(amx)
// V(avx512_vnni) ... SOURCE is the digest of the sources and the names of the requested variants, COMPILER the compiler.

#include <cstring>

#include "interface.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace diskprefix {

#define V(name) extern const Operators name;
VARIANTS
#undef V

namespace {

// From the oldest to the newest of each kind of CPU.
#define LEVELS(L)                                                                                     \
  L(baseline) L(avx2) L(avx2_vnni) L(avx512) L(avx512_vnni) L(amx) L(neon_dot) L(neon_i8mm)

#define L(name) name##_level,
enum Level { LEVELS(L) };
#undef L

#if defined(__x86_64__)

uint64_t saved_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

bool may_use_tiles() {
#if defined(__linux__)
  // On Linux, a process must request the registers of AMX.
  const long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}

// CPUs with AVX-512 may have AVX-VNNI or not.
bool has_avx_vnni() {
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4;
}

// Cascade Lake and Ice Lake have AVX-512 VNNI without bfloat16; Skylake has neither.
bool has_avx512_vnni() {
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && c & 1 << 11;
}

Level level_of_cpu() {
  uint32_t a, b, c, d, b7, c7, d7, a71 = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return baseline_level;
  const bool has_fma = c & bit_FMA, has_half = c & bit_F16C;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return baseline_level;
  const uint32_t last = a;
  const uint64_t saved = saved_registers();
  const uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;
  if ((saved & YMM) != YMM || !has_fma || !has_half || !(b7 & bit_AVX2)) return baseline_level;
  const uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  if ((saved & ZMM) != ZMM || (b7 & wide) != wide) return has_avx_vnni() ? avx2_vnni_level : avx2_level;
  if (last >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
  const uint32_t HAS_BFLOAT16 = 1 << 5, HAS_TILES = 1 << 24, HAS_TILES_OF_BFLOAT16 = 1 << 22;
  if (!has_avx512_vnni()) return avx512_level;
  const bool has_amx = a71 & HAS_BFLOAT16 && c7 & bit_AVX512VBMI && d7 & HAS_TILES && d7 & HAS_TILES_OF_BFLOAT16 && (saved & TILES) == TILES;
  return has_amx && may_use_tiles() ? amx_level : avx512_vnni_level;
}

#elif defined(__aarch64__) && defined(__linux__)

Level level_of_cpu() {
  const unsigned long HAS_DOTS = 1 << 20, HAS_SQUARES = 1 << 13;
  if (!(getauxval(AT_HWCAP) & HAS_DOTS)) return baseline_level;
  return getauxval(AT_HWCAP2) & HAS_SQUARES ? neon_i8mm_level : neon_dot_level;
}

#elif defined(__aarch64__) && defined(__APPLE__)

bool has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
}

Level level_of_cpu() {
  if (!has("hw.optional.arm.FEAT_DotProd")) return baseline_level;
  return has("hw.optional.arm.FEAT_I8MM") ? neon_i8mm_level : neon_dot_level;
}

#else

Level level_of_cpu() { return baseline_level; }

#endif

bool can_run(Level wanted) {
#if defined(__x86_64__)
  if (wanted == avx2_vnni_level && !has_avx_vnni()) return false;
#endif
  return level_of_cpu() >= wanted;
}

}  // namespace
}  // namespace diskprefix

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

EXPORTED const char* diskprefix_source() { return SOURCE; }

EXPORTED const char* diskprefix_compiler() { return COMPILER; }

// Returns whether this CPU can compute a variant of its kind, compiled or not.
EXPORTED int diskprefix_can_run(const char* name) {
#define L(level) \
  if (!strcmp(name, #level)) return diskprefix::can_run(diskprefix::level##_level);
  LEVELS(L)
#undef L
  return 0;
}

// Returns the operators of the variant `name`, null if this CPU cannot compute them.
EXPORTED const diskprefix::Operators* diskprefix_operators(const char* name) {
#define V(variant)                                                                                \
  if (!strcmp(name, diskprefix::variant.name) && diskprefix::can_run(diskprefix::variant##_level)) \
    return &diskprefix::variant;
  VARIANTS
#undef V
  return nullptr;
}
}
