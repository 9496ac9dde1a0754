// The forms of a matrix's weights, and their conversion into the factors of a product.
//
// A quantised weight is table[code] × scale + zero, rounded to bfloat16. `model/quants/quant_form.py` describes the layout in
// memory: strips of 16 rows of the matrix (16 columns of the result), each a sequence of blocks of 32 columns of the matrix.
// Matrices in bfloat16 are multiplied by `dense.h`.
//
// With AMX a block becomes a tile: 16 rows of 32 bfloat16. In the other variants the factors are table[code], and scales and
// zeros are applied to the sums. There a block becomes 16 pairs of columns, each with the 16 rows, and a vector is multiplied
// with a pair of a row: in bfloat16 where AVX-512 has it, or else as integers. ARM's dot products take four columns.

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
typedef uint16_t Lanes __attribute__((vector_size(LANES * 4)));
typedef int8_t BytesOfLanes __attribute__((vector_size(LANES * 2)));
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

#if defined(__AVX512BF16__)

INLINE __m512i pair_of(Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

#endif

#if defined(__AMX_BF16__)

constexpr bool HAS_ROWS = true;  // a line of codes is a row of the strip; otherwise a pair of columns
constexpr int64_t BLOCK_BYTES = 1024;  // of the factors of a block

#elif defined(__AVX512BF16__)

#define KEEPS_CODES

constexpr int FEW = 6;

// The scales of the strip's rows follow the pairs, for one or two groups, and then the zeros.
constexpr int64_t SCALES_AT = 1024, BLOCK_BYTES = SCALES_AT + 4 * 64;
constexpr bool HAS_ROWS = false;

#else

#define TAKES_INTEGERS

constexpr int FEW = 4;
constexpr int TOGETHER = 6;  // rows whose blocks with the same columns lie side by side
constexpr bool HAS_ROWS = false;

// A block of a row: 2^n × integers of 15 bits. Numbers down to a 64th of the largest one are exact. `sums` are the sums of
// the integers: of both halves and of all; `totals` are the sums of the numbers.
struct Integers {
#if defined(__ARM_FEATURE_DOTPROD)
  int8_t high[INNER], low[INNER];  // 256 × high + low, with each eight columns in the order {0, 4, 1, 5, 2, 6, 3, 7}
#else
  int16_t whole[INNER];
#endif
  float scale, totals[3];
  int32_t sums[3];
};

#if defined(__ARM_FEATURE_DOTPROD)

constexpr int STEPS = 4;  // of a block; each step has some columns of the strip's rows
constexpr int WIDE = 1;   // parts that are multiplied together if there are many rows
constexpr int64_t FACTOR_BYTES = 1;

struct Factors {
  int8x16_t first, second;  // columns in the order {0, 4, 1, 5}, and the others
};

#else

constexpr int STEPS = 16, WIDE = LANES < 16 ? 2 : 1;
constexpr int64_t FACTOR_BYTES = 2;

typedef Lanes Factors;

#endif

// The scales of the strip's rows follow the integers, for one or two groups, and then the zeros.
constexpr int64_t SCALES_AT = STRIP * INNER * FACTOR_BYTES, BLOCK_BYTES = SCALES_AT + 4 * 64;
constexpr int64_t STEP_BYTES = SCALES_AT * WIDE / PARTS / STEPS;

#endif

struct Part;

// How a matrix is converted to factors of a product. `strip` is the address of a strip.
struct Form {
  // Unpacks blocks `begin` to `end`. With AMX `begin` is 0.
  void (*unpack)(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to);
  // Writes one row of a quantised strip in bfloat16.
  void (*look_up)(const uint8_t* strip, int64_t blocks, int64_t row, const float* table, uint16_t* to);
  int64_t strip_bytes;
#if defined(__AMX_BF16__)
  // Multiplies few rows, in one or two groups, with one or two strips.
  void (*multiply[2][2])(const Part& part, int64_t strip, uint8_t* factors);
#elif defined(KEEPS_CODES)
  // Multiplies 1 to FEW rows with the blocks of a strip. `sums` are the sums of the halves of the rows' blocks.
  void (*multiply[FEW])(const uint8_t* strip, int64_t blocks, const float* table, const uint16_t* rows, const float* sums,
                        Floats* out);
  int64_t groups;  // of a block
  bool has_zeros;
#else
  void (*multiply[FEW])(const uint8_t* strip, int64_t blocks, const float* table, const Integers* rows, Floats* out);
  int64_t groups;
  bool has_zeros;
#endif
};

// How far ahead memory is prefetched, in bytes. Blocks are contiguous in a strip, and strips in a matrix.
constexpr int64_t AHEAD = 2048;

#if defined(__AVX512VBMI__)

// Operands of the rotation of eight bytes by -4 to 15 bits: the first bit of each byte of the result.
struct Rotations {
  uint8_t from[20][64] = {};
  constexpr Rotations() {
    for (int by = -4; by < 16; ++by)
      for (int i = 0; i < 64; ++i) from[by + 4][i] = (i % 8 * 8 + by + 64) % 64;
  }
};
alignas(64) constexpr Rotations ROTATIONS;

// With AMX, vector products have one port, which shifts use too. Rotations use another port, but bring in other bits.
INLINE Lanes down(Lanes from, int by) {
  return by ? (Lanes)_mm512_multishift_epi64_epi8(loaded<__m512i>(ROTATIONS.from[by + 4]), (__m512i)from) : from;
}

#else

INLINE Lanes down(Lanes from, int by) { return by < 0 ? from << (uint16_t)-by : from >> (uint16_t)by; }

#endif

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

// 32 columns of a strip: 16 lines of 32 lanes. Either a line is a row of the strip and a lane one of its columns, or a line
// is a pair of columns and a lane one of these columns in a row. Codes of less than 8 bits are stored in planes: words of 32
// lanes of 16 bits, each with the low 4, 2 or 1 bits of some lines; then words with the higher bits. Codes index a table of
// 64 entries; with fewer codes the table repeats. Codes of 8 bits are the numbers themselves.
template <int BITS, int GROUP, bool HAS_ZEROS, int SCALES, bool HAS_TABLE>
struct Block {
  typedef matrices::Numbers<SCALES, GROUP, HAS_ZEROS> Numbers;
  static constexpr int64_t CODES = STRIP * INNER * BITS / 8;
  static constexpr int BLOCKS = Numbers::BLOCKS, GROUPS = Numbers::GROUPS;
  static constexpr bool ZEROS = HAS_ZEROS;
  static constexpr int64_t BYTES = Numbers::BYTES + BLOCKS * CODES;  // in a unit
  static constexpr int LOW = BITS >= 4 ? 4 : BITS > 1 ? 2 : 1, HIGH = BITS - LOW, OF_LOW = 16 / LOW, OF_HIGH = HIGH ? 16 / HIGH : 1;
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

  static float number_of(const uint8_t* codes, int64_t row, int column, const float* table) {
    const int64_t line = HAS_ROWS ? row : column / 2;
    const int64_t lane = HAS_ROWS ? column % GROUP * GROUPS + column / GROUP : 2 * row + column % 2;
    if (BITS == 8) return (int8_t)codes[INNER * line + lane];
    const auto word = [=](int64_t number) { return loaded<uint16_t>(codes + 64 * number + 2 * lane); };
    uint32_t code = word(line / OF_LOW) >> LOW * (line % OF_LOW) & LOW_MASK;
    if (HIGH) code |= word(LOW + line / OF_HIGH) >> HIGH * (line % OF_HIGH) << LOW & HIGH_MASK;
    return table[code];
  }

  // The words of a part.
  struct Planes {
    Lanes words[BITS];
    const uint8_t* bytes;

    Planes() = default;
    INLINE explicit Planes(const uint8_t* codes, int part = 0) : bytes(codes + 2 * LANES * part) {
      if (BITS < 8)
        for (int i = 0; i < BITS; ++i) words[i] = in_register(loaded<Lanes>(codes + 64 * i + part * sizeof(Lanes)));
    }
  };

  static INLINE Lanes in_register(Lanes words) {
#if defined(__AVX512F__)
    // Without this, GCC loads the words again for each code.
    __asm__("" : "+v"(words));
#endif
    return words;
  }

#if defined(__AVX512BF16__)

  // The table in bfloat16.
  struct Table {
    __m512i first, second;

    INLINE explicit Table(const float* table) {
      if (BITS < 8) first = pair_of(loaded<Floats>(table), loaded<Floats>(table + 16));
      if (BITS == 6) second = pair_of(loaded<Floats>(table + 32), loaded<Floats>(table + 48));
    }

    INLINE __m512i of(__m512i codes) const {
      return BITS == 6 ? _mm512_permutex2var_epi16(first, codes, second) : _mm512_permutexvar_epi16(codes, first);
    }
  };

  // Returns the codes of a line; the bits above them are undefined.
  static INLINE __m512i codes_of(const Planes& planes, int line) {
    const Lanes low = down(planes.words[line / OF_LOW], LOW * (line % OF_LOW));
    if constexpr (!HIGH) return (__m512i)low;
    const Lanes high = down(planes.words[LOW + line / OF_HIGH], HIGH * (line % OF_HIGH) - LOW);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(LOW_MASK), (__m512i)low, (__m512i)high, 0xca);
  }

#endif

#if defined(KEEPS_CODES)

  template <class Body>
  static INLINE void each_pair(const uint8_t* codes, const Table& table, const Body& body) {
    const Planes planes(codes);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      if (64 * pair < CODES) __builtin_prefetch(codes + AHEAD + 64 * pair);
      if constexpr (BITS == 8) body(pair, pair_of(bytes_at(codes + STRIP * 2 * pair, 0), bytes_at(codes + STRIP * (2 * pair + 1), 0)));
      else body(pair, table.of(codes_of(planes, pair)));
    }
  }

