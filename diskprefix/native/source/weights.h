// The forms of a matrix's weights, and their conversion into the factors of a product.
//
// A quantised weight is the number of its code × scale + zero, rounded to bfloat16. `model/quants/quant_form.py` describes
// how the matrix lies in memory: strips of 16 rows of the matrix, which are 16 columns of the result, in each one block after
// the other, of 32 columns of the matrix. Matrices in bfloat16 are multiplied by `dense.h`.
//
// With AMX a block becomes a tile: 16 rows of 32 bfloat16. For the others it becomes 16 pairs of columns, in each the 16
// rows. A vector of AVX-512 multiplies one with a pair of a row; there the codes' numbers are the factors, and scales and
// zeros come to the sums.

#pragma once

#include "interface.h"
#include "vector.h"

namespace diskprefix {
namespace {
namespace matrices {

constexpr int64_t STRIP = 16;
constexpr int64_t INNER = 32;

typedef float Sixteen __attribute__((vector_size(64)));
typedef uint32_t SixteenWords __attribute__((vector_size(64)));
typedef int32_t SixteenInts __attribute__((vector_size(64)));
typedef int16_t SixteenShorts __attribute__((vector_size(32)));
typedef int8_t SixteenBytes __attribute__((vector_size(16)));
typedef uint8_t SixteenUnsigned __attribute__((vector_size(16)));
typedef uint16_t Lanes __attribute__((vector_size(64)));

#define INLINE inline __attribute__((always_inline))

INLINE Sixteen sixteen(float number) { return number - Sixteen{}; }

INLINE Sixteen halves_at(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  Sixteen numbers;
  for (int64_t first = 0; first < 16; first += LANES)
    store((char*)&numbers + first * 4, Float16::load((const uint16_t*)from + first));
  return numbers;
#endif
}

INLINE Sixteen bytes_at(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
  return __builtin_convertvector(__builtin_convertvector(loaded<SixteenBytes>(from), SixteenInts), Sixteen);
#endif
}

// Half of 2^(byte - 127), as MXFP4 has it.
INLINE Sixteen exponents_at(const uint8_t* from) {
  const SixteenWords exponents = __builtin_convertvector(loaded<SixteenUnsigned>(from), SixteenWords);
  const SixteenWords is_small = (SixteenWords)(exponents < 2);
  return (Sixteen)(is_small & (exponents + 1) * 0x200000u | ~is_small & exponents - 1 << 23);
}

inline Sixteen rounded(Sixteen numbers) {
  const SixteenWords bits = (SixteenWords)numbers;
  return (Sixteen)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

#if defined(__AVX512BF16__)

INLINE __m512i pair_of(Sixteen low, Sixteen high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

#endif

#if defined(__AMX_BF16__)

constexpr bool HAS_ROWS = true;  // a line of codes is a row of the strip, else a pair of columns
constexpr int64_t BLOCK_BYTES = 1024;  // of factors

#elif defined(__AVX512BF16__)

#define KEEPS_CODES

constexpr int FEW = 6;

// Behind the pairs are the scales of the strip's rows for one group or two, then the zeros.
constexpr int64_t SCALES_AT = 1024, BLOCK_BYTES = SCALES_AT + 4 * 64;
constexpr bool HAS_ROWS = false;

#elif defined(__ARM_FEATURE_DOTPROD)

#define HAS_DOTS

constexpr int FEW = 4;

// Behind the integers are the scales of the strip's rows for one group or two, then the zeros.
constexpr int64_t SCALES_AT = 512, BLOCK_BYTES = SCALES_AT + 4 * 64;
constexpr bool HAS_ROWS = false;

// A block of a row: 2^n × (256 × high + low), in the order {0, 4, 1, 5, 2, 6, 3, 7} of each eight columns, and the sums of
// its halves. Numbers down to a 64th of the largest one are exact.
struct Dots {
  int8_t high[INNER], low[INNER];
  float scale, halves[2], unused;
};

#else

constexpr bool HAS_ROWS = false;
constexpr int64_t BLOCK_BYTES = 2048;

INLINE void put_pair(uint8_t* to, int pair, Sixteen even, Sixteen odd) {
  store(to + 128 * pair, rounded(even));
  store(to + 128 * pair + 64, rounded(odd));
}

#endif

struct Part;

// A matrix's way into the factors of a product. `strip` is where a strip begins.
struct Form {
  // The blocks from `begin` to `end`. With AMX `begin` is 0.
  void (*unpack)(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to);
  // One row of a strip of quants, in bfloat16.
  void (*look_up)(const uint8_t* strip, int64_t blocks, int64_t row, const float* table, uint16_t* to);
  int64_t strip_bytes;
#if defined(__AMX_BF16__)
  // Few rows times one or two strips, in one or two groups.
  void (*multiply[2][2])(const Part& part, int64_t strip, uint8_t* factors);
#elif defined(KEEPS_CODES)
  // 1 to FEW rows times the blocks of a strip. `sums` are those of the halves of the rows' blocks.
  void (*multiply[FEW])(const uint8_t* strip, int64_t blocks, const float* table, const uint16_t* rows, const float* sums,
                        Sixteen* out);
  int64_t groups;  // of a block
  bool has_zeros;
#elif defined(HAS_DOTS)
  void (*multiply[FEW])(const uint8_t* strip, int64_t blocks, const float* table, const Dots* rows, Sixteen* out);
  int64_t groups;
  bool has_zeros;
#endif
};

// The distance in bytes at which memory is fetched ahead. Blocks of a strip follow each other, and so do strips.
constexpr int64_t AHEAD = 2048;

#if defined(__AVX512VBMI__)

// For each byte of eight, at which bit it begins when they are turned by -4 to 15 bits.
struct Turns {
  uint8_t from[20][64] = {};
  constexpr Turns() {
    for (int by = -4; by < 16; ++by)
      for (int i = 0; i < 64; ++i) from[by + 4][i] = (i % 8 * 8 + by + 64) % 64;
  }
};
alignas(64) constexpr Turns TURNS;

// Beside AMX, products have only the port of the shifts. Turning has another one; it brings in other bits.
INLINE Lanes down(Lanes from, int by) {
  return by ? (Lanes)_mm512_multishift_epi64_epi8(loaded<__m512i>(TURNS.from[by + 4]), (__m512i)from) : from;
}

#else

INLINE Lanes down(Lanes from, int by) { return by < 0 ? from << (uint16_t)-by : from >> (uint16_t)by; }

#endif

// The scales and zeros of the groups of a unit, in front of its codes. A unit is one block, or eight whose groups' numbers
// are small integers times those of the unit.
template <int SCALES, int GROUP, bool HAS_ZEROS>
struct Numbers {
  static constexpr bool IS_NESTED = SCALES == IN_BYTES || SCALES == IN_NIBBLES || SCALES == SHARED;
  static constexpr int BLOCKS = IS_NESTED ? 8 : 1, GROUPS = INNER / GROUP, OF_UNIT = BLOCKS * GROUPS;
  static constexpr int64_t SHARED_BYTES = IS_NESTED ? STRIP * 2 * (1 + HAS_ZEROS) : 0;
  static constexpr int64_t OF_GROUP = SCALES == IN_FLOAT16 ? 32 : SCALES == SHARED ? 0 : 16;
  static constexpr int64_t PARTS = HAS_ZEROS && SCALES != IN_NIBBLES ? 2 : 1;
  static constexpr int64_t BYTES = SHARED_BYTES + OF_UNIT * OF_GROUP * PARTS;

  const uint8_t* from;
  Sixteen scale_of_unit, zero_of_unit;

  INLINE explicit Numbers(const uint8_t* unit) : from(unit + SHARED_BYTES) {
    if (IS_NESTED) scale_of_unit = halves_at(unit);
    if (IS_NESTED && HAS_ZEROS) zero_of_unit = halves_at(unit + STRIP * 2);
  }

  INLINE Sixteen scale(int64_t group) const {
    const uint8_t* at = from + group * OF_GROUP;
    if constexpr (SCALES == IN_FLOAT16) return halves_at(at);
    if constexpr (SCALES == IN_EXPONENTS) return exponents_at(at);
    if constexpr (SCALES == IN_BYTES) return scale_of_unit * bytes_at(at);
    if constexpr (SCALES == IN_NIBBLES) return scale_of_unit * nibbles_at(at, 0);
    return scale_of_unit;
  }

  // Nested ones are stored as what is subtracted.
  INLINE Sixteen zero(int64_t group) const {
    if constexpr (SCALES == IN_NIBBLES) return -(zero_of_unit * nibbles_at(from + group * OF_GROUP, 4));
    const uint8_t* at = from + (OF_UNIT + group) * OF_GROUP;
    if constexpr (SCALES == IN_FLOAT16) return halves_at(at);
    return -(zero_of_unit * bytes_at(at));
  }

 private:
  static INLINE Sixteen nibbles_at(const uint8_t* from, int bit) {
    const SixteenInts bytes = __builtin_convertvector(loaded<SixteenUnsigned>(from), SixteenInts);
    return __builtin_convertvector(bytes >> bit & 15, Sixteen);
  }
};

// 32 columns of a strip: 16 lines of 32 lanes. A line is a row of the strip and a lane one of its columns, or a line is a
// pair of columns and a lane one of them in a row. Codes of less than 8 bits lie in planes: words of 32 lanes of 16 bits, in
// each the low 4 or 2 bits of some of the lines; then words with the bits above. The number of a code is that in a table of
// 64, where the numbers of fewer codes stand again and again. With 8 bits a code is its own number.
template <int BITS, int GROUP, bool HAS_ZEROS, int SCALES, bool HAS_TABLE>
struct Block {
  typedef matrices::Numbers<SCALES, GROUP, HAS_ZEROS> Numbers;
  static constexpr int64_t CODES = STRIP * INNER * BITS / 8;
  static constexpr int BLOCKS = Numbers::BLOCKS, GROUPS = Numbers::GROUPS;
  static constexpr bool ZEROS = HAS_ZEROS;
  static constexpr int64_t BYTES = Numbers::BYTES + BLOCKS * CODES;  // of a unit
  static constexpr int LOW = BITS >= 4 ? 4 : 2, HIGH = BITS - LOW, OF_LOW = 16 / LOW, OF_HIGH = HIGH ? 16 / HIGH : 1;
  static constexpr uint32_t LOW_MASK = (1 << LOW) - 1, HIGH_MASK = (1 << BITS) - 1 - LOW_MASK;

  static void look_up(const uint8_t* strip, int64_t blocks, int64_t row, const float* table, uint16_t* to) {
    for (int64_t block = 0; block < blocks; block += BLOCKS, strip += BYTES) {
      const Numbers numbers(strip);
      for (int64_t i = 0; i < BLOCKS; ++i, to += INNER) {
        float found[INNER];
        for (int group = 0; group < GROUPS; ++group) {
          const float scale = numbers.scale(i * GROUPS + group)[row], zero = HAS_ZEROS ? numbers.zero(i * GROUPS + group)[row] : 0;
          for (int column = group * GROUP; column < (group + 1) * GROUP; ++column) {
            found[column] = number_of(strip + Numbers::BYTES + i * CODES, row, column, table) * scale;
            if (HAS_ZEROS) found[column] += zero;
          }
        }
        for (int64_t first = 0; first < INNER; first += LANES) BFloat16::put(to + first, loaded<Floats>(found + first));
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

  struct Words {
    SixteenWords words[BITS];
    const uint8_t* codes;

    INLINE explicit Words(const uint8_t* from) : codes(from) {
      if (BITS < 8)
        for (int i = 0; i < BITS; ++i) words[i] = in_register(loaded<SixteenWords>(from + 64 * i));
    }
  };

  static INLINE SixteenWords in_register(SixteenWords words) {
#if defined(__AVX512F__)
    // GCC would load them again for each code.
    __asm__("" : "+v"(words));
#endif
    return words;
  }

  // A code times a scale is exact where there are zeros, so both ways give the same bits.
  static INLINE Sixteen fused(Sixteen code, Sixteen scale, Sixteen zero) {
#if defined(__AVX512F__)
    return (Sixteen)_mm512_fmadd_ps((__m512)code, (__m512)scale, (__m512)zero);
#else
    return code * scale + zero;
#endif
  }

#if defined(__AVX512BF16__)

  // The numbers of the codes in bfloat16.
  struct Table {
    __m512i first, second;

    INLINE explicit Table(const float* table) {
      if (BITS < 8) first = pair_of(loaded<Sixteen>(table), loaded<Sixteen>(table + 16));
      if (BITS == 6) second = pair_of(loaded<Sixteen>(table + 32), loaded<Sixteen>(table + 48));
    }

    INLINE __m512i of(__m512i codes) const {
      return BITS == 6 ? _mm512_permutex2var_epi16(first, codes, second) : _mm512_permutexvar_epi16(codes, first);
    }
  };

  // The codes of a line, with anything in the bits above them.
  static INLINE __m512i codes_of(const Words& words, int line) {
    const Lanes low = down((Lanes)words.words[line / OF_LOW], LOW * (line % OF_LOW));
    if constexpr (!HIGH) return (__m512i)low;
    const Lanes high = down((Lanes)words.words[LOW + line / OF_HIGH], HIGH * (line % OF_HIGH) - LOW);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(LOW_MASK), (__m512i)low, (__m512i)high, 0xca);
  }

#endif

#if defined(KEEPS_CODES)

  template <class Body>
  static INLINE void each_pair(const uint8_t* codes, const Table& table, const Body& body) {
    const Words words(codes);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      if (64 * pair < CODES) __builtin_prefetch(codes + AHEAD + 64 * pair);
      if constexpr (BITS == 8) body(pair, pair_of(bytes_at(codes + STRIP * 2 * pair), bytes_at(codes + STRIP * (2 * pair + 1))));
      else body(pair, table.of(codes_of(words, pair)));
    }
  }

#elif defined(__AMX_BF16__)

  // Codes of 6 bits become numbers from 128 on, whose products with a scale are too large by 160 times the scale.
  static constexpr bool HAS_SHIFT = BITS == 6, ADDS = HAS_ZEROS || HAS_SHIFT;

  // A strip whose blocks are unpacked one after the other. The numbers of a unit are computed while the one before is
  // unpacked, which would wait for them. They lie in memory, from where that of one row is loaded into all lanes.
  class Strip {
   public:
    INLINE Strip(const uint8_t* strip, int64_t blocks, const float* table) : strip_(strip), blocks_(blocks), table_(table) { prepare(0); }

    INLINE void unpack(int64_t block, uint8_t* to) {
      if (block % BLOCKS == 0 && block + BLOCKS < blocks_) prepare(block + BLOCKS);
      const uint8_t* codes = strip_ + block / BLOCKS * BYTES + Numbers::BYTES + block % BLOCKS * CODES;
      const uint8_t* ahead = strip_ + AHEAD + BYTES + block * BYTES / BLOCKS;
      const float (*scales)[STRIP] = numbers_[block % (2 * BLOCKS)], (*added)[STRIP] = scales + GROUPS;
      const Words words(codes);
      const Table in_bfloat16(table_);
      const auto weights = [=](Sixteen of_codes, int group, int row) {
        const Sixteen scale = sixteen(scales[group][row]);
        return ADDS ? fused(of_codes, scale, sixteen(added[group][row])) : of_codes * scale;
      };
      __m512i by_code;
#pragma GCC unroll 16
      for (int row = 0; row < 16; ++row) {
        // One line at a time: many at once would delay the computation.
        if (64 * row < BYTES / BLOCKS) __builtin_prefetch(ahead + 64 * row);
        __m512i factors;
        if constexpr (BITS == 8) {
          const uint8_t* of_row = codes + INNER * row;
          factors = pair_of(weights(bytes_at(of_row), 0, row), weights(bytes_at(of_row + STRIP), 0, row));
        } else if constexpr (BITS == 6) {
          const SixteenWords found = (SixteenWords)codes_of(words, row);
          factors = pair_of(weights(from_128(found << 16), 0, row), weights(from_128(found), 1, row));
        } else if constexpr (GROUPS == 2) {
          const SixteenWords found = (SixteenWords)in_bfloat16.of(codes_of(words, row));
          factors = pair_of(weights((Sixteen)(found << 16), 0, row), weights((Sixteen)(found & 0xffff0000u), 1, row));
        } else if constexpr (BITS == 5) {
          by_code = pair_of(weights(loaded<Sixteen>(table_), 0, row), weights(loaded<Sixteen>(table_ + 16), 0, row));
          factors = _mm512_permutexvar_epi16(codes_of(words, row), by_code);
        } else {
          // 16 weights of this row and 16 of the next one.
          const Sixteen numbers = loaded<Sixteen>(table_);
          if (row % 2 == 0) by_code = pair_of(weights(numbers, 0, row), weights(numbers, 0, row + 1));
          const __m512i low = _mm512_set1_epi16(15), next = _mm512_set1_epi16(row % 2 * 16);
          factors = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(codes_of(words, row), low, next, 0xea), by_code);
        }
        store(to + 64 * row, factors);
      }
    }

   private:
    const uint8_t* const strip_;
    const int64_t blocks_;
    const float* const table_;
    alignas(64) float numbers_[2 * BLOCKS][GROUPS * (1 + ADDS)][STRIP];

    // Computes the numbers of the unit that begins with this block.
    INLINE void prepare(int64_t block) {
      const Numbers numbers(strip_ + block / BLOCKS * BYTES);
      float (*to)[GROUPS * (1 + ADDS)][STRIP] = numbers_ + block % (2 * BLOCKS);
#pragma GCC unroll 8
      for (int i = 0; i < BLOCKS; ++i)
        for (int group = 0; group < GROUPS; ++group) {
          const Sixteen scale = numbers.scale(i * GROUPS + group);
          store(to[i][group], scale);
          if (HAS_ZEROS) store(to[i][GROUPS + group], numbers.zero(i * GROUPS + group));
          if (HAS_SHIFT) store(to[i][GROUPS + group], -160.0f * scale);
        }
      written();
    }

    // 128 more than the upper half of each lane.
    static INLINE Sixteen from_128(SixteenWords codes) {
      return (Sixteen)_mm512_ternarylogic_epi32((__m512i)codes, _mm512_set1_epi32(0x3f0000), _mm512_set1_epi32(0x43000000), 0xea);
    }
  };

  static void unpack(const uint8_t* strip, int64_t, int64_t blocks, const float* table, uint8_t* to) {
    Strip opened(strip, blocks, table);
    for (int64_t block = 0; block < blocks; ++block) opened.unpack(block, to + block * BLOCK_BYTES);
  }

#elif defined(HAS_DOTS)

  // The numbers of the codes times a power of 2, with which they are integers of 8 bits.
  struct Table {
    uint8x16_t numbers[4];
    float unit = 1.0f;

    INLINE explicit Table(const float* table) {
      if (BITS == 8) return;
      float largest = 0.0f;
      for (int i = 0; i < 64; ++i) largest = __builtin_fmaxf(largest, __builtin_fabsf(table[i]));
      while (largest <= 63.5f * unit && unit > 0x1p-9f) unit *= 0.5f;
      int8_t found[64];
      for (int i = 0; i < 64; ++i) found[i] = (int8_t)(table[i] / unit);
      for (int i = 0; i < 4; ++i) numbers[i] = loaded<uint8x16_t>(found + 16 * i);
    }

    INLINE int8x16_t of(uint8x16_t codes) const {
      if constexpr (BITS == 6) return (int8x16_t)vqtbl4q_u8({{numbers[0], numbers[1], numbers[2], numbers[3]}}, codes);
      if constexpr (BITS == 5) return (int8x16_t)vqtbl2q_u8({{numbers[0], numbers[1]}}, codes);
      return (int8x16_t)vqtbl1q_u8(numbers[0], codes);
    }
  };

  // The bits of a line, N of each lane, in its lower byte, and those of the line after the next one in the upper byte.
  template <int N>
  static INLINE uint8x16_t bytes_of(uint16x8_t words, int line) {
    const uint16x8_t first = words >> (uint16_t)(N * line);
    const uint16x8_t both = N == 4 ? first : vbslq_u16(vdupq_n_u16(0xff), first, first << (uint16_t)(8 - 2 * N));
    return (uint8x16_t)(both & (uint16_t)(0x101 * ((1 << N) - 1)));
  }

  // Calls `body` for each eight columns of four rows of a strip: with the first, second, fifth, and sixth column, in the
  // order {0, 4, 1, 5}, and with the others.
  template <class Body>
  static INLINE void each_eight(const uint8_t* codes, int quarter, const Table& table, const Body& body) {
    if constexpr (BITS == 8) {
      for (int eight = 0; eight < 4; ++eight) {
        const int8_t* lines = (const int8_t*)codes + 128 * eight + 8 * quarter;
        const auto both = [](const int8_t* line) {
          const int8x8_t first = vld1_s8(line), second = vld1_s8(line + 64);
          return vcombine_s8(vzip1_s8(first, second), vzip2_s8(first, second));
        };
        body(eight, both(lines), both(lines + 32));
      }
    } else {
      uint16x8_t words[BITS];
      for (int i = 0; i < BITS; ++i) words[i] = loaded<uint16x8_t>(codes + 64 * i + 16 * quarter);
      const auto numbers = [&](int line) {
        uint8x16_t found = bytes_of<LOW>(words[line / OF_LOW], line % OF_LOW);
        if constexpr (HIGH > 0) found |= bytes_of<HIGH>(words[LOW + line / OF_HIGH], line % OF_HIGH) << LOW;
        return table.of(found);
      };
#pragma GCC unroll 4
      for (int eight = 0; eight < 4; ++eight) body(eight, numbers(4 * eight), numbers(4 * eight + 1));
    }
  }

#else

  static void unpack(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to) {
    for (int64_t block = begin; block < end; ++block, to += BLOCK_BYTES) unpack_one(strip, block, table, to);
  }

  static void unpack_one(const uint8_t* strip, int64_t block, const float* table, uint8_t* to) {
    const uint8_t* unit = strip + block / BLOCKS * BYTES;
    const uint8_t* codes = unit + Numbers::BYTES + block % BLOCKS * CODES;
    const Numbers numbers(unit);
    const Words words(codes);
    Sixteen scales[GROUPS], zeros[GROUPS];
    for (int group = 0; group < GROUPS; ++group) {
      scales[group] = numbers.scale(block % BLOCKS * GROUPS + group);
      if (HAS_ZEROS) zeros[group] = numbers.zero(block % BLOCKS * GROUPS + group);
    }
#if defined(__AVX512F__)
#pragma GCC unroll 16
#endif
    for (int pair = 0; pair < 16; ++pair) {
      // One line at a time: many at once would delay the computation.
      if (64 * pair < CODES) __builtin_prefetch(codes + AHEAD + 64 * pair);
      const int group = GROUPS == 1 ? 0 : pair / 8;
      Sixteen parts[2];
      for (int column = 0; column < 2; ++column) {
        const Sixteen number = number_of(words, pair, column, table);
        parts[column] = HAS_ZEROS ? fused(number, scales[group], zeros[group]) : number * scales[group];
      }
      put_pair(to, pair, parts[0], parts[1]);
    }
  }

  // The numbers of the codes in one column of a pair.
  static INLINE Sixteen number_of(const Words& words, int pair, int column, const float* table) {
    if constexpr (BITS == 8) {
      const SixteenInts both = __builtin_convertvector(loaded<SixteenShorts>(words.codes + STRIP * 2 * pair), SixteenInts);
      return __builtin_convertvector((column ? both : both << 24) >> (column ? 8 : 24), Sixteen);
    }
    SixteenWords code = words.words[pair / OF_LOW] >> LOW * (pair % OF_LOW) + 16 * column;
    if (HIGH) {
      const int by = HIGH * (pair % OF_HIGH) + 16 * column - LOW;
      const SixteenWords plane = words.words[LOW + pair / OF_HIGH];
      code = code & LOW_MASK | (by > 0 ? plane >> by : plane << -by) & HIGH_MASK;
    }
#if defined(__AVX512F__)
    // A look-up by their last bits, which is faster than a conversion.
    if constexpr (BITS <= 4) return (Sixteen)_mm512_permutexvar_ps((__m512i)code, (__m512)loaded<Sixteen>(table));
    if constexpr (BITS == 5)
      return (Sixteen)_mm512_permutex2var_ps((__m512)loaded<Sixteen>(table), (__m512i)code, (__m512)loaded<Sixteen>(table + 16));
#endif
    if (!HIGH) code &= LOW_MASK;
    if constexpr (HAS_TABLE) return in_table(code, table);
    // The codes stand for numbers one after the other.
    return __builtin_convertvector((SixteenInts)code, Sixteen) + sixteen(table[0]);
  }

  static INLINE Sixteen in_table(SixteenWords codes, const float* table) {
    Sixteen numbers;
#if defined(__AVX2__)
    for (int half = 0; half < 2; ++half) {
      const __m256i at = loaded<__m256i>((const char*)&codes + 32 * half);
      const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
      const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
      store((char*)&numbers + 32 * half, _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28)));
    }
#elif defined(__aarch64__)
    // The 64 bytes of 16 numbers are a table.
    const uint8x16x4_t bytes = vld1q_u8_x4((const uint8_t*)table);
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32x4_t at = loaded<uint32x4_t>((const char*)&codes + 16 * quarter) * 0x04040404u + 0x03020100u;
      store((char*)&numbers + 16 * quarter, vqtbl4q_u8(bytes, (uint8x16_t)at));
    }
#else
    for (int lane = 0; lane < 16; ++lane) numbers[lane] = table[codes[lane]];
#endif
    return numbers;
  }

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

// The sum of a row's numbers in a group of a block, from the sums of the halves of the block.
INLINE float sum_of_group(const float* halves, int64_t group, int64_t groups) {
  return groups == 1 ? halves[0] + halves[1] : halves[group];
}

template <class Weights, int COUNT>
void multiply(const uint8_t* strip, int64_t blocks, const float* table, const uint16_t* rows,
              const float* sums, Sixteen* out) {
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
      __m512 found[COUNT][Weights::GROUPS] = {};
      Weights::each_pair(strip, numbers_of_codes, [&](int pair, __m512i factors) {
        for (int row = 0; row < COUNT; ++row) {
          __m512& sum = found[row][pair * Weights::GROUPS / 16];
          const __m512i left = _mm512_set1_epi32(loaded<int32_t>(rows + row * columns + 2 * pair));
          sum = _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)factors);
        }
      });
      for (int group = 0; group < Weights::GROUPS; ++group) {
        const __m512 scale = (__m512)numbers.scale(i * Weights::GROUPS + group);
        for (int row = 0; row < COUNT; ++row) kept[row] = _mm512_fmadd_ps(found[row][group], scale, kept[row]);
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
  for (int row = 0; row < COUNT; ++row) out[row] = (Sixteen)kept[row];
}

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {unpack<Weights>, Weights::look_up, strip_bytes,
          {multiply<Weights, 1>, multiply<Weights, 2>, multiply<Weights, 3>, multiply<Weights, 4>, multiply<Weights, 5>,
           multiply<Weights, 6>},
          Weights::GROUPS, Weights::ZEROS};
}

#elif defined(__AMX_BF16__)

// In `matrix.h`.
template <class Weights, int STRIPS, int GROUPS>
void multiply_few(const Part& part, int64_t strip, uint8_t* factors);

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {Weights::unpack, Weights::look_up, strip_bytes,
          {{multiply_few<Weights, 1, 1>, multiply_few<Weights, 1, 2>}, {multiply_few<Weights, 2, 1>, multiply_few<Weights, 2, 2>}}};
}

