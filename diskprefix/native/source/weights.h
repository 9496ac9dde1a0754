// The forms of a matrix's weights, and their conversion into the factors of a product.
//
// A quantised weight is code × scale + zero, rounded to bfloat16. `model/quants/forms.py` describes how the matrix lies
// in memory: strips of 16 rows of the matrix, which are 16 columns of the result, in each one block after the other, of
// 32 columns of the matrix. A matrix in bfloat16 lies row after row, and has blocks of the same size.
//
// A block becomes 16 pairs of columns: 16 rows of two bfloat16 side by side are what a tile of AMX takes, and what a vector
// of AVX-512 multiplies with a pair. There the codes themselves are the factors, and scales and zeros come to the sums.

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
typedef int8_t SixteenBytes __attribute__((vector_size(16)));
typedef int64_t EightLongs __attribute__((vector_size(64)));

// 16 scales or zeros, stored in float32 or float16.
template <class Stored>
inline Sixteen scales_at(const uint8_t* from) {
  if constexpr (sizeof(Stored) == 4) return loaded<Sixteen>(from);
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  Sixteen numbers;
  for (int64_t first = 0; first < 16; first += LANES)
    store((char*)&numbers + first * 4, Float16::load((const uint16_t*)from + first));
  return numbers;
#endif
}