#elif defined(__AMX_BF16__)

  // Codes of 6 bits become numbers from 128 on. Their products with a scale are too large by 160 × the scale.
  static constexpr bool HAS_SHIFT = BITS == 6, ADDS = HAS_ZEROS || HAS_SHIFT;

  // A strip whose blocks are unpacked one after the other. The scales and zeros of a unit are computed while the previous
  // unit is unpacked, so that unpacking does not wait for them. They are in memory, from where those of one row are loaded
  // into all lanes.
  class Strip {
   public:
    INLINE Strip(const uint8_t* strip, int64_t blocks, const float* table) : strip_(strip), blocks_(blocks), table_(table) { prepare(0); }

    INLINE void unpack(int64_t block, uint8_t* to) {
      if (block % BLOCKS == 0 && block + BLOCKS < blocks_) prepare(block + BLOCKS);
      const uint8_t* codes = strip_ + block / BLOCKS * BYTES + Numbers::BYTES + block % BLOCKS * CODES;
      const uint8_t* ahead = strip_ + AHEAD + BYTES + block * BYTES / BLOCKS;
      const float (*scales)[STRIP] = numbers_[block % (2 * BLOCKS)], (*added)[STRIP] = scales + GROUPS;
      const Planes planes(codes);
      const Table in_bfloat16(table_);
      const auto weights = [=](Floats of_codes, int group, int row) {
        const Floats scale = all(scales[group][row]);
        return ADDS ? fma(of_codes, scale, all(added[group][row])) : of_codes * scale;
      };
      __m512i by_code;
#pragma GCC unroll 16
      for (int row = 0; row < 16; ++row) {
        // One cache line at a time: many at once would delay the computation.
        if (64 * row < BYTES / BLOCKS) __builtin_prefetch(ahead + 64 * row);
        __m512i factors;
        if constexpr (BITS == 8) {
          const uint8_t* of_row = codes + INNER * row;
          factors = pair_of(weights(bytes_at(of_row, 0), 0, row), weights(bytes_at(of_row + STRIP, 0), 0, row));
        } else if constexpr (BITS == 6) {
          const Words words = (Words)codes_of(planes, row);
          factors = pair_of(weights(from_128(words << 16), 0, row), weights(from_128(words), 1, row));
        } else if constexpr (GROUPS == 2) {
          const Words words = (Words)in_bfloat16.of(codes_of(planes, row));
          factors = pair_of(weights((Floats)(words << 16), 0, row), weights((Floats)(words & 0xffff0000u), 1, row));
        } else if constexpr (BITS == 5) {
          by_code = pair_of(weights(loaded<Floats>(table_), 0, row), weights(loaded<Floats>(table_ + 16), 0, row));
          factors = _mm512_permutexvar_epi16(codes_of(planes, row), by_code);
        } else {
          // 16 weights of this row and 16 of the next one.
          const Floats numbers = loaded<Floats>(table_);
          if (row % 2 == 0) by_code = pair_of(weights(numbers, 0, row), weights(numbers, 0, row + 1));
          const __m512i low = _mm512_set1_epi16(15), next = _mm512_set1_epi16(row % 2 * 16);
          factors = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(codes_of(planes, row), low, next, 0xea), by_code);
        }
        store(to + 64 * row, factors);
      }
    }

   private:
    const uint8_t* const strip_;
    const int64_t blocks_;
    const float* const table_;
    alignas(64) float numbers_[2 * BLOCKS][GROUPS * (1 + ADDS)][STRIP];

    // Computes the scales and zeros of the unit that begins with this block.
    INLINE void prepare(int64_t block) {
      const Numbers numbers(strip_ + block / BLOCKS * BYTES);
      float (*to)[GROUPS * (1 + ADDS)][STRIP] = numbers_ + block % (2 * BLOCKS);
#pragma GCC unroll 8
      for (int i = 0; i < BLOCKS; ++i)
        for (int group = 0; group < GROUPS; ++group) {
          const Floats scale = numbers.scale(i * GROUPS + group);
          store(to[i][group], scale);
          if (HAS_ZEROS) store(to[i][GROUPS + group], numbers.zero(i * GROUPS + group));
          if (HAS_SHIFT) store(to[i][GROUPS + group], -160.0f * scale);
        }
      written();
    }

    // Returns 128 + the upper half of each lane.
    static INLINE Floats from_128(Words codes) {
      return (Floats)_mm512_ternarylogic_epi32((__m512i)codes, _mm512_set1_epi32(0x3f0000), _mm512_set1_epi32(0x43000000), 0xea);
    }
  };

  static void unpack(const uint8_t* strip, int64_t, int64_t blocks, const float* table, uint8_t* to) {
    Strip opened(strip, blocks, table);
    for (int64_t block = 0; block < blocks; ++block) opened.unpack(block, to + block * BLOCK_BYTES);
  }