#elif defined(HAS_DOTS)

// The scales of a block's groups and then the zeros.
template <class Weights>
INLINE void put_numbers(const typename Weights::Numbers& numbers, int64_t block, float unit, Sixteen* to) {
  for (int group = 0; group < Weights::GROUPS; ++group, ++to) store(to, numbers.scale(block * Weights::GROUPS + group) * unit);
  for (int group = 0; Weights::ZEROS && group < Weights::GROUPS; ++group, ++to)
    store(to, numbers.zero(block * Weights::GROUPS + group));
}

template <class Weights>
void unpack(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to) {
  const typename Weights::Table numbers_of_codes(table);
  for (int64_t block = begin; block < end; ++block, to += BLOCK_BYTES) {
    const uint8_t* unit = strip + block / Weights::BLOCKS * Weights::BYTES;
    const uint8_t* codes = unit + Weights::Numbers::BYTES + block % Weights::BLOCKS * Weights::CODES;
    for (int quarter = 0; quarter < 4; ++quarter)
      Weights::each_eight(codes, quarter, numbers_of_codes, [&](int eight, int8x16_t first, int8x16_t second) {
        uint8_t* at = to + 128 * quarter + 32 * eight;
#if defined(__ARM_FEATURE_MATMUL_INT8)
        // All eight columns of two rows.
        store(at, vzip1q_s32((int32x4_t)first, (int32x4_t)second));
        store(at + 16, vzip2q_s32((int32x4_t)first, (int32x4_t)second));
#else
        store(at, first);
        store(at + 16, second);
#endif
      });
    put_numbers<Weights>(typename Weights::Numbers(unit), block % Weights::BLOCKS, numbers_of_codes.unit, (Sixteen*)(to + SCALES_AT));
  }
}

