// How this thread rounds. A library that was compiled with -ffast-math sets the control word of the thread that loads it, and
// of those that it starts, so that denormal numbers become zeros. Saved states would then have other bits.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace diskprefix {

#if defined(__x86_64__)
constexpr uint64_t USUAL_CONTROL_WORD = 0x1f80;
inline uint64_t control_word() { return _mm_getcsr(); }
inline void set_control_word(uint64_t word) { _mm_setcsr((unsigned)word); }
#elif defined(__aarch64__)
constexpr uint64_t USUAL_CONTROL_WORD = 0;
inline uint64_t control_word() {
  uint64_t word;
  __asm__ volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
inline void set_control_word(uint64_t word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
constexpr uint64_t USUAL_CONTROL_WORD = 0;
inline uint64_t control_word() { return USUAL_CONTROL_WORD; }
inline void set_control_word(uint64_t) {}
#endif

// Rounds to nearest, with denormal numbers, for as long as it lives.
class UsualRounding {
 public:
  UsualRounding() : before_(control_word()) { set_control_word(USUAL_CONTROL_WORD); }
  ~UsualRounding() { set_control_word(before_); }

 private:
  const uint64_t before_;
};

}  // namespace diskprefix
