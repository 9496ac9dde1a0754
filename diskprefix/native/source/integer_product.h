// Products of quantised weights with rows of integers.
//
// The sum of a group of a block is an exact integer. The result is a sum from the first block to the last: each group adds
// its sum × scale of the weights × scale of the row, and then its zero × the sum of the row's numbers.

#pragma once

#include "part.h"

namespace diskprefix {
namespace {
namespace matrices {

// A block of unpacked weights: its steps, the scales of one or two groups, and then their zeros.
constexpr int64_t SCALES_AT = 64 * STEPS, BLOCK_BYTES = SCALES_AT + 4 * 64;

// How the weights of a form are integers.
template <class Weights>
struct Integral {
  static constexpr int BITS = Weights::BITS;
#if defined(HAS_VNNI)
  static constexpr bool IS_SIGNED = false;
  static constexpr int ABOVE_BITS = Weights::HAS_TABLE || BITS == 8 ? 7 : Weights::ZEROS ? 0 : BITS - 1, MOST = 255;
#elif defined(__AVX2__)
  // Bytes beyond 127 would overflow in sums of 16 bits. Tables of 4 bits have numbers up to 12 (MXFP4, NVFP4), or up to 127.
  static constexpr bool IS_SMALL = Weights::SCALES == IN_EXPONENTS || Weights::SCALES == IN_FLOAT8;
  static constexpr bool IS_SIGNED = BITS == 8 || (BITS == 4 && Weights::HAS_TABLE && !IS_SMALL);
  static constexpr int OF_TABLE = BITS <= 2 ? 2 : BITS == 4 ? 4 : 6;
  static constexpr int ABOVE_BITS = IS_SIGNED || Weights::ZEROS ? 0 : Weights::HAS_TABLE ? OF_TABLE : BITS - 1;
  static constexpr int MOST = IS_SIGNED ? 128 : Weights::HAS_TABLE ? 2 << OF_TABLE : (1 << BITS) - 1;
#else
  static constexpr bool IS_SIGNED = !Weights::ZEROS;
  static constexpr int ABOVE_BITS = 0, MOST = 128;
#endif
  typedef matrices::IntegerForm<Weights::GROUPS, Weights::ZEROS, IS_SIGNED, ABOVE_BITS, MOST> Form;
  static constexpr int ABOVE = ABOVE_BITS ? 1 << ABOVE_BITS : 0;
};

// Reads the codes of a part of a strip as integers.
template <class Weights>
class Codes {
  typedef Integral<Weights> Integers;
  static constexpr int BITS = Weights::BITS, LOW = Weights::LOW, HIGH = Weights::HIGH;

 public:
  // The table ÷ `unit`, a power of 2 with which all numbers are integers.
  struct Table {
    float unit = 1.0f;
    alignas(64) uint8_t entries[64];

    INLINE explicit Table(const float* table) {
      if (!Weights::HAS_TABLE) return;
      for (int i = 0; i < 64; ++i)
        while ((float)(int)(table[i] / unit) != table[i] / unit && unit > 0x1p-9f) unit *= 0.5f;
      for (int i = 0; i < 64; ++i) entries[i] = (int)(table[i] / unit) + Integers::ABOVE;
    }
  };

  INLINE Codes(const uint8_t* codes, int part, const Table& table) : codes_(codes + part * sizeof(Bytes)) {
    if (BITS < 8)
      for (int i = 0; i < BITS; ++i) planes_[i] = loaded<Lanes>(codes_ + 64 * i);
    if (Weights::HAS_TABLE) entries_ = loaded<Bytes>(table.entries);
  }

  // Returns the integers of a step.
  INLINE Bytes step(int step) const {
    if constexpr (BITS == 8) {
      const Bytes bytes = loaded<Bytes>(codes_ + 64 * step);
      return Integers::ABOVE ? bytes ^ (uint8_t)Integers::ABOVE : bytes;
    }
    const Bytes codes = codes_of(step);
    if constexpr (Weights::HAS_TABLE) return looked_up(codes);
    return Integers::IS_SIGNED && !Weights::ZEROS ? codes - (uint8_t)(1 << BITS - 1) : codes;
  }

 private:
  const uint8_t* codes_;
  Lanes planes_[BITS];
  Bytes entries_;

