// Products of rows with matrices. A row's result depends on no other row: each number is one sum in a fixed order, whatever
// the number of rows and of threads, and whatever other matrices are multiplied in the same call.
//
// `weights.h` turns blocks of a matrix into factors. For few rows a block is multiplied at once, for many a whole strip is
// unpacked first.

#pragma once

#include "dense.h"
#include "weights.h"

namespace diskprefix {
namespace {
namespace matrices {

// The rows of a call: `rows` as they are, `packed` in the form of `Multiply`.
struct Part {
  const Matrix* matrix;
  Form form;
  const uint16_t* rows;
  const uint8_t* packed;
  int64_t num_rows, blocks, strips;
  uint16_t* out;

  const uint8_t* strip(int64_t number) const { return (const uint8_t*)matrix->weights + number * form.strip_bytes; }

  void unpack(int64_t number, int64_t begin, int64_t end, uint8_t* to) const {
    form.unpack(strip(number), begin, end, matrix->table, to);
  }

  void put(Sixteen sums, int64_t row, int64_t column) const {
    if (matrix->bias) sums += loaded<Sixteen>(matrix->bias + column);
    for (int64_t first = 0; first < STRIP; first += LANES)
      BFloat16::put(out + row * matrix->rows + column + first, loaded<Floats>((const char*)&sums + 4 * first));
  }
};

#if defined(__AMX_BF16__)

// The rows of the matrix are left factors, and those of the call right ones: groups of 16, pairs of columns, in each all rows
// of the group.
struct Multiply {
  static constexpr int64_t ROWS = 32, FEW_ROWS = 32;
  static constexpr int64_t AT_ONCE = 4;  // blocks, if there are few rows
  static constexpr int64_t PACKED_TOGETHER = 16;

  static TileScope scope_of(const Part& part) { return TileScope(16, 16, least(part.num_rows, 16)); }

  // A single row has the right form already.
  static bool takes_packed(const Part& part) { return part.num_rows > 1; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) { return up_to(num_rows, 16) * columns * 2; }

  static void pack(const uint16_t* rows, int64_t begin, int64_t end, int64_t, int64_t columns, uint8_t* packed) {
    for (int64_t row = begin; row < end; row += 16)
      TileProduct::turn_rows(rows + row * columns, columns, least(end - row, 16), columns, (uint16_t*)packed + row * columns);
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
        Floats* found = sums[half][group];
        if (!is_one) transpose(sums[half][group]);
        for (int64_t i = 0; i < least(16, part.num_rows - row - 16 * group); ++i)
          part.put((Sixteen)found[i], row + 16 * group + i, STRIP * (strip + half));
      }
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t* factors) {
    const auto& multiply = part.form.multiply;
    const int groups = part.num_rows > 16;
    for (; strip + 2 <= last; strip += 2) multiply[1][groups](part, strip, factors);
    if (strip < last) multiply[0][groups](part, strip, factors);
  }

