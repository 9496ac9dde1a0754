// Products of rows with matrices. A row's result depends on no other row: each number is one sum in a fixed order, whatever
// the number of rows and of threads, and whatever other matrices are multiplied in the same call.

#pragma once

#include "dense.h"
#if defined(__AMX_BF16__)
#include "tile_product.h"
#else
#include "integer_product.h"
#endif

namespace diskprefix {
namespace {
namespace matrices {

template <int BITS, int GROUP, bool HAS_ZEROS, int SCALES, bool HAS_TABLE = false>
Form form_of_blocks(const Matrix& matrix) {
  typedef Block<BITS, GROUP, HAS_ZEROS, SCALES, HAS_TABLE> Weights;
  if (matrix.columns % (INNER * Weights::BLOCKS)) return {};
  return form_with<Weights>(matrix.columns / INNER / Weights::BLOCKS * Weights::BYTES);
}

// Returns the form of a matrix; see `runtime/plan/quants/quant_form.py`. `strip_bytes` is 0 for bfloat16, for an unknown
// form, and for a row that ends inside a unit.
inline Form form_of(const Matrix& matrix) {
#define FORM(bits_, group_, has_zeros_, scales_, has_table_)                                                        \
  if (matrix.bits == bits_ && matrix.group == group_ && matrix.has_zeros == has_zeros_ && matrix.scales == scales_ && \
      matrix.has_table == has_table_)                                                                                 \
    return form_of_blocks<bits_, group_, has_zeros_, scales_, has_table_>(matrix);
  FORM(2, 16, true, IN_NIBBLES, false)
  FORM(1, 128, false, IN_FLOAT16, true)
  FORM(2, 32, false, SHARED, true)
  FORM(2, 64, false, IN_FLOAT16, true)
  FORM(3, 16, false, IN_BYTES, false)
  FORM(3, 16, false, IN_BYTES, true)
  FORM(3, 32, false, IN_BYTES, true)
  FORM(4, 32, true, IN_FLOAT16, false)
  FORM(4, 32, true, IN_BYTES, false)
  FORM(4, 32, false, IN_FLOAT16, false)
  FORM(4, 32, false, IN_FLOAT16, true)
  FORM(4, 32, false, IN_BYTES, true)
  FORM(4, 32, false, IN_EXPONENTS, true)
  FORM(4, 16, false, IN_FLOAT8, true)
  FORM(5, 32, true, IN_FLOAT16, false)
  FORM(5, 32, true, IN_BYTES, false)
  FORM(5, 32, false, IN_FLOAT16, false)
  FORM(6, 16, false, IN_BYTES, false)
  FORM(8, 32, false, IN_FLOAT16, false)
#undef FORM
  return {};
}

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
      return Multiply::pack(parts[i], begin, end);
}

// Multiplies with pairs of strips `begin` to `end`. Returns false if there is not enough memory.
inline bool multiply_part(const Part& part, int64_t begin, int64_t end) {
  if (part.matrix->bits == 16) return multiply_dense(part, 2 * STRIP * begin, least(2 * STRIP * end, part.matrix->rows));
  static thread_local Memory memory;
  const bool is_few = Multiply::is_few(part);
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
  const bool is_few = Multiply::is_few(*parts);
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