  INLINE Bytes codes_of(int step) const {
    const int of_low = step % Weights::OF_LOW;
    const Bytes low = (Bytes)(of_low ? planes_[step / Weights::OF_LOW] >> (uint16_t)(LOW * of_low) : planes_[step / Weights::OF_LOW]);
    if constexpr (!HIGH) return low & (uint8_t)Weights::LOW_MASK;
    const int by = HIGH * (step % Weights::OF_HIGH) - LOW;
    const Lanes plane = planes_[LOW + step / Weights::OF_HIGH];
    const Bytes high = (Bytes)(by < 0 ? plane << (uint16_t)-by : plane >> (uint16_t)by);
#if defined(__AVX512F__)
    const __m512i mask = _mm512_set1_epi8(Weights::LOW_MASK);
    const __m512i both = _mm512_ternarylogic_epi32(mask, (__m512i)low, (__m512i)high, 0xca);
    return (Bytes)both & (uint8_t)(Weights::LOW_MASK | Weights::HIGH_MASK);
#else
    return low & (uint8_t)Weights::LOW_MASK | high & (uint8_t)Weights::HIGH_MASK;
#endif
  }

  INLINE Bytes looked_up(Bytes codes) const {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)entries_, (__m512i)codes);
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)entries_, (__m256i)codes);
#elif defined(__aarch64__)
    return (Bytes)vqtbl1q_u8((uint8x16_t)entries_, (uint8x16_t)codes);
#else
    for (uint8_t* code = (uint8_t*)&codes; code < (uint8_t*)(&codes + 1); ++code) *code = ((const uint8_t*)&entries_)[*code];
    return codes;
#endif
  }
};

template <class Weights>
void unpack(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to) {
  const typename Codes<Weights>::Table integers(table);
  for (int64_t block = begin; block < end; ++block, to += BLOCK_BYTES) {
    const uint8_t* unit = strip + block / Weights::BLOCKS * Weights::BYTES;
    const uint8_t* codes = unit + Weights::Numbers::BYTES + block % Weights::BLOCKS * Weights::CODES;
    for (int part = 0; part < PARTS; ++part) {
      const Codes<Weights> of_part(codes, part, integers);
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; ++step) store(to + 64 * step + part * sizeof(Bytes), of_part.step(step));
    }
    const typename Weights::Numbers numbers(unit);
    uint8_t* at = to + SCALES_AT;
    for (int kind = 0; kind < 1 + Weights::ZEROS; ++kind)
      for (int group = 0; group < Weights::GROUPS; ++group)
        for (int part = 0; part < PARTS; ++part, at += sizeof(Floats)) {
          const int64_t number = block % Weights::BLOCKS * Weights::GROUPS + group;
          store(at, kind ? numbers.zero(number, part) : numbers.scale(number, part) * all(integers.unit));
        }
  }
}

// Adds the product of a group of a block.
template <class Row>
INLINE Floats with_group(Floats sum, Ints total, Floats scales, const Row& row) {
  return fma(__builtin_convertvector(total, Floats), scales * all(row.scale), sum);
}

// Adds the products of a group of a block, for a part of a strip.
template <class Weights, int GROUP, int COUNT>
INLINE void add_group(const Codes<Weights>& codes, int part, const typename Weights::Numbers& numbers, int64_t block, float unit,
                      const Row8* rows, Floats (&kept)[PARTS][COUNT]) {
  typedef typename Integral<Weights>::Form Form;
  constexpr int STEPS_OF_GROUP = Form::STEPS_OF_GROUP, PLACE = place_of(GROUP, Form::GROUPS);
  Sums<Row8, Form> sums[COUNT];
  for (int row = 0; row < COUNT; ++row) sums[row].start(rows[row], GROUP);
#pragma GCC unroll 8
  for (int step = GROUP * STEPS_OF_GROUP; step < (GROUP + 1) * STEPS_OF_GROUP; ++step) {
    const Bytes weights = codes.step(step);
    for (int row = 0; row < COUNT; ++row) sums[row].add(weights, rows[row], step);
  }
  const int64_t at = block * Weights::GROUPS + GROUP;
  const Floats scales = numbers.scale(at, part) * all(unit);
  for (int row = 0; row < COUNT; ++row) kept[part][row] = with_group(kept[part][row], sums[row].total(), scales, rows[row]);
  if (!Weights::ZEROS) return;
  const Floats zeros = numbers.zero(at, part);
  for (int row = 0; row < COUNT; ++row) kept[part][row] = fma(zeros, all(rows[row].totals[PLACE]), kept[part][row]);
}

