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

// The rows of a call: `rows` as given, `packed` in the form that `Multiply` takes.
struct Part {
  const Matrix* matrix;
  Form form;
  const uint16_t* rows;
  const uint8_t* packed;
  int64_t num_rows, blocks, strips;
  uint16_t* out;
  int64_t out_stride;  // from row to row, in elements

  Part(const Matrix& matrix, const void* rows, const uint8_t* packed, int64_t num_rows, void* out, int64_t out_stride)
      : matrix(&matrix), form(form_of(matrix)), rows((const uint16_t*)rows), packed(packed), num_rows(num_rows),
        blocks(matrix.columns / INNER), strips(matrix.rows / STRIP), out((uint16_t*)out), out_stride(out_stride) {}

  int64_t pairs() const { return (strips + 1) / 2; }

  const uint8_t* strip(int64_t number) const { return (const uint8_t*)matrix->weights + number * form.strip_bytes; }

  void unpack(int64_t number, int64_t begin, int64_t end, uint8_t* to) const {
    form.unpack(strip(number), begin, end, matrix->table, to);
  }

  // Stores the sums of a row and a strip, whose vectors are contiguous.
  void put(const void* sums, int64_t row, int64_t strip) const {
    for (int64_t i = 0, column = strip * STRIP; i < STRIP; i += LANES, column += LANES) {
      const Floats number = loaded<Floats>((const float*)sums + i);
      BFloat16::put(out + row * out_stride + column, matrix->bias ? number + loaded<Floats>(matrix->bias + column) : number);
    }
  }
};

// Unpacked at a time for many rows: what stays in the cache of a core while all rows use it.
constexpr int64_t PANEL_BYTES = 512 * 1024;

#if !defined(TAKES_INTEGERS)

// The bytes of two unpacked strips.
inline int64_t bytes_of_pair(const Part& part) { return 2 * part.blocks * BLOCK_BYTES; }

template <class Multiply>
inline void multiply_many(const Part& part, int64_t first, int64_t last, uint8_t* weights) {
  for (int64_t strip = first; strip < last; ++strip)
    part.unpack(strip, 0, part.blocks, weights + (strip - first) * part.blocks * BLOCK_BYTES);
  for (int64_t row = 0; row < part.num_rows; row += Multiply::ROWS)
    for (int64_t strip = first; strip < last; strip += 2) {
      const uint8_t* of_strip = weights + (strip - first) * part.blocks * BLOCK_BYTES;
      if (strip + 1 < last) Multiply::template many_of<2>(part, row, strip, of_strip);
      else Multiply::template many_of<1>(part, row, strip, of_strip);
    }
}

#endif

#if defined(__AMX_BF16__)

// The rows of the matrix are left factors, and the rows of the call right factors, in groups of 16 rows: pairs of columns,
// each with all rows of the group.
struct Multiply {
  static constexpr int64_t ROWS = 32, FEW_ROWS = 32;
  static constexpr int64_t UNPACKED_BYTES = 4 * BLOCK_BYTES;
  static constexpr int64_t PACKED_TOGETHER = 16;

  static int64_t pair_bytes(const Part& part) { return bytes_of_pair(part); }

  static void many(const Part& part, int64_t first, int64_t last, uint8_t* panel) { multiply_many<Multiply>(part, first, last, panel); }

  static TileScope scope_of(const Part& part) { return TileScope(16, 16, least(part.num_rows, 16)); }

  // A single row has the right form already.
  static bool takes_packed(const Part& part) { return part.num_rows > 1; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) { return up_to(num_rows, 16) * columns * 2; }

