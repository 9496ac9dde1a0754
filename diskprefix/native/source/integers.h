// Rows and weights as integers of 8 bits, and the sums of their products.
//
// A block of a row, 32 numbers, is integers × a scale: of 8 bits (`Row8`), or of 15 bits (`Row15`). Sums of products are
// exact integers, so their order and the instructions do not matter. Weights are bytes: a step has four columns of all 16
// rows of a strip. They are signed, or numbers + `above`, which are not negative; `IntegerForm` says which.

#pragma once

#include "weights.h"

namespace diskprefix {
namespace {
namespace matrices {

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define MULTIPLIES_BYTES
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_VNNI
#endif

// What does not depend on the bits of a row. `sums` are the sums of the integers: of both halves and of all; `totals` are
// the sums of the numbers.
struct RowScale {
  float scale, totals[3];
  int32_t sums[3];
};

constexpr int64_t place_of(int64_t group, int64_t groups) { return groups == 1 ? 2 : group; }

// Integers of 16 bits. In each four columns the order is {0, 2, 1, 3}: a multiplication takes the first and the third byte
// of a step, or the second and the fourth.
struct WideRow : RowScale {
  int16_t integers[INNER];

  void put(const int16_t* from) {
    for (int i = 0; i < INNER; ++i) integers[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = from[i];
  }
};

// PLANES = 2: 256 × the first + the second.
template <int PLANES>
struct alignas(64) ByteRow : RowScale {
  static constexpr int NUM_PLANES = PLANES;
  int8_t planes[PLANES][INNER];

  void put(const int16_t* from) {
    for (int i = 0; i < INNER; ++i) {
      if (PLANES == 2) planes[0][i] = from[i] + 128 >> 8;
      planes[PLANES - 1][i] = from[i];
    }
  }
};

#if defined(__ARM_FEATURE_DOTPROD)
struct Row8 : ByteRow<1> {};
struct Row15 : ByteRow<2> {};
#elif defined(MULTIPLIES_BYTES)
struct Row8 : ByteRow<1> {};
struct Row15 : WideRow {};
#else
struct Row8 : WideRow {};
struct Row15 : WideRow {};
#endif

// Finishes a block whose integers are known.
template <class Row>
INLINE void put_integers(const int16_t* integers, float scale, Row& to) {
  to.scale = scale;
  to.put(integers);
  for (int half = 0; half < 2; ++half) {
    Ints sum = {};
    for (int i = 0; i < 16; i += LANES) sum += (Ints)(__builtin_convertvector(loaded<Halves>(integers + 16 * half + i), Words) << 16) >> 16;
    to.sums[half] = folded(sum, [](Ints a, Ints b) { return a + b; });
  }
  to.sums[2] = to.sums[0] + to.sums[1];
  for (int i = 0; i < 3; ++i) to.totals[i] = to.sums[i] * to.scale;
}

// Rounds the numbers of a block × `factor` to integers: adding 1.5 × 2^23 rounds in the last bits.
INLINE void round_block(const uint16_t* from, Floats factor, int16_t* integers) {
  for (int i = 0; i < INNER; i += LANES) {
    const Words bits = (Words)(BFloat16::load(from + i) * factor + all(12582912.0f));
    store(integers + i, __builtin_convertvector(bits, Halves));
  }
}

// Returns the bits of the largest absolute number of a block.
INLINE uint32_t largest_bits(const uint16_t* from) {
  const auto larger = [](Halves a, Halves b) { return a > b ? a : b; };
  Halves highest = {};
  for (int i = 0; i < INNER; i += LANES) highest = larger(highest, loaded<Halves>(from + i) & (uint16_t)0x7fff);
  return folded(highest, larger);
}

constexpr uint32_t INFINITE_BITS = 0x7f80, LEAST_BITS = 32 << 7;

// The largest number becomes 127. Numbers below 2^-95 count as that. An infinity or a NaN makes the scale NaN, and so the
// result.
INLINE void pack_block(const uint16_t* from, Row8& to) {
  const uint32_t bits = largest_bits(from);
  const float largest = BFloat16::one(bits > LEAST_BITS ? bits : LEAST_BITS);
  int16_t integers[INNER];
  round_block(from, all(127.0f / largest), integers);
  put_integers(integers, bits >= INFINITE_BITS ? __builtin_nanf("") : largest / 127.0f, to);
}

// The scale is a power of 2, so numbers down to a 64th of the largest one are exact.
INLINE void pack_block(const uint16_t* from, Row15& to) {
  const uint32_t bits = largest_bits(from);
  const int32_t exponent = (bits > LEAST_BITS ? bits : LEAST_BITS) >> 7;
  int16_t integers[INNER];
  round_block(from, (Floats)all_ints(267 - exponent << 23), integers);
  put_integers(integers, bits >= INFINITE_BITS ? __builtin_nanf("") : ((Floats)all_ints(exponent - 13 << 23))[0], to);
}

// How weights are integers: without `SIGNED` they are numbers + 2^`ABOVE_BITS` (or + 0). `MOST` is the largest absolute byte.
template <int GROUPS_, bool HAS_ZEROS, bool SIGNED_, int ABOVE_BITS_, int MOST>
struct IntegerForm {
  static constexpr int GROUPS = GROUPS_;  // of a block
  static constexpr bool ZEROS = HAS_ZEROS, SIGNED = SIGNED_;
  static constexpr int ABOVE_BITS = ABOVE_BITS_;
  static constexpr int STEPS_OF_GROUP = STEPS / GROUPS;
  // Steps whose products may be added in 16 bits, which hold 2 × 127 × MOST × the number of steps.
  static constexpr int NARROW = MOST <= 16 ? STEPS_OF_GROUP : MOST <= 32 ? 4 : MOST <= 64 ? 2 : 1;
};

// Sums of the products of one row with LANES rows of a strip.
template <class Row, class Form>
struct Sums;

#if defined(__ARM_FEATURE_DOTPROD)

template <class Row, class Form>
struct Sums {
  int32x4_t planes[Row::NUM_PLANES] = {};

