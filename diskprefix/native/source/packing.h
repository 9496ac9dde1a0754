// Weights of a GGUF file (llama.cpp, ggml/src/ggml-common.h), packed as `runtime/plan/quants/quant_form.py` describes.

#pragma once

#include <cerrno>
#include <atomic>

#include <unistd.h>

#include "memory.h"
#include "parts.h"
#include "weights.h"

namespace diskprefix {
namespace {
namespace matrices {
namespace packing {

constexpr int64_t MOST_WEIGHTS = 256, MOST_GROUPS = 16;

// A unit: one block of the file for each row of a strip. Scales and zeros of the unit or of a group have one number for
// each row.
struct Decoded {
  uint8_t codes[STRIP][MOST_WEIGHTS];
  float factors[STRIP];
  uint16_t scales[STRIP], zeros[STRIP];
  uint8_t scales_of_groups[MOST_GROUPS][STRIP], zeros_of_groups[MOST_GROUPS][STRIP];
};

// One row of a unit. `grid` has the codes of types whose codes stand for several weights.
struct Row {
  uint8_t* codes;
  uint16_t *own_scale, *own_zero;
  uint8_t *scales, *zeros;
  const uint8_t* grid;

  void scale(const uint8_t* half) const { memcpy(own_scale, half, 2); }
  void zero(const uint8_t* half) const { memcpy(own_zero, half, 2); }
  void scale(int group, int number) const { scales[group * STRIP] = number; }
  void zero(int group, int number) const { zeros[group * STRIP] = number; }
};

typedef uint8_t BytesOfHalf __attribute__((vector_size(INNER / 2)));
typedef uint8_t BytesOfLine __attribute__((vector_size(INNER)));
typedef uint16_t WordsOfLine __attribute__((vector_size(2 * INNER)));
typedef uint8_t BytesOfStep __attribute__((vector_size(4 * STRIP)));

template <class Bytes>
INLINE void halves_of(const uint8_t* from, int count, uint8_t* codes) {
  for (int i = 0; i < count; i += sizeof(Bytes)) {
    const Bytes both = loaded<Bytes>(from + i);
    store(codes + i, both & 15);
    store(codes + count + i, both >> 4);
  }
}

// Writes 2 × `count` codes: the low nibbles of the bytes, then the high ones.
INLINE void halves(const uint8_t* from, int count, uint8_t* codes) {
  count < INNER ? halves_of<BytesOfHalf>(from, count, codes) : halves_of<BytesOfLine>(from, count, codes);
}

// Writes 128 codes of 2 bits: the lowest two bits of 32 bytes, then the next two, and so on.
inline void quarters(const uint8_t* from, uint8_t* codes) {
  for (int quarter = 0; quarter < 4; ++quarter)
    for (int i = 0; i < 32; ++i) codes[32 * quarter + i] = from[i] >> 2 * quarter & 3;
}

// Adds the fifth bit to 32 codes of 4 bits.
inline void fifth_bits(const uint8_t* from, uint8_t* codes) {
  constexpr BytesOfLine BITS = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                                1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint64_t bytes[4];
  for (int i = 0; i < 4; ++i) bytes[i] = from[i] * 0x0101010101010101u;
  store(codes, loaded<BytesOfLine>(codes) | (BytesOfLine)((loaded<BytesOfLine>(bytes) & BITS) != 0) & 16);
}

// Returns 8 signs from 7 bits; the number of signs set is even.
inline uint32_t even_signs(uint32_t bits) { return bits & 127 | __builtin_parity(bits & 127) << 7; }

// Writes COUNT codes of a grid, each with its sign in bit `bits`.
template <int COUNT>
inline void chosen(const uint8_t* grid, uint32_t at, uint32_t signs, int bits, uint8_t* codes) {
  for (int i = 0; i < COUNT; ++i) codes[i] = grid[COUNT * at + i] | (signs >> i & 1) << bits;
}

inline int odd(int number) { return 2 * number + 1; }

// The types: the bytes of a block, the form, and how a block is decoded.

template <int BITS, int GROUP, bool HAS_ZEROS, int SCALES>
struct Kept {
  typedef Block<BITS, GROUP, HAS_ZEROS, SCALES, false> Form;
};

struct Q4_0 : Kept<4, 32, false, IN_FLOAT16> {
  static constexpr int BYTES = 18;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    halves(from + 2, 16, row.codes);
  }
};

typedef Q4_0 IQ4_NL;

struct Q4_1 : Kept<4, 32, true, IN_FLOAT16> {
  static constexpr int BYTES = 20;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from), row.zero(from + 2);
    halves(from + 4, 16, row.codes);
  }
};

struct Q5_0 : Kept<5, 32, false, IN_FLOAT16> {
  static constexpr int BYTES = 22;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    halves(from + 6, 16, row.codes);
    fifth_bits(from + 2, row.codes);
  }
};