#else

#if defined(__ARM_FEATURE_DOTPROD)
  static constexpr bool LOOKS_UP = BITS < 8;
  static constexpr int ABOVE_BITS = 0;
#else
  static constexpr bool LOOKS_UP = HAS_TABLE;
  static constexpr int ABOVE_BITS = HAS_TABLE ? 7 : HAS_ZEROS || BITS == 8 ? 0 : BITS - 1;
#endif
  // The offset of the factors above the numbers, with which they are the codes themselves, or positive bytes.
  static constexpr int ABOVE = ABOVE_BITS ? 1 << ABOVE_BITS : 0;

  // The table × a power of 2, as integers of 8 bits.
  struct Table {
    float unit = 1.0f;
#if defined(__ARM_FEATURE_DOTPROD)
    uint8x16_t numbers[4];
#else
    Lanes numbers;
#endif

    INLINE explicit Table(const float* table) {
      if (!LOOKS_UP) return;
      float largest = 0.0f;
      for (int i = 0; i < 64; ++i) largest = __builtin_fmaxf(largest, __builtin_fabsf(table[i]));
      while (largest <= 63.5f * unit && unit > 0x1p-9f) unit *= 0.5f;
      uint8_t entries[64];
      for (int i = 0; i < 64; ++i) entries[i] = (int)(table[i] / unit) + ABOVE;
      memcpy(&numbers, entries, sizeof numbers);
    }

#if defined(__ARM_FEATURE_DOTPROD)
    INLINE int8x16_t of(uint8x16_t codes) const {
      if constexpr (BITS == 6) return (int8x16_t)vqtbl4q_u8({{numbers[0], numbers[1], numbers[2], numbers[3]}}, codes);
      if constexpr (BITS == 5) return (int8x16_t)vqtbl2q_u8({{numbers[0], numbers[1]}}, codes);
      return (int8x16_t)vqtbl1q_u8(numbers[0], codes);
    }
#else
    INLINE Lanes of(Lanes codes) const {
      if (!HAS_TABLE) return codes;
#if defined(__AVX512BW__)
      return (Lanes)_mm512_shuffle_epi8((__m512i)numbers, (__m512i)codes);
#elif defined(__AVX2__)
      return (Lanes)_mm256_shuffle_epi8((__m256i)numbers, (__m256i)codes);
#else
      for (uint8_t* code = (uint8_t*)&codes; code < (uint8_t*)(&codes + 1); ++code) *code = ((const uint8_t*)&numbers)[*code];
      return codes;
#endif
    }
#endif
  };

