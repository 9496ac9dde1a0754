// Products of rows with a matrix of 4 or 8 bits. A row's result depends on no other row: each number is one sum in a fixed
// order, whatever the number of rows and of threads.
//
// A weight is code × scale + zero, rounded to bfloat16. `model/quants.py` describes how the matrix lies in memory: strips
// of 16 rows of the matrix, which are 16 columns of the result, in each one block after the other, of 32 columns of the
// matrix. A block is dequantised into 16 pairs of columns; 16 rows of two bfloat16 side by side are what a tile of AMX
// takes. For few rows it is multiplied at once, for many a whole strip is dequantised first.

#pragma once

#include <cstdlib>

#include "interface.h"
#include "vector.h"

namespace diskprefix {
namespace {
namespace quantised {

constexpr int64_t STRIP = 16;
constexpr int64_t INNER = 32;

typedef float Sixteen __attribute__((vector_size(64)));
typedef uint32_t SixteenWords __attribute__((vector_size(64)));
typedef int32_t SixteenInts __attribute__((vector_size(64)));
typedef int8_t SixteenBytes __attribute__((vector_size(16)));
typedef uint16_t SixteenHalves __attribute__((vector_size(32)));
typedef int64_t EightLongs __attribute__((vector_size(64)));

// Memory of a thread, which grows and stays.
struct Room {
  void* memory = nullptr;
  size_t size = 0;
  ~Room() { free(memory); }
  void* of(size_t bytes) {
    if (bytes > size) {
      free(memory);
      size = 0;
      if (posix_memalign(&memory, 64, bytes)) return memory = nullptr;
      size = bytes;
    }
    return memory;
  }
};

template <class Stored>
struct Scales;

template <>
struct Scales<float> {
  static Sixteen load(const uint8_t* from) { return loaded<Sixteen>(from); }
};

template <>
struct Scales<uint16_t> {
  static Sixteen load(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Sixteen)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    Sixteen numbers;
    for (int64_t first = 0; first < 16; first += LANES) {
      const Floats part = Float16::load((const uint16_t*)from + first);
      memcpy((char*)&numbers + first * 4, &part, sizeof part);
    }
    return numbers;
#endif
  }
};

// How a block becomes the factors of `Multiply`.
struct Form {
  void (*dequantise)(const uint8_t* block, uint8_t* to);
  int64_t bytes;
};

#define LOW_PAIRS 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7
#define HIGH_PAIRS 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15

inline SixteenHalves to_bfloat16(Sixteen numbers) {
  const SixteenWords bits = (SixteenWords)numbers;
  const SixteenWords rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const SixteenWords is_number = (SixteenWords)(numbers == numbers);
  return __builtin_convertvector((SixteenWords)((is_number & rounded) | (~is_number & 0x7fc0)), SixteenHalves);
}

inline void put_row(const QuantisedProduct& call, Sixteen sums, int64_t row, int64_t column) {
  if (call.bias) sums += loaded<Sixteen>(call.bias + column);
  store((uint16_t*)call.out + row * call.matrix_rows + column, to_bfloat16(sums));
}

inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AMX_BF16__)

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
struct Tiles {
  typedef uint16_t Row;                        // 32 columns of 16 rows behind each other, from 17 rows on
  static constexpr int64_t FEW_ROWS = 16;      // are multiplied block by block
  static constexpr int64_t BLOCK_BYTES = 1024; // of weights
  static constexpr int64_t AT_ONCE = 8;        // blocks, if there are few rows: a tile is not read right after its store

  struct Scope {
    explicit Scope(int64_t num_rows) {
      struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
      } tiles;
      for (int tile = 0; tile < 8; ++tile) {
        tiles.row_bytes[tile] = 64;
        tiles.rows[tile] = tile < 6 ? least_of(num_rows, 16) : 16;
      }
      _tile_loadconfig(&tiles);
    }
    ~Scope() { _tile_release(); }
  };