struct Q5_1 : Kept<5, 32, true, IN_FLOAT16> {
  static constexpr int BYTES = 24;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from), row.zero(from + 2);
    halves(from + 8, 16, row.codes);
    fifth_bits(from + 4, row.codes);
  }
};

struct Q8_0 : Kept<8, 32, false, IN_FLOAT16> {
  static constexpr int BYTES = 34;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    memcpy(row.codes, from + 2, 32);
  }
};

struct MXFP4 : Kept<4, 32, false, IN_EXPONENTS> {
  static constexpr int BYTES = 17;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(0, from[0]);
    halves(from + 1, 16, row.codes);
  }
};

// The lowest two bits of each byte come first.
struct Q2_0 : Kept<2, 64, false, IN_FLOAT16> {
  static constexpr int BYTES = 18;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int i = 0; i < 64; ++i) row.codes[i] = from[2 + i / 4] >> 2 * (i % 4) & 3;
  }
};

struct Q1_0 : Kept<1, 128, false, IN_FLOAT16> {
  static constexpr int BYTES = 18;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int i = 0; i < 128; ++i) row.codes[i] = from[2 + i / 8] >> i % 8 & 1;
  }
};

// As llama.cpp: a NaN scale is 0, and the sign is ignored.
struct NVFP4 : Kept<4, 16, false, IN_FLOAT8> {
  static constexpr int BYTES = 36;

  static void decode(const uint8_t* from, const Row& row) {
    for (int group = 0; group < 4; ++group) {
      row.scale(group, from[group] == 127 ? 0 : from[group] & 127);
      for (int i = 0; i < 8; ++i) {
        row.codes[16 * group + i] = from[4 + 8 * group + i] & 15;
        row.codes[16 * group + 8 + i] = from[4 + 8 * group + i] >> 4;
      }
    }
  }
};

struct Q2_K : Kept<2, 16, true, IN_NIBBLES> {
  static constexpr int BYTES = 84;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from + 80), row.zero(from + 82);
    for (int group = 0; group < 16; ++group) row.scale(group, from[group]);
    for (int part = 0; part < 2; ++part) quarters(from + 16 + 32 * part, row.codes + 128 * part);
  }
};

struct Q3_K : Kept<3, 16, false, IN_BYTES> {
  static constexpr int BYTES = 110;

  static void decode(const uint8_t* from, const Row& row) {
    const uint8_t* scales = from + 96;
    row.scale(from + 108);
    for (int group = 0; group < 16; ++group) {
      const int low = scales[group % 8] >> group / 8 * 4 & 15, high = scales[8 + group % 4] >> group / 4 * 2 & 3;
      row.scale(group, (low | high << 4) - 32);
    }
    for (int part = 0; part < 2; ++part) quarters(from + 32 + 32 * part, row.codes + 128 * part);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i) row.codes[32 * part + i] |= (from[i] >> part & 1) << 2;
  }
};

