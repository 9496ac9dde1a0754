// Floating-point values in planes, as they are stored: `prefixstore/store/README.md` describes the bytes. All variants, and
// `prefixstore/store/codec/planes.py`, compute the same bytes.

#pragma once

#include "interface.h"
#include "memory.h"

namespace diskprefix {
namespace {

constexpr int64_t GROUP = 64, RUN = 2048, MAX_BITS = 4;

typedef uint16_t Half __attribute__((may_alias, aligned(1)));
typedef uint32_t Single __attribute__((may_alias, aligned(1)));
typedef uint8_t Bytes __attribute__((vector_size(GROUP)));

// The parts of a value: its exponent, a byte with the other bits, and the lower half of a longer value. `MARKS` are bits of
// the upper byte that are stored next to the codes.
struct BFloatPlanes {
  typedef Half Value;
  static constexpr int64_t REST_BYTES = 1, NUM_MARKS = 0;
  static constexpr uint8_t MARKS[1] = {0};
  static uint8_t exponent(Value value) { return value >> 7; }
  static void keep(Value value, uint8_t* rest, Half*) { *rest = (value >> 8 & 0x80) | (value & 0x7f); }
  static Value joined(uint8_t exponent, const uint8_t* rest, const Half*) {
    return exponent << 7 | (*rest & 0x80) << 8 | (*rest & 0x7f);
  }
};

struct HalfPlanes {
  typedef Half Value;
  static constexpr int64_t REST_BYTES = 1, NUM_MARKS = 3;
  static constexpr uint8_t MARKS[NUM_MARKS] = {0x01, 0x02, 0x80};
  static uint8_t exponent(Value value) { return value >> 10 & 0x1f; }
  static void keep(Value value, uint8_t* rest, Half*) { *rest = value; }
  static Value joined(uint8_t upper, const uint8_t* rest, const Half*) { return upper << 8 | *rest; }
};

struct SinglePlanes {
  typedef Single Value;
  static constexpr int64_t REST_BYTES = 3, NUM_MARKS = 0;
  static constexpr uint8_t MARKS[1] = {0};
  static uint8_t exponent(Value value) { return value >> 23; }
  static void keep(Value value, uint8_t* rest, Half* lower) {
    BFloatPlanes::keep(value >> 16, rest, lower);
    *lower = value;
  }
  static Value joined(uint8_t exponent, const uint8_t* rest, const Half* lower) {
    return (Single)BFloatPlanes::joined(exponent, rest, lower) << 16 | *lower;
  }
};

// Where the parts of the data begin, for rows of `width` values.
struct Parts {
  int64_t values, word_bytes, codes, counts, bases, exceptions;

  template <class Format>
  static Parts of(const Planes* call, int64_t bits) {
    Parts parts;
    const int64_t groups = call->num_rows * (up_to(call->width, GROUP) / GROUP);
    const int64_t runs = call->num_rows * (up_to(call->width, RUN) / RUN);
    parts.values = call->num_rows * call->width;
    parts.word_bytes = (bits + Format::NUM_MARKS) * sizeof(uint64_t);
    parts.codes = parts.values * Format::REST_BYTES;
    parts.counts = parts.codes + groups * parts.word_bytes;
    parts.bases = parts.counts + runs * sizeof(Half);
    parts.exceptions = parts.bases + runs;
    return parts;
  }
};

// Returns a byte for each bit, the lowest first: 255 if it is set, or else 0.
inline Bytes spread(uint64_t bits) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_movm_epi8(bits);
#else
  uint64_t bytes[8];
  for (int i = 0; i < 8; ++i) {
    const uint64_t bits_of_byte = (bits >> 8 * i & 0xff) * 0x0101010101010101 & 0x8040201008040201;
    bytes[i] = ((bits_of_byte + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101) * 0xff;
  }
  return loaded<Bytes>(bytes);
#endif
}

// Returns bit `bit` of each byte.
inline uint64_t bits_of(const uint8_t* bytes, uint8_t bit) {
#if defined(__AVX512BW__)
  return _mm512_test_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(bit));
#else
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    const uint64_t ones = loaded<uint64_t>(bytes + 8 * i) >> __builtin_ctz(bit) & 0x0101010101010101;
    bits |= (ones * 0x0102040810204080 >> 56) << 8 * i;
  }
  return bits;
#endif
}