#if defined(__ARM_FEATURE_DOTPROD)

  // Returns N bits for each lane: those of a line in the lower byte, those of the second line after it in the upper byte.
  template <int N>
  static INLINE uint8x16_t bytes_of(uint16x8_t words, int line) {
    const uint16x8_t first = words >> (uint16_t)(N * line);
    const uint16x8_t both = N == 4 ? first : vbslq_u16(vdupq_n_u16(0xff), first, first << (uint16_t)(8 - 2 * N));
    return (uint8x16_t)(both & (uint16_t)(0x101 * ((1 << N) - 1)));
  }

  // Returns eight columns of four rows of a strip.
  static INLINE Factors factors_of(const Planes& planes, int eight, const Table& table) {
    if constexpr (BITS == 8) {
      const int8_t* lines = (const int8_t*)planes.bytes + 128 * eight;
      const auto both = [](const int8_t* line) {
        const int8x8_t first = vld1_s8(line), second = vld1_s8(line + 64);
        return vcombine_s8(vzip1_s8(first, second), vzip2_s8(first, second));
      };
      return {both(lines), both(lines + 32)};
    }
    const auto numbers = [&](int line) {
      uint8x16_t codes = bytes_of<LOW>(planes.words[line / OF_LOW], line % OF_LOW);
      if constexpr (HIGH > 0) codes |= bytes_of<HIGH>(planes.words[LOW + line / OF_HIGH], line % OF_HIGH) << LOW;
      return table.of(codes);
    };
    return {numbers(4 * eight), numbers(4 * eight + 1)};
  }