// Eight scales and eight minima of 6 bits.
inline void scales_of_k(const uint8_t* from, const Row& row) {
  const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
  row.scale(from), row.zero(from + 2);
  for (int i = 0; i < 4; ++i) {
    row.scale(i, low[i] & 63);
    row.scale(4 + i, high[i] & 15 | low[i] >> 6 << 4);
    row.zero(i, middle[i] & 63);
    row.zero(4 + i, high[i] >> 4 | middle[i] >> 6 << 4);
  }
}

struct Q4_K : Kept<4, 32, true, IN_BYTES> {
  static constexpr int BYTES = 144;

  static void decode(const uint8_t* from, const Row& row) {
    scales_of_k(from, row);
    for (int part = 0; part < 4; ++part) halves(from + 16 + 32 * part, 32, row.codes + 64 * part);
  }
};

struct Q5_K : Kept<5, 32, true, IN_BYTES> {
  static constexpr int BYTES = 176;

  static void decode(const uint8_t* from, const Row& row) {
    const uint8_t* fifth = from + 16;
    scales_of_k(from, row);
    for (int part = 0; part < 4; ++part) halves(from + 48 + 32 * part, 32, row.codes + 64 * part);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i) row.codes[32 * part + i] |= (fifth[i] >> part & 1) << 4;
  }
};

struct Q6_K : Kept<6, 16, false, IN_BYTES> {
  static constexpr int BYTES = 210;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from + 208);
    for (int group = 0; group < 16; ++group) row.scale(group, from[192 + group]);
    for (int part = 0; part < 2; ++part) {
      const uint8_t* high = from + 128 + 32 * part;
      halves(from + 64 * part, 64, row.codes + 128 * part);
      for (int quarter = 0; quarter < 4; ++quarter)
        for (int i = 0; i < 32; ++i) row.codes[128 * part + 32 * quarter + i] |= (high[i] >> 2 * quarter & 3) << 4;
    }
  }
};

struct IQ4_XS : Kept<4, 32, false, IN_BYTES> {
  static constexpr int BYTES = 136;

  static void decode(const uint8_t* from, const Row& row) {
    const uint32_t high = loaded<uint16_t>(from + 2);
    row.scale(from);
    for (int group = 0; group < 8; ++group) {
      row.scale(group, (from[4 + group / 2] >> group % 2 * 4 & 15 | (high >> 2 * group & 3) << 4) - 32);
      halves(from + 8 + 16 * group, 16, row.codes + 32 * group);
    }
  }
};

// 32 bits with four grid indices (of 8 codes each), then 32 bits with signs and scale.
struct IQ2_XXS : Kept<3, 32, false, IN_BYTES> {
  static constexpr int BYTES = 66;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int group = 0; group < 8; ++group) {
      const uint8_t* at = from + 2 + 8 * group;
      const uint32_t rest = loaded<uint32_t>(at + 4);
      row.scale(group, odd(rest >> 28));
      for (int i = 0; i < 4; ++i) chosen<8>(row.grid, at[i], even_signs(rest >> 7 * i), 2, row.codes + 32 * group + 8 * i);
    }
  }
};

struct IQ2_XS : Kept<3, 16, false, IN_BYTES> {
  static constexpr int BYTES = 74;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int group = 0; group < 16; ++group) row.scale(group, odd(from[66 + group / 2] >> group % 2 * 4 & 15));
    for (int i = 0; i < 32; ++i) {
      const uint32_t at = loaded<uint16_t>(from + 2 + 2 * i);
      chosen<8>(row.grid, at & 511, even_signs(at >> 9), 2, row.codes + 8 * i);
    }
  }
};

struct IQ2_S : Kept<3, 16, false, IN_BYTES> {
  static constexpr int BYTES = 82;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int group = 0; group < 16; ++group) row.scale(group, odd(from[74 + group / 2] >> group % 2 * 4 & 15));
    for (int i = 0; i < 32; ++i)
      chosen<8>(row.grid, from[2 + i] | (from[66 + i / 4] >> i % 4 * 2 & 3) << 8, from[34 + i], 2, row.codes + 8 * i);
  }
};