inline Sixteen rounded(Sixteen numbers) {
  const SixteenWords bits = (SixteenWords)numbers;
  return (Sixteen)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

#if defined(__AMX_BF16__)

constexpr int64_t BLOCK_BYTES = 1024;  // of factors

inline void put_pair(uint8_t* to, int pair, Sixteen low, Sixteen high) {
  store(to + 64 * pair, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

#elif defined(__AVX512BF16__)

#define KEEPS_CODES

constexpr int FEW = 6;

// Behind the pairs are the scales of the strip's rows, and those of a second group or the zeros.
constexpr int64_t SCALES_AT = 1024, BLOCK_BYTES = SCALES_AT + 2 * 64;

inline __m512i pair_of(Sixteen low, Sixteen high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

#else

constexpr int64_t BLOCK_BYTES = 2048;

inline void put_pair(uint8_t* to, int pair, Sixteen low, Sixteen high) {
  store(to + 128 * pair, rounded(low));
  store(to + 128 * pair + 64, rounded(high));
}

#endif

// The conversion of a block into factors. Its rows are `stride` bytes apart if it is not quantised.
struct Form {
  void (*unpack)(const uint8_t* block, int64_t stride, uint8_t* to);
  // One row of a strip of quants, in bfloat16.
  void (*look_up)(const uint8_t* block, int64_t blocks, int64_t row, uint16_t* to);
  int64_t block_bytes, strip_bytes, stride;
#if defined(KEEPS_CODES)
  // 1 to FEW rows times the blocks of a strip. `sums` are those of the rows' blocks.
  void (*multiply[FEW])(const uint8_t* block, int64_t stride, int64_t blocks, const uint16_t* rows,
                        const float* sums, Sixteen* out);
  int64_t groups;  // of a block
  bool has_zeros;
#endif
};

#define LOW_PAIRS 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7
#define HIGH_PAIRS 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15

// The distance in bytes at which memory is fetched ahead. Blocks of a strip follow each other, and so do strips.
constexpr int64_t AHEAD = 2048;

// Makes two vectors of each of the 16 pairs of columns: the weights of rows 0 to 7 of the strip and of rows 8 to 15,
// those of a pair side by side.
template <int BITS, int GROUP, bool HAS_ZEROS, class Stored>
struct Block {
  static constexpr int64_t CODES = STRIP * INNER * BITS / 8;
  static constexpr int GROUPS = INNER / GROUP;
  static constexpr int64_t NUMBERS = GROUPS * STRIP * sizeof(Stored);
  static constexpr int64_t BYTES = CODES + NUMBERS * (HAS_ZEROS ? 2 : 1);

  static void look_up(const uint8_t* block, int64_t blocks, int64_t row, uint16_t* to) {
    for (int64_t number = 0; number < blocks; ++number, block += BYTES, to += INNER) {
      float numbers[INNER];
      for (int column = 0; column < INNER; ++column) {
        const uint8_t* at = block + CODES + (column / GROUP * STRIP + row) * sizeof(Stored);
        numbers[column] = code_of(block, row, column) * number_at(at);
        if (HAS_ZEROS) numbers[column] += number_at(at + NUMBERS);
      }
      for (int64_t first = 0; first < INNER; first += LANES) BFloat16::put(to + first, loaded<Floats>(numbers + first));
    }
  }

  static float number_at(const uint8_t* from) {
    if constexpr (sizeof(Stored) == 4) return loaded<float>(from);
    return from_half(loaded<uint16_t>(from));
  }

  static int32_t code_of(const uint8_t* block, int64_t row, int column) {
    constexpr int OF_WORD = 32 / BITS, OF_WORDS = OF_WORD * BITS;
    const int vector = column / 2 * 2 + row / 8, last = vector - OF_WORDS;
    const int64_t lane = row % 8 * 2 + column % 2;
    if (BITS == 8) return (int8_t)block[STRIP * vector + lane];
    const auto word = [=](int number) { return loaded<uint32_t>(block + 64 * number + 4 * lane); };
    const uint32_t code = last < 0 ? word(vector / OF_WORD) >> BITS * (vector % OF_WORD)
                                   : word(3 * last) >> 30 | word(3 * last + 1) >> 30 << 2 | (word(2) >> 30 + last & 1) << 4;
    const uint32_t first = code << 32 - BITS;
    return HAS_ZEROS ? first >> 32 - BITS : (int32_t)first >> 32 - BITS;
  }

#if defined(KEEPS_CODES)

  static constexpr bool ZEROS = HAS_ZEROS;

  template <class Body>
  static inline __attribute__((always_inline)) void each_pair(const uint8_t* block, int64_t, const Body& body) {
    SixteenWords words[BITS];
    if (BITS < 8)
      for (int i = 0; i < BITS; ++i) words[i] = in_register(loaded<SixteenWords>(block + 64 * i));
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      if (64 * pair < BYTES) __builtin_prefetch(block + AHEAD + 64 * pair);
      if constexpr (BITS == 4) {
        body(pair, looked_up(words[pair / 4], pair % 4));
      } else if constexpr (BITS == 5) {
        body(pair, pair_of(of_words(words, 2 * pair), of_words(words, 2 * pair + 1)));
      } else {
        body(pair, pair_of(of_bytes(block + STRIP * 2 * pair), of_bytes(block + STRIP * (2 * pair + 1))));
      }
    }
  }

  static inline __attribute__((always_inline)) Sixteen scale(const uint8_t* block, int number) {
    return scales_at<Stored>(block + CODES + number * STRIP * sizeof(Stored));
  }

  // Of four pairs of 4 bits the one with this number. Even words hold the first two pairs, odd words the others; in each
  // the code of rows 0 to 7 comes before that of rows 8 to 15.
  static inline __attribute__((always_inline)) __m512i looked_up(SixteenWords words, int number) {
    typedef uint16_t Table __attribute__((vector_size(64)));
    const Table of_even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                           0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Table numbers = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
                           0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                           0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const SixteenWords high = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
    const Table part = of_even + (uint16_t)(number / 2);
    const __m512i both = _mm512_permutexvar_epi16((__m512i)part, (__m512i)words);
    const __m512i at = _mm512_srlv_epi32(both, (__m512i)(high + (uint32_t)(8 * (number % 2))));
    return _mm512_permutexvar_epi16(at, (__m512i)numbers);
  }

#else

  static void unpack(const uint8_t* block, int64_t, uint8_t* to) {
    SixteenWords words[BITS];
    if (BITS < 8)
      for (int i = 0; i < BITS; ++i) words[i] = in_register(loaded<SixteenWords>(block + 64 * i));
    Sixteen scales[GROUPS][2], zeros[GROUPS][2];
    for (int group = 0; group < GROUPS; ++group) {
      const uint8_t* at = block + CODES + group * STRIP * sizeof(Stored);
      spread(scales_at<Stored>(at), scales[group]);
      if (HAS_ZEROS) spread(scales_at<Stored>(at + NUMBERS), zeros[group]);
    }
#if defined(__AVX512F__)
#pragma GCC unroll 16
#endif
    for (int pair = 0; pair < 16; ++pair) {
      // One line at a time: many at once would delay the computation.
      if (64 * pair < BYTES) __builtin_prefetch(block + AHEAD + 64 * pair);
      const int group = GROUPS == 1 ? 0 : pair / 8;
      Sixteen parts[2];
      for (int half = 0; half < 2; ++half) {
        const Sixteen code = BITS < 8 ? of_words(words, 2 * pair + half) : of_bytes(block + STRIP * (2 * pair + half));
        parts[half] = HAS_ZEROS ? fused(code, scales[group][half], zeros[group][half]) : code * scales[group][half];
      }
      put_pair(to, pair, parts[0], parts[1]);
    }
  }

  static inline __attribute__((always_inline)) void spread(Sixteen numbers, Sixteen* halves) {
    halves[0] = __builtin_shufflevector(numbers, numbers, LOW_PAIRS);
    halves[1] = __builtin_shufflevector(numbers, numbers, HIGH_PAIRS);
  }

#endif

  static inline __attribute__((always_inline)) SixteenWords in_register(SixteenWords words) {
#if defined(__AVX512F__)
    // GCC would load them again for each code.
    __asm__("" : "+v"(words));
#endif
    return words;
  }

  static inline __attribute__((always_inline)) Sixteen of_bytes(const uint8_t* codes) {
#if defined(__AVX512F__)
    return (Sixteen)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
#else
    return __builtin_convertvector(__builtin_convertvector(loaded<SixteenBytes>(codes), SixteenInts), Sixteen);
#endif
  }

  // Returns the vector of codes with this number, of 32.
  static inline __attribute__((always_inline)) Sixteen of_words(const SixteenWords* words, int number) {
    constexpr int OF_WORD = 32 / BITS, OF_WORDS = OF_WORD * BITS;
    if (number < OF_WORDS) return number_of(words[number / OF_WORD], BITS * (number % OF_WORD));
    // Codes of 5 bits leave 2 bits of each word, which are the last two: the middle word has a bit of both.
    const int last = number - OF_WORDS, first = 3 * last;
    return number_of(words[first] >> 30 | words[first + 1] >> 30 << 2 | (words[2] >> (30 + last) & 1) << 4, 0);
  }

  // The code at bit `at` of each word. Codes have a sign if there are no zeros.
  static inline __attribute__((always_inline)) Sixteen number_of(SixteenWords words, int at) {
#if defined(__AVX512F__)
    // A look-up by their last bits, which is faster than a conversion.
    const __m512 low = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 high = _mm512_add_ps(low, _mm512_set1_ps(HAS_ZEROS ? 16 : -16));
    if constexpr (BITS == 4) return (Sixteen)_mm512_permutexvar_ps((__m512i)(words >> at), low);
    if constexpr (BITS == 5) return (Sixteen)_mm512_permutex2var_ps(low, (__m512i)(words >> at), high);
#endif
    constexpr int OTHERS = 32 - BITS;
    const SixteenWords first = words << (OTHERS - at);
    if (HAS_ZEROS) return __builtin_convertvector((SixteenInts)(first >> OTHERS), Sixteen);
    return __builtin_convertvector((SixteenInts)first >> OTHERS, Sixteen);
  }

  // A code times a scale is exact where there are zeros, so both ways give the same bits.
  static inline __attribute__((always_inline)) Sixteen fused(Sixteen code, Sixteen scale, Sixteen zero) {
#if defined(__AVX512F__)
    return (Sixteen)_mm512_fmadd_ps((__m512)code, (__m512)scale, (__m512)zero);
#else
    return code * scale + zero;
#endif
  }
};

#if defined(KEEPS_CODES)

// Weights in bfloat16 are turned: a row of the block holds 16 pairs.
struct Rows {
  static constexpr int64_t BYTES = INNER * 2;
  static constexpr int GROUPS = 1;
  static constexpr bool ZEROS = false;

  template <class Body>
  static inline __attribute__((always_inline)) void each_pair(const uint8_t* block, int64_t stride, const Body& body) {
    Floats square[16];
    for (int64_t row = 0; row < 16; ++row) {
      square[row] = loaded<Floats>(block + row * stride);
      _mm_prefetch(block + (STRIP + row) * stride, _MM_HINT_T1);
    }
    transpose(square);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) body(pair, (__m512i)square[pair]);
  }

  static Sixteen scale(const uint8_t*, int) { return (Sixteen)all(1.0f); }

  static constexpr auto look_up = nullptr;
};

template <class Weights>
void unpack(const uint8_t* block, int64_t stride, uint8_t* to) {
  Weights::each_pair(block, stride, [to](int pair, __m512i factors) { store(to + 64 * pair, factors); });
  for (int number = 0; number < Weights::GROUPS + Weights::ZEROS; ++number)
    store(to + SCALES_AT + 64 * number, Weights::scale(block, number));
}

template <class Weights, int COUNT>
void multiply(const uint8_t* block, int64_t stride, int64_t blocks, const uint16_t* rows, const float* sums, Sixteen* out) {
  const int64_t columns = blocks * INNER;
  __m512 kept[COUNT] = {};
  for (int64_t number = 0; number < blocks; ++number, block += Weights::BYTES, rows += INNER) {
    __m512 found[COUNT][Weights::GROUPS] = {};
    Weights::each_pair(block, stride, [&](int pair, __m512i factors) {
      for (int i = 0; i < COUNT; ++i) {
        __m512& sum = found[i][pair * Weights::GROUPS / 16];
        const __m512i left = _mm512_set1_epi32(loaded<int32_t>(rows + i * columns + 2 * pair));
        sum = _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)factors);
      }
    });
    for (int group = 0; group < Weights::GROUPS; ++group) {
      const __m512 scale = (__m512)Weights::scale(block, group);
      for (int i = 0; i < COUNT; ++i) kept[i] = _mm512_fmadd_ps(found[i][group], scale, kept[i]);
    }
    if (Weights::ZEROS) {
      const __m512 zero = (__m512)Weights::scale(block, Weights::GROUPS);
      for (int i = 0; i < COUNT; ++i) kept[i] = _mm512_fmadd_ps(zero, _mm512_set1_ps(sums[i * blocks + number]), kept[i]);
    }
  }
  for (int i = 0; i < COUNT; ++i) out[i] = (Sixteen)kept[i];
}