  static int64_t row_room(int64_t num_rows, int64_t columns) {
    return num_rows <= FEW_ROWS ? 0 : up_to(num_rows, 16) * columns * 2;
  }

  static void pack_row(const uint16_t* from, int64_t row, int64_t columns, void* rows) {
    uint16_t* to = (uint16_t*)rows + (row / 16) * 16 * columns + (row % 16) * INNER;
    for (int64_t column = 0; column < columns; column += INNER, to += 16 * INNER)
      store(to, loaded<__m512i>(from + column));
  }

  static void put(uint8_t* to, int pair, Sixteen low, Sixteen high) {
    store(to + 64 * pair, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }

  template <int ROWS, int STRIPS>
  static void add(const void* a, const void* a_next, int64_t stride, int64_t step, const uint8_t* weights,
                  const uint8_t* next, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block) {
      _tile_loadd(6, weights + block * BLOCK_BYTES, 64);
      _tile_loadd(4, (const uint8_t*)a + block * step, stride);
      _tile_dpbf16ps(0, 4, 6);
      if (ROWS == 2) {
        _tile_loadd(5, (const uint8_t*)a_next + block * step, stride);
        _tile_dpbf16ps(2, 5, 6);
      }
      if (STRIPS == 2) {
        _tile_loadd(7, next + block * BLOCK_BYTES, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (ROWS == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  template <int ROWS, int STRIPS>
  static void clear() {
    _tile_zero(0);
    if (STRIPS == 2) _tile_zero(1);
    if (ROWS == 2) _tile_zero(2);
    if (ROWS == 2 && STRIPS == 2) _tile_zero(3);
  }

  template <int ROWS, int STRIPS>
  static void finish(const QuantisedProduct& call, int64_t row, int64_t column) {
    alignas(64) float sums[4][256];
    _tile_stored(0, sums[0], 64);
    if (STRIPS == 2) _tile_stored(1, sums[1], 64);
    if (ROWS == 2) _tile_stored(2, sums[2], 64);
    if (ROWS == 2 && STRIPS == 2) _tile_stored(3, sums[3], 64);
    for (int tile = 0; tile < ROWS; ++tile)
      for (int strip = 0; strip < STRIPS; ++strip)
        for (int64_t i = 0; i < least_of(16, call.num_rows - row - 16 * tile); ++i)
          put_row(call, loaded<Sixteen>(sums[2 * tile + strip] + 16 * i), row + 16 * tile + i, column + STRIP * strip);
  }

  template <int STRIPS>
  static void few(const QuantisedProduct& call, const Form& form, const uint8_t*, int64_t strip, uint8_t* weights) {
    const int64_t blocks = call.matrix_columns / INNER;
    const uint8_t* packed = call.packed + strip * blocks * form.bytes;
    clear<1, STRIPS>();
    for (int64_t first = 0; first < blocks; first += AT_ONCE) {
      const int64_t count = least_of(AT_ONCE, blocks - first);
      for (int half = 0; half < STRIPS; ++half)
        for (int64_t block = 0; block < count; ++block) {
          uint8_t* to = weights + (half * AT_ONCE + block) * BLOCK_BYTES;
          form.dequantise(packed + (half * blocks + first + block) * form.bytes, to);
        }
      const uint16_t* rows = (const uint16_t*)call.rows + first * INNER;
      add<1, STRIPS>(rows, nullptr, call.matrix_columns * 2, INNER * 2, weights, weights + AT_ONCE * BLOCK_BYTES, count);
    }
    finish<1, STRIPS>(call, 0, strip * STRIP);
  }

  template <int STRIPS>
  static void many(const QuantisedProduct& call, const uint8_t* rows, int64_t row, int64_t strip, const uint8_t* weights) {
    const int64_t blocks = call.matrix_columns / INNER, of_tile = blocks * 1024;
    const uint8_t *a = rows + row / 16 * of_tile, *next = weights + blocks * BLOCK_BYTES;
    if (row + 16 < call.num_rows) {
      clear<2, STRIPS>();
      add<2, STRIPS>(a, a + of_tile, 64, 1024, weights, next, blocks);
      finish<2, STRIPS>(call, row, strip * STRIP);
    } else {
      clear<1, STRIPS>();
      add<1, STRIPS>(a, nullptr, 64, 1024, weights, next, blocks);
      finish<1, STRIPS>(call, row, strip * STRIP);
    }
  }
};
typedef Tiles Multiply;

#else

// In float32. The factors are bfloat16, so their products are exact, and it does not matter whether they are fused with
// the addition. Even and odd columns are summed apart, and added up at the end.
struct Multiply {
  static constexpr int64_t FEW_ROWS = 4;
  static constexpr int64_t BLOCK_BYTES = 2048;
  static constexpr int64_t AT_ONCE = 1;

  struct Scope {
    explicit Scope(int64_t) {}
    ~Scope() {}
  };

  static int64_t row_room(int64_t num_rows, int64_t columns) { return num_rows * columns * 4; }

  static void pack_row(const uint16_t* from, int64_t row, int64_t columns, void* rows) {
    float* to = (float*)rows + row * columns;
    for (int64_t column = 0; column < columns; ++column) to[column] = BFloat16::one(from[column]);
  }

  static void put(uint8_t* to, int pair, Sixteen low, Sixteen high) {
    store(to + 128 * pair, rounded(low));
    store(to + 128 * pair + 64, rounded(high));
  }

  static Sixteen rounded(Sixteen numbers) {
    const SixteenWords bits = (SixteenWords)numbers;
    return (Sixteen)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
  }

  template <int ROWS>
  static void add(const float* rows, int64_t stride, const uint8_t* weights, int64_t blocks, Sixteen (*sums)[2]) {
    Sixteen kept[ROWS][2];
    for (int row = 0; row < ROWS; ++row) kept[row][0] = sums[row][0], kept[row][1] = sums[row][1];
    for (int64_t pair = 0; pair < 16 * blocks; ++pair) {
      const Sixteen low = loaded<Sixteen>(weights + 128 * pair), high = loaded<Sixteen>(weights + 128 * pair + 64);
      for (int row = 0; row < ROWS; ++row) {
        int64_t two;
        memcpy(&two, rows + row * stride + 2 * pair, 8);
        const Sixteen factors = (Sixteen)(two - EightLongs{});
        kept[row][0] += factors * low;
        kept[row][1] += factors * high;
      }
    }
    for (int row = 0; row < ROWS; ++row) sums[row][0] = kept[row][0], sums[row][1] = kept[row][1];
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

  static void finish(const QuantisedProduct& call, int64_t row, int64_t count, int64_t strip, Sixteen (*sums)[2]) {
    for (int64_t i = 0; i < count; ++i) {
      const Sixteen even = __builtin_shufflevector(sums[i][0], sums[i][1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const Sixteen odd = __builtin_shufflevector(sums[i][0], sums[i][1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
      put_row(call, even + odd, row + i, strip * STRIP);
    }
  }

  template <int STRIPS>
  static void few(const QuantisedProduct& call, const Form& form, const uint8_t* rows, int64_t strip, uint8_t* weights) {
    const int64_t blocks = call.matrix_columns / INNER;
    for (int half = 0; half < STRIPS; ++half) {
      const uint8_t* packed = call.packed + (strip + half) * blocks * form.bytes;
      Sixteen sums[FEW_ROWS][2] = {};
      for (int64_t block = 0; block < blocks; ++block) {
        form.dequantise(packed + block * form.bytes, weights);
        add(call.num_rows, (const float*)rows + block * INNER, call.matrix_columns, weights, 1, sums);
      }
      finish(call, 0, call.num_rows, strip + half, sums);
    }
  }

  template <int STRIPS>
  static void many(const QuantisedProduct& call, const uint8_t* rows, int64_t first, int64_t strip, const uint8_t* weights) {
    const int64_t blocks = call.matrix_columns / INNER;
    for (int half = 0; half < STRIPS; ++half)
      for (int64_t row = first; row < least_of(first + 32, call.num_rows); row += FEW_ROWS) {
        const int64_t count = least_of(FEW_ROWS, call.num_rows - row);
        Sixteen sums[FEW_ROWS][2] = {};
        add(count, (const float*)rows + row * call.matrix_columns, call.matrix_columns, weights + half * blocks * BLOCK_BYTES, blocks, sums);
        finish(call, row, count, strip + half, sums);
      }
  }
};

#endif

// A form of blocks. Of each of the 16 pairs of columns it makes two vectors: the weights of rows 0 to 7 of the strip and of
// rows 8 to 15, those of a pair side by side.
template <int BITS, int GROUP, bool HAS_ZEROS, class Stored>
struct Block {
  static constexpr int64_t CODES = STRIP * INNER * BITS / 8;
  static constexpr int GROUPS = INNER / GROUP;
  static constexpr int64_t NUMBERS = GROUPS * STRIP * sizeof(Stored);
  static constexpr int64_t BYTES = CODES + NUMBERS * (HAS_ZEROS ? 2 : 1);

  static void dequantise(const uint8_t* block, uint8_t* to) {
    Sixteen scales[GROUPS][2], zeros[GROUPS][2];
    for (int group = 0; group < GROUPS; ++group) {
      const uint8_t* at = block + CODES + group * STRIP * sizeof(Stored);
      spread(Scales<Stored>::load(at), scales[group]);
      if (HAS_ZEROS) spread(Scales<Stored>::load(at + NUMBERS), zeros[group]);
    }
#if defined(__AVX512F__)
#pragma GCC unroll 16
#endif
    for (int pair = 0; pair < 16; ++pair) {
      const int group = GROUPS == 1 ? 0 : pair / 8;
      Sixteen parts[2];
      for (int half = 0; half < 2; ++half) {
        parts[half] = codes(block, pair, half) * scales[group][half];
        if (HAS_ZEROS) parts[half] = fused(codes(block, pair, half), scales[group][half], zeros[group][half]);
      }
      Multiply::put(to, pair, parts[0], parts[1]);
    }
  }

  static inline __attribute__((always_inline)) void spread(Sixteen numbers, Sixteen* halves) {
    halves[0] = __builtin_shufflevector(numbers, numbers, LOW_PAIRS);
    halves[1] = __builtin_shufflevector(numbers, numbers, HIGH_PAIRS);
  }

  static inline __attribute__((always_inline)) Sixteen codes(const uint8_t* block, int pair, int half) {
    if constexpr (BITS == 4) {
      const SixteenWords words = loaded<SixteenWords>(block + 128 * (pair / 8) + 64 * half) >> (4 * (pair % 8));
#if defined(__AVX512F__)
      // Looked up by the last four bits, which is faster than converting them.
      const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
      return (Sixteen)_mm512_permutexvar_ps((__m512i)words, numbers);
#else
      return __builtin_convertvector((SixteenWords)(words & 15), Sixteen);
#endif
    } else {
      const uint8_t* at = block + 32 * pair + 16 * half;
#if defined(__AVX512F__)
      return (Sixteen)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#else
      return __builtin_convertvector(__builtin_convertvector(loaded<SixteenBytes>(at), SixteenInts), Sixteen);
#endif
    }
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

// Of dequantised strips, for many rows: as much as stays in the cache of a core while all rows go by.
constexpr int64_t PANEL_BYTES = 512 * 1024;

class Product {
 public:
  Product(const QuantisedProduct& call, const Form& form)
      : call_(call), form_(form), blocks_(call.matrix_columns / INNER), strips_(call.matrix_rows / STRIP) {}

  bool run() {
    if (!call_.num_rows) return true;
    static thread_local Room room;
    const int64_t needed = Multiply::row_room(call_.num_rows, call_.matrix_columns);
    rows_ = needed ? (uint8_t*)room.of(needed) : nullptr;
    if (needed && !rows_) return false;
    const int64_t pairs = (strips_ + 1) / 2;
    if (needed && !spread(call_.num_rows, 16, &Product::pack)) return false;
    return spread(pairs, least_of(pairs, 4), &Product::multiply) && !failed_;
  }

 private:
  const QuantisedProduct& call_;
  const Form form_;
  const int64_t blocks_, strips_;
  uint8_t* rows_ = nullptr;
  volatile bool failed_ = false;
  void (Product::*work_)(int64_t, int64_t) = nullptr;

  bool spread(int64_t count, int64_t grain, void (Product::*work)(int64_t, int64_t)) {
    work_ = work;
    if (call_.num_threads == 1 || count <= grain) {
      (this->*work)(0, count);
      return true;
    }
    const Work call = [](int64_t begin, int64_t end, void* self) {
      Product* product = (Product*)self;
      (product->*product->work_)(begin, end);
    };
    return !call_.parallel_for(0, count, grain, call, this);
  }

  void pack(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      Multiply::pack_row((const uint16_t*)call_.rows + row * call_.matrix_columns, row, call_.matrix_columns, rows_);
  }

  // Of the strips 2 × begin to 2 × end.
  void multiply(int64_t begin, int64_t end) {
    static thread_local Room room;
    const bool is_few = call_.num_rows <= Multiply::FEW_ROWS;
    const int64_t of_pair = 2 * (is_few ? Multiply::AT_ONCE : blocks_) * Multiply::BLOCK_BYTES;
    const int64_t fit = PANEL_BYTES / of_pair, at_once = is_few || fit < 1 ? 1 : fit;
    uint8_t* weights = (uint8_t*)room.of(least_of(at_once, end - begin) * of_pair);
    if (!weights) {
      failed_ = true;
      return;
    }
    Multiply::Scope scope(is_few ? call_.num_rows : 16);
    for (int64_t pair = begin; pair < end; pair += at_once) {
      const int64_t strip = 2 * pair, last = least_of(2 * least_of(pair + at_once, end), strips_);
      if (is_few) few(strip, last, weights);
      else many(strip, last, weights);
    }
  }

  void few(int64_t strip, int64_t last, uint8_t* weights) {
    if (last - strip == 2) Multiply::few<2>(call_, form_, rows_, strip, weights);
    else Multiply::few<1>(call_, form_, rows_, strip, weights);
  }

  void many(int64_t first, int64_t last, uint8_t* weights) {
    for (int64_t block = 0; block < (last - first) * blocks_; ++block) {
      uint8_t* to = weights + block * Multiply::BLOCK_BYTES;
      form_.dequantise(call_.packed + (first * blocks_ + block) * form_.bytes, to);
    }
    for (int64_t row = 0; row < call_.num_rows; row += 32)
      for (int64_t strip = first; strip < last; strip += 2) {
        const uint8_t* of_strip = weights + (strip - first) * blocks_ * Multiply::BLOCK_BYTES;
        if (strip + 1 < last) Multiply::many<2>(call_, rows_, row, strip, of_strip);
        else Multiply::many<1>(call_, rows_, row, strip, of_strip);
      }
  }
};

template <int BITS, int GROUP, bool HAS_ZEROS>
Form form_of(int64_t scale_type) {
  typedef Block<BITS, GROUP, HAS_ZEROS, uint16_t> Small;
  typedef Block<BITS, GROUP, HAS_ZEROS, float> Large;
  return scale_type == FLOAT16 ? Form{Small::dequantise, Small::BYTES} : Form{Large::dequantise, Large::BYTES};
}

Form form_of(const QuantisedProduct& call) {
  if (call.bits == 4) return form_of<4, 32, true>(call.scale_type);
  if (call.group == 16) return form_of<8, 16, false>(call.scale_type);
  return call.has_zeros ? form_of<8, 32, true>(call.scale_type) : form_of<8, 32, false>(call.scale_type);
}

}  // namespace quantised

int32_t quantised_product(const QuantisedProduct* call) {
  return !quantised::Product(*call, quantised::form_of(*call)).run();
}

}  // namespace
}  // namespace diskprefix