struct IQ3_XXS : Kept<4, 32, false, IN_BYTES> {
  static constexpr int BYTES = 98;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int group = 0; group < 8; ++group) {
      const uint8_t* at = from + 2 + 8 * group;
      const uint32_t rest = loaded<uint32_t>(from + 66 + 4 * group);
      row.scale(group, odd(rest >> 28));
      for (int i = 0; i < 8; ++i)
        chosen<4>(row.grid, at[i], even_signs(rest >> i / 2 * 7) >> i % 2 * 4, 3, row.codes + 32 * group + 4 * i);
    }
  }
};

struct IQ3_S : Kept<4, 32, false, IN_BYTES> {
  static constexpr int BYTES = 110;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int group = 0; group < 8; ++group) row.scale(group, odd(from[106 + group / 2] >> group % 2 * 4 & 15));
    for (int i = 0; i < 64; ++i) {
      const uint32_t at = from[2 + i] | (from[66 + i / 8] >> i % 8 & 1) << 8;
      chosen<4>(row.grid, at, from[74 + i / 2] >> i % 2 * 4, 3, row.codes + 4 * i);
    }
  }
};

// All 8 numbers are shifted by an eighth; the bit is the sign of the shift.
struct IQ1_S : Kept<3, 32, false, IN_BYTES> {
  static constexpr int BYTES = 50;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from);
    for (int group = 0; group < 8; ++group) {
      const uint32_t high = loaded<uint16_t>(from + 34 + 2 * group);
      row.scale(group, odd(high >> 12 & 7));
      for (int i = 0; i < 4; ++i)
        chosen<8>(row.grid, from[2 + 4 * group + i] | (high >> 3 * i & 7) << 8, high >> 15 ? 255 : 0, 2,
                  row.codes + 32 * group + 8 * i);
    }
  }
};

// The scale of the block is in the top four bits of each of four words.
struct IQ1_M : Kept<3, 16, false, IN_BYTES> {
  static constexpr int BYTES = 56;

  static void decode(const uint8_t* from, const Row& row) {
    const auto word = [from](int number) { return (uint32_t)loaded<uint16_t>(from + 48 + 2 * number); };
    const uint16_t scale = word(0) >> 12 | word(1) >> 12 << 4 | word(2) >> 12 << 8 | word(3) >> 12 << 12;
    row.scale((const uint8_t*)&scale);
    for (int group = 0; group < 16; ++group) row.scale(group, odd(word(group / 4) >> group % 4 * 3 & 7));
    for (int i = 0; i < 32; ++i) {
      const uint32_t high = from[32 + i / 2] >> i % 2 * 4;
      chosen<8>(row.grid, from[i] | (high & 7) << 8, high & 8 ? 255 : 0, 2, row.codes + 8 * i);
    }
  }
};

struct TQ2_0 : Kept<2, 32, false, SHARED> {
  static constexpr int BYTES = 66;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from + 64);
    for (int part = 0; part < 2; ++part) quarters(from + 32 * part, row.codes + 128 * part);
  }
};

// A byte has five ternary digits.
struct TQ1_0 : Kept<2, 32, false, SHARED> {
  static constexpr int BYTES = 54;

  static void decode(const uint8_t* from, const Row& row) {
    row.scale(from + 52);
    digits(from, 32, 5, row.codes);
    digits(from + 32, 16, 5, row.codes + 160);
    digits(from + 48, 4, 4, row.codes + 240);
  }

  static void digits(const uint8_t* from, int count, int of_byte, uint8_t* codes) {
    uint8_t power = 1;
    for (int digit = 0; digit < of_byte; ++digit, power *= 3)
      for (int i = 0; i < count; ++i) codes[digit * count + i] = (uint8_t)(from[i] * power) * 3 >> 8;
  }
};