template <class Weights, int COUNT = FEW>
void multiply_few(const uint8_t* strip, int64_t blocks, const float* table, const Row8* rows, int64_t num_rows, Floats* out) {
  if constexpr (COUNT > 1)
    if (num_rows < COUNT) return multiply_few<Weights, COUNT - 1>(strip, blocks, table, rows, num_rows, out);
  const typename Codes<Weights>::Table integers(table);
  Floats kept[PARTS][COUNT] = {};
  for (int64_t block = 0; block < blocks; block += Weights::BLOCKS) {
    const typename Weights::Numbers numbers(strip);
    for (int64_t line = 0; line < Weights::Numbers::BYTES; line += 64) __builtin_prefetch(strip + AHEAD + line);
    strip += Weights::Numbers::BYTES;
    for (int64_t i = 0; i < Weights::BLOCKS; ++i, strip += Weights::CODES, rows += FEW) {
      for (int64_t line = 0; line < Weights::CODES; line += 64) __builtin_prefetch(strip + AHEAD + line);
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; ++part) {
        const Codes<Weights> codes(strip, part, integers);
        add_group<Weights, 0>(codes, part, numbers, i, integers.unit, rows, kept);
        if constexpr (Weights::GROUPS > 1) add_group<Weights, 1>(codes, part, numbers, i, integers.unit, rows, kept);
      }
    }
  }
  for (int row = 0; row < COUNT; ++row)
    for (int part = 0; part < PARTS; ++part) out[row * PARTS + part] = kept[part][row];
}

// The sums of a group of an unpacked block with COUNT rows, for VECTORS parts of strips that are `across` bytes apart.
template <class Form, class Row, int COUNT, int VECTORS>
struct GroupSums {
  Sums<Row, Form> sums[COUNT][VECTORS];

  INLINE GroupSums(const Row* rows, const uint8_t* weights, int64_t across, int group) {
    constexpr int STEPS_OF_GROUP = Form::STEPS_OF_GROUP;
    for (int row = 0; row < COUNT; ++row)
      for (int at = 0; at < VECTORS; ++at) sums[row][at].start(rows[row], group);
#pragma GCC unroll 8
    for (int i = 0; i < STEPS_OF_GROUP; ++i) {
      const int step = group * STEPS_OF_GROUP + i;
      Bytes some[VECTORS];
      for (int at = 0; at < VECTORS; ++at) some[at] = loaded<Bytes>(weights + 64 * step + at * across);
      for (int row = 0; row < COUNT; ++row)
        for (int at = 0; at < VECTORS; ++at) sums[row][at].add(some[at], rows[row], step);
    }
  }

  INLINE Ints total(int row, int at) const { return sums[row][at].total(); }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Squares of two rows of the strip and two rows of the step. If COUNT is odd, the last row is there twice.
template <class Form, class Row, int COUNT>
struct Squares {
  int32x4_t sums[Row::NUM_PLANES][(COUNT + 1) / 2][2] = {};

  INLINE void add(const uint8_t* weights, const Row* rows, int step) {
    // Eight columns of two rows at a time.
    const int32x4_t low = loaded<int32x4_t>(weights + 64 * step), high = loaded<int32x4_t>(weights + 64 * (step + 1));
    const int8x16_t first = (int8x16_t)vzip1q_s32(low, high), second = (int8x16_t)vzip2q_s32(low, high);
    for (int row = 0; row < COUNT; row += 2)
      for (int plane = 0; plane < Row::NUM_PLANES; ++plane) {
        const Row &upper = rows[row], &lower = rows[row + 1 < COUNT ? row + 1 : row];
        const int8x16_t numbers = vcombine_s8(vld1_s8(upper.planes[plane] + 4 * step), vld1_s8(lower.planes[plane] + 4 * step));
        int32x4_t* to = sums[plane][row / 2];
        to[0] = vmmlaq_s32(to[0], first, numbers);
        to[1] = vmmlaq_s32(to[1], second, numbers);
      }
  }

