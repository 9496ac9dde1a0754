// Vectors of float32 for the instructions that this file is compiled for, mostly by the compilers' vector types. Everything
// is in unnamed namespaces: variants must not share functions, because some would crash on an older CPU.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "interface.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace diskprefix {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

constexpr float LOG2_E = 1.4426950408889634f;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t up_to(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

template <class Vector>
inline Vector loaded(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  memcpy(to, &vector, sizeof vector);
}

// A barrier: the compiler moves no store across it. GCC needs it before loads of tiles, because its intrinsics do not
// declare that they read memory.
inline void written() { __asm__ volatile("" ::: "memory"); }

inline Floats all(float number) { return number - Floats{}; }
inline Ints all_ints(int32_t number) { return number - Ints{}; }

// Multiply-and-add is written out (-ffp-contract=off): otherwise the surrounding code would decide where it is used.
// All variants have its bits.
#if defined(__SSE2__) && !defined(__FMA__)

// The sum of numbers in double precision, rounded so that a second rounding, to float32, gives the bits of one: of the two
// nearest numbers it is the one whose last bit is 1, unless it is exact (Boldo and Melquiond).
inline __m128d sum_to_odd(__m128d a, __m128d b) {
  const __m128d sum = _mm_add_pd(a, b), part = _mm_sub_pd(sum, a), none = _mm_setzero_pd();
  const __m128d error = _mm_add_pd(_mm_sub_pd(a, _mm_sub_pd(sum, part)), _mm_sub_pd(b, part));
  // Compared twice, because the error of an infinite sum is NaN.
  const __m128i is_off = (__m128i)_mm_or_pd(_mm_cmplt_pd(error, none), _mm_cmpgt_pd(error, none));
  const __m128i is_above = _mm_srli_epi64(_mm_and_si128(is_off, (__m128i)_mm_xor_pd(sum, error)), 63);
  return (__m128d)_mm_or_si128(_mm_sub_epi64((__m128i)sum, is_above), _mm_srli_epi64(is_off, 63));
}

inline __m128 joined(__m128d low, __m128d high) { return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high)); }

__attribute__((noinline, cold)) Floats sums_to_odd(__m128d a, __m128d b, __m128d c, __m128d d) {
  return (Floats)joined(sum_to_odd(a, c), sum_to_odd(b, d));
}

// A product is exact in double precision. A sum that is rounded there and again to float32 has other bits only if the first
// rounding gave a number halfway between two of float32, or if float32 has fewer bits for it, which it has near 0.
inline Floats fma(Floats a, Floats b, Floats c) {
  const auto low = [](Floats numbers) { return _mm_cvtps_pd((__m128)numbers); };
  const auto high = [](Floats numbers) { return _mm_cvtps_pd(_mm_movehl_ps((__m128)numbers, (__m128)numbers)); };
  const __m128d first = _mm_mul_pd(low(a), low(b)), second = _mm_mul_pd(high(a), high(b));
  const __m128d sums[2] = {_mm_add_pd(first, low(c)), _mm_add_pd(second, high(c))};
  const Floats rounded = (Floats)joined(sums[0], sums[1]);
  const Ints dropped = (Ints)_mm_shuffle_ps((__m128)sums[0], (__m128)sums[1], 0x88) << 3, size = (Ints)rounded & 0x7fffffff;
  const Ints may_differ = (dropped == INT32_MIN) | (size > 0) & (size <= 0x00800000);
  if (__builtin_expect(_mm_movemask_epi8((__m128i)may_differ), 0)) return sums_to_odd(first, second, low(c), high(c));
  return rounded;
}

#else

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  Floats sums;
  for (int lane = 0; lane < LANES; ++lane) sums[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return sums;
#endif
}

#endif

inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Returns a mask of the lanes in which one of two numbers is NaN.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q); }
inline bool has_any(Mask mask) { return mask; }
#else
typedef Ints Mask;
inline Mask unordered(Floats a, Floats b) { return (a != a) | (b != b); }
inline bool has_any(Mask mask) {
  bool is_any = false;
  for (int lane = 0; lane < LANES; ++lane) is_any |= mask[lane] != 0;
  return is_any;
}
#endif