#else

  // Returns the codes of a line.
  static INLINE Lanes codes_of(const Planes& planes, int line) {
    Lanes low = down(planes.words[line / OF_LOW], LOW * (line % OF_LOW));
    if (line % OF_LOW < OF_LOW - 1) low &= (uint16_t)LOW_MASK;
    if constexpr (!HIGH) return low;
    return low | down(planes.words[LOW + line / OF_HIGH], HIGH * (line % OF_HIGH) - LOW) & (uint16_t)HIGH_MASK;
  }

  // Returns a pair of columns of a part of a strip.
  static INLINE Factors factors_of(const Planes& planes, int pair, const Table& table) {
    if constexpr (BITS == 8) return (Factors)__builtin_convertvector(loaded<BytesOfLanes>(planes.bytes + 32 * pair), Shorts);
    if constexpr (HAS_TABLE && BITS == 4) {
      // The bytes of a word have the codes of two lines; both are looked up together.
      const Lanes both = table.of(down(planes.words[pair / OF_LOW], LOW * (pair % 2)) & (uint16_t)0x0f0f);
      return pair & 2 ? both >> 8 : both & (uint16_t)0xff;
    }
    return table.of(codes_of(planes, pair)) & (uint16_t)(HAS_TABLE ? 0xff : 0xffff);
  }

#endif

#endif
};

#if defined(KEEPS_CODES)

template <class Weights>
void unpack_one(const uint8_t* strip, int64_t block, const float* table, uint8_t* to) {
  const uint8_t* unit = strip + block / Weights::BLOCKS * Weights::BYTES;
  const int64_t number = block % Weights::BLOCKS;
  Weights::each_pair(unit + Weights::Numbers::BYTES + number * Weights::CODES, typename Weights::Table(table),
                     [to](int pair, __m512i factors) { store(to + 64 * pair, factors); });
  const typename Weights::Numbers numbers(unit);
  uint8_t* at = to + SCALES_AT;
  for (int group = 0; group < Weights::GROUPS; ++group, at += 64) store(at, numbers.scale(number * Weights::GROUPS + group));
  if (Weights::ZEROS)
    for (int group = 0; group < Weights::GROUPS; ++group, at += 64) store(at, numbers.zero(number * Weights::GROUPS + group));
}

template <class Weights>
void unpack(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to) {
  for (int64_t block = begin; block < end; ++block, to += BLOCK_BYTES) unpack_one<Weights>(strip, block, table, to);
}

// Returns the sum of a row's numbers in a group of a block, from the sums of the block's halves.
INLINE float sum_of_group(const float* halves, int64_t group, int64_t groups) {
  return groups == 1 ? halves[0] + halves[1] : halves[group];
}

