// Products of rows with a packed matrix. A row's result depends on no other row: each number is one sum in a fixed order.

#pragma once

#include "vector.h"

namespace diskprefix {
namespace {

// In float32, whatever the type of the model: a number is one chain of multiply-and-add, in the order of the inner index.
template <class Type>
struct VectorProduct {
  typedef typename Type::Stored Stored;
  typedef float Factor;
  static constexpr int ROWS = 1;   // rows, inner sizes and columns are padded to multiples of these
  static constexpr int INNER = 1;
  static constexpr int COLUMNS = LANES;
  static constexpr int FEW_ROWS = 0;
  static constexpr int MOST_ROWS = 6;
  static constexpr int MOST_VECTORS = LANES == 16 ? 4 : 2;

  // Exists while `multiply` is called for `num_rows` rows or less.
  struct Scope {
    explicit Scope(int64_t) {}
    ~Scope() {}
  };

  // Rows of `dim` numbers, the rest up to `inner` is 0.
  static void pack_row(const Stored* from, int64_t dim, int64_t inner, float* to) {
    for (int64_t i = 0; i < inner; ++i) to[i] = i < dim ? Type::one(from[i]) : 0.0f;
  }

  static void put_factors(float* to, Floats low, Floats high) {
    store(to, low);
    store(to + LANES, high);
  }

  // [tokens, dim] as a matrix [dim, tokens]. Of `num_tokens` tokens `present` are there, the others are 0.
  static void pack_turned(const Stored* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim, int64_t,
                          float* to) {
    for (int64_t token = 0; token < num_tokens; token += LANES)
      for (int64_t first = 0; first < dim; first += LANES) {
        Floats square[LANES];
        const int64_t width = dim - first < LANES ? dim - first : LANES;
        for (int64_t row = 0; row < LANES; ++row) square[row] = part_of(from + (token + row) * stride + first, width, token + row < present);
        transpose(square);
        for (int64_t column = 0; column < width; ++column) store(to + (first + column) * num_tokens + token, square[column]);
      }
  }

  // [tokens, dim] as a matrix [tokens, columns].
  static void pack_plain(const Stored* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                         int64_t columns, float* to) {
    for (int64_t token = 0; token < num_tokens; ++token)
      for (int64_t first = 0; first < columns; first += LANES) {
        const int64_t width = dim - first < LANES ? dim - first : LANES;
        store(to + token * columns + first, part_of(from + token * stride + first, width, token < present));
      }
  }

  static Floats part_of(const Stored* from, int64_t width, bool is_present) {
    if (!is_present) return Floats{};
    if (width >= LANES) return Type::load(from);
    Stored padded[LANES] = {};
    for (int64_t i = 0; i < width; ++i) padded[i] = from[i];
    return Type::load(padded);
  }

  // out [rows, columns] = left [rows, inner] × the first rows and columns of a packed matrix [all_inner, all_columns].
  static void multiply(const float* left, int64_t left_stride, const float* matrix, int64_t, int64_t all_columns,
                       float* out, int64_t out_stride, int64_t num_rows, int64_t inner, int64_t columns) {
    for (int64_t column = 0; column < columns;) {
      const bool is_wide = columns - column >= MOST_VECTORS * LANES;
      for (int64_t row = 0; row < num_rows; row += MOST_ROWS) {
        const int64_t rows = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        const float* a = left + row * left_stride;
        float* c = out + row * out_stride + column;
        if (is_wide)
          rows_of<MOST_ROWS, MOST_VECTORS>(rows, a, left_stride, matrix + column, all_columns, c, out_stride, inner);
        else
          rows_of<MOST_ROWS, 1>(rows, a, left_stride, matrix + column, all_columns, c, out_stride, inner);
      }
      column += is_wide ? MOST_VECTORS * LANES : LANES;
    }
  }

  template <int MOST, int VECTORS>
  static void rows_of(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                      int64_t c_stride, int64_t inner) {
    if (rows == MOST)
      block<MOST, VECTORS>(a, a_stride, b, b_stride, c, c_stride, inner);
    else if constexpr (MOST > 1)
      rows_of<MOST - 1, VECTORS>(rows, a, a_stride, b, b_stride, c, c_stride, inner);
  }