  static void pack(const uint16_t* rows, int64_t begin, int64_t end, int64_t, int64_t columns, uint8_t* packed) {
    for (int64_t row = begin; row < end; row += 16)
      TileProduct::transpose_rows(rows + row * columns, columns, least(end - row, 16), columns, (uint16_t*)packed + row * columns);
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

// Multiplies a pair of numbers of a row with pairs of 16 columns. Each group of a block is summed alone, in the order of the
// columns. The group's sum × its scale is added to the result, and so are its zeros × the sums of the row's halves.
struct Multiply {
  static constexpr int64_t ROWS = 6, FEW_ROWS = FEW;
  static constexpr int64_t UNPACKED_BYTES = 0, PACKED_TOGETHER = 1;

  static int64_t pair_bytes(const Part& part) { return bytes_of_pair(part); }

  static void many(const Part& part, int64_t first, int64_t last, uint8_t* panel) { multiply_many<Multiply>(part, first, last, panel); }

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
      Floats sums[FEW_ROWS];
      part.form.multiply[part.num_rows - 1](part.strip(strip), part.blocks, part.matrix->table, part.rows,
                                            (const float*)part.packed, sums);
      for (int64_t row = 0; row < part.num_rows; ++row) part.put(sums + row, row, strip);
    }
  }