template <class Weights, int COUNT>
void multiply(const uint8_t* strip, int64_t blocks, const float* table, const uint16_t* rows,
              const float* sums, Floats* out) {
  typedef typename Weights::Numbers Numbers;
  const typename Weights::Table numbers_of_codes(table);
  const int64_t columns = blocks * INNER, halves = blocks * 2;
  __m512 kept[COUNT] = {};
  for (int64_t block = 0; block < blocks; block += Weights::BLOCKS) {
    const Numbers numbers(strip);
    for (int64_t line = 0; line < Numbers::BYTES; line += 64) __builtin_prefetch(strip + AHEAD + line);
    strip += Numbers::BYTES;
#pragma GCC unroll 1
    for (int64_t i = 0; i < Weights::BLOCKS; ++i, strip += Weights::CODES, rows += INNER) {
      __m512 products[COUNT][Weights::GROUPS] = {};
      Weights::each_pair(strip, numbers_of_codes, [&](int pair, __m512i factors) {
        for (int row = 0; row < COUNT; ++row) {
          __m512& sum = products[row][pair * Weights::GROUPS / 16];
          const __m512i left = _mm512_set1_epi32(loaded<int32_t>(rows + row * columns + 2 * pair));
          sum = _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)factors);
        }
      });
      for (int group = 0; group < Weights::GROUPS; ++group) {
        const __m512 scale = (__m512)numbers.scale(i * Weights::GROUPS + group);
        for (int row = 0; row < COUNT; ++row) kept[row] = _mm512_fmadd_ps(products[row][group], scale, kept[row]);
      }
      for (int group = 0; Weights::ZEROS && group < Weights::GROUPS; ++group) {
        const __m512 zero = (__m512)numbers.zero(i * Weights::GROUPS + group);
        for (int row = 0; row < COUNT; ++row) {
          const __m512 sum = _mm512_set1_ps(sum_of_group(sums + row * halves + 2 * (block + i), group, Weights::GROUPS));
          kept[row] = _mm512_fmadd_ps(zero, sum, kept[row]);
        }
      }
    }
  }
  for (int row = 0; row < COUNT; ++row) out[row] = (Floats)kept[row];
}

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {unpack<Weights>, Weights::look_up, strip_bytes,
          {multiply<Weights, 1>, multiply<Weights, 2>, multiply<Weights, 3>, multiply<Weights, 4>, multiply<Weights, 5>,
           multiply<Weights, 6>},
          Weights::GROUPS, Weights::ZEROS};
}

#elif defined(__AMX_BF16__)

// Defined in `matrix.h`.
template <class Weights, int STRIPS, int GROUPS>
void multiply_few(const Part& part, int64_t strip, uint8_t* factors);

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {Weights::unpack, Weights::look_up, strip_bytes,
          {{multiply_few<Weights, 1, 1>, multiply_few<Weights, 1, 2>}, {multiply_few<Weights, 2, 1>, multiply_few<Weights, 2, 2>}}};
}

#else

#if defined(__ARM_FEATURE_DOTPROD)

INLINE void put_factors(Factors factors, int, uint8_t* to) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  // All eight columns of two rows at a time.
  store(to, vzip1q_s32((int32x4_t)factors.first, (int32x4_t)factors.second));
  store(to + 16, vzip2q_s32((int32x4_t)factors.first, (int32x4_t)factors.second));
#else
  store(to, factors);
#endif
}

INLINE int32x4_t dots_of(int32x4_t sum, Factors factors, const int8_t* row) {
  const int8x8_t numbers = vld1_s8(row);
  return vdotq_lane_s32(vdotq_lane_s32(sum, factors.first, numbers, 0), factors.second, numbers, 1);
}

// The sums of a part of a strip for one row.
struct Sums {
  int32x4_t high = {}, low = {};

  INLINE void add(Factors factors, const Integers& row, int eight) {
    high = dots_of(high, factors, row.high + 8 * eight);
    low = dots_of(low, factors, row.low + 8 * eight);
  }

  INLINE Ints whole() const { return (Ints)vaddq_s32(vshlq_n_s32(high, 8), low); }
};

#else

INLINE void put_factors(Factors factors, int above, uint8_t* to) { store(to, factors - (uint16_t)above); }

struct Sums {
  Ints sums = {};

  INLINE void add(Factors factors, const Integers& row, int pair) {
    const Ints numbers = all_ints(loaded<int32_t>(row.whole + 2 * pair));
#if defined(__AVX512VNNI__)
    sums = (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)factors, (__m512i)numbers);
#elif defined(__AVX512BW__)
    sums += (Ints)_mm512_madd_epi16((__m512i)factors, (__m512i)numbers);
#elif defined(__AVXVNNI__)
    sums = (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)factors, (__m256i)numbers);
