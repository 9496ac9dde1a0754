// What Python and the variants agree on. `native/library.py` has the same structures. Strides count elements.

#pragma once

#include <cstdint>

namespace diskprefix {

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// torch's own pool of threads: it calls `work` with parts of [begin, end).
typedef void (*Work)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Work work, void* context);

// Consecutive tokens of one sequence: `num_rows` rows of the query, the first at position `start`. The memory of keys
// and of values, [kv_heads, tokens, dim], begins with position `first`.
struct Run {
  int64_t start, num_rows, first;
  const void* keys;
  int64_t key_head_stride, key_token_stride;
  const void* values;
  int64_t value_head_stride, value_token_stride;
};

struct Attention {
  int64_t dtype, num_heads, num_kv_heads, key_dim, value_dim, num_runs;
  // A token sees the last `window` tokens, or those of its chunk of `chunk` tokens, or if both are 0 all up to itself.
  int64_t window, chunk;
  const void* query;  // [heads, rows, key_dim]
  int64_t query_head_stride, query_row_stride;
  void* out;           // [rows, heads, value_dim]
  const float* sinks;  // one for each head, or null
  double scale, softcap;  // without soft cap 0
  int64_t num_threads;
  ParallelFor parallel_for;
};

// Rows times a quantised matrix. `rows` is bfloat16 [num_rows, matrix_columns], `out` bfloat16 [num_rows, matrix_rows].
struct QuantisedProduct {
  int64_t num_rows, matrix_rows, matrix_columns;
  int64_t bits, group, has_zeros, scale_type;  // the form of its blocks, see model/quants.py
  const void* rows;
  const uint8_t* packed;
  const float* bias;  // [matrix_rows], or null
  void* out;
  int64_t num_threads;
  ParallelFor parallel_for;
};

// The operators, as one variant computes them. They return 0, or 1 if there is not enough memory.
struct Operators {
  const char* name;
  int32_t (*attention)(const Attention* call, const Run* runs);
  int32_t (*quantised_product)(const QuantisedProduct* call);
};

}  // namespace diskprefix