// Adds the products of four rows of a strip with eight columns of a row.
INLINE int32x4_t dots_of(int32x4_t sum, int8x16_t first, int8x16_t second, const int8_t* row) {
  const int8x8_t numbers = vld1_s8(row);
  return vdotq_lane_s32(vdotq_lane_s32(sum, first, numbers, 0), second, numbers, 1);
}

// Adds the product of a group of a block, which is an exact integer.
INLINE float32x4_t with_group(float32x4_t sum, int32x4_t high, int32x4_t low, const float* scales, const Dots& row) {
  return vfmaq_f32(sum, vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low)), vmulq_n_f32(vld1q_f32(scales), row.scale));
}

INLINE float32x4_t with_zero(float32x4_t sum, const float* zeros, const Dots& row, int64_t group, int64_t groups) {
  return vfmaq_n_f32(sum, vld1q_f32(zeros), groups == 1 ? row.halves[0] + row.halves[1] : row.halves[group]);
}

template <class Weights, int COUNT>
void multiply(const uint8_t* strip, int64_t blocks, const float* table, const Dots* rows, Sixteen* out) {
  constexpr int GROUPS = Weights::GROUPS;
  const typename Weights::Table numbers_of_codes(table);
  float32x4_t kept[4][COUNT] = {};
  for (int64_t block = 0; block < blocks; block += Weights::BLOCKS) {
    const typename Weights::Numbers numbers(strip);
    for (int64_t line = 0; line < Weights::Numbers::BYTES; line += 64) __builtin_prefetch(strip + AHEAD + line);
    strip += Weights::Numbers::BYTES;
    for (int64_t i = 0; i < Weights::BLOCKS; ++i, strip += Weights::CODES, ++rows) {
      for (int64_t line = 0; line < Weights::CODES; line += 64) __builtin_prefetch(strip + AHEAD + line);
      Sixteen of_groups[2 * GROUPS];
      put_numbers<Weights>(numbers, i, numbers_of_codes.unit, of_groups);
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        int32x4_t high[COUNT][GROUPS] = {}, low[COUNT][GROUPS] = {};
        Weights::each_eight(strip, quarter, numbers_of_codes, [&](int eight, int8x16_t first, int8x16_t second) {
          const int group = eight * GROUPS / 4;
          for (int row = 0; row < COUNT; ++row) {
            const Dots& of_row = rows[row * blocks];
            high[row][group] = dots_of(high[row][group], first, second, of_row.high + 8 * eight);
            low[row][group] = dots_of(low[row][group], first, second, of_row.low + 8 * eight);
          }
        });
        const float* scales = (const float*)of_groups + 4 * quarter;
        for (int row = 0; row < COUNT; ++row) {
          const Dots& of_row = rows[row * blocks];
          float32x4_t& sum = kept[quarter][row];
          for (int group = 0; group < GROUPS; ++group)
            sum = with_group(sum, high[row][group], low[row][group], scales + 16 * group, of_row);
          for (int group = 0; Weights::ZEROS && group < GROUPS; ++group)
            sum = with_zero(sum, scales + 16 * (GROUPS + group), of_row, group, GROUPS);
        }
      }
    }
  }
  for (int row = 0; row < COUNT; ++row)
    for (int quarter = 0; quarter < 4; ++quarter) store((char*)(out + row) + 16 * quarter, kept[quarter][row]);
}

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {unpack<Weights>, Weights::look_up, strip_bytes,
          {multiply<Weights, 1>, multiply<Weights, 2>, multiply<Weights, 3>, multiply<Weights, 4>}, Weights::GROUPS, Weights::ZEROS};
}