// Writes the planes of 32 columns from `first` on.
template <class Form>
inline void put_codes(const Decoded& decoded, int64_t first, uint8_t* to) {
#if defined(HAS_ROWS)
  typedef WordsOfLine Plane;
  uint8_t lines[16][INNER];
  for (int row = 0; row < STRIP; ++row) {
    const uint8_t* codes = decoded.codes[row] + first;
    if (Form::GROUPS == 1) memcpy(lines[row], codes, INNER);
    else
      for (int i = 0; i < 16; ++i) lines[row][2 * i] = codes[i], lines[row][2 * i + 1] = codes[16 + i];
  }
  const auto line = [&](int number) { return __builtin_convertvector(loaded<BytesOfLine>(lines[number]), WordsOfLine); };
#else
  typedef BytesOfStep Plane;
  uint32_t lines[STEPS][STRIP];
  for (int row = 0; row < STRIP; ++row)
    for (int step = 0; step < STEPS; ++step) memcpy(&lines[step][row], decoded.codes[row] + first + 4 * step, 4);
  const auto line = [&](int number) { return loaded<BytesOfStep>(lines[number]); };
#endif
  if constexpr (Form::CODES == sizeof lines) {
    memcpy(to, lines, sizeof lines);
  } else {
    Plane planes[Form::LOW + Form::HIGH] = {};
    for (int number = 0; number < (int)(sizeof lines / sizeof lines[0]); ++number) {
      const Plane codes = line(number);
      planes[number / Form::OF_LOW] |= (codes & Form::LOW_MASK) << Form::LOW * (number % Form::OF_LOW);
      if (Form::HIGH) planes[Form::LOW + number / Form::OF_HIGH] |= codes >> Form::LOW << Form::HIGH * (number % Form::OF_HIGH);
    }
    memcpy(to, planes, sizeof planes);
  }
}

// Writes a unit, and returns the end.
template <class Form>
inline uint8_t* put_unit(const Decoded& decoded, uint8_t* to) {
  typedef typename Form::Numbers Numbers;
  const auto put = [&to](const void* from, int64_t bytes) { memcpy(to, from, bytes), to += bytes; };
  if (Numbers::HAS_FACTORS) put(decoded.factors, sizeof decoded.factors);
  if (Numbers::IS_NESTED || Numbers::OF_GROUP == 32) {
    put(decoded.scales, sizeof decoded.scales);
    if (Form::ZEROS) put(decoded.zeros, sizeof decoded.zeros);
  }
  if (Numbers::OF_GROUP == STRIP) {
    put(decoded.scales_of_groups, Numbers::OF_UNIT * STRIP);
    if (Numbers::KINDS == 2) put(decoded.zeros_of_groups, Numbers::OF_UNIT * STRIP);
  }
  for (int64_t block = 0; block < Form::BLOCKS; ++block, to += Form::CODES) put_codes<Form>(decoded, block * INNER, to);
  return to;
}

enum Failure { NO_MEMORY = 1, CUT_SHORT = 2 };

// Read from a file at a time: the bytes are packed while they are in the cache.
constexpr int64_t BYTES_AT_ONCE = 1 << 18;

inline bool read_all(int file, uint8_t* to, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t count = pread(file, to, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count, offset += count, bytes -= count;
  }
  return true;
}

// Packs `strips` strips of the rows at `from`, in the order given by `order` if it is not null. `factors` has one number for
// each row.
template <class Type>
void pack_strips(const Packing& call, int64_t strips, const uint8_t* from, const int32_t* order, const float* factors, uint8_t* to) {
  typedef typename Type::Form Form;
  const int64_t units = call.columns / (Form::BLOCKS * INNER);
  Decoded decoded = {};
  for (int64_t strip = 0; strip < strips; ++strip) {
    const uint8_t* rows[STRIP];
    for (int64_t row = 0; row < STRIP; ++row) {
      const int64_t place = strip * STRIP + row;
      rows[row] = from + (order ? order[place] : place) * units * Type::BYTES;
      // Our table has twice the format's numbers.
      decoded.factors[row] = 0.5f * (factors ? factors[place] : 1.0f);
    }
    for (int64_t unit = 0; unit < units; ++unit) {
      for (int64_t row = 0; row < STRIP; ++row)
        Type::decode(rows[row] + unit * Type::BYTES,
                     {decoded.codes[row], decoded.scales + row, decoded.zeros + row, decoded.scales_of_groups[0] + row,
                      decoded.zeros_of_groups[0] + row, (const uint8_t*)call.grid});
      to = put_unit<Form>(decoded, to);
    }
  }
}

