// Products of each head's rows with its matrix, with a bias or without: the same bits for a row alone, nothing read or written beside the numbers.

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  const int64_t SIZES[] = {1, 15, 16, 17, 32, 33, 64, 96};
  DenseProduct call = {};
  call.dtype = input.number(0, 1), call.is_transposed = input.number(0, 1);
  call.num_heads = input.number(1, 4), call.num_rows = input.number(1, 40);
  call.inner = input.one_of(SIZES), call.outer = input.one_of(SIZES);
  const int64_t gap = input.number(0, 5), begin = input.number(0, call.num_rows - 1), end = input.number(begin + 1, call.num_rows);
  const bool wild = input.number(0, 3) == 3, is_by_row = input.flag();
  const int64_t seed = input.number(0, 255), item = bytes_of(call.dtype);
  call.row_stride = (is_by_row ? call.num_heads * call.inner : call.inner) + gap;
  call.head_stride = is_by_row ? call.inner : call.num_rows * call.row_stride;
  const int64_t lines = call.is_transposed ? call.outer : call.inner, of_line = call.is_transposed ? call.inner : call.outer;
  call.line_stride = of_line + gap, call.matrix_stride = lines * call.line_stride;
  const auto count = [](int64_t heads, int64_t head_stride, int64_t rows, int64_t row_stride, int64_t width) {
    return (heads - 1) * head_stride + (rows - 1) * row_stride + width;
  };
  const Guarded rows = numbers(input, call.dtype, count(call.num_heads, call.head_stride, call.num_rows, call.row_stride, call.inner), wild);
  const Guarded matrices = numbers(input, call.dtype, count(call.num_heads, call.matrix_stride, lines, call.line_stride, of_line), wild);
  const bool has_bias = input.flag();
  const Guarded bias = numbers(input, FLOAT32, has_bias ? call.outer : 0, wild);
  call.bias = has_bias ? bias.as<float>() : nullptr;
  call.rows = rows.as<void>(), call.matrices = matrices.as<void>();
  for (const Operators* operators : variants()) {
    cut() = seed;
    Guarded whole(call.num_heads * call.num_rows * call.outer * item), some(call.num_heads * (end - begin) * call.outer * item);
    call.out = whole.marked().as<void>();
    call.out_row_stride = call.outer, call.out_head_stride = call.num_rows * call.outer;
    if (!run_plan(operators, {{DENSE, 0, &call}}, call.num_rows, 1 + seed % 3)) fail("a product of heads fails", operators->name);
    DenseProduct alone = call;
    alone.rows = rows.as<char>() + begin * call.row_stride * item;
    alone.out = some.marked().as<void>(), alone.out_head_stride = (end - begin) * call.outer;
    if (!run_plan(operators, {{DENSE, 0, &alone}}, end - begin, 1)) fail("a product of some rows fails", operators->name);
    for (int64_t head = 0; head < call.num_heads; ++head)
      require_same(call.dtype, some.as<char>() + head * alone.out_head_stride * item,
                   whole.as<char>() + (head * call.out_head_stride + begin * call.outer) * item, (end - begin) * call.outer,
                   "rows have other bits alone", operators->name);
  }
  return 0;
}