  INLINE Ints total(int row) const {
    const auto line = [=](int plane) {
      const int32x4_t* from = sums[plane][row / 2];
      return row % 2 ? vuzp2q_s32(from[0], from[1]) : vuzp1q_s32(from[0], from[1]);
    };
    if constexpr (Row::NUM_PLANES == 1) return (Ints)line(0);
    else return (Ints)vaddq_s32(vshlq_n_s32(line(0), 8), line(1));
  }
};

template <class Form, class Row, int COUNT>
struct GroupSums<Form, Row, COUNT, WIDE> {
  Squares<Form, Row, COUNT> squares[WIDE];

  INLINE GroupSums(const Row* rows, const uint8_t* weights, int64_t across, int group) {
    for (int at = 0; at < WIDE; ++at)
#pragma GCC unroll 4
      for (int i = 0; i < Form::STEPS_OF_GROUP; i += 2) squares[at].add(weights + at * across, rows, group * Form::STEPS_OF_GROUP + i);
  }

  INLINE Ints total(int row, int at) const { return squares[at].total(row); }
};

#endif

// Adds the products of `count` unpacked blocks with COUNT rows, for VECTORS parts or strips whose weights are `across` bytes
// and whose sums `sums_across` numbers apart.
template <class Form, class Row, int COUNT, int VECTORS>
INLINE void add_blocks(const Row* rows, const uint8_t* weights, int64_t across, int64_t count, float* sums, int64_t sums_across) {
  constexpr int GROUPS = Form::GROUPS;
  Floats kept[COUNT][VECTORS];
  for (int row = 0; row < COUNT; ++row)
    for (int at = 0; at < VECTORS; ++at) kept[row][at] = loaded<Floats>(sums + row * STRIP + at * sums_across);
  for (int64_t block = 0; block < count; ++block, rows += TOGETHER, weights += BLOCK_BYTES)
#pragma GCC unroll 2
    for (int group = 0; group < GROUPS; ++group) {
      const GroupSums<Form, Row, COUNT, VECTORS> products(rows, weights, across, group);
      for (int at = 0; at < VECTORS; ++at) {
        const uint8_t* numbers = weights + SCALES_AT + at * across;
        const Floats scales = loaded<Floats>(numbers + 64 * group), zeros = loaded<Floats>(numbers + 64 * (GROUPS + group));
        for (int row = 0; row < COUNT; ++row) {
          Floats& sum = kept[row][at];
          sum = with_group(sum, products.total(row, at), scales, rows[row]);
          if (Form::ZEROS) sum = fma(zeros, all(rows[row].totals[place_of(group, GROUPS)]), sum);
        }
      }
    }
  for (int row = 0; row < COUNT; ++row)
    for (int at = 0; at < VECTORS; ++at) store(sums + row * STRIP + at * sums_across, kept[row][at]);
}

// Two strips, each with its sums [num_rows, STRIP].
template <class Form, class Row, int COUNT>
INLINE void add_rows(const Row* rows, const uint8_t* weights, int64_t count, float* sums, int64_t sums_across) {
  if (PARTS == 1) return add_blocks<Form, Row, COUNT, 2>(rows, weights, count * BLOCK_BYTES, count, sums, sums_across);
#pragma GCC unroll 1
  for (int part = 0; part < 2 * PARTS; part += WIDE)
    add_blocks<Form, Row, COUNT, WIDE>(rows, weights + part / PARTS * count * BLOCK_BYTES + part % PARTS * sizeof(Bytes), sizeof(Bytes),
                                       count, sums + part / PARTS * sums_across + part % PARTS * LANES, LANES);
}

template <class Form, class Row>
void multiply_many(const Row* rows, int64_t num_rows, int64_t row_blocks, const uint8_t* weights, int64_t count, float* sums) {
  const int64_t across = num_rows * STRIP;
  for (; num_rows >= TOGETHER; num_rows -= TOGETHER, rows += TOGETHER * row_blocks, sums += TOGETHER * STRIP)
    add_rows<Form, Row, TOGETHER>(rows, weights, count, sums, across);
  // The others have few functions: each is large.
  if (num_rows >= 4) add_rows<Form, Row, 4>(rows, weights, count, sums, across), rows += 4, sums += 4 * STRIP;
  if (num_rows & 2) add_rows<Form, Row, 2>(rows, weights, count, sums, across), rows += 2, sums += 2 * STRIP;
  if (num_rows & 1) add_rows<Form, Row, 1>(rows, weights, count, sums, across);
}

template <class Weights>
Form form_with(int64_t strip_bytes) {
  typedef typename Integral<Weights>::Form Integers;
  return {unpack<Weights>, Weights::look_up, strip_bytes, multiply_few<Weights>, multiply_many<Integers, Row8>, multiply_many<Integers, Row15>};
}

struct Multiply {
  static constexpr int64_t PACKED_TOGETHER = 1;
  static constexpr int64_t MANY_BLOCKS = 8, UNPACKED_BYTES = 2 * MANY_BLOCKS * BLOCK_BYTES;