template <class Type>
int32_t pack_of(const Packing& call) {
  typedef typename Type::Form Form;
  const int64_t units = call.columns / (Form::BLOCKS * INNER), row_bytes = units * Type::BYTES;
  const int64_t many = most(1, BYTES_AT_ONCE / (STRIP * row_bytes));
  std::atomic<int32_t> failure(0);
  const auto pack_part = [&](int64_t begin, int64_t end) {
    uint8_t* out = (uint8_t*)call.out + begin * units * Form::BYTES;
    const int32_t* order = call.order ? call.order + begin * STRIP : nullptr;
    const auto factors_from = [&](int64_t strip) { return call.factors ? call.factors + strip * STRIP : nullptr; };
    if (call.content) {
      const int64_t before = order ? 0 : begin * STRIP * row_bytes;
      return pack_strips<Type>(call, end - begin, (const uint8_t*)call.content + before, order, factors_from(begin), out);
    }
    static thread_local Memory memory;
    if (!memory.reserve(many * STRIP * row_bytes)) return failure.store(NO_MEMORY);
    uint8_t* read = memory.take<uint8_t>(many * STRIP * row_bytes);
    for (int64_t strip = begin; strip < end; strip += many, out += many * units * Form::BYTES) {
      const int64_t first = strip * STRIP, strips = least(many, end - strip);
      // Without `order`, the rows of several strips are read together.
      const int64_t together = call.order ? 1 : strips * STRIP;
      for (int64_t row = 0; row < strips * STRIP; row += together) {
        const int64_t place = call.order ? call.order[first + row] : first + row;
        if (!read_all(call.file, read + row * row_bytes, together * row_bytes, call.offset + place * row_bytes))
          return failure.store(CUT_SHORT);
      }
      pack_strips<Type>(call, strips, read, nullptr, factors_from(strip), out);
    }
  };
  spread(call.num_threads, call.strips, 1 + 65536 / call.columns, pack_part);
  return failure;
}

}  // namespace packing
}  // namespace matrices

int32_t pack(const Packing* call) {
  switch (call->type) {
#define TYPE(number, name) \
  case number:             \
    return matrices::packing::pack_of<matrices::packing::name>(*call);
    TYPE(2, Q4_0)
    TYPE(3, Q4_1)
    TYPE(6, Q5_0)
    TYPE(7, Q5_1)
    TYPE(8, Q8_0)
    TYPE(10, Q2_K)
    TYPE(11, Q3_K)
    TYPE(12, Q4_K)
    TYPE(13, Q5_K)
    TYPE(14, Q6_K)
    TYPE(16, IQ2_XXS)
    TYPE(17, IQ2_XS)
    TYPE(18, IQ3_XXS)
    TYPE(19, IQ1_S)
    TYPE(20, IQ4_NL)
    TYPE(21, IQ3_S)
    TYPE(22, IQ2_S)
    TYPE(23, IQ4_XS)
    TYPE(29, IQ1_M)
    TYPE(34, TQ1_0)
    TYPE(35, TQ2_0)
    TYPE(39, MXFP4)
    TYPE(40, NVFP4)
    TYPE(41, Q1_0)
    TYPE(42, Q2_0)
#undef TYPE
  }
  return 1;
}

}  // namespace
}  // namespace diskprefix
