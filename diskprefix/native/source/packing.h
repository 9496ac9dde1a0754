// Weights of a GGUF file (llama.cpp, ggml/src/ggml-common.h), packed as `model/quants/forms.py` describes. All variants
// give the same bytes.

#pragma once

#include "parts.h"

namespace diskprefix {
namespace {
namespace packing {

constexpr int64_t STRIP = 16, INNER = 32, MOST_WEIGHTS = 256, MOST_GROUPS = 16;

// The same columns of the rows of a strip. Codes have a sign or not, as their form has them. A group's numbers are those
// of all rows.
struct Decoded {
  uint8_t codes[STRIP][MOST_WEIGHTS];
  float scales[MOST_GROUPS][STRIP], zeros[MOST_GROUPS][STRIP];
};

// The numbers of one row.
struct Numbers {
  float *scales, *zeros;

  void scale(int group, float number) const { scales[group * STRIP] = number; }
  void zero(int group, float number) const { zeros[group * STRIP] = number; }
};

inline float half_at(const uint8_t* from) { return from_half(loaded<uint16_t>(from)); }

// 2 × `count` codes: the low halves of the bytes, then the high ones.
inline void halves(const uint8_t* from, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) codes[i] = from[i] & 15;
  for (int i = 0; i < count; ++i) codes[count + i] = from[i] >> 4;
}

// What 32 bits add to 32 codes of 4 bits.
inline void fifth_bits(const uint8_t* from, uint8_t* codes) {
  const uint32_t bits = loaded<uint32_t>(from);
  for (int i = 0; i < 32; ++i) codes[i] |= (bits >> i & 1) << 4;
}

template <int COUNT>
inline void move(uint8_t* codes, int by) {
  for (int i = 0; i < COUNT; ++i) codes[i] += by;
}

// The types: weights and bytes of a block, the form, and how a block becomes codes and numbers.

struct Q4_0 {
  static constexpr int WEIGHTS = 32, BYTES = 18, BITS = 4, GROUP = 32;
  static constexpr bool HAS_ZEROS = true;
  typedef uint16_t Stored;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    halves(from + 2, 16, codes);
    numbers.scale(0, half_at(from));
    numbers.zero(0, -8 * half_at(from));
  }
};

struct Q4_1 : Q4_0 {
  static constexpr int BYTES = 20;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    halves(from + 4, 16, codes);
    numbers.scale(0, half_at(from));
    numbers.zero(0, half_at(from + 2));
  }
};

struct Q5_0 {
  static constexpr int WEIGHTS = 32, BYTES = 22, BITS = 5, GROUP = 32;
  static constexpr bool HAS_ZEROS = false;
  typedef uint16_t Stored;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    halves(from + 6, 16, codes);
    fifth_bits(from + 2, codes);
    move<32>(codes, -16);
    numbers.scale(0, half_at(from));
  }
};

struct Q5_1 {
  static constexpr int WEIGHTS = 32, BYTES = 24, BITS = 5, GROUP = 32;
  static constexpr bool HAS_ZEROS = true;
  typedef uint16_t Stored;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    halves(from + 8, 16, codes);
    fifth_bits(from + 4, codes);
    numbers.scale(0, half_at(from));
    numbers.zero(0, half_at(from + 2));
  }
};

struct Q8_0 {
  static constexpr int WEIGHTS = 32, BYTES = 34, BITS = 8, GROUP = 32;
  static constexpr bool HAS_ZEROS = false;
  typedef uint16_t Stored;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    memcpy(codes, from + 2, 32);
    numbers.scale(0, half_at(from));
  }
};

// Eight scales and eight minima of 6 bits.
inline void scales_of_k(const uint8_t* from, Numbers numbers) {
  const float scale = half_at(from), least = half_at(from + 2);
  const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
  for (int i = 0; i < 4; ++i) {
    numbers.scale(i, scale * (low[i] & 63));
    numbers.scale(4 + i, scale * (high[i] & 15 | low[i] >> 6 << 4));
    numbers.zero(i, -(least * (middle[i] & 63)));
    numbers.zero(4 + i, -(least * (high[i] >> 4 | middle[i] >> 6 << 4)));
  }
}

struct Q4_K {
  static constexpr int WEIGHTS = 256, BYTES = 144, BITS = 4, GROUP = 32;
  static constexpr bool HAS_ZEROS = true;
  typedef float Stored;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    scales_of_k(from, numbers);
    for (int part = 0; part < 4; ++part) halves(from + 16 + 32 * part, 32, codes + 64 * part);
  }
};

struct Q5_K : Q4_K {
  static constexpr int BYTES = 176, BITS = 5;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    scales_of_k(from, numbers);
    const uint8_t* fifth = from + 16;
    for (int part = 0; part < 4; ++part) halves(from + 48 + 32 * part, 32, codes + 64 * part);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i) codes[32 * part + i] |= (fifth[i] >> part & 1) << 4;
  }
};

