// Products of rows with a packed matrix. A row's result depends on no other row: each number is one sum in a fixed order.

#pragma once

#include <type_traits>

#include "parts.h"

namespace diskprefix {
namespace {

// How far ahead memory is prefetched, to the L2 cache, because L1 is too small.
constexpr int64_t PREFETCH_BYTES = 16384;

// A block of sums in registers: R rows × C vectors of columns. `Terms` multiplies `STEP` inner numbers of a row with the
// same inner numbers of a vector of columns. Vectors of the matrix are `across` elements apart, inner steps `down`. With
// `adds` the sums are added to `out`.
template <class Terms, int R, int C, class Factor, class Number>
inline void block(const Factor* left, int64_t left_stride, const Number* matrix, int64_t across, int64_t down, float* out,
                  int64_t out_stride, int64_t inner, bool adds) {
  Floats sums[R][C] = {};
  for (int row = 0; adds && row < R; ++row)
    for (int column = 0; column < C; ++column) sums[row][column] = loaded<Floats>(out + row * out_stride + column * LANES);
  for (int64_t i = 0; i < inner; i += Terms::STEP, matrix += down) {
    Floats right[C];
    for (int column = 0; column < C; ++column) {
      // A packed matrix is in the cache.
      if (!std::is_same<Number, Factor>::value && LANES * column * sizeof(Number) % 64 == 0)
        __builtin_prefetch((const char*)(matrix + column * across) + PREFETCH_BYTES, 0, 2);
      right[column] = Terms::numbers_of(matrix + column * across);
    }
    for (int row = 0; row < R; ++row) {
      const Floats factor = Terms::each(left + row * left_stride + i);
      for (int column = 0; column < C; ++column) sums[row][column] = Terms::add(sums[row][column], factor, right[column]);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int column = 0; column < C; ++column) store(out + row * out_stride + column * LANES, sums[row][column]);
}

template <class Terms, int R, int C, class Factor, class Number>
inline void block_of(int64_t rows, const Factor* left, int64_t left_stride, const Number* matrix, int64_t across,
                     int64_t down, float* out, int64_t out_stride, int64_t inner, bool adds) {
  if (rows == R)
    block<Terms, R, C>(left, left_stride, matrix, across, down, out, out_stride, inner, adds);
  else if constexpr (R > 1)
    block_of<Terms, R - 1, C>(rows, left, left_stride, matrix, across, down, out, out_stride, inner, adds);
}

// Rows × matrix, in blocks of at most R rows and C vectors.
template <class Terms, int R, int C, class Factor, class Number>
void blocks(const Factor* left, int64_t left_stride, const Number* matrix, int64_t across, int64_t down, float* out,
            int64_t out_stride, int64_t num_rows, int64_t inner, int64_t columns, bool adds) {
  for (int64_t column = 0; column < columns;) {
    const bool is_wide = columns - column >= C * LANES;
    const Number* right = matrix + column / LANES * across;
    for (int64_t row = 0; row < num_rows; row += R) {
      const int64_t rows = least(R, num_rows - row);
      const Factor* a = left + row * left_stride;
      float* c = out + row * out_stride + column;
      if (is_wide)
        block_of<Terms, R, C>(rows, a, left_stride, right, across, down, c, out_stride, inner, adds);
      else
        block_of<Terms, R, 1>(rows, a, left_stride, right, across, down, c, out_stride, inner, adds);
    }
    column += is_wide ? C * LANES : LANES;
  }
}

template <class Terms, int R, int VECTORS, class Factor, class Stored>
inline void vectors_of_tokens(const Factor* rows, int64_t inner, const Stored* tokens, int64_t stride, float* out,
                              int64_t out_stride) {
  // Prefetches the next tokens, or farther ahead if their rows are short.
  const int64_t ahead = most(PREFETCH_BYTES, VECTORS * LANES * stride * (int64_t)sizeof(Stored));
  Floats sums[VECTORS][R] = {};
  for (int64_t i = 0; i < inner; i += Terms::STEP * LANES)
    for (int vector = 0; vector < VECTORS; ++vector) {
      Floats square[LANES];
      for (int64_t token = 0; token < LANES; ++token) {
        const Stored* from = tokens + (vector * LANES + token) * stride + i;
        if (i * sizeof(Stored) % 64 == 0) __builtin_prefetch((const char*)from + ahead, 0, 2);
        square[token] = Terms::numbers_of(from);
      }
      transpose(square);
      for (int64_t column = 0; column < LANES; ++column)
        for (int row = 0; row < R; ++row)
          sums[vector][row] = Terms::add(sums[vector][row], Terms::each(rows + row * inner + i + Terms::STEP * column), square[column]);
    }
  for (int row = 0; row < R; ++row)
    for (int vector = 0; vector < VECTORS; ++vector) store(out + row * out_stride + vector * LANES, sums[vector][row]);
}

// out [rows, tokens] = rows × tokensᵀ, with tokens as they lie in memory, for at most R rows. The bits are those of
// `blocks`.
template <class Terms, int R, class Factor, class Stored>
void rows_by_tokens(const Factor* rows, int64_t num_rows, int64_t inner, const Stored* tokens, int64_t stride,
                    int64_t num_tokens, float* out, int64_t out_stride) {
  if constexpr (R > 1)
    if (num_rows < R) return rows_by_tokens<Terms, R - 1>(rows, num_rows, inner, tokens, stride, num_tokens, out, out_stride);
  // Two vectors at a time are two independent chains of sums.
  for (int64_t token = 0; token < num_tokens; token += 2 * LANES) {
    const Stored* from = tokens + token * stride;
    if (token + LANES < num_tokens) vectors_of_tokens<Terms, R, 2>(rows, inner, from, stride, out + token, out_stride);
    else vectors_of_tokens<Terms, R, 1>(rows, inner, from, stride, out + token, out_stride);
  }
}

// Packs rows of `inner` factors, contiguous.
template <class Factor>
inline void copy_rows(const Factor* rows, int64_t stride, int64_t num_rows, int64_t inner, Factor* to) {
  for (int64_t row = 0; row < num_rows; ++row) memcpy(to + row * inner, rows + row * stride, inner * sizeof(Factor));
}

// Returns whether values of `dim` numbers are multiplied as they lie in memory.
template <class Product>
constexpr bool takes_values(int64_t dim) {
  if constexpr (Product::VALUES > 0) return dim % Product::VALUES == 0;
  return false;
}

// Lives while `multiply` is called for at most this number of rows.
struct NoScope {
  explicit NoScope(int64_t) {}
  ~NoScope() {}
};

// Products in float32, whatever the model's dtype: a number is one chain of multiply-and-add, in the order of the inner
// index.
template <class Type>
struct VectorProduct {
  typedef typename Type::Stored Stored;
  typedef float Factor;
  typedef NoScope Scope;
  static constexpr int INNER = LANES;  // inner sizes and columns are padded to multiples of these
  static constexpr int COLUMNS = LANES;
  static constexpr int WHOLE_ROWS = 1;  // the memory of rows has a multiple of this number of rows
  static constexpr int FEW_ROWS = LANES == 16 ? 8 : 4;  // at most this number use tokens as they lie in memory
  static constexpr int64_t TOKENS = 16;  // lines of values that are read together
  static constexpr int VALUES = LANES;  // values with a multiple of this size are multiplied as they lie in memory; 0: none are
  static constexpr int STEP = 1;

  // Packs a row of `dim` numbers, followed by zeros up to `inner`.
  static void pack_row(const Stored* from, int64_t dim, int64_t inner, float* to) {
    for (int64_t i = 0; i < inner; ++i) to[i] = i < dim ? Type::one(from[i]) : 0.0f;
  }

  static void put_factors(float* to, Floats low, Floats high) {
    store(to, low);
    store(to + LANES, high);
  }

  // Packs [tokens, dim] as a matrix [inner, tokens]. `present` of the `num_tokens` tokens exist; the others become 0.
  template <class Number>
  static void pack_transposed(const Number* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                          int64_t inner, float* to) {
    for (int64_t token = 0; token < num_tokens; token += LANES)
      for (int64_t first = 0; first < inner; first += LANES) {
        Floats square[LANES];
        for (int64_t row = 0; row < LANES; ++row)
          square[row] = part_of(from + (token + row) * stride + first, dim - first, token + row < present);
        transpose(square);
        for (int64_t column = 0; column < LANES; ++column) store(to + (first + column) * num_tokens + token, square[column]);
      }
  }

  // Packs [tokens, dim] as a matrix [tokens, columns].
  template <class Number>
  static void pack_plain(const Number* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                         int64_t columns, float* to) {
    for (int64_t token = 0; token < num_tokens; ++token)
      for (int64_t first = 0; first < columns; first += LANES) {
        const int64_t width = dim - first < LANES ? dim - first : LANES;
        store(to + token * columns + first, part_of(from + token * stride + first, width, token < present));
      }
  }

  template <class Number>
  static Floats part_of(const Number* from, int64_t width, bool is_present) {
    typedef std::conditional_t<std::is_same<Number, float>::value, Float32, Type> Form;
    return is_present && width > 0 ? some_of<Form>(from, width) : Floats{};
  }

  // out [rows, columns] = left [rows, inner] × the first rows and columns of a packed matrix [all_inner, all_columns]. If
  // `begin` is not 0, the products from inner number `begin` on are added to `out`.
  static void multiply(const float* left, int64_t left_stride, const float* matrix, int64_t, int64_t all_columns,
                       float* out, int64_t out_stride, int64_t num_rows, int64_t inner, int64_t columns, int64_t begin = 0) {
    blocks<VectorProduct, 6, LANES == 16 ? 4 : 2>(left + begin, left_stride, matrix + begin * all_columns, LANES, all_columns, out,
                                                  out_stride, num_rows, inner - begin, columns, begin > 0);
  }

  static void transpose_rows(const float* rows, int64_t stride, int64_t num_rows, int64_t inner, float* to) {
    copy_rows(rows, stride, num_rows, inner, to);
  }

  template <class Number>
  static void multiply_tokens(const float* rows, int64_t num_rows, int64_t inner, const Number* tokens, int64_t stride,
                              int64_t num_tokens, float* out, int64_t out_stride) {
    rows_by_tokens<VectorProduct, FEW_ROWS>(rows, num_rows, inner, tokens, stride, num_tokens, out, out_stride);
  }

  // out [rows, columns] = weights [rows, tokens] × values [tokens, columns], with values as they lie in memory, for at most
  // `FEW_ROWS` rows, with `adds` added to `out`. The bits are those of `multiply`.
  template <class Number>
  static void multiply_values(const float* weights, int64_t weights_stride, int64_t num_rows, const Number* values,
                              int64_t stride, int64_t num_tokens, int64_t, float* out, int64_t columns, bool adds) {
    for (int64_t begin = 0; begin < num_tokens; begin += TOKENS) {
      const auto some = num_rows == 1 ? blocks<VectorProduct, 1, LANES, float, Number>
                                      : blocks<VectorProduct, FEW_ROWS, LANES / FEW_ROWS, float, Number>;
      some(weights + begin, weights_stride, values + begin * stride, LANES, stride, out, columns, num_rows,
           least(TOKENS, num_tokens - begin), columns, adds || begin > 0);
    }
  }

  template <class Number>
  static Floats numbers_of(const Number* from) {
    if constexpr (std::is_same<Number, float>::value) return loaded<Floats>(from);
    else return Type::load(from);
  }
  static Floats each(const float* left) { return all(*left); }
  static Floats add(Floats sum, Floats left, Floats right) { return fma(left, right, sum); }
};

#if defined(__AMX_BF16__)

// Factors in bfloat16. A packed matrix consists of panels, one for each vector of columns; a panel has the columns' pairs of
// consecutive inner numbers.
struct Pairs {
  typedef uint16_t Stored;
  typedef uint16_t Factor;
  static constexpr int INNER = 2 * LANES;
  static constexpr int COLUMNS = LANES;

  static void pack_row(const uint16_t* from, int64_t dim, int64_t inner, uint16_t* to) {
    for (int64_t i = 0; i < inner; ++i) to[i] = i < dim ? from[i] : 0;
  }

  static void put_factors(uint16_t* to, Floats low, Floats high) {
    store(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }

  static void pack_transposed(const uint16_t* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                          int64_t inner, uint16_t* to) {
    for (int64_t token = 0; token < num_tokens; token += LANES)
      for (int64_t first = 0; first < inner; first += INNER, to += LANES * INNER) {
        Floats square[LANES];
        const Width some = width_of(dim - first);
        for (int64_t row = 0; row < LANES; ++row)
          square[row] = numbers_at(from + (token + row) * stride + first, token + row < present ? some : 0);
        transpose(square);
        for (int64_t pair = 0; pair < LANES; ++pair) store(to + pair * INNER, square[pair]);
      }
  }

  static void pack_plain(const uint16_t* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                         int64_t columns, uint16_t* to) {
    // Token by token: memory is read fastest in its order, one line at a time.
    const Pairing pairing;
    for (int64_t token = 0; token < num_tokens; token += 2) {
      const uint16_t *even = from + token * stride, *odd = even + stride;
      for (int64_t first = 0; first < columns; first += INNER) {
        __builtin_prefetch((const char*)(even + first) + PREFETCH_BYTES, 0, 2);
        __builtin_prefetch((const char*)(odd + first) + PREFETCH_BYTES, 0, 2);
        const Width some = width_of(dim - first);
        Floats low, high;
        pairing.of(numbers_at(even + first, token < present ? some : 0), numbers_at(odd + first, token + 1 < present ? some : 0),
                   low, high);
        store(to + first * num_tokens + token * LANES, low);
        if (first + LANES < columns) store(to + (first + LANES) * num_tokens + token * LANES, high);
      }
    }
  }

  // A mask of the numbers of a vector that exist.
  typedef __mmask32 Width;

  static Width width_of(int64_t width) { return width >= INNER ? ~0u : (1u << width) - 1; }

  static Floats numbers_at(const uint16_t* from, Width width) { return (Floats)_mm512_maskz_loadu_epi16(width, from); }

  // Interleaves two vectors to pairs.
  struct Pairing {
    __m512i low, high;
    Pairing() {
      alignas(64) uint16_t numbers[2][32];
      for (int i = 0; i < 32; ++i) numbers[0][i] = i / 2 + i % 2 * 32, numbers[1][i] = i / 2 + i % 2 * 32 + 16;
      low = loaded<__m512i>(numbers[0]), high = loaded<__m512i>(numbers[1]);
    }
    void of(Floats first, Floats second, Floats& lower, Floats& higher) const {
      lower = (Floats)_mm512_permutex2var_epi16((__m512i)first, low, (__m512i)second);
      higher = (Floats)_mm512_permutex2var_epi16((__m512i)first, high, (__m512i)second);
    }
  };
};

// Configures the tiles of AMX, and releases them at the end of the scope, because another library may use them after us.
// Tiles 0 to 3 hold sums, 4 and 5 left factors, 6 and 7 right factors. `first` is the number of rows of tiles 0, 1 and 4,
// `second` that of tiles 2, 3 and 5; `columns` is the number of columns of right factors and sums.
struct TileScope {
  TileScope(int64_t first, int64_t second, int64_t columns) {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } tiles;
    for (int tile = 0; tile < 8; ++tile) {
      tiles.row_bytes[tile] = tile == 4 || tile == 5 ? 64 : 4 * columns;
      tiles.rows[tile] = tile > 5 ? 16 : tile == 2 || tile == 3 || tile == 5 ? second : first;
    }
    written();
    _tile_loadconfig(&tiles);
  }
  ~TileScope() { _tile_release(); }
};

// Sums of ROWS × COLUMNS tiles.
template <int ROWS, int COLUMNS>
struct TileSums {
  static void clear() {
    _tile_zero(0);
    if (COLUMNS == 2) _tile_zero(1);
    if (ROWS == 2) _tile_zero(2);
    if (ROWS == 2 && COLUMNS == 2) _tile_zero(3);
  }

  // Loads the sums that `put` stored.
  static void load(const float* from, int64_t across, int64_t down, int64_t stride) {
    written();
    _tile_loadd(0, from, stride);
    if (COLUMNS == 2) _tile_loadd(1, from + across, stride);
    if (ROWS == 2) _tile_loadd(2, from + down, stride);
    if (ROWS == 2 && COLUMNS == 2) _tile_loadd(3, from + down + across, stride);
  }

  // Adds the products of `blocks` blocks of 32 inner numbers. Rows of factors are `stride` and `right_stride` bytes apart,
  // blocks `step` and `right_step`.
  static void add(const void* left, const void* left2, int64_t stride, int64_t step, const void* right, const void* right2,
                  int64_t right_stride, int64_t right_step, int64_t blocks) {
    written();
    for (int64_t block = 0; block < blocks; ++block) {
      _tile_loadd(6, (const char*)right + block * right_step, right_stride);
      _tile_loadd(4, (const char*)left + block * step, stride);
      _tile_dpbf16ps(0, 4, 6);
      if (ROWS == 2) {
        _tile_loadd(5, (const char*)left2 + block * step, stride);
        _tile_dpbf16ps(2, 5, 6);
      }
      if (COLUMNS == 2) {
        _tile_loadd(7, (const char*)right2 + block * right_step, right_stride);
        _tile_dpbf16ps(1, 4, 7);
        if (ROWS == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  // Stores the tiles `across` and `down` numbers apart. Their rows are `stride` bytes apart.
  static void put(float* to, int64_t across, int64_t down, int64_t stride) {
    _tile_stored(0, to, stride);
    if (COLUMNS == 2) _tile_stored(1, to + across, stride);
    if (ROWS == 2) _tile_stored(2, to + down, stride);
    if (ROWS == 2 && COLUMNS == 2) _tile_stored(3, to + down + across, stride);
  }
};

// Products of bfloat16 by tiles of 16 rows and 32 inner numbers.
struct TileProduct : Pairs {
  static constexpr int WHOLE_ROWS = 16;
  static constexpr int FEW_ROWS = 16;  // at most this number may use tokens as they lie in memory
  static constexpr int VALUES = 0;

  struct Scope : TileScope {
    explicit Scope(int64_t num_rows) : TileScope(least(num_rows, 16), 16, 16) {}
  };

  // The memory of `left` and `out` has whole tiles of rows.
  static void multiply(const uint16_t* left, int64_t left_stride, const uint16_t* matrix, int64_t all_inner, int64_t,
                       float* out, int64_t out_stride, int64_t num_rows, int64_t inner, int64_t columns, int64_t begin = 0) {
    const int64_t panel = all_inner * 16;
    for (int64_t column = 0; column < columns; column += 32)
      for (int64_t row = 0; row < num_rows; row += 32) {
        const bool is_tall = row + 16 < num_rows, is_wide = column + 16 < columns;
        const auto multiply_some = is_tall ? (is_wide ? tiles<2, 2> : tiles<2, 1>) : (is_wide ? tiles<1, 2> : tiles<1, 1>);
        multiply_some(left + row * left_stride + begin, left_stride, matrix + column / 16 * panel + begin * 16, panel,
            out + row * out_stride + column, out_stride, inner - begin, begin > 0);
      }
  }

  template <int ROWS, int COLUMNS>
  static void tiles(const uint16_t* left, int64_t left_stride, const uint16_t* right, int64_t panel, float* out,
                    int64_t out_stride, int64_t inner, bool adds) {
    typedef TileSums<ROWS, COLUMNS> Sums;
    if (adds) Sums::load(out, 16, 16 * out_stride, out_stride * 4);
    else Sums::clear();
    Sums::add(left, left + 16 * left_stride, left_stride * 2, 64, right, right + panel, 64, 1024, inner / 32);
    Sums::put(out, 16, 16 * out_stride, out_stride * 4);
  }

  // Packs at most 16 rows, [rows, inner], as right factors: pairs of inner numbers, each with all rows.
  static void transpose_rows(const uint16_t* rows, int64_t stride, int64_t num_rows, int64_t inner, uint16_t* to) {
    for (int64_t first = 0; first < inner; first += 32, to += 512) {
      Floats square[16] = {};
      for (int64_t row = 0; row < num_rows; ++row) square[row] = loaded<Floats>(rows + row * stride + first);
      transpose(square);
      for (int64_t pair = 0; pair < 16; ++pair) store(to + pair * 32, square[pair]);
    }
  }

  // out [rows, tokens] = rows × tokensᵀ, for 32 tokens at a time as they lie in memory, and at most 16 rows in the form that
  // `transpose_rows` writes. The bits are those of `multiply`.
  static void multiply_tokens(const uint16_t* transposed, int64_t num_rows, int64_t inner, const uint16_t* tokens,
                              int64_t stride, int64_t num_tokens, float* out, int64_t out_stride) {
    alignas(64) Floats sums[2][16];
    written();
    for (int64_t token = 0; token < num_tokens; token += 32, tokens += 32 * stride) {
      _tile_zero(2); _tile_zero(3);
      for (int64_t i = 0; i < inner; i += 32) {
        for (int64_t row = 0; row < 32; ++row)
          _mm_prefetch((const char*)(tokens + row * stride + i) + 8192, _MM_HINT_T0);
        _tile_loadd(5, transposed + i * 16, 64);
        _tile_loadd(6, tokens + i, stride * 2);
        _tile_dpbf16ps(2, 6, 5);
        _tile_loadd(7, tokens + 16 * stride + i, stride * 2);
        _tile_dpbf16ps(3, 7, 5);
      }
      _tile_stored(2, sums[0], 64);
      _tile_stored(3, sums[1], 64);
      for (int half = 0; half < 2; ++half) {
        transpose(sums[half]);
        for (int64_t row = 0; row < num_rows; ++row) store(out + row * out_stride + token + 16 * half, sums[half][row]);
      }
    }
  }
};

#endif

#if defined(__AMX_BF16__)
typedef TileProduct ProductOfBFloat16;
#else
typedef VectorProduct<BFloat16> ProductOfBFloat16;
#endif

}  // namespace
}  // namespace diskprefix
