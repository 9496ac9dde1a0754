// Attention over the memory of up to three sequences: the same bits for a row beside all others and in a call of its own,
// whatever the threads do, and nothing read behind the last token.

#include "input.h"

namespace {

// Rows of one sequence in pages. Those before the first visible token are not there. Where the heads of a token lie side by
// side, the last page ends with the last token.
struct Pages {
  std::vector<Guarded> memory;
  std::vector<char*> table;
  Rows rows;

  Pages(Input& input, int64_t dtype, int64_t heads, int64_t dim, int64_t visible, int64_t tokens, int64_t page_tokens,
        bool is_by_token, bool wild, bool is_finite) {
    for (int64_t start = 0; start < tokens; start += page_tokens) {
      if (start + page_tokens <= visible) {
        table.push_back(nullptr);
        continue;
      }
      const int64_t count = is_by_token ? std::min(page_tokens, tokens - start) : page_tokens;
      memory.push_back(numbers(input, dtype, heads * count * dim, wild));
      if (is_finite) memory.back().finite(dtype);
      table.push_back(memory.back().as<char>());
    }
    rows = {table.data(), 0, is_by_token ? dim : page_tokens * dim, is_by_token ? heads * dim : dim};
  }
};

struct Sequence {
  Run run;
  Pages keys, values;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  const int64_t SIZES[] = {1, 16, 17, 31, 32, 48, 64, 80}, PAGES[] = {256, 512, 64, 48};
  Attention call = {};
  call.dtype = input.number(0, 1);
  call.num_kv_heads = input.number(1, 2), call.num_heads = call.num_kv_heads * input.number(1, 5);
  call.key_dim = input.one_of(SIZES), call.value_dim = input.one_of(SIZES);
  call.num_runs = input.number(1, 3);
  const int64_t kind = input.number(0, 2);
  if (kind == 1) call.window = input.number(1, 600);
  if (kind == 2) call.chunk = input.number(1, 600);
  const bool wild = input.number(0, 3) == 3, is_by_token = input.flag(), has_sinks = input.flag(), is_by_row = input.flag();
  call.softcap = input.flag() ? 3.0 : 0.0, call.scale = 1.0 / (1 + input.number(0, 20));
  call.num_threads = input.number(1, 4);
  const int64_t seed = input.number(0, 255);
  std::vector<Sequence> sequences;
  int64_t num_rows = 0;
  for (int64_t i = 0; i < call.num_runs; ++i) {
    const int64_t start = input.number(0, 700), rows = input.flag() ? input.number(1, 4) : input.number(1, 40);
    const int64_t visible = call.window ? start - call.window + 1 : call.chunk ? start - start % call.chunk : 0;
    const int64_t tokens = start + rows, page_tokens = input.one_of(PAGES);
    // A weight of 0 times an infinite value is no number: it would reach the rows before it (native/README.md).
    Sequence one = {{start, rows, page_tokens},
                    {input, call.dtype, call.num_kv_heads, call.key_dim, visible, tokens, page_tokens, is_by_token, wild, false},
                    {input, call.dtype, call.num_kv_heads, call.value_dim, visible, tokens, page_tokens, is_by_token, wild, true}};
    one.run.keys = one.keys.rows, one.run.values = one.values.rows;
    num_rows += rows;
    sequences.push_back(std::move(one));
  }
  const Guarded query = numbers(input, call.dtype, call.num_heads * num_rows * call.key_dim, wild);
  const Guarded sinks = numbers(input, FLOAT32, has_sinks ? call.num_heads : 0, false);
  const int64_t of_row = call.num_heads * call.value_dim, item = bytes_of(call.dtype);
  call.query = query.as<void>(), call.sinks = has_sinks ? sinks.as<float>() : nullptr;
  call.query_head_stride = is_by_row ? call.key_dim : num_rows * call.key_dim;
  call.query_row_stride = is_by_row ? call.num_heads * call.key_dim : call.key_dim;
  std::vector<Run> runs;
  for (const Sequence& one : sequences) runs.push_back(one.run);
  for (const Operators* operators : variants()) {
    cut() = seed;
    Guarded whole(num_rows * of_row * item);
    call.num_runs = runs.size(), call.out = whole.marked().as<void>(), call.query = query.as<void>();
    if (operators->attention(&call, runs.data())) fail("attention fails", operators->name);
    int64_t before = 0;
    for (const Sequence& one : sequences) {
      // Rows of one sequence, from one that the seed chooses to one that it chooses.
      const int64_t begin = seed % one.run.num_rows, end = begin + 1 + seed / 3 % (one.run.num_rows - begin);
      Guarded some((end - begin) * of_row * item);
      Run run = one.run;
      run.start += begin, run.num_rows = end - begin;
      Attention alone = call;
      alone.num_runs = 1, alone.out = some.marked().as<void>(), alone.num_threads = 1 + seed % 3;
      alone.query = (const char*)call.query + (before + begin) * call.query_row_stride * item;
      if (operators->attention(&alone, &run)) fail("attention of some rows fails", operators->name);
      require_same(call.dtype, some.as<void>(), whole.as<char>() + (before + begin) * of_row * item, (end - begin) * of_row,
                   "rows have other bits alone", operators->name);
      before += one.run.num_rows;
    }
  }
  return 0;
}
