// Products by the tiles of AMX in bfloat16. A block of a matrix becomes a tile: 16 rows of 32 bfloat16, rounded.

#pragma once

#include "part.h"

namespace diskprefix {
namespace {
namespace matrices {

constexpr int64_t BLOCK_BYTES = 1024;  // of the factors of a block

INLINE __m512i pair_of(Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

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

// A strip whose blocks are unpacked one after the other. The scales and zeros of a unit are computed while the previous
// unit is unpacked, so that unpacking does not wait for them. They are in memory, from where those of one row are loaded
// into all lanes.
template <class Weights>
class OpenStrip {
  typedef typename Weights::Numbers Numbers;
  static constexpr int BITS = Weights::BITS, BLOCKS = Weights::BLOCKS, GROUPS = Weights::GROUPS, LOW = Weights::LOW, HIGH = Weights::HIGH;
  static constexpr int64_t BYTES = Weights::BYTES, CODES = Weights::CODES;
  // Codes of 6 bits become numbers from 128 on. Their products with a scale are too large by 160 × the scale.
  static constexpr bool HAS_SHIFT = BITS == 6, ADDS = Weights::ZEROS || HAS_SHIFT;

 public:
  INLINE OpenStrip(const uint8_t* strip, int64_t blocks, const float* table) : strip_(strip), blocks_(blocks), table_(table) { prepare(0); }

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

  // The words of the codes.
  struct Planes {
    Lanes words[BITS];

    INLINE explicit Planes(const uint8_t* codes) {
      if (BITS == 8) return;
      for (int i = 0; i < BITS; ++i) {
        words[i] = loaded<Lanes>(codes + 64 * i);
        // Without this, GCC loads the words again for each code.
        __asm__("" : "+v"(words[i]));
      }
    }
  };

  // The table in bfloat16.
  struct Table {
    __m512i first;

    INLINE explicit Table(const float* table) {
      if (BITS < 8) first = pair_of(loaded<Floats>(table), loaded<Floats>(table + 16));
    }

    INLINE __m512i of(__m512i codes) const { return _mm512_permutexvar_epi16(codes, first); }
  };

  // Returns the codes of a row; the bits above them are undefined.
  static INLINE __m512i codes_of(const Planes& planes, int row) {
    const Lanes low = down(planes.words[row / Weights::OF_LOW], LOW * (row % Weights::OF_LOW));
    if constexpr (!HIGH) return (__m512i)low;
    const Lanes high = down(planes.words[LOW + row / Weights::OF_HIGH], HIGH * (row % Weights::OF_HIGH) - LOW);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(Weights::LOW_MASK), (__m512i)low, (__m512i)high, 0xca);
  }

  // Computes the scales and zeros of the unit that begins with this block.
  INLINE void prepare(int64_t block) {
    const Numbers numbers(strip_ + block / BLOCKS * BYTES);
    float (*to)[GROUPS * (1 + ADDS)][STRIP] = numbers_ + block % (2 * BLOCKS);
#pragma GCC unroll 8
    for (int i = 0; i < BLOCKS; ++i)
      for (int group = 0; group < GROUPS; ++group) {
        const Floats scale = numbers.scale(i * GROUPS + group);
        store(to[i][group], scale);
        if (Weights::ZEROS) store(to[i][GROUPS + group], numbers.zero(i * GROUPS + group));
        if (HAS_SHIFT) store(to[i][GROUPS + group], -160.0f * scale);
      }
    written();
  }

  // Returns 128 + the upper half of each lane.
  static INLINE Floats from_128(Words codes) {
    return (Floats)_mm512_ternarylogic_epi32((__m512i)codes, _mm512_set1_epi32(0x3f0000), _mm512_set1_epi32(0x43000000), 0xea);
  }
};

// The rows of the matrix are left factors, and the rows of the call right factors, in groups of 16 rows: pairs of columns,
// each with all rows of the group.
struct Multiply {
  static constexpr int64_t ROWS = 32;
  static constexpr int64_t UNPACKED_BYTES = 4 * BLOCK_BYTES;
  static constexpr int64_t PACKED_TOGETHER = 16;

  // The bytes of two unpacked strips.
  static int64_t pair_bytes(const Part& part) { return 2 * part.blocks * BLOCK_BYTES; }

  static void many(const Part& part, int64_t first, int64_t last, uint8_t* weights) {
    for (int64_t strip = first; strip < last; ++strip)
      part.unpack(strip, 0, part.blocks, weights + (strip - first) * part.blocks * BLOCK_BYTES);
    for (int64_t row = 0; row < part.num_rows; row += ROWS)
      for (int64_t strip = first; strip < last; strip += 2) {
        const uint8_t* of_strip = weights + (strip - first) * part.blocks * BLOCK_BYTES;
        if (strip + 1 < last) many_of<2>(part, row, strip, of_strip);
        else many_of<1>(part, row, strip, of_strip);
      }
  }