struct Q6_K {
  static constexpr int WEIGHTS = 256, BYTES = 210, BITS = 8, GROUP = 16;
  static constexpr bool HAS_ZEROS = false;
  typedef float Stored;

  static void decode(const uint8_t* from, uint8_t* codes, Numbers numbers) {
    const float scale = half_at(from + 208);
    for (int group = 0; group < 16; ++group) numbers.scale(group, scale * (int8_t)from[192 + group]);
    for (int part = 0; part < 2; ++part) {
      const uint8_t* high = from + 128 + 32 * part;
      halves(from + 64 * part, 64, codes + 128 * part);
      for (int quarter = 0; quarter < 4; ++quarter)
        for (int i = 0; i < 32; ++i) codes[128 * part + 32 * quarter + i] |= (high[i] >> 2 * quarter & 3) << 4;
    }
    move<256>(codes, -32);
  }
};

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint32_t Lanes __attribute__((vector_size(64)));

// Writes codes of less than 8 bits: a word has those at one place of consecutive vectors.
template <int BITS>
inline void put_words(const Bytes* vectors, uint8_t* to) {
  constexpr int OF_WORD = 32 / BITS;
  Lanes words[BITS] = {};
  const auto at = [vectors](int number) { return __builtin_convertvector(vectors[number], Lanes) & (1u << BITS) - 1; };
  for (int word = 0; word < BITS; ++word)
    for (int place = 0; place < OF_WORD; ++place) words[word] |= at(word * OF_WORD + place) << BITS * place;
  for (int last = 0; last < 32 - OF_WORD * BITS; ++last) {
    const Lanes codes = at(30 + last);
    words[3 * last] |= codes << 30;
    words[3 * last + 1] |= codes >> 2 << 30;
    words[2] |= codes >> 4 << 30 + last;
  }
  memcpy(to, words, sizeof words);
}

// Writes 32 columns from `first` on, and returns the end.
template <class Type>
inline uint8_t* put_block(const Decoded& decoded, int first, uint8_t* to) {
  uint16_t pairs[16][STRIP];
  for (int row = 0; row < STRIP; ++row) {
    uint16_t of_row[16];
    memcpy(of_row, decoded.codes[row] + first, sizeof of_row);
    for (int pair = 0; pair < 16; ++pair) pairs[pair][row] = of_row[pair];
  }
  if constexpr (Type::BITS == 8) memcpy(to, pairs, sizeof pairs);
  else put_words<Type::BITS>((const Bytes*)pairs, to);
  to += STRIP * INNER * Type::BITS / 8;
  for (int part = 0; part < 1 + Type::HAS_ZEROS; ++part)
    for (int group = 0; group < INNER / Type::GROUP; ++group, to += STRIP * sizeof(typename Type::Stored)) {
      const float* numbers = (part ? decoded.zeros : decoded.scales)[first / Type::GROUP + group];
      if constexpr (sizeof(typename Type::Stored) == 4) {
        memcpy(to, numbers, STRIP * 4);
      } else {
        for (int row = 0; row < STRIP; ++row) store(to + 2 * row, to_half(numbers[row]));
      }
    }
  return to;
}

template <class Type>
bool pack_of(const Packing& call) {
  const int64_t blocks = call.columns / Type::WEIGHTS;
  return spread(call.num_threads, call.parallel_for, call.strips, 1 + 65536 / call.columns, [&](int64_t begin, int64_t end) {
    Decoded decoded;
    uint8_t* to = (uint8_t*)call.out + begin * call.strip_bytes;
    for (int64_t strip = begin; strip < end; ++strip) {
      const uint8_t* rows[STRIP];
      for (int64_t row = 0; row < STRIP; ++row) {
        const int64_t place = strip * STRIP + row;
        rows[row] = (const uint8_t*)call.content + (call.order ? call.order[place] : place) * blocks * Type::BYTES;
      }
      for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t row = 0; row < STRIP; ++row)
          Type::decode(rows[row] + block * Type::BYTES, decoded.codes[row], {decoded.scales[0] + row, decoded.zeros[0] + row});
        for (int first = 0; first < Type::WEIGHTS; first += INNER) to = put_block<Type>(decoded, first, to);
      }
    }
  });
}

}  // namespace packing

int32_t pack(const Packing* call) {
  using namespace packing;
  switch (call->type) {
    case 2: return !pack_of<Q4_0>(*call);
    case 3: return !pack_of<Q4_1>(*call);
    case 6: return !pack_of<Q5_0>(*call);
    case 7: return !pack_of<Q5_1>(*call);
    case 8: return !pack_of<Q8_0>(*call);
    case 12: return !pack_of<Q4_K>(*call);
    case 13: return !pack_of<Q5_K>(*call);
    case 14: return !pack_of<Q6_K>(*call);
  }
  return 1;
}

}  // namespace
}  // namespace diskprefix