#elif defined(__AVX2__)
    sums += (Ints)_mm256_madd_epi16((__m256i)factors, (__m256i)numbers);
#elif defined(__SSE2__)
    sums += (Ints)_mm_madd_epi16((__m128i)factors, (__m128i)numbers);
#else
    sums += ((Ints)factors << 16 >> 16) * (numbers << 16 >> 16) + ((Ints)factors >> 16) * (numbers >> 16);
#endif
#if defined(__x86_64__)
    // Without this, GCC multiplies everything first and keeps the products in memory.
    __asm__("" : "+v"(sums));
#endif
  }

  INLINE Ints whole() const { return sums; }
};

#endif

// Writes the scales of a block's groups, and then the zeros.
template <class Weights>
INLINE void put_numbers(const typename Weights::Numbers& numbers, int64_t block, float unit, uint8_t* to) {
  for (int kind = 0; kind < 1 + Weights::ZEROS; ++kind)
    for (int group = 0; group < Weights::GROUPS; ++group)
      for (int part = 0; part < PARTS; ++part, to += sizeof(Floats)) {
        const int64_t at = block * Weights::GROUPS + group;
        store(to, kind ? numbers.zero(at, part) : numbers.scale(at, part) * all(unit));
      }
}

template <class Weights>
void unpack(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to) {
  const typename Weights::Table numbers_of_codes(table);
  for (int64_t block = begin; block < end; ++block, to += BLOCK_BYTES) {
    const uint8_t* unit = strip + block / Weights::BLOCKS * Weights::BYTES;
    const uint8_t* codes = unit + Weights::Numbers::BYTES + block % Weights::BLOCKS * Weights::CODES;
    for (int part = 0; part < PARTS; ++part) {
      const typename Weights::Planes planes(codes, part);
      uint8_t* of_part = to + part / WIDE * STEPS * STEP_BYTES + part % WIDE * sizeof(Factors);
#pragma GCC unroll 16
      for (int step = 0; step < STEPS; ++step)
        put_factors(Weights::factors_of(planes, step, numbers_of_codes), Weights::ABOVE, of_part + step * STEP_BYTES);
    }
    put_numbers<Weights>(typename Weights::Numbers(unit), block % Weights::BLOCKS, numbers_of_codes.unit, to + SCALES_AT);
  }
}

// Adds the product of a group of a block, an exact integer.
INLINE Floats with_group(Floats sum, Ints whole, Floats scales, const Integers& row) {
  return fma(__builtin_convertvector(whole, Floats), scales * all(row.scale), sum);
}

// Returns the index of a group's sum in a row's `sums`.
constexpr int64_t place_of(int64_t group, int64_t groups) { return groups == 1 ? 2 : group; }

// Adds the products of a group of a block, of the parts of a strip from `first` on.
template <class Weights, int GROUP, int COUNT>
INLINE void add_group(const uint8_t* codes, int first, const typename Weights::Numbers& numbers, int64_t block,
                      const typename Weights::Table& table, const Integers* rows, Floats (&kept)[PARTS][COUNT]) {
  constexpr int STEPS_OF_GROUP = STEPS / Weights::GROUPS, PLACE = place_of(GROUP, Weights::GROUPS);
  Sums products[WIDE][COUNT];
  typename Weights::Planes planes[WIDE];
  for (int part = 0; part < WIDE; ++part) planes[part] = typename Weights::Planes(codes, first + part);
#pragma GCC unroll 16
  for (int step = GROUP * STEPS_OF_GROUP; step < (GROUP + 1) * STEPS_OF_GROUP; ++step)
    for (int part = 0; part < WIDE; ++part) {
      const Factors factors = Weights::factors_of(planes[part], step, table);
      for (int row = 0; row < COUNT; ++row) products[part][row].add(factors, rows[row], step);
    }
  for (int part = 0; part < WIDE; ++part) {
    const int64_t at = block * Weights::GROUPS + GROUP;
    const Floats scales = numbers.scale(at, first + part) * all(table.unit);
    for (int row = 0; row < COUNT; ++row) {
      Ints whole = products[part][row].whole();
      if (Weights::ABOVE) whole -= all_ints(rows[row].sums[PLACE]) << Weights::ABOVE_BITS;
      kept[first + part][row] = with_group(kept[first + part][row], whole, scales, rows[row]);
    }
    if (!Weights::ZEROS) continue;
    const Floats zeros = numbers.zero(at, first + part);
    for (int row = 0; row < COUNT; ++row) {
      Floats& sum = kept[first + part][row];
      sum = fma(zeros, all(rows[row].totals[PLACE]), sum);
    }
  }
}