  template <int STRIPS, int COUNT = ROWS>
  static void many_of(const Part& part, int64_t row, int64_t strip, const uint8_t* weights) {
    if constexpr (COUNT > 1)
      if (part.num_rows - row < COUNT) return many_of<STRIPS, COUNT - 1>(part, row, strip, weights);
    const int64_t columns = part.matrix->columns, next = part.blocks * BLOCK_BYTES;
    const int64_t groups = part.form.groups, pairs = 16 / groups;
    const uint16_t* rows = part.rows + row * columns;
    const int64_t halves = part.blocks * 2;
    const float* sums = (const float*)part.packed;
    __m512 kept[COUNT][STRIPS] = {};
    for (int64_t block = 0; block < part.blocks; ++block, weights += BLOCK_BYTES) {
      const uint8_t *factors = weights, *scales = weights + SCALES_AT;
      for (int64_t group = 0; group < groups; ++group, scales += 64) {
        __m512 products[COUNT][STRIPS] = {};
#pragma GCC unroll 8
        for (int64_t pair = 0; pair < pairs; ++pair, factors += 64, rows += 2) {
          __m512bh right[STRIPS];
          for (int half = 0; half < STRIPS; ++half) {
            right[half] = loaded<__m512bh>(factors + half * next);
            // Without this, GCC loads `right` again for each row.
            if (COUNT > 1) __asm__("" : "+v"(right[half]));
          }
          for (int i = 0; i < COUNT; ++i) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32(loaded<int32_t>(rows + i * columns));
            for (int half = 0; half < STRIPS; ++half) products[i][half] = _mm512_dpbf16_ps(products[i][half], left, right[half]);
          }
        }
        for (int half = 0; half < STRIPS; ++half) {
          const __m512 scale = loaded<__m512>(scales + half * next);
          for (int i = 0; i < COUNT; ++i) kept[i][half] = _mm512_fmadd_ps(products[i][half], scale, kept[i][half]);
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
      for (int half = 0; half < STRIPS; ++half) part.put((const Floats*)kept[i] + half, row + i, strip + half);
  }
};

#else

// The sums of COUNT rows for the parts of a strip that are multiplied together.
template <int COUNT>
struct SumsOfRows {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  // Squares of two rows of the strip and two rows of the step. If COUNT is odd, the last row is there twice.
  int32x4_t squares[2][(COUNT + 1) / 2][2] = {};

  INLINE void add(const uint8_t* weights, const Integers* rows, int64_t eight) {
    const int8x16_t first = loaded<int8x16_t>(weights), second = loaded<int8x16_t>(weights + 16);
    for (int row = 0; row < COUNT; row += 2) {
      const Integers *upper = rows + row, *lower = row + 1 < COUNT ? upper + 1 : upper;
      const int8x16_t parts[2] = {vcombine_s8(vld1_s8(upper->high + 8 * eight), vld1_s8(lower->high + 8 * eight)),
                                  vcombine_s8(vld1_s8(upper->low + 8 * eight), vld1_s8(lower->low + 8 * eight))};
      for (int part = 0; part < 2; ++part) {
        int32x4_t* sums = squares[part][row / 2];
        sums[0] = vmmlaq_s32(sums[0], first, parts[part]);
        sums[1] = vmmlaq_s32(sums[1], second, parts[part]);
      }
    }
  }

  INLINE Ints of(int row, int) const {
    const auto lines = [=](int part) {
      const int32x4_t* sums = squares[part][row / 2];
      return row % 2 ? vuzp2q_s32(sums[0], sums[1]) : vuzp1q_s32(sums[0], sums[1]);
    };
    return (Ints)vaddq_s32(vshlq_n_s32(lines(0), 8), lines(1));
  }
#else
  Sums sums[COUNT][WIDE];

  INLINE void add(const uint8_t* weights, const Integers* rows, int64_t step) {
    Factors factors[WIDE];
    for (int part = 0; part < WIDE; ++part) factors[part] = loaded<Factors>(weights + part * sizeof(Factors));
#pragma GCC unroll 6
    for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 2
      for (int part = 0; part < WIDE; ++part) sums[row][part].add(factors[part], rows[row], step);
  }

  INLINE Ints of(int row, int part) const { return sums[row][part].whole(); }
#endif
};

// Rows are integers with a scale for each block. The sum of a group of a block is an exact integer, so the order does not
// matter. It is added × the scales to the result, and so are the group's zeros × the sums of the row's halves.
struct Multiply {
  static constexpr int64_t FEW_ROWS = FEW;
  static constexpr int64_t PACKED_TOGETHER = 1;
  static constexpr int64_t MANY_BLOCKS = 8, UNPACKED_BYTES = MANY_BLOCKS * BLOCK_BYTES;

  static NoScope scope_of(const Part& part) { return NoScope(part.num_rows); }

  static bool takes_packed(const Part&) { return true; }

  static int64_t packed_bytes(int64_t num_rows, int64_t columns) {
    return up_to(num_rows, TOGETHER) * (columns / INNER) * sizeof(Integers);
  }

  static void pack(const uint16_t* rows, int64_t begin, int64_t end, int64_t, int64_t columns, uint8_t* packed) {
    const int64_t blocks = columns / INNER;
    for (int64_t row = begin; row < end; ++row) {
      Integers* to = (Integers*)packed + row / TOGETHER * TOGETHER * blocks + row % TOGETHER;
      for (int64_t block = 0; block < blocks; ++block) pack_block(rows + row * columns + block * INNER, to[block * TOGETHER]);
    }
  }

  // Exponents below 2^-95 count as 2^-95. An infinity or a NaN in the row makes the sum NaN.
  static void pack_block(const uint16_t* from, Integers& to) {
    Halves highest = {};
    for (int i = 0; i < INNER; i += LANES) {
      const Halves numbers = loaded<Halves>(from + i) & (uint16_t)0x7fff;
      highest = numbers > highest ? numbers : highest;
    }
    int64_t exponent = 32;
    for (int lane = 0; lane < LANES; ++lane) exponent = most(exponent, highest[lane] >> 7);
    const Floats factor = (Floats)all_ints((267 - exponent) << 23);
    int16_t whole[INNER];
    for (int i = 0; i < INNER; i += LANES) {
      // Adding 1.5 × 2^23 rounds a number to an integer in the last bits.
      const Words bits = (Words)(BFloat16::load(from + i) * factor + all(12582912.0f));
      store(whole + i, __builtin_convertvector(bits, Halves));
    }
    to.scale = exponent == 255 ? __builtin_nanf("") : ((Floats)all_ints((exponent - 13) << 23))[0];
    for (int half = 0; half < 2; ++half) {
      to.sums[half] = 0;
      for (int i = 16 * half; i < 16 * half + 16; ++i) to.sums[half] += whole[i];
    }
    to.sums[2] = to.sums[0] + to.sums[1];
    for (int i = 0; i < 3; ++i) to.totals[i] = to.sums[i] * to.scale;
#if defined(__ARM_FEATURE_DOTPROD)
    static const uint8_t ORDER[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int i = 0; i < INNER; i += 8) {
      const int16x8_t eight = vld1q_s16(whole + i);
      vst1_s8(to.high + i, vtbl1_s8(vrshrn_n_s16(eight, 8), (int8x8_t)vld1_u8(ORDER)));
      vst1_s8(to.low + i, vtbl1_s8(vmovn_s16(eight), (int8x8_t)vld1_u8(ORDER)));
    }
#else
    memcpy(to.whole, whole, sizeof whole);
#endif
  }

  static void few(const Part& part, int64_t strip, int64_t last, uint8_t*) {
    for (; strip < last; ++strip) {
      Floats sums[FEW_ROWS][PARTS];
      part.form.multiply[part.num_rows - 1](part.strip(strip), part.blocks, part.matrix->table, (const Integers*)part.packed, sums[0]);
      for (int64_t row = 0; row < part.num_rows; ++row) part.put(sums[row], row, strip);
    }
  }

  // The bytes of the sums of two strips, and of what is prefetched.
  static int64_t pair_bytes(const Part& part) { return 2 * (part.num_rows * STRIP * sizeof(float) + AHEAD); }

  // Unpacks a few blocks of a strip at a time for all rows; meanwhile the sums are in memory.
  static void many(const Part& part, int64_t first, int64_t last, uint8_t* panel) {
    float* sums = (float*)(panel + UNPACKED_BYTES);
    const int64_t of_strip = part.num_rows * STRIP;
    memset(sums, 0, (last - first) * of_strip * sizeof *sums);
    for (int64_t block = 0; block < part.blocks; block += MANY_BLOCKS) {
      const int64_t end = least(block + MANY_BLOCKS, part.blocks);
      for (int64_t strip = first; strip < last; ++strip) {
        part.unpack(strip, block, end, panel);
        for (int64_t row = 0; row < part.num_rows; row += TOGETHER) {
          const Integers* rows = (const Integers*)part.packed + row * part.blocks + block * TOGETHER;
          float* of_rows = sums + (strip - first) * of_strip + row * STRIP;
          if (part.form.groups == 1) add<1>(part, row, rows, panel, end - block, of_rows);
          else add<2>(part, row, rows, panel, end - block, of_rows);
        }
      }
    }
    for (int64_t strip = first; strip < last; ++strip)
      for (int64_t row = 0; row < part.num_rows; ++row, sums += STRIP) part.put(sums, row, strip);
  }

  // Adds the products of some blocks of a strip with some rows.
  template <int GROUPS, int COUNT = TOGETHER>
  static void add(const Part& part, int64_t row, const Integers* rows, const uint8_t* weights, int64_t count, float* sums) {
    if constexpr (COUNT > 1)
      if (part.num_rows - row < COUNT) return add<GROUPS, COUNT - 1>(part, row, rows, weights, count, sums);
    for (int64_t first = 0; first < PARTS; first += WIDE) {
      Floats kept[COUNT][WIDE];
      for (int i = 0; i < COUNT; ++i) memcpy(kept[i], sums + i * STRIP + first * LANES, sizeof kept[i]);
      for (int64_t block = 0; block < count; ++block) {
        const Integers* of_block = rows + block * TOGETHER;
        const uint8_t* factors = weights + block * BLOCK_BYTES + first / WIDE * STEPS * STEP_BYTES;
        const uint8_t* numbers = weights + block * BLOCK_BYTES + SCALES_AT + first * sizeof(Floats);
        for (int group = 0; group < GROUPS; ++group) {
          SumsOfRows<COUNT> products;
#pragma GCC unroll 4
          for (int step = group * STEPS / GROUPS; step < (group + 1) * STEPS / GROUPS; ++step)
            products.add(factors + step * STEP_BYTES, of_block, step);
#pragma GCC unroll 6
          for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 2
            for (int at = 0; at < WIDE; ++at) {
              const Floats scales = loaded<Floats>(numbers + 64 * group + at * sizeof(Floats));
              kept[i][at] = with_group(kept[i][at], products.of(i, at), scales, of_block[i]);
            }
          for (int i = 0; part.form.has_zeros && i < COUNT; ++i)
            for (int at = 0; at < WIDE; ++at) {
              const Floats zeros = loaded<Floats>(numbers + 64 * (GROUPS + group) + at * sizeof(Floats));
              kept[i][at] = fma(zeros, all(of_block[i].totals[place_of(group, GROUPS)]), kept[i][at]);
            }
        }
      }
      for (int i = 0; i < COUNT; ++i) memcpy(sums + i * STRIP + first * LANES, kept[i], sizeof kept[i]);
    }
  }
};

#endif

// Multiplies with rows `begin` to `end` of a matrix in bfloat16.
inline bool multiply_dense(const Part& part, int64_t begin, int64_t end) {
  const Matrix& matrix = *part.matrix;
  const uint16_t* weights = (const uint16_t*)matrix.weights + begin * matrix.columns;
  const DenseProduct call = {BFLOAT16, true, 1, part.num_rows, matrix.columns, end - begin, part.rows, 0, matrix.columns,
                             weights, 0, matrix.columns, matrix.bias ? matrix.bias + begin : nullptr, part.out + begin, 0,
                             part.out_stride, 1};
  return !dense(&call);
}

// Packs rows `begin` to `end`, which all parts share, if any part takes packed rows.
inline void pack_rows(const Part* parts, int64_t count, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < count; ++i)
    if (parts[i].matrix->bits != 16 && Multiply::takes_packed(parts[i]))
      return Multiply::pack(parts[i].rows, begin, end, parts[i].num_rows, parts[i].matrix->columns, (uint8_t*)parts[i].packed);
}

// Multiplies with pairs of strips `begin` to `end`. Returns false if there is not enough memory.
inline bool multiply_part(const Part& part, int64_t begin, int64_t end) {
  if (part.matrix->bits == 16) return multiply_dense(part, 2 * STRIP * begin, least(2 * STRIP * end, part.matrix->rows));
  static thread_local Memory memory;
  const bool is_few = part.num_rows <= Multiply::FEW_ROWS;
  const int64_t at_once = is_few ? end - begin : most(1, PANEL_BYTES / Multiply::pair_bytes(part));
  const int64_t needed = Multiply::UNPACKED_BYTES + (is_few ? 0 : least(at_once, end - begin) * Multiply::pair_bytes(part));
  if (!memory.reserve(needed)) return false;
  uint8_t* panel = memory.take<uint8_t>(needed);
  const auto scope = Multiply::scope_of(part);
  for (int64_t pair = begin; pair < end; pair += at_once) {
    const int64_t strip = 2 * pair, last = least(2 * least(pair + at_once, end), part.strips);
    if (is_few) Multiply::few(part, strip, last, panel);
    else Multiply::many(part, strip, last, panel);
  }
  return true;
}

// Multiplies all parts. Threads repeatedly take some of the remaining pairs of strips, so that slow and fast threads end at
// about the same time. Returns false if there is not enough memory.
inline bool multiply_all(const Part* parts, int64_t num_parts, int64_t num_threads) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < num_parts; ++i) pairs += parts[i].pairs();
  std::atomic<int64_t> next{0};
  std::atomic<bool> has_failed{false};
  const auto take = [&](int64_t, int64_t) {
    for (int64_t begin = next; begin < pairs;) {
      const int64_t end = begin + most(1, (pairs - begin) / (2 * num_threads));
      if (!next.compare_exchange_weak(begin, end)) continue;
      for (int64_t i = 0, first = 0; first < end; first += parts[i++].pairs()) {
        const int64_t from = most(begin - first, 0), to = least(end - first, parts[i].pairs());
        if (from < to && !multiply_part(parts[i], from, to)) has_failed = true;
      }
      begin = next;
    }
  };
  const bool is_few = parts->num_rows <= Multiply::FEW_ROWS;
  spread(num_threads, is_few ? least((pairs + 3) / 4, num_threads) : num_threads, 1, take);
  return !has_failed;
}

}  // namespace matrices