// Writes the exponents of a run of `size` values, each in the upper byte of its value if there are marks. Returns false if
// the run does not have exactly `count` exceptions.
template <class Format, int BITS>
bool unpack(const uint8_t* words, int64_t size, uint8_t base, const uint8_t* exceptions, int64_t count,
            uint8_t* exponents) {
  const uint8_t* end = exceptions + count;
  for (int64_t start = 0; start < size; start += GROUP) {
    uint64_t excepted = size - start < GROUP ? (1ull << (size - start)) - 1 : ~0ull;
    Bytes recovered = base - Bytes{};
    for (int i = 0; i < BITS; ++i, words += sizeof(uint64_t)) {
      const uint64_t word = loaded<uint64_t>(words);
      recovered -= spread(word) & (uint8_t)(1 << i);
      excepted &= word;
    }
    if (__builtin_popcountll(excepted) > end - exceptions) return false;
    store(exponents + start, recovered);
    for (; excepted; excepted &= excepted - 1) exponents[start + __builtin_ctzll(excepted)] = *exceptions++;
    if constexpr (Format::NUM_MARKS) {
      recovered = loaded<Bytes>(exponents + start) << 2 & 0x7c;
      for (int i = 0; i < Format::NUM_MARKS; ++i, words += sizeof(uint64_t))
        recovered |= spread(loaded<uint64_t>(words)) & Format::MARKS[i];
      store(exponents + start, recovered);
    }
  }
  return exceptions == end;
}

template <class Format, int BITS>
int32_t join_with(const Planes* call) {
  typedef typename Format::Value Value;
  const Parts parts = Parts::of<Format>(call, BITS);
  const uint8_t *data = (const uint8_t*)call->data, *rest = data, *words = data + parts.codes;
  const Half *lower = (const Half*)(data + parts.values), *counts = (const Half*)(data + parts.counts);
  const uint8_t *bases = data + parts.bases, *exceptions = data + parts.exceptions, *end = data + call->num_bytes;
  if (call->num_bytes < parts.exceptions) return 1;
  uint8_t exponents[RUN];
  for (int64_t row = 0; row < call->num_rows; ++row) {
    Value* values = (Value*)((char*)call->values + row * call->stride);
    for (int64_t left = call->width; left > 0; left -= RUN) {
      const int64_t size = least(RUN, left), count = *counts++;
      if (count > end - exceptions || !unpack<Format, BITS>(words, size, *bases++, exceptions, count, exponents)) return 1;
      for (int64_t i = 0; i < size; ++i) values[i] = Format::joined(exponents[i], rest + i, lower + i);
      values += size, rest += size, lower += size, exceptions += count;
      words += up_to(size, GROUP) / GROUP * parts.word_bytes;
    }
  }
  return exceptions != end;
}

template <class Format>
int32_t join_as(const Planes* call) {
  switch (call->bits) {
    case 1: return join_with<Format, 1>(call);
    case 2: return join_with<Format, 2>(call);
    case 3: return join_with<Format, 3>(call);
    case 4: return join_with<Format, 4>(call);
    default: return 1;
  }
}

int32_t join(Planes* call) {
  switch (call->dtype) {
    case BFLOAT16: return join_as<BFloatPlanes>(call);
    case FLOAT16: return join_as<HalfPlanes>(call);
    case FLOAT32: return join_as<SinglePlanes>(call);
    default: return 1;
  }
}

// The code of a run: it covers the exponents from `base` down; `exceptions` values have another one.
struct Code {
  int64_t exceptions;
  uint8_t base;
};

// Finds the best code of a run for each number of bits: fewest exceptions, then the lowest base.
inline void find_codes(const uint8_t* exponents, int64_t size, Code* codes) {
  int32_t counted[4][256] = {};
  for (int64_t i = 0; i < size; ++i) ++counted[i & 3][exponents[i]];
  int32_t before[257] = {};
  for (int i = 0; i < 256; ++i)
    before[i + 1] = before[i] + counted[0][i] + counted[1][i] + counted[2][i] + counted[3][i];
  for (int bits = 1; bits <= MAX_BITS; ++bits) {
    const int width = (1 << bits) - 1;
    int best = -1;
    // A lower base would cover no more exponents, and its codes would wrap around to 255.
    for (int base = width - 1; base < 256; ++base) {
      const int present = before[base + 1] - before[base + 1 - width];
      if (present > best) best = present, codes[bits - 1].base = base;
    }
    codes[bits - 1].exceptions = size - best;
  }
}