// Converts LANES 8-bit integers. Compilers would convert them one by one.
inline Ints wide_ints(const int8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif defined(__SSE2__)
  __m128i four = _mm_cvtsi32_si128(loaded<int32_t>(from));
  four = _mm_unpacklo_epi8(four, four);
  return (Ints)_mm_srai_epi32(_mm_unpacklo_epi16(four, four), 24);
#elif defined(__aarch64__)
  return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(loaded<uint32_t>(from)))));
#else
  Ints numbers;
  for (int lane = 0; lane < LANES; ++lane) numbers[lane] = from[lane];
  return numbers;
#endif
}

inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < LANES; ++lane) numbers[lane] = lane;
  return numbers;
}

template <int BY, class Vector, int... LANE>
inline Vector rotated(Vector vector, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(vector, vector, ((LANE + BY) % LANES)...);
}

// Combines the LANES lanes of a vector in a fixed order: halves of the vector, again and again.
template <int HALF = LANES / 2, class Vector, class Combine>
inline auto folded(Vector vector, const Combine& combine) {
  const Vector half = combine(vector, rotated<HALF>(vector, std::make_integer_sequence<int, LANES>()));
  if constexpr (HALF > 1)
    return folded<HALF / 2>(half, combine);
  else
    return +half[0];
}

inline float sum_of(Floats vector) { return folded(vector, [](Floats a, Floats b) { return a + b; }); }

// A sum whose order does not depend on the size of a vector, with 16 lanes in each of CHAINS chains: number i is added in lane
// i % 16 of chain i / 16 % CHAINS. Then the chains are added in pairs, and the halves of the lanes, again and again.
template <int CHAINS>
class Total {
 public:
  // Returns where LANES numbers are added, of which the first is number `first`.
  Floats& from(int64_t first) { return sums_[first / LANES % COUNT]; }

  float sum() const { return sum_of(halved<1>(0)); }

 private:
  static constexpr int OF_CHAIN = 16 / LANES, COUNT = CHAINS * OF_CHAIN;  // vectors
  Floats sums_[COUNT] = {};

  // Returns vector `part` of the sum of some chains.
  template <int NUM_CHAINS>
  Floats of_chains(int first, int part) const {
    if constexpr (NUM_CHAINS == 1) return sums_[first * OF_CHAIN + part];
    else return of_chains<NUM_CHAINS / 2>(first, part) + of_chains<NUM_CHAINS / 2>(first + NUM_CHAINS / 2, part);
  }

  // Returns vector `part` of the sum of all chains, whose lanes were halved until `SIZE` vectors were left.
  template <int SIZE>
  Floats halved(int part) const {
    if constexpr (SIZE == OF_CHAIN) return of_chains<CHAINS>(0, part);
    else return halved<2 * SIZE>(part) + halved<2 * SIZE>(part + SIZE);
  }
};

// Of 0 and -0 it may be either.
inline float largest_of(Floats vector) { return folded(vector, larger); }

// 2^x for x up to 126, with an error of 2 units in the last place. Exactly 1 for 0; 0 below -126 and for NaN.
inline Floats exp2(Floats x) {
  const Floats magic = all(12582912.0f);  // 1.5 × 2^23: adding it rounds to an integer
  Floats shifted = x + magic;
  Floats part = x - (shifted - magic);
  Floats sum = all(1.5403530e-4f);
  sum = fma(sum, part, all(1.3333558e-3f));
  sum = fma(sum, part, all(9.6181291e-3f));
  sum = fma(sum, part, all(5.5504109e-2f));
  sum = fma(sum, part, all(2.4022651e-1f));
  sum = fma(sum, part, all(6.9314718e-1f));
  sum = fma(sum, part, all(1.0f));
  Ints bits = (Ints)sum + ((Ints)shifted << 23);
  return (Floats)(bits & (x >= all(-126.0f)));
}

