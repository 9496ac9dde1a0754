// The forms of a matrix's weights in memory, and how their codes are read.
//
// A quantised weight is table[code] × scale + zero, rounded to bfloat16 where it is looked up.
// `runtime/plan/quants/quant_form.py` describes the layout: strips of 16 rows of the matrix (16 columns of the result),
// each a sequence of blocks of 32 columns of the matrix. `integer_product.h` multiplies them with rows of integers,
// `tile_product.h` with rows of bfloat16 by the tiles of AMX, for which the codes lie in another order. Matrices in
// bfloat16 are multiplied by `dense.h`.

#pragma once

#include "interface.h"
#include "vector.h"

namespace diskprefix {
namespace {
namespace matrices {

constexpr int64_t STRIP = 16;
constexpr int64_t INNER = 32;

// The number of vectors for the rows of a strip.
constexpr int PARTS = STRIP / LANES;

typedef uint8_t UnsignedBytes __attribute__((vector_size(LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES * 4)));
typedef uint16_t Lanes __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));

#define INLINE inline __attribute__((always_inline))

// Loads one float16 for each row of a part of a strip.
INLINE Floats halves_at(const uint8_t* from, int part) { return Float16::load((const uint16_t*)from + part * LANES); }

// Widens bytes; GCC would convert them one by one.
INLINE Words words_at(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(loaded<__m128i>(from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(loaded<UnsignedBytes>(from), Words);
#endif
}

INLINE Floats bytes_at(const uint8_t* from, int part) {
  return __builtin_convertvector((Ints)words_at(from + part * LANES) << 24 >> 24, Floats);
}

// Returns half of 2^(byte - 127), the scale of MXFP4.
INLINE Floats exponents_at(const uint8_t* from, int part) {
  const Words exponents = words_at(from + part * LANES);
  const Words is_small = (Words)(exponents < 2);
  return (Floats)(is_small & (exponents + 1) * 0x200000u | ~is_small & exponents - 1 << 23);
}

// Converts unsigned 8-bit floats: 4 bits of exponent, 3 of mantissa, with subnormals.
INLINE Floats floats8_at(const uint8_t* from, int part) {
  const Words bits = words_at(from + part * LANES);
  const Words is_small = (Words)(bits < 8);
  return (Floats)((bits << 20) + 0x3c000000u + (is_small & 0x800000u)) - (Floats)(is_small & 0x3c800000u);
}

// Lines of codes: 16 rows of 32 columns for AMX in bfloat16, in planes of 16 bits for a column; otherwise steps of four
// columns of all 16 rows, in planes of bytes.
#if defined(__AMX_BF16__)
#define HAS_ROWS
constexpr int LINE_BITS = 16;
#else
constexpr int LINE_BITS = 8;
constexpr int STEPS = INNER / 4;
#endif

// How far ahead memory is prefetched, in bytes. Blocks are contiguous in a strip, and strips in a matrix.
constexpr int64_t AHEAD = 2048;

// The scales and zeros of the groups of a unit, before its codes. A unit is one block, or the blocks of a larger group, or
// eight blocks whose groups have integers × the scale of the unit, or two blocks whose 8-bit scales are multiplied by a
// float32 of the unit.
template <int SCALES, int GROUP, bool HAS_ZEROS>
struct Numbers {
  static constexpr bool IS_NESTED = SCALES == IN_BYTES || SCALES == IN_NIBBLES || SCALES == SHARED;
  static constexpr bool IS_LARGE = GROUP > INNER, HAS_FACTORS = SCALES == IN_FLOAT8;
  static constexpr int BLOCKS = IS_NESTED ? 8 : HAS_FACTORS ? 2 : IS_LARGE ? GROUP / INNER : 1;
  static constexpr int GROUPS = IS_LARGE ? 1 : INNER / GROUP, OF_UNIT = BLOCKS * INNER / GROUP;
  static constexpr int64_t SHARED_BYTES = IS_NESTED ? STRIP * 2 * (1 + HAS_ZEROS) : HAS_FACTORS ? STRIP * 4 : 0;
  static constexpr int64_t OF_GROUP = SCALES == IN_FLOAT16 ? 32 : SCALES == SHARED ? 0 : 16;
  static constexpr int64_t KINDS = HAS_ZEROS && SCALES != IN_NIBBLES ? 2 : 1;
  static constexpr int64_t BYTES = SHARED_BYTES + OF_UNIT * OF_GROUP * KINDS;

  const uint8_t* from;
  Floats scale_of_unit[PARTS], zero_of_unit[PARTS];

  INLINE explicit Numbers(const uint8_t* unit) : from(unit + SHARED_BYTES) {
    for (int part = 0; HAS_FACTORS && part < PARTS; ++part) scale_of_unit[part] = loaded<Floats>(unit + part * sizeof(Floats));
    for (int part = 0; IS_NESTED && part < PARTS; ++part) {
      scale_of_unit[part] = halves_at(unit, part);
      if (HAS_ZEROS) zero_of_unit[part] = halves_at(unit + STRIP * 2, part);
    }
  }

  // Returns the scale of group number `group`; each block has `GROUPS` groups.
  INLINE Floats scale(int64_t group, int part = 0) const {
    const uint8_t* at = from + (IS_LARGE ? 0 : group * OF_GROUP);
    if constexpr (SCALES == IN_FLOAT16) return halves_at(at, part);
    if constexpr (SCALES == IN_EXPONENTS) return exponents_at(at, part);
    if constexpr (SCALES == IN_BYTES) return scale_of_unit[part] * bytes_at(at, part);
    if constexpr (SCALES == IN_FLOAT8) return scale_of_unit[part] * floats8_at(at, part);
    if constexpr (SCALES == IN_NIBBLES) return scale_of_unit[part] * nibbles_at(at, part, 0);
    return scale_of_unit[part];
  }

  // Nested zeros are stored as numbers to subtract.
  INLINE Floats zero(int64_t group, int part = 0) const {
    static_assert(!IS_LARGE || !HAS_ZEROS);
    if constexpr (SCALES == IN_NIBBLES) return -(zero_of_unit[part] * nibbles_at(from + group * OF_GROUP, part, 4));
    const uint8_t* at = from + (OF_UNIT + group) * OF_GROUP;
    if constexpr (SCALES == IN_FLOAT16) return halves_at(at, part);
    return -(zero_of_unit[part] * bytes_at(at, part));
  }

 private:
  static INLINE Floats nibbles_at(const uint8_t* from, int part, int bit) {
    return __builtin_convertvector((Ints)words_at(from + part * LANES) >> bit & 15, Floats);
  }
};

// The codes of a block. Codes of less than 8 bits are stored in planes: the first ones have the low 4, 2 or 1 bits of the
// codes, the others the remaining bits. Codes index a table of 64 entries; with fewer codes the table repeats. Codes of 8
// bits are the numbers themselves.
template <int BITS_, int GROUP_, bool HAS_ZEROS, int SCALES_, bool HAS_TABLE_>
struct Block {
  typedef matrices::Numbers<SCALES_, GROUP_, HAS_ZEROS> Numbers;
  static constexpr int BITS = BITS_, GROUP = GROUP_, SCALES = SCALES_;
  static constexpr int64_t CODES = STRIP * INNER * BITS / 8;
  static constexpr int BLOCKS = Numbers::BLOCKS, GROUPS = Numbers::GROUPS;
  static constexpr bool ZEROS = HAS_ZEROS, HAS_TABLE = HAS_TABLE_;
  static constexpr int64_t BYTES = Numbers::BYTES + BLOCKS * CODES;  // in a unit
  static constexpr int LOW = BITS >= 4 ? 4 : BITS > 1 ? 2 : 1, HIGH = BITS - LOW;
  static constexpr int OF_LOW = LINE_BITS / LOW, OF_HIGH = HIGH ? LINE_BITS / HIGH : 1;  // lines of a plane
  static constexpr uint32_t LOW_MASK = (1 << LOW) - 1, HIGH_MASK = (1 << BITS) - 1 - LOW_MASK;

  static void look_up(const uint8_t* strip, int64_t blocks, int64_t row, const float* table, uint16_t* to) {
    for (int64_t block = 0; block < blocks; block += BLOCKS, strip += BYTES) {
      const Numbers numbers(strip);
      for (int64_t i = 0; i < BLOCKS; ++i, to += INNER) {
        float unpacked[INNER];
        for (int group = 0; group < GROUPS; ++group) {
          const auto of_row = [row](Floats numbers) { return numbers[row % LANES]; };
          const float scale = of_row(numbers.scale(i * GROUPS + group, row / LANES));
          const float zero = HAS_ZEROS ? of_row(numbers.zero(i * GROUPS + group, row / LANES)) : 0;
          for (int column = group * INNER / GROUPS; column < (group + 1) * INNER / GROUPS; ++column) {
            unpacked[column] = number_of(strip + Numbers::BYTES + i * CODES, row, column, table) * scale;
            if (HAS_ZEROS) unpacked[column] += zero;
          }
        }
        for (int64_t first = 0; first < INNER; first += LANES) BFloat16::put(to + first, loaded<Floats>(unpacked + first));
      }
    }
  }

#if defined(HAS_ROWS)

  static float number_of(const uint8_t* codes, int64_t row, int column, const float* table) {
    const int64_t lane = column % GROUP * GROUPS + column / GROUP;
    if (BITS == 8) return (int8_t)codes[INNER * row + lane];
    const auto word = [=](int64_t number) { return loaded<uint16_t>(codes + 64 * number + 2 * lane); };
    uint32_t code = word(row / OF_LOW) >> LOW * (row % OF_LOW) & LOW_MASK;
    if (HIGH) code |= word(LOW + row / OF_HIGH) >> HIGH * (row % OF_HIGH) << LOW & HIGH_MASK;
    return table[code];
  }

#else

  static float number_of(const uint8_t* codes, int64_t row, int column, const float* table) {
    const int64_t step = column / 4, lane = 4 * row + column % 4;
    if (BITS == 8) return (int8_t)codes[64 * step + lane];
    uint32_t code = codes[64 * (step / OF_LOW) + lane] >> LOW * (step % OF_LOW) & LOW_MASK;
    if (HIGH) code |= codes[64 * (LOW + step / OF_HIGH) + lane] >> HIGH * (step % OF_HIGH) << LOW & HIGH_MASK;
    return table[code];
  }

#endif
};

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