  template <int R, int C>
  static void block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                    int64_t inner) {
    Floats sums[R][C] = {};
    for (int64_t i = 0; i < inner; ++i) {
      Floats right[C];
      for (int column = 0; column < C; ++column) right[column] = loaded<Floats>(b + i * b_stride + column * LANES);
      for (int row = 0; row < R; ++row) {
        const Floats left = all(a[row * a_stride + i]);
        for (int column = 0; column < C; ++column) sums[row][column] = fma(left, right[column], sums[row][column]);
      }
    }
    for (int row = 0; row < R; ++row)
      for (int column = 0; column < C; ++column) store(c + row * c_stride + column * LANES, sums[row][column]);
  }
};

#if defined(__AMX_BF16__)

// Products of bfloat16 by tiles of 16 rows and 32 inner numbers. The matrix lies in panels of 16 columns, in each the
// pairs of inner numbers that belong together.
struct TileProduct {
  typedef uint16_t Stored;
  typedef uint16_t Factor;
  static constexpr int ROWS = 16;
  static constexpr int INNER = 32;
  static constexpr int COLUMNS = 16;
  static constexpr int64_t AHEAD = 4096;  // bytes: how far before its use memory is fetched, and twice as far for keys
  static constexpr int FEW_ROWS = 16;  // or fewer may be multiplied with tokens as they lie in memory

  // Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 the matrix. Another library may use them after us.
  struct Scope {
    explicit Scope(int64_t num_rows) {
      struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
      } tiles;
      for (int tile = 0; tile < 8; ++tile) {
        tiles.row_bytes[tile] = 64;
        const bool is_of_rows = tile == 0 || tile == 1 || tile == 4;
        tiles.rows[tile] = is_of_rows && num_rows < 16 ? num_rows : 16;
      }
      written();
      _tile_loadconfig(&tiles);
    }
    ~Scope() { _tile_release(); }
  };

  static void pack_row(const uint16_t* from, int64_t dim, int64_t inner, uint16_t* to) {
    for (int64_t i = 0; i < inner; ++i) to[i] = i < dim ? from[i] : 0;
  }