// Computed from exp(2x). The error is about 1e-7, also near 0. Returns NaN for NaN, which the limits and exp2 would hide.
inline Floats tanh(Floats x) {
  Floats limited = larger(x, all(-20.0f));
  limited = limited > all(20.0f) ? all(20.0f) : limited;
  const Floats value = all(1.0f) - all(2.0f) / (exp2(limited * all(2.0f * LOG2_E)) + all(1.0f));
  return x == x ? value : x;
}

inline float from_half(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
  float number;
  if (rest >= 0x7c00) {
    wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else {
    // 2^112 moves the exponent, and makes subnormal numbers normal.
    wide = rest << 13;
    memcpy(&number, &wide, 4);
    number *= 5.192296858534828e33f;
    memcpy(&wide, &number, 4);
    wide |= sign;
  }
  memcpy(&number, &wide, 4);
  return number;
}

inline uint16_t to_half(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;
  float shifted;
  if (bits < 0x38800000) {
    memcpy(&shifted, &bits, 4);
    shifted += 0.5f;  // aligns the last bit with that of a subnormal float16
    memcpy(&bits, &shifted, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (uint16_t)((bits - 0x38000000) >> 13);
}

// The types in which a model's numbers are stored.
struct Float32 {
  typedef float Stored;
  static Floats load(const float* from) { return loaded<Floats>(from); }
  static float one(float stored) { return stored; }
  static float narrowed(float number) { return number; }
  static void put(float* to, Floats numbers) { store(to, numbers); }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static Floats load(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(loaded<Halves>(from), Words) << 16);
  }
  static float one(uint16_t stored) {
    uint32_t bits = (uint32_t)stored << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
  }
  // Converts a number that the type represents exactly.
  static uint16_t narrowed(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits >> 16;
  }
  static void put(uint16_t* to, Floats numbers) {
    Words bits = (Words)numbers;
    Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    store(to, __builtin_convertvector((Words)(numbers == numbers) & rounded | (Words)(numbers != numbers) & 0x7fc0, Halves));
  }
};

struct Float16 {
  typedef uint16_t Stored;
  static Floats load(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)loaded<Halves>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)loaded<Halves>(from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    Floats numbers;
    for (int lane = 0; lane < LANES; ++lane) numbers[lane] = from_half(from[lane]);
    return numbers;
#endif
  }
  static float one(uint16_t stored) { return from_half(stored); }
  static void put(uint16_t* to, Floats numbers) {
    for (int lane = 0; lane < LANES; ++lane) to[lane] = to_half(numbers[lane]);
  }
};

// Calls `body` with the type of a model's numbers.
template <class Body>
inline auto with_type(int64_t dtype, const Body& body) {
  return dtype == FLOAT32 ? body(Float32()) : body(BFloat16());
}

// One step of transposing a square of LANES × LANES: swaps the off-diagonal squares of STEP × STEP.
template <int STEP, int... LANE>
inline void exchange(Floats& upper, Floats& lower, std::integer_sequence<int, LANE...>) {
  Floats above = upper, below = lower;
  upper = __builtin_shufflevector(above, below, (LANE & STEP ? LANES + LANE - STEP : LANE)...);
  lower = __builtin_shufflevector(above, below, (LANE & STEP ? LANES + LANE : LANE + STEP)...);
}

template <int STEP>
inline void exchange_all(Floats* rows) {
  for (int row = 0; row < LANES; ++row)
    if (!(row & STEP)) exchange<STEP>(rows[row], rows[row + STEP], std::make_integer_sequence<int, LANES>());
}

inline void transpose(Floats* rows) {
  exchange_all<1>(rows);
  exchange_all<2>(rows);
  if constexpr (LANES > 4) exchange_all<4>(rows);
  if constexpr (LANES > 8) exchange_all<8>(rows);
}

}  // namespace
}  // namespace diskprefix