int32_t product(const Product* call) {
  using namespace matrices;
  static thread_local Memory memory;
  const int64_t count = call->num_matrices, rows = call->num_rows, packed = Multiply::packed_bytes(rows, call->matrices[0]->columns);
  if (!rows) return 0;
  if (!memory.reserve(Memory::size_of<Part>(count) + packed)) return 1;
  Part* parts = memory.take<Part>(count);
  uint8_t* to = memory.take<uint8_t>(packed);
  for (int64_t i = 0; i < count; ++i) parts[i] = Part(*call->matrices[i], call->rows, to, rows, call->outs[i], call->matrices[i]->rows);
  const int64_t together = Multiply::PACKED_TOGETHER;
  spread(call->num_threads, up_to(rows, together) / together, 16 / together, [=](int64_t begin, int64_t end) {
    pack_rows(parts, count, begin * together, least(end * together, rows));
  });
  return !multiply_all(parts, count, call->num_threads);
}

int32_t head_product(const HeadProduct* call) {
  using namespace matrices;
  static thread_local Memory memory;
  const int64_t heads = call->num_heads, rows = call->num_rows, columns = call->matrices[0]->columns;
  const int64_t of_head = up_to(Multiply::packed_bytes(rows, columns), 64);
  if (!rows) return 0;
  if (!memory.reserve(Memory::size_of<Part>(heads) + Memory::size_of<uint16_t>(heads * rows * columns) + heads * of_head)) return 1;
  Part* parts = memory.take<Part>(heads);
  uint16_t* own = memory.take<uint16_t>(heads * rows * columns);
  uint8_t* packed = memory.take<uint8_t>(heads * of_head);
  spread(call->num_threads, heads, 1 + 4096 / (rows * columns), [=](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      uint16_t* to = own + head * rows * columns;
      for (int64_t row = 0; row < rows; ++row)
        memcpy(to + row * columns, (const uint16_t*)call->rows + head * call->head_stride + row * call->row_stride, columns * 2);
      parts[head] = Part(*call->matrices[head], to, packed + head * of_head, rows,
                         (uint16_t*)call->out + head * call->out_head_stride, call->out_row_stride);
      pack_rows(parts + head, 1, 0, rows);
    }
  });
  return !multiply_all(parts, heads, call->num_threads);
}

int32_t require_matrix(const Matrix* matrix, const int64_t* num_bytes) {
  const int64_t rows = matrix->rows, columns = matrix->columns;
  if (rows <= 0 || columns <= 0 || rows % matrices::STRIP || columns % matrices::INNER) return 1;
  const bool is_dense = matrix->bits == 16;
  const int64_t strip_bytes = is_dense ? 2 * matrices::STRIP * columns : matrices::form_of(*matrix).strip_bytes;
  const bool has_numbers = !matrix->has_table || matrix->table;
  return !(strip_bytes && has_numbers && *num_bytes == rows / matrices::STRIP * strip_bytes);
}

int32_t look_up(const Lookup* call) {
  const matrices::Form form = matrices::form_of(*call->matrix);
  const int64_t columns = call->matrix->columns;
  spread(call->num_threads, call->num_rows, 1 + 8192 / columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = call->ids[i];
      form.look_up((const uint8_t*)call->matrix->weights + row / matrices::STRIP * form.strip_bytes,
                   columns / matrices::INNER, row % matrices::STRIP, call->matrix->table,
                   (uint16_t*)call->out + i * columns);
    }
  });
  return 0;
}

}  // namespace
}  // namespace diskprefix