#else

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {Weights::unpack, Weights::look_up, strip_bytes};
}

#endif

template <int BITS, int GROUP, bool HAS_ZEROS, int SCALES, bool HAS_TABLE = false>
Form form_of_blocks(const Matrix& matrix) {
#if defined(__AVX512F__) || defined(HAS_DOTS)
  // Up to 5 bits are looked up anyway.
  typedef Block<BITS, GROUP, HAS_ZEROS, SCALES, false> Weights;
#else
  typedef Block<BITS, GROUP, HAS_ZEROS, SCALES, HAS_TABLE> Weights;
#endif
  return form_with<Weights>(matrix.columns / INNER / Weights::BLOCKS * Weights::BYTES);
}

// The forms in `model/quants/forms.py`.
inline Form form_of(const Matrix& matrix) {
  if (matrix.bits == 16) return {};
#define FORM(bits_, group_, has_zeros_, scales_, has_table_)                                                        \
  if (matrix.bits == bits_ && matrix.group == group_ && matrix.has_zeros == has_zeros_ && matrix.scales == scales_ && \
      matrix.has_table == has_table_)                                                                                 \
    return form_of_blocks<bits_, group_, has_zeros_, scales_, has_table_>(matrix);
  FORM(2, 16, true, IN_NIBBLES, false)
  FORM(2, 32, false, SHARED, true)
  FORM(3, 16, false, IN_BYTES, false)
  FORM(3, 16, false, IN_BYTES, true)
  FORM(3, 32, false, IN_BYTES, true)
  FORM(4, 32, true, IN_FLOAT16, false)
  FORM(4, 32, true, IN_BYTES, false)
  FORM(4, 32, false, IN_FLOAT16, false)
  FORM(4, 32, false, IN_FLOAT16, true)
  FORM(4, 32, false, IN_BYTES, true)
  FORM(4, 32, false, IN_EXPONENTS, true)
  FORM(5, 32, true, IN_FLOAT16, false)
  FORM(5, 32, true, IN_BYTES, false)
  FORM(5, 32, false, IN_FLOAT16, false)
  FORM(6, 16, false, IN_BYTES, false)
#undef FORM
  return form_of_blocks<8, 32, false, IN_FLOAT16>(matrix);
}

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