  static void put_factors(uint16_t* to, Floats low, Floats high) {
    store(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }

  static void pack_turned(const uint16_t* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                          int64_t inner, uint16_t* to) {
    for (int64_t token = 0; token < num_tokens; token += 16)
      for (int64_t first = 0; first < inner; first += 32, to += 512) {
        Floats square[16];
        const int64_t width = dim - first;
        const __mmask32 some = width >= 32 ? ~0u : (1u << width) - 1;
        for (int64_t row = 0; row < 16; ++row) {
          const __mmask32 mask = token + row < present ? some : 0;
          square[row] = (Floats)_mm512_maskz_loadu_epi16(mask, from + (token + row) * stride + first);
        }
        transpose(square);
        for (int64_t pair = 0; pair < 16; ++pair) store(to + pair * 32, square[pair]);
      }
  }

  static void pack_plain(const uint16_t* from, int64_t stride, int64_t present, int64_t num_tokens, int64_t dim,
                         int64_t columns, uint16_t* to) {
    // Token by token, as memory is read fastest in its order, one line of it at a time.
    for (int64_t token = 0; token < num_tokens; token += 2) {
      const uint16_t *even = from + token * stride, *odd = even + stride;
      const bool are_whole = token + 1 < present && dim == columns;
      for (int64_t first = 0; first < columns; first += 16) {
        _mm_prefetch((const char*)even + AHEAD + 4 * first, _MM_HINT_T0);
        const __mmask16 some = dim - first >= 16 ? 0xffff : (1u << (dim - first)) - 1;
        const __m512i low = words_of(even + first, are_whole ? 0xffff : token < present ? some : 0);
        const __m512i high = words_of(odd + first, are_whole ? 0xffff : token + 1 < present ? some : 0);
        store(to + first * num_tokens + token * 16, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }

  static __m512i words_of(const uint16_t* from, __mmask16 mask) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  }

  // The memory behind `left` and `out` has whole tiles of rows.
  static void multiply(const uint16_t* left, int64_t left_stride, const uint16_t* matrix, int64_t all_inner, int64_t,
                       float* out, int64_t out_stride, int64_t num_rows, int64_t inner, int64_t columns) {
    const int64_t panel = all_inner * 16;
    written();
    for (int64_t column = 0; column < columns; column += 32) {
      const uint16_t* right = matrix + column / 16 * panel;
      const bool is_pair = column + 16 < columns;
      for (int64_t row = 0; row < num_rows; row += 32) {
        const uint16_t* a = left + row * left_stride;
        float* c = out + row * out_stride + column;
        if (row + 16 < num_rows) {
          if (is_pair) four(a, left_stride, right, panel, c, out_stride, inner);
          else two_rows(a, left_stride, right, c, out_stride, inner);
        } else {
          if (is_pair) two_columns(a, left_stride, right, panel, c, out_stride, inner);
          else single(a, left_stride, right, c, out_stride, inner);
        }
      }
    }
  }

  static void four(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t panel, float* c, int64_t c_stride,
                   int64_t inner) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < inner; i += 32) {
      _tile_loadd(4, a + i, a_stride * 2);
      _tile_loadd(6, b + i * 16, 64);
      _tile_loadd(7, b + panel + i * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 16 * a_stride + i, a_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(1, c + 16, c_stride * 4);
    _tile_stored(2, c + 16 * c_stride, c_stride * 4);
    _tile_stored(3, c + 16 * c_stride + 16, c_stride * 4);
  }

  static void two_rows(const uint16_t* a, int64_t a_stride, const uint16_t* b, float* c, int64_t c_stride,
                       int64_t inner) {
    _tile_zero(0); _tile_zero(2);
    for (int64_t i = 0; i < inner; i += 32) {
      _tile_loadd(4, a + i, a_stride * 2);
      _tile_loadd(5, a + 16 * a_stride + i, a_stride * 2);
      _tile_loadd(6, b + i * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(2, c + 16 * c_stride, c_stride * 4);
  }

  static void two_columns(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t panel, float* c,
                          int64_t c_stride, int64_t inner) {
    _tile_zero(0); _tile_zero(1);
    for (int64_t i = 0; i < inner; i += 32) {
      _tile_loadd(4, a + i, a_stride * 2);
      _tile_loadd(6, b + i * 16, 64);
      _tile_loadd(7, b + panel + i * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(1, c + 16, c_stride * 4);
  }

  // 16 rows or fewer, [rows, inner], as right factors: pairs of inner numbers, in each all rows.
  static void turn_rows(const uint16_t* rows, int64_t num_rows, int64_t inner, uint16_t* to) {
    for (int64_t first = 0; first < inner; first += 32, to += 512) {
      Floats square[16] = {};
      for (int64_t row = 0; row < num_rows; ++row) square[row] = loaded<Floats>(rows + row * inner + first);
      transpose(square);
      for (int64_t pair = 0; pair < 16; ++pair) store(to + pair * 32, square[pair]);
    }
  }

  // out [rows, tokens] = rows × tokensᵀ, for 32 tokens at a time as they lie in memory, and what `turn_rows` made of 16
  // rows or fewer. Each number has the bits that `multiply` gives it.
  static void multiply_tokens(const uint16_t* turned, int64_t num_rows, int64_t inner, const uint16_t* tokens,
                              int64_t stride, int64_t num_tokens, float* out, int64_t out_stride) {
    alignas(64) Floats sums[2][16];
    written();
    for (int64_t token = 0; token < num_tokens; token += 32, tokens += 32 * stride) {
      _tile_zero(2); _tile_zero(3);
      for (int64_t i = 0; i < inner; i += 32) {
        for (int64_t row = 0; row < 32; ++row)
          _mm_prefetch((const char*)(tokens + row * stride + i) + 2 * AHEAD, _MM_HINT_T0);
        _tile_loadd(5, turned + i * 16, 64);
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

  static void single(const uint16_t* a, int64_t a_stride, const uint16_t* b, float* c, int64_t c_stride,
                     int64_t inner) {
    _tile_zero(0);
    for (int64_t i = 0; i < inner; i += 32) {
      _tile_loadd(4, a + i, a_stride * 2);
      _tile_loadd(6, b + i * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, c, c_stride * 4);
  }
};

#endif

}  // namespace
}  // namespace diskprefix