  template <int STRIPS>
  static void many(const Part& part, int64_t row, int64_t strip, const uint8_t* weights) {
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

// A block is unpacked while the one before is multiplied, because the load of a tile waits for the stores before it. Two
// strips are two chains of sums, each of which waits for its last one.
template <class Weights, int STRIPS, int GROUPS>
void multiply_few(const Part& part, int64_t strip, uint8_t* factors) {
  const auto opened = [&](int half) { return typename Weights::Strip(part.strip(strip + half), part.blocks, part.matrix->table); };
  typename Weights::Strip first = opened(0), second = opened(STRIPS - 1);
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

#elif defined(KEEPS_CODES)

// A pair of a row times a pair of 16 columns. A group of a block is a sum of its own, in the order of the columns; times its
// scale it is added to that of the number, and so are its zero or zeros times the sums of the row's halves.
struct Multiply {
  static constexpr int64_t ROWS = 6, FEW_ROWS = FEW;
  static constexpr int64_t AT_ONCE = 1, PACKED_TOGETHER = 1;

  static NoScope scope_of(const Part& part) { return NoScope(part.num_rows); }

  static bool takes_packed(const Part& part) { return part.form.has_zeros; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) { return num_rows * (columns / 16) * 4; }

  // The sums of the halves of each row's blocks.
  static void pack(const uint16_t* rows, int64_t begin, int64_t end, int64_t, int64_t columns, uint8_t* packed) {
    float* to = (float*)packed + begin * (columns / 16);
    for (int64_t at = begin * columns; at < end * columns; at += 16) *to++ = sum_of(BFloat16::load(rows + at));
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t*) {
    for (; strip < last; ++strip) {
      Sixteen sums[FEW_ROWS];
      part.form.multiply[part.num_rows - 1](part.strip(strip), part.blocks, part.matrix->table, part.rows,
                                            (const float*)part.packed, sums);
      for (int64_t row = 0; row < part.num_rows; ++row) part.put(sums[row], row, strip * STRIP);
    }
  }

  template <int STRIPS, int COUNT = ROWS>
  static void many(const Part& part, int64_t row, int64_t strip, const uint8_t* weights) {
    if constexpr (COUNT > 1)
      if (part.num_rows - row < COUNT) return many<STRIPS, COUNT - 1>(part, row, strip, weights);
    const int64_t columns = part.matrix->columns, next = part.blocks * BLOCK_BYTES;
    const int64_t groups = part.form.groups, pairs = 16 / groups;
    const uint16_t* rows = part.rows + row * columns;
    const int64_t halves = part.blocks * 2;
    const float* sums = (const float*)part.packed;
    __m512 kept[COUNT][STRIPS] = {};
    for (int64_t block = 0; block < part.blocks; ++block, weights += BLOCK_BYTES) {
      const uint8_t *factors = weights, *scales = weights + SCALES_AT;
      for (int64_t group = 0; group < groups; ++group, scales += 64) {
        __m512 found[COUNT][STRIPS] = {};
#pragma GCC unroll 8
        for (int64_t pair = 0; pair < pairs; ++pair, factors += 64, rows += 2) {
          __m512bh right[STRIPS];
          for (int half = 0; half < STRIPS; ++half) {
            right[half] = loaded<__m512bh>(factors + half * next);
            // GCC would load them again for each row.
            if (COUNT > 1) __asm__("" : "+v"(right[half]));
          }
          for (int i = 0; i < COUNT; ++i) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32(loaded<int32_t>(rows + i * columns));
            for (int half = 0; half < STRIPS; ++half) found[i][half] = _mm512_dpbf16_ps(found[i][half], left, right[half]);
          }
        }
        for (int half = 0; half < STRIPS; ++half) {
          const __m512 scale = loaded<__m512>(scales + half * next);
          for (int i = 0; i < COUNT; ++i) kept[i][half] = _mm512_fmadd_ps(found[i][half], scale, kept[i][half]);
        }
      }
      for (int64_t group = 0; part.form.has_zeros && group < groups; ++group, scales += 64)
        for (int i = 0; i < COUNT; ++i) {
          const __m512 sum = _mm512_set1_ps(sum_of_group(sums + (row + i) * halves + 2 * block, group, groups));
          for (int half = 0; half < STRIPS; ++half)
            kept[i][half] = _mm512_fmadd_ps(loaded<__m512>(scales + half * next), sum, kept[i][half]);
        }
    }
    for (int i = 0; i < COUNT; ++i)
      for (int half = 0; half < STRIPS; ++half) part.put((Sixteen)kept[i][half], row + i, (strip + half) * STRIP);
  }
};

#elif defined(HAS_DOTS)

// Products of integers of 8 bits, which are exact in any order.
template <int COUNT>
struct IntegerSums {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  // Squares of two rows of the strip and two rows of the step. A last row alone is there twice.
  int32x4_t squares[2][(COUNT + 1) / 2][2] = {};

  INLINE void add(const int8_t* weights, const Dots* rows, int64_t stride, int64_t eight) {
    const int8x16_t first = vld1q_s8(weights), second = vld1q_s8(weights + 16);
    for (int row = 0; row < COUNT; row += 2) {
      const Dots *upper = rows + row * stride, *lower = row + 1 < COUNT ? upper + stride : upper;
      const int8x16_t parts[2] = {vcombine_s8(vld1_s8(upper->high + 8 * eight), vld1_s8(lower->high + 8 * eight)),
                                  vcombine_s8(vld1_s8(upper->low + 8 * eight), vld1_s8(lower->low + 8 * eight))};
      for (int part = 0; part < 2; ++part) {
        int32x4_t* sums = squares[part][row / 2];
        sums[0] = vmmlaq_s32(sums[0], first, parts[part]);
        sums[1] = vmmlaq_s32(sums[1], second, parts[part]);
      }
    }
  }

  INLINE int32x4_t of(int part, int row) const {
    const int32x4_t* sums = squares[part][row / 2];
    return row % 2 ? vuzp2q_s32(sums[0], sums[1]) : vuzp1q_s32(sums[0], sums[1]);
  }
#else
  int32x4_t sums[2][COUNT] = {};

  INLINE void add(const int8_t* weights, const Dots* rows, int64_t stride, int64_t eight) {
    const int8x16_t first = vld1q_s8(weights), second = vld1q_s8(weights + 16);
    for (int row = 0; row < COUNT; ++row) {
      sums[0][row] = dots_of(sums[0][row], first, second, rows[row * stride].high + 8 * eight);
      sums[1][row] = dots_of(sums[1][row], first, second, rows[row * stride].low + 8 * eight);
    }
  }

  INLINE int32x4_t of(int part, int row) const { return sums[part][row]; }
#endif
};

// Rows are integers with a scale for each block. A group of a block is summed up as an integer; times the scales it is
// added to the number, and so are its zero or zeros times the sums of the row's halves.
struct Multiply {
  static constexpr int64_t ROWS = 6, FEW_ROWS = FEW;
  static constexpr int64_t AT_ONCE = 1, PACKED_TOGETHER = 1;

  static NoScope scope_of(const Part& part) { return NoScope(part.num_rows); }

  static bool takes_packed(const Part&) { return true; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) { return num_rows * (columns / INNER) * sizeof(Dots); }

  static void pack(const uint16_t* rows, int64_t begin, int64_t end, int64_t, int64_t columns, uint8_t* packed) {
    Dots* to = (Dots*)packed + begin * (columns / INNER);
    for (int64_t at = begin * columns; at < end * columns; at += INNER) pack_block(rows + at, *to++);
  }

  // An exponent of 2^-95 or less is taken for that. Infinite numbers, and those that are none, make a sum that is none.
  static void pack_block(const uint16_t* from, Dots& to) {
    static const uint8_t ORDER[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    uint16x8_t highest = {};
    for (int i = 0; i < INNER; i += 8) highest = vmaxq_u16(highest, vld1q_u16(from + i) & (uint16_t)0x7fff);
    const uint32_t exponent = vmaxvq_u16(highest) >> 7, limited = most(exponent, 32);
    const Floats factor = (Floats)all_ints((267 - limited) << 23);
    to.scale = exponent == 255 ? __builtin_nanf("") : ((Floats)all_ints((limited - 13) << 23))[0];
    to.unused = 0.0f;
    for (int half = 0; half < 2; ++half) {
      Floats sum = {};
      for (int i = 16 * half; i < 16 * half + 16; i += 8) {
        const Floats first = BFloat16::load(from + i), second = BFloat16::load(from + i + 4);
        sum += first + second;
        const int16x8_t whole = vcombine_s16(vmovn_s32(vcvtnq_s32_f32((float32x4_t)(first * factor))),
                                             vmovn_s32(vcvtnq_s32_f32((float32x4_t)(second * factor))));
        vst1_s8(to.high + i, vtbl1_s8(vrshrn_n_s16(whole, 8), (int8x8_t)vld1_u8(ORDER)));
        vst1_s8(to.low + i, vtbl1_s8(vmovn_s16(whole), (int8x8_t)vld1_u8(ORDER)));
      }
      to.halves[half] = sum_of(sum);
    }
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t*) {
    for (; strip < last; ++strip) {
      Sixteen sums[FEW_ROWS];
      part.form.multiply[part.num_rows - 1](part.strip(strip), part.blocks, part.matrix->table, (const Dots*)part.packed, sums);
      for (int64_t row = 0; row < part.num_rows; ++row) part.put(sums[row], row, strip * STRIP);
    }
  }

  template <int STRIPS, int COUNT = ROWS>
  static void many(const Part& part, int64_t row, int64_t strip, const uint8_t* weights) {
    if constexpr (COUNT > 1)
      if (part.num_rows - row < COUNT) return many<STRIPS, COUNT - 1>(part, row, strip, weights);
    const Dots* rows = (const Dots*)part.packed + row * part.blocks;
    const int64_t groups = part.form.groups, eights = 4 / groups;
    for (int half = 0; half < STRIPS; ++half) {
      Sixteen sums[COUNT];
      for (int quarter = 0; quarter < 4; ++quarter) {
        float32x4_t kept[COUNT] = {};
        for (int64_t block = 0; block < part.blocks; ++block) {
          const uint8_t* of_block = weights + (half * part.blocks + block) * BLOCK_BYTES;
          const int8_t* integers = (const int8_t*)of_block + 128 * quarter;
          const float* scales = (const float*)(of_block + SCALES_AT) + 4 * quarter;
          for (int64_t group = 0; group < groups; ++group, scales += 16) {
            IntegerSums<COUNT> found;
            for (int64_t eight = group * eights; eight < (group + 1) * eights; ++eight)
              found.add(integers + 32 * eight, rows + block, part.blocks, eight);
            for (int i = 0; i < COUNT; ++i)
              kept[i] = with_group(kept[i], found.of(0, i), found.of(1, i), scales, rows[i * part.blocks + block]);
          }
          for (int64_t group = 0; part.form.has_zeros && group < groups; ++group, scales += 16)
            for (int i = 0; i < COUNT; ++i) kept[i] = with_zero(kept[i], scales, rows[i * part.blocks + block], group, groups);
        }
        for (int i = 0; i < COUNT; ++i) store((char*)(sums + i) + 16 * quarter, kept[i]);
      }
      for (int i = 0; i < COUNT; ++i) part.put(sums[i], row + i, (strip + half) * STRIP);
    }
  }
};

#else

// In float32. Products of bfloat16 factors are exact, so it does not matter whether they are fused with the addition.
// Even and odd columns are summed apart, and added up at the end.
struct Multiply {
  static constexpr int64_t ROWS = 32, FEW_ROWS = 4;
  static constexpr int64_t AT_ONCE = 1, PACKED_TOGETHER = 1;

  static NoScope scope_of(const Part& part) { return NoScope(part.num_rows); }

  static bool takes_packed(const Part&) { return true; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) { return num_rows * columns * 4; }

  static void pack(const uint16_t* rows, int64_t begin, int64_t end, int64_t, int64_t columns, uint8_t* packed) {
    for (int64_t i = begin * columns; i < end * columns; ++i) ((float*)packed)[i] = BFloat16::one(rows[i]);
  }

  template <int ROWS>
  static void add(const float* rows, int64_t stride, const uint8_t* weights, int64_t blocks, Sixteen (*sums)[2]) {
    for (int64_t first = 0; first < STRIP * 4; first += LANES * 4) {
      Floats kept[ROWS][2];
      for (int row = 0; row < ROWS; ++row)
        for (int odd = 0; odd < 2; ++odd) kept[row][odd] = loaded<Floats>((const char*)&sums[row][odd] + first);
      for (int64_t pair = 0; pair < 16 * blocks; ++pair) {
        const Floats even = loaded<Floats>(weights + 128 * pair + first), odd = loaded<Floats>(weights + 128 * pair + 64 + first);
        for (int row = 0; row < ROWS; ++row) {
          const float* factors = rows + row * stride + 2 * pair;
          kept[row][0] = fma(all(factors[0]), even, kept[row][0]);
          kept[row][1] = fma(all(factors[1]), odd, kept[row][1]);
        }
      }
      for (int row = 0; row < ROWS; ++row)
        for (int odd = 0; odd < 2; ++odd) store((char*)&sums[row][odd] + first, kept[row][odd]);
    }
  }

  static void add(int64_t count, const float* rows, int64_t stride, const uint8_t* weights, int64_t blocks,
                  Sixteen (*sums)[2]) {
    switch (count) {
      case 1: return add<1>(rows, stride, weights, blocks, sums);
      case 2: return add<2>(rows, stride, weights, blocks, sums);
      case 3: return add<3>(rows, stride, weights, blocks, sums);
      default: return add<4>(rows, stride, weights, blocks, sums);
    }
  }

  static void finish(const Part& part, int64_t row, int64_t count, int64_t strip, Sixteen (*sums)[2]) {
    for (int64_t i = 0; i < count; ++i) part.put(sums[i][0] + sums[i][1], row + i, strip * STRIP);
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t* factors) {
    for (; strip < last; ++strip) {
      Sixteen sums[FEW_ROWS][2] = {};
      for (int64_t block = 0; block < part.blocks; ++block) {
        part.unpack(strip, block, block + 1, factors);
        add(part.num_rows, (const float*)part.packed + block * INNER, part.matrix->columns, factors, 1, sums);
      }
      finish(part, 0, part.num_rows, strip, sums);
    }
  }

  template <int STRIPS>
  static void many(const Part& part, int64_t first, int64_t strip, const uint8_t* weights) {
    const int64_t columns = part.matrix->columns;
    for (int half = 0; half < STRIPS; ++half)
      for (int64_t row = first; row < least(first + ROWS, part.num_rows); row += FEW_ROWS) {
        const int64_t count = least(FEW_ROWS, part.num_rows - row);
        Sixteen sums[FEW_ROWS][2] = {};
        add(count, (const float*)part.packed + row * columns, columns, weights + half * part.blocks * BLOCK_BYTES, part.blocks, sums);
        finish(part, row, count, strip + half, sums);
      }
  }
};

#endif

// The bytes of unpacked strips for many rows: as much as stays in the cache of a core while all rows use it.
constexpr int64_t PANEL_BYTES = 512 * 1024;

inline void multiply_many(const Part& part, int64_t first, int64_t last, uint8_t* weights) {
  for (int64_t strip = first; strip < last; ++strip)
    part.unpack(strip, 0, part.blocks, weights + (strip - first) * part.blocks * BLOCK_BYTES);
  for (int64_t row = 0; row < part.num_rows; row += Multiply::ROWS)
    for (int64_t strip = first; strip < last; strip += 2) {
      const uint8_t* of_strip = weights + (strip - first) * part.blocks * BLOCK_BYTES;
      if (strip + 1 < last) Multiply::many<2>(part, row, strip, of_strip);
      else Multiply::many<1>(part, row, strip, of_strip);
    }
}

// Multiplies with rows `begin` to `end` of a matrix in bfloat16.
inline bool multiply_dense(const Part& part, int64_t begin, int64_t end) {
  const Matrix& matrix = *part.matrix;
  const uint16_t* weights = (const uint16_t*)matrix.weights + begin * matrix.columns;
  const DenseProduct call = {BFLOAT16, true, 1, part.num_rows, matrix.columns, end - begin, part.rows, 0, matrix.columns,
                             weights, 0, matrix.columns, matrix.bias ? matrix.bias + begin : nullptr, part.out + begin, 0,
                             matrix.rows, 1, nullptr};
  return !dense(&call);
}

// Whether any of the matrices that the same rows are multiplied with takes rows in the form of `Multiply`.
inline bool take_packed(const Part* parts, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (parts[i].matrix->bits != 16 && Multiply::takes_packed(parts[i])) return true;
  return false;
}

// Multiplies with the pairs of strips from `begin` to `end`. Returns false if there is not enough memory.
inline bool multiply_part(const Part& part, int64_t begin, int64_t end) {
  if (part.matrix->bits == 16) return multiply_dense(part, 2 * STRIP * begin, least(2 * STRIP * end, part.matrix->rows));
  static thread_local Memory memory;
  const bool is_few = part.num_rows <= Multiply::FEW_ROWS;
  const int64_t of_pair = (is_few ? Multiply::AT_ONCE : 2 * part.blocks) * BLOCK_BYTES;
  const int64_t fit = PANEL_BYTES / of_pair, at_once = is_few || fit < 1 ? 1 : fit;
  const int64_t needed = least(at_once, end - begin) * of_pair;
  if (!memory.reserve(needed)) return false;
  uint8_t* weights = memory.take<uint8_t>(needed);
  const auto scope = Multiply::scope_of(part);
  for (int64_t pair = begin; pair < end; pair += at_once) {
    const int64_t strip = 2 * pair, last = least(2 * least(pair + at_once, end), part.strips);
    if (is_few) Multiply::few(part, strip, last, weights);
    else multiply_many(part, strip, last, weights);
  }
  return true;
}

class Products {
 public:
  explicit Products(const Product& call) : call_(call), columns_(call.matrices[0]->columns) {
    for (int64_t i = 0; i < call.num_matrices; ++i) {
      const Matrix& matrix = *call.matrices[i];
      const int64_t strips = matrix.rows / STRIP;
      parts_[i] = {&matrix, form_of(matrix), (const uint16_t*)call.rows, nullptr, call.num_rows, columns_ / INNER, strips,
                   (uint16_t*)call.outs[i]};
      pairs_ += (strips + 1) / 2;
    }
  }

  bool run() {
    if (!call_.num_rows) return true;
    static thread_local Memory memory;
    if (take_packed(parts_, call_.num_matrices)) {
      const int64_t needed = Multiply::packed_bytes(call_.num_rows, columns_);
      if (!memory.reserve(needed)) return false;
      packed_ = memory.take<uint8_t>(needed);
      for (Part& part : parts_) part.packed = packed_;
      const int64_t together = Multiply::PACKED_TOGETHER, count = up_to(call_.num_rows, together) / together;
      if (!spread(call_.num_threads, call_.parallel_for, count, 16 / together, [=](int64_t begin, int64_t end) {
            pack(begin * together, least(end * together, call_.num_rows));
          }))
        return false;
    }
    const bool is_few = call_.num_rows <= Multiply::FEW_ROWS;
    const int64_t count = is_few ? least((pairs_ + 3) / 4, call_.num_threads) : call_.num_threads;
    return spread(call_.num_threads, call_.parallel_for, count, 1, [this](int64_t, int64_t) { take(); }) && !failed_;
  }

 private:
  const Product& call_;
  const int64_t columns_;
  Part parts_[MAX_MATRICES] = {};
  int64_t pairs_ = 0;
  std::atomic<int64_t> next_{0};
  uint8_t* packed_ = nullptr;
  std::atomic<bool> failed_{false};

  void pack(int64_t begin, int64_t end) {
    Multiply::pack((const uint16_t*)call_.rows, begin, end, call_.num_rows, columns_, packed_);
  }

  // A thread takes part of the remaining pairs, again and again, so that slow and fast threads end at about the same
  // time.
  void take() {
    for (int64_t begin = next_; begin < pairs_;) {
      const int64_t end = begin + most(1, (pairs_ - begin) / (2 * call_.num_threads));
      if (!next_.compare_exchange_weak(begin, end)) continue;
      multiply(begin, end);
      begin = next_;
    }
  }

  // Multiplies with the pairs of strips from `begin` to `end`, counted through all matrices.
  void multiply(int64_t begin, int64_t end) {
    for (int64_t i = 0; i < call_.num_matrices; ++i) {
      const int64_t pairs = (parts_[i].strips + 1) / 2;
      if (begin < pairs && end > 0 && !multiply_part(parts_[i], most(begin, 0), least(end, pairs))) failed_ = true;
      begin -= pairs, end -= pairs;
    }
  }
};

}  // namespace matrices

int32_t product(const Product* call) { return !matrices::Products(*call).run(); }

int32_t look_up(const Lookup* call) {
  const matrices::Form form = matrices::form_of(*call->matrix);
  const int64_t columns = call->matrix->columns;
  return !spread(call->num_threads, call->parallel_for, call->num_rows, 1 + 8192 / columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = call->ids[i];
      form.look_up((const uint8_t*)call->matrix->weights + row / matrices::STRIP * form.strip_bytes,
                   columns / matrices::INNER, row % matrices::STRIP, call->matrix->table,
                   (uint16_t*)call->out + i * columns);
    }
  });
}

}  // namespace
}  // namespace diskprefix