template <class Weights, int COUNT>
void multiply(const uint8_t* strip, int64_t blocks, const float* table, const Integers* rows, Floats* out) {
  const typename Weights::Table numbers_of_codes(table);
  Floats kept[PARTS][COUNT] = {};
  for (int64_t block = 0; block < blocks; block += Weights::BLOCKS) {
    const typename Weights::Numbers numbers(strip);
    for (int64_t line = 0; line < Weights::Numbers::BYTES; line += 64) __builtin_prefetch(strip + AHEAD + line);
    strip += Weights::Numbers::BYTES;
    for (int64_t i = 0; i < Weights::BLOCKS; ++i, strip += Weights::CODES, rows += TOGETHER) {
      for (int64_t line = 0; line < Weights::CODES; line += 64) __builtin_prefetch(strip + AHEAD + line);
#pragma GCC unroll 4
      for (int first = 0; first < PARTS; first += WIDE) {
        add_group<Weights, 0>(strip, first, numbers, i, numbers_of_codes, rows, kept);
        if constexpr (Weights::GROUPS > 1) add_group<Weights, 1>(strip, first, numbers, i, numbers_of_codes, rows, kept);
      }
    }
  }
  for (int row = 0; row < COUNT; ++row)
    for (int part = 0; part < PARTS; ++part) out[row * PARTS + part] = kept[part][row];
}

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {unpack<Weights>, Weights::look_up, strip_bytes,
          {multiply<Weights, 1>, multiply<Weights, 2>, multiply<Weights, 3>, multiply<Weights, 4>}, Weights::GROUPS, Weights::ZEROS};
}

#endif

template <int BITS, int GROUP, bool HAS_ZEROS, int SCALES, bool HAS_TABLE = false>
Form form_of_blocks(const Matrix& matrix) {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_DOTPROD)
  // Codes of up to 5 bits are looked up in any case.
  typedef Block<BITS, GROUP, HAS_ZEROS, SCALES, false> Weights;
#else
  typedef Block<BITS, GROUP, HAS_ZEROS, SCALES, HAS_TABLE> Weights;
#endif
  if (matrix.columns % (INNER * Weights::BLOCKS)) return {};
  return form_with<Weights>(matrix.columns / INNER / Weights::BLOCKS * Weights::BYTES);
}

// Returns the form of a matrix; see `model/quants/quant_form.py`. `strip_bytes` is 0 for bfloat16, for an unknown form, and
// for a row that ends inside a unit.
inline Form form_of(const Matrix& matrix) {
#define FORM(bits_, group_, has_zeros_, scales_, has_table_)                                                        \
  if (matrix.bits == bits_ && matrix.group == group_ && matrix.has_zeros == has_zeros_ && matrix.scales == scales_ && \
      matrix.has_table == has_table_)                                                                                 \
    return form_of_blocks<bits_, group_, has_zeros_, scales_, has_table_>(matrix);
  FORM(2, 16, true, IN_NIBBLES, false)
  FORM(1, 128, false, IN_FLOAT16, true)
  FORM(2, 32, false, SHARED, true)
  FORM(2, 64, false, IN_FLOAT16, true)
  FORM(3, 16, false, IN_BYTES, false)
  FORM(3, 16, false, IN_BYTES, true)
  FORM(3, 32, false, IN_BYTES, true)
  FORM(4, 32, true, IN_FLOAT16, false)
  FORM(4, 32, true, IN_BYTES, false)
  FORM(4, 32, false, IN_FLOAT16, false)
  FORM(4, 32, false, IN_FLOAT16, true)
  FORM(4, 32, false, IN_BYTES, true)
  FORM(4, 32, false, IN_EXPONENTS, true)
  FORM(4, 16, false, IN_FLOAT8, true)
  FORM(5, 32, true, IN_FLOAT16, false)
  FORM(5, 32, true, IN_BYTES, false)
  FORM(5, 32, false, IN_FLOAT16, false)
  FORM(6, 16, false, IN_BYTES, false)
  FORM(8, 32, false, IN_FLOAT16, false)
#undef FORM
  return {};
}

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