  INLINE void start(const Row&, int) {}

  INLINE void add(Bytes weights, const Row& row, int step) {
    for (int plane = 0; plane < Row::NUM_PLANES; ++plane)
      planes[plane] = vdotq_s32(planes[plane], (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(loaded<int32_t>(row.planes[plane] + 4 * step))));
  }

  INLINE Ints total() const {
    if constexpr (Row::NUM_PLANES == 1) return (Ints)planes[0];
    else return (Ints)vaddq_s32(vshlq_n_s32(planes[0], 8), planes[1]);
  }
};

#else

INLINE void in_register(Ints& sums) {
#if defined(__x86_64__)
  // Without this, GCC multiplies everything first and keeps the products in memory.
  __asm__("" : "+v"(sums));
#endif
}

// Returns where a sum begins: by how much weights above their numbers make it too large, below 0.
template <class Form>
INLINE Ints less_above(const RowScale& row, int group) {
  return Form::ABOVE_BITS ? -(all_ints(row.sums[place_of(group, Form::GROUPS)]) << Form::ABOVE_BITS) : Ints{};
}

// Adds the products of pairs of 16 bits.
INLINE Ints with_pairs(Ints sums, Lanes weights, Ints numbers) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)numbers);
#elif defined(__AVX512BW__)
  return sums + (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)numbers);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)numbers);
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)numbers);
#elif defined(__SSE2__)
  return sums + (Ints)_mm_madd_epi16((__m128i)weights, (__m128i)numbers);
#else
  return sums + ((Ints)weights << 16 >> 16) * (numbers << 16 >> 16) + ((Ints)weights >> 16) * (numbers >> 16);
#endif
}

template <class Form>
struct WideSums {
  Ints sums;

  INLINE void start(const RowScale& row, int group) { sums = less_above<Form>(row, group); }

  INLINE void add(Bytes weights, const WideRow& row, int step) {
    const Lanes both = (Lanes)weights;
    const Lanes even = Form::SIGNED ? (Lanes)((Shorts)(both << 8) >> 8) : both & (uint16_t)0xff;
    const Lanes odd = Form::SIGNED ? (Lanes)((Shorts)both >> 8) : both >> 8;
    sums = with_pairs(sums, even, all_ints(loaded<int32_t>(row.integers + 4 * step)));
    sums = with_pairs(sums, odd, all_ints(loaded<int32_t>(row.integers + 4 * step + 2)));
    in_register(sums);
  }

  INLINE Ints total() const { return sums; }
};

#if defined(MULTIPLIES_BYTES)

#if defined(HAS_VNNI)

template <class Form>
struct ByteSums {
  Ints sums;

  INLINE void start(const RowScale& row, int group) { sums = less_above<Form>(row, group); }

  INLINE void add(Bytes weights, const Row8& row, int step) {
    const Ints numbers = all_ints(loaded<int32_t>(row.planes[0] + 4 * step));
#if defined(__AVX512VNNI__)
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)numbers);
#else
    sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)numbers);
#endif
    in_register(sums);
  }

  INLINE Ints total() const { return sums; }
};

#else

#if defined(__AVX512BW__)
INLINE Lanes with_bytes(Bytes weights, Ints numbers) { return (Lanes)_mm512_maddubs_epi16((__m512i)weights, (__m512i)numbers); }
INLINE Ints widened(Lanes pairs) { return (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
INLINE Bytes absolute(Bytes weights) { return (Bytes)_mm512_abs_epi8((__m512i)weights); }
INLINE Ints with_signs(Ints numbers, Bytes weights) {
  const __m512i negative = _mm512_setzero_si512();
  return (Ints)_mm512_mask_sub_epi8((__m512i)numbers, _mm512_movepi8_mask((__m512i)weights), negative, (__m512i)numbers);
}
#else
INLINE Lanes with_bytes(Bytes weights, Ints numbers) { return (Lanes)_mm256_maddubs_epi16((__m256i)weights, (__m256i)numbers); }
INLINE Ints widened(Lanes pairs) { return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
INLINE Bytes absolute(Bytes weights) { return (Bytes)_mm256_abs_epi8((__m256i)weights); }
INLINE Ints with_signs(Ints numbers, Bytes weights) { return (Ints)_mm256_sign_epi8((__m256i)numbers, (__m256i)weights); }
#endif

template <class Form>
struct ByteSums {
  Ints sums;
  Lanes narrow;

  INLINE void start(const RowScale& row, int group) { sums = less_above<Form>(row, group); }

  INLINE void add(Bytes weights, const Row8& row, int step) {
    const Ints numbers = all_ints(loaded<int32_t>(row.planes[0] + 4 * step));
    const Lanes pairs = Form::SIGNED ? with_bytes(absolute(weights), with_signs(numbers, weights)) : with_bytes(weights, numbers);
    narrow = step % Form::NARROW ? narrow + pairs : pairs;
    __asm__("" : "+v"(narrow));
    if (step % Form::NARROW == Form::NARROW - 1) sums += widened(narrow);
  }

  INLINE Ints total() const { return sums; }
};

#endif

template <class Form>
struct Sums<Row8, Form> : ByteSums<Form> {};
#else
template <class Form>
struct Sums<Row8, Form> : WideSums<Form> {};
#endif

template <class Form>
struct Sums<Row15, Form> : WideSums<Form> {};

#endif

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