  static TileScope scope_of(const Part& part) { return TileScope(16, 16, least(part.num_rows, 16)); }

  static bool is_few(const Part& part) { return part.num_rows <= ROWS; }

  // A single row has the right form already.
  static bool takes_packed(const Part& part) { return part.num_rows > 1; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) { return up_to(num_rows, 16) * columns * 2; }

  static void pack(const Part& part, int64_t begin, int64_t end) {
    const int64_t columns = part.matrix->columns;
    for (int64_t row = begin; row < end; row += 16)
      TileProduct::transpose_rows(part.rows + row * columns, columns, least(end - row, 16), columns, (uint16_t*)part.packed + row * columns);
  }

  // Adds the products of a block of STRIPS with GROUPS of rows.
  template <int STRIPS, int GROUPS>
  static void add(const Part& part, int64_t block, const uint8_t* left) {
    if (part.num_rows == 1) {
      TileSums<STRIPS, 1>::add(left, left + BLOCK_BYTES, 64, 0, part.rows + block * INNER, nullptr, 4, 0, 1);
      return;
    }
    const uint8_t* right = part.packed + block * 1024;
    TileSums<STRIPS, GROUPS>::add(left, left + BLOCK_BYTES, 64, 0, right, right + part.blocks * 1024, 64, 0, 1);
  }

  template <int STRIPS, int GROUPS>
  static void finish(const Part& part, int64_t row, int64_t strip) {
    alignas(64) Floats sums[STRIPS][GROUPS][16];
    const bool is_one = part.num_rows == 1;
    TileSums<STRIPS, GROUPS>::put((float*)sums, 256, 256 * GROUPS, is_one ? 4 : 64);
    for (int half = 0; half < STRIPS; ++half)
      for (int group = 0; group < GROUPS; ++group) {
        Floats* of_group = sums[half][group];
        if (!is_one) transpose(sums[half][group]);
        for (int64_t i = 0; i < least(16, part.num_rows - row - 16 * group); ++i)
          part.put(of_group + i, row + 16 * group + i, strip + half);
      }
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t* factors) {
    const auto& multiply = part.form.multiply;
    const int groups = part.num_rows > 16;
    for (; strip + 2 <= last; strip += 2) multiply[1][groups](part, strip, factors);
    if (strip < last) multiply[0][groups](part, strip, factors);
  }

  template <int STRIPS>
  static void many_of(const Part& part, int64_t row, int64_t strip, const uint8_t* weights) {
    if (row + 16 < part.num_rows) multiply<STRIPS, 2>(part, row, strip, weights);
    else multiply<STRIPS, 1>(part, row, strip, weights);
  }

  template <int STRIPS, int GROUPS>
  static void multiply(const Part& part, int64_t row, int64_t strip, const uint8_t* weights) {
    const int64_t of_tile = part.blocks * 1024;
    const uint8_t* right = part.packed + row / 16 * of_tile;
    TileSums<STRIPS, GROUPS>::clear();
    TileSums<STRIPS, GROUPS>::add(weights, weights + of_tile, 64, 1024, right, right + of_tile, 64, 1024, part.blocks);
    finish<STRIPS, GROUPS>(part, row, strip);
  }
};

// Each block is unpacked while the previous one is multiplied, because the load of a tile waits for earlier stores. Two
// strips are two independent chains of sums: a sum must wait only for the previous one of its chain.
template <class Weights, int STRIPS, int GROUPS>
void multiply_few(const Part& part, int64_t strip, uint8_t* factors) {
  const auto opened = [&](int half) { return OpenStrip<Weights>(part.strip(strip + half), part.blocks, part.matrix->table); };
  OpenStrip<Weights> first = opened(0), second = opened(STRIPS - 1);
  TileSums<STRIPS, GROUPS>::clear();
  const auto place = [factors](int64_t block) { return factors + block % 2 * 2 * BLOCK_BYTES; };
  for (int64_t block = 0; block <= part.blocks; ++block) {
    if (block < part.blocks) {
      first.unpack(block, place(block));
      if (STRIPS == 2) second.unpack(block, place(block) + BLOCK_BYTES);
    }
    if (block) Multiply::add<STRIPS, GROUPS>(part, block - 1, place(block - 1));
  }
  Multiply::finish<STRIPS, GROUPS>(part, 0, strip);
}

template <class Weights>
void unpack(const uint8_t* strip, int64_t, int64_t blocks, const float* table, uint8_t* to) {
  OpenStrip<Weights> opened(strip, blocks, table);
  for (int64_t block = 0; block < blocks; ++block) opened.unpack(block, to + block * BLOCK_BYTES);
}

template <class Weights>
Form form_with(int64_t strip_bytes) {
  return {unpack<Weights>, Weights::look_up, strip_bytes,
          {{multiply_few<Weights, 1, 1>, multiply_few<Weights, 1, 2>}, {multiply_few<Weights, 2, 1>, multiply_few<Weights, 2, 2>}}};
}

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