// Writes the words of a run of `size` values, and its exceptions. Returns the end.
template <class Format>
uint8_t* pack(const typename Format::Value* values, uint8_t* exponents, int64_t size, uint8_t base, int64_t bits,
              uint8_t* words, uint8_t* exceptions) {
  const uint8_t outside = (1 << bits) - 1;
  uint8_t upper[GROUP];
  for (int64_t start = 0; start < size; start += GROUP) {
    const int64_t count = least(GROUP, size - start);
    uint8_t codes[GROUP] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t code = base - exponents[start + i];
      codes[i] = code < outside ? code : outside;
    }
    uint64_t excepted = ~0ull;
    for (int64_t i = 0; i < bits; ++i, words += sizeof(uint64_t)) {
      const uint64_t word = bits_of(codes, 1 << i);
      store(words, word);
      excepted &= word;
    }
    for (; excepted; excepted &= excepted - 1) *exceptions++ = exponents[start + __builtin_ctzll(excepted)];
    if constexpr (Format::NUM_MARKS) {
      for (int64_t i = 0; i < GROUP; ++i) upper[i] = i < count ? values[start + i] >> 8 : 0;
      for (uint8_t mark : Format::MARKS) store(words, bits_of(upper, mark)), words += sizeof(uint64_t);
    }
  }
  return exceptions;
}

template <class Format>
int32_t split_as(Planes* call) {
  typedef typename Format::Value Value;
  static thread_local Memory memory;
  const int64_t runs = call->num_rows * (up_to(call->width, RUN) / RUN);
  if (!memory.reserve(Memory::size_of<Code[MAX_BITS]>(runs))) return 1;
  Code(*codes)[MAX_BITS] = memory.take<Code[MAX_BITS]>(runs), (*code)[MAX_BITS] = codes;
  if (Parts::of<Format>(call, 1).exceptions >= call->num_bytes) return 1;
  uint8_t *data = (uint8_t*)call->data, *rest = data;
  uint8_t exponents[RUN];
  int64_t total[MAX_BITS] = {};
  Half* lower = (Half*)(data + call->num_rows * call->width);
  for (int64_t row = 0; row < call->num_rows; ++row) {
    const Value* values = (const Value*)((const char*)call->values + row * call->stride);
    for (int64_t left = call->width; left > 0; left -= RUN, ++code) {
      const int64_t size = least(RUN, left);
      for (int64_t i = 0; i < size; ++i) Format::keep(values[i], rest + i, lower + i);
      for (int64_t i = 0; i < size; ++i) exponents[i] = Format::exponent(values[i]);
      find_codes(exponents, size, *code);
      for (int i = 0; i < MAX_BITS; ++i) total[i] += (*code)[i].exceptions;
      values += size, rest += size, lower += size;
    }
  }
  for (int bits = 1; bits <= MAX_BITS; ++bits) total[bits - 1] += Parts::of<Format>(call, bits).exceptions;
  int64_t bits = 1;
  for (int i = 2; i <= MAX_BITS; ++i)
    if (total[i - 1] < total[bits - 1]) bits = i;
  if (total[bits - 1] >= call->num_bytes) return 1;
  const Parts parts = Parts::of<Format>(call, bits);
  uint8_t *words = data + parts.codes, *bases = data + parts.bases, *exceptions = data + parts.exceptions;
  Half* counts = (Half*)(data + parts.counts);
  code = codes;
  for (int64_t row = 0; row < call->num_rows; ++row) {
    const Value* values = (const Value*)((const char*)call->values + row * call->stride);
    for (int64_t left = call->width; left > 0; left -= RUN, ++code) {
      const int64_t size = least(RUN, left);
      for (int64_t i = 0; i < size; ++i) exponents[i] = Format::exponent(values[i]);
      const Code& best = (*code)[bits - 1];
      *counts++ = best.exceptions, *bases++ = best.base;
      exceptions = pack<Format>(values, exponents, size, best.base, bits, words, exceptions);
      values += size, words += up_to(size, GROUP) / GROUP * parts.word_bytes;
    }
  }
  call->bits = bits, call->num_bytes = total[bits - 1];
  return 0;
}

int32_t split(Planes* call) {
  switch (call->dtype) {
    case BFLOAT16: return split_as<BFloatPlanes>(call);
    case FLOAT16: return split_as<HalfPlanes>(call);
    case FLOAT32: return split_as<SinglePlanes>(call);
    default: return 1;
  }
}

}  // namespace
}  // namespace diskprefix