template <class Weights>
Form form_with(int64_t strip_bytes, int64_t stride) {
  return {unpack<Weights>, Weights::look_up, Weights::BYTES, strip_bytes, stride,
          {multiply<Weights, 1>, multiply<Weights, 2>, multiply<Weights, 3>, multiply<Weights, 4>, multiply<Weights, 5>,
           multiply<Weights, 6>},
          Weights::GROUPS, Weights::ZEROS};
}

#elif defined(__AMX_BF16__)

// Weights in bfloat16 are turned: a row of the block holds 16 pairs.
inline void unpack_rows(const uint8_t* block, int64_t stride, uint8_t* to) {
  Floats square[16];
  for (int64_t row = 0; row < 16; ++row) square[row] = loaded<Floats>(block + row * stride);
  transpose(square);
  for (int64_t pair = 0; pair < 16; ++pair) store(to + 64 * pair, square[pair]);
}

#endif

#if !defined(KEEPS_CODES)

template <class Weights>
Form form_with(int64_t strip_bytes, int64_t stride) {
  return {Weights::unpack, Weights::look_up, Weights::BYTES, strip_bytes, stride};
}

#endif

template <int BITS, int GROUP, bool HAS_ZEROS>
Form form_of_blocks(const Matrix& matrix) {
  typedef Block<BITS, GROUP, HAS_ZEROS, uint16_t> Small;
  typedef Block<BITS, GROUP, HAS_ZEROS, float> Large;
  const int64_t blocks = matrix.columns / INNER;
  return matrix.scale_type == FLOAT16 ? form_with<Small>(Small::BYTES * blocks, 0) : form_with<Large>(Large::BYTES * blocks, 0);
}

inline Form form_of(const Matrix& matrix) {
#if defined(KEEPS_CODES)
  if (matrix.bits == 16) return form_with<Rows>(STRIP * matrix.columns * 2, matrix.columns * 2);
#elif defined(__AMX_BF16__)
  if (matrix.bits == 16) return {unpack_rows, nullptr, INNER * 2, STRIP * matrix.columns * 2, matrix.columns * 2};
#endif
  if (matrix.bits == 4) return form_of_blocks<4, 32, true>(matrix);
  if (matrix.bits == 5) return matrix.has_zeros ? form_of_blocks<5, 32, true>(matrix) : form_of_blocks<5, 32, false>(matrix);
  return matrix.group == 16 ? form_of_blocks<8, 16, false>(matrix) : form_of_blocks<8, 32, false>(matrix);
}

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