  static NoScope scope_of(const Part& part) { return NoScope(part.num_rows); }

  // Rows of 15 bits, which are seldom chosen, have no code of their own for few rows.
  static bool is_few(const Part& part) { return part.num_rows <= FEW && part.matrix->row_bits == 8; }

  static bool takes_packed(const Part&) { return true; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) {
    return up_to(num_rows, TOGETHER) * (columns / INNER) * most(sizeof(Row8), sizeof(Row15));
  }

  static void pack(const Part& part, int64_t begin, int64_t end) {
    part.matrix->row_bits == 8 ? pack_rows<Row8>(part, begin, end) : pack_rows<Row15>(part, begin, end);
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t*) {
    for (; strip < last; ++strip) {
      Floats sums[FEW][PARTS];
      part.form.few(part.strip(strip), part.blocks, part.matrix->table, (const Row8*)part.packed, part.num_rows, sums[0]);
      for (int64_t row = 0; row < part.num_rows; ++row) part.put(sums[row], row, strip);
    }
  }

  // The bytes of the sums of two strips, and of what is prefetched.
  static int64_t pair_bytes(const Part& part) { return 2 * (part.num_rows * STRIP * sizeof(float) + AHEAD); }

  static void many(const Part& part, int64_t first, int64_t last, uint8_t* panel) {
    part.matrix->row_bits == 8 ? many(part, part.form.many_8, first, last, panel) : many(part, part.form.many_15, first, last, panel);
  }

 private:
  template <class Row>
  static void pack_rows(const Part& part, int64_t begin, int64_t end) {
    const int64_t together = is_few(part) ? FEW : TOGETHER;
    for (int64_t row = begin; row < end; ++row) {
      Row* to = (Row*)part.packed + row / together * together * part.blocks + row % together;
      const uint16_t* from = part.rows + row * part.matrix->columns;
      for (int64_t block = 0; block < part.blocks; ++block) pack_block(from + block * INNER, to[block * together]);
    }
  }

  // Unpacks a few blocks of two strips at a time for all rows; meanwhile the sums are in memory.
  template <class Row>
  static void many(const Part& part, MultiplyMany<Row> multiply, int64_t first, int64_t last, uint8_t* panel) {
    float* sums = (float*)(panel + UNPACKED_BYTES);
    const int64_t of_strip = part.num_rows * STRIP;
    memset(sums, 0, up_to(last - first, 2) * of_strip * sizeof *sums);
    for (int64_t block = 0; block < part.blocks; block += MANY_BLOCKS) {
      const int64_t count = least(MANY_BLOCKS, part.blocks - block);
      const Row* rows = (const Row*)part.packed + block * TOGETHER;
      for (int64_t strip = first; strip < last; strip += 2) {
        // A last strip without another one is multiplied twice.
        for (int64_t i = 0; i < 2; ++i) part.unpack(least(strip + i, last - 1), block, block + count, panel + i * count * BLOCK_BYTES);
        multiply(rows, part.num_rows, part.blocks, panel, count, sums + (strip - first) * of_strip);
      }
    }
    for (int64_t strip = first; strip < last; ++strip)
      for (int64_t row = 0; row < part.num_rows; ++row, sums += STRIP) part.put(sums, row, strip);
  }
};

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
