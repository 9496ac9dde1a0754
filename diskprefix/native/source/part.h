// A matrix with the rows that it is multiplied with, and the functions of its form.

#pragma once

#if defined(__AMX_BF16__)
#include "weights.h"
#else
#include "integers.h"
#endif

namespace diskprefix {
namespace {
namespace matrices {

struct Part;

#if !defined(HAS_ROWS)

// Rows that are multiplied while a block is unpacked.
#if defined(MULTIPLIES_BYTES)
constexpr int FEW = 4;
#else
constexpr int FEW = 1;  // with four, this code would be two thirds of the library
#endif
// Vectors of rows of strips that are multiplied together: parts of a strip, or whole strips.
constexpr int WIDE = 2;
// Rows that are multiplied together: their blocks with the same columns lie side by side.
constexpr int TOGETHER = 6;

// Adds the products of `count` unpacked blocks of two strips with all rows.
template <class Row>
using MultiplyMany = void (*)(const Row* rows, int64_t num_rows, int64_t row_blocks, const uint8_t* weights, int64_t count, float* sums);

#endif

// How a matrix is converted to factors of a product. `strip` is the address of a strip.
struct Form {
  // Unpacks blocks `begin` to `end`. With tiles of bfloat16 `begin` is 0.
  void (*unpack)(const uint8_t* strip, int64_t begin, int64_t end, const float* table, uint8_t* to);
  // Writes one row of a quantised strip in bfloat16.
  void (*look_up)(const uint8_t* strip, int64_t blocks, int64_t row, const float* table, uint16_t* to);
  int64_t strip_bytes;
#if defined(HAS_ROWS)
  // Multiplies few rows, in one or two groups, with one or two strips.
  void (*multiply[2][2])(const Part& part, int64_t strip, uint8_t* factors);
#else
  // Multiplies 1 to FEW rows with the blocks of a strip.
  void (*few)(const uint8_t* strip, int64_t blocks, const float* table, const Row8* rows, int64_t num_rows, Floats* out);
  MultiplyMany<Row8> many_8;
  MultiplyMany<Row15> many_15;
#endif
};

Form form_of(const Matrix& matrix);

// `rows` as given, `packed` in the form that `Multiply` takes.
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

}  // namespace matrices
}  // namespace
}  // namespace diskprefix
