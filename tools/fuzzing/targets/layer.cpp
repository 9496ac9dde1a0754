// A layer as a plan: norms, products, heads, attention, gates and sums, one behind the other. The same bits for tokens of
// one step and of two, the same keys and values in memory, and the same whatever the threads do.

#include "forms.h"

namespace {

// Copies keys or values, bfloat16 [heads, tokens, dim], as far as both have tokens: a step sees no more than it may.
void copy_tokens(const Guarded& from, int64_t tokens, const Guarded& to, int64_t tokens_to, int64_t heads, int64_t dim) {
  for (int64_t head = 0; head < heads; ++head)
    memcpy(to.as<uint16_t>() + head * tokens_to * dim, from.as<uint16_t>() + head * tokens * dim, std::min(tokens, tokens_to) * dim * 2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  const QuantForm& form = FORMS[input.number(0, FORMS.size() - 1)];
  const bool has_head_norms = input.flag(), has_second_norms = input.flag();
  const int64_t unit = form.unit_columns(), width = unit, inner = unit;
  const int64_t kv_heads = input.number(1, 2), heads = kv_heads * input.number(1, 2);
  // All rows of the products are whole strips, all columns whole units.
  const int64_t key_dim = 16 * input.number(1, 3), value_dim = unit / heads, start = input.number(0, 300), num_rows = input.number(1, 20);
  const int64_t middle = input.number(0, num_rows), seed = input.number(0, 255), window = input.flag() ? input.number(1, 400) : 0;
  if (unit % heads || value_dim % 16) return 0;
  const int64_t half = input.flag() ? key_dim / 2 : 4, kind = input.number(0, 3), parts = kind == LAYER ? 2 : 1;
  const auto query = TestMatrix::random(input, form, heads * key_dim, width, false), key = TestMatrix::random(input, form, kv_heads * key_dim, width, false);
  const auto value = TestMatrix::random(input, form, kv_heads * value_dim, width, false), last = TestMatrix::random(input, form, width, unit, false);
  const auto gate = TestMatrix::random(input, form, inner, width, false), up = TestMatrix::random(input, form, inner, width, false);
  const auto down = TestMatrix::random(input, form, width, inner, false);
  const int64_t pairing = input.number(0, 2);
  const Guarded rows = numbers(input, BFLOAT16, num_rows * width, false), weight = numbers(input, BFLOAT16, parts * width, false);
  const Guarded head_weight = numbers(input, BFLOAT16, parts * key_dim, false);
  const Guarded cosines = numbers(input, BFLOAT16, num_rows * half, false), sines = numbers(input, BFLOAT16, num_rows * half, false);
  const int64_t tokens = start + num_rows, of_keys = kv_heads * tokens * key_dim, of_values = kv_heads * tokens * value_dim;
  const Guarded keys = numbers(input, BFLOAT16, of_keys, false), values = numbers(input, BFLOAT16, of_values, false);
  for (const Operators* operators : variants()) {
    cut() = seed;
    Guarded outs[2] = {Guarded(num_rows * width * 2), Guarded(num_rows * width * 2)};
    Guarded all_keys[2] = {Guarded(of_keys * 2), Guarded(of_keys * 2)}, all_values[2] = {Guarded(of_values * 2), Guarded(of_values * 2)};
    for (int way = 0; way < 2; ++way) {
      all_keys[way].copied(keys.as<void>()), all_values[way].copied(values.as<void>());
      const int64_t ends[] = {way ? middle : num_rows, num_rows};
      int64_t begin = 0;
      for (int64_t end : ends) {
        if (begin == end) continue;
        const int64_t count = end - begin, there = start + end;
        const Guarded some_keys(kv_heads * there * key_dim * 2), some_values(kv_heads * there * value_dim * 2);
        copy_tokens(all_keys[way], tokens, some_keys, there, kv_heads, key_dim);
        copy_tokens(all_values[way], tokens, some_values, there, kv_heads, value_dim);
        const Rows to_keys = {nullptr, 0, there * key_dim, key_dim}, to_values = {nullptr, 0, there * value_dim, value_dim};
        std::vector<Guarded> made;
        const auto room = [&](int64_t of_row) { return made.emplace_back(count * of_row * 2).marked().as<void>(); };
        void *residual = room(width), *normed = room(width), *added = room(width), *of_gate = room(inner), *of_up = room(inner);
        void *queries = room(heads * key_dim), *own_keys = room(kv_heads * key_dim), *own_values = room(kv_heads * value_dim), *seen = room(unit);
        memcpy(residual, rows.as<uint16_t>() + begin * width, count * width * 2);
        Norm norm = {BFLOAT16, kind, 0, width, residual, weight.as<void>(), normed, 1e-6};
        Norm second = {BFLOAT16, kind, 0, width, added, weight.as<void>(), added, 1e-6};
        Product into = {0, 3, normed, {query->get(), key->get(), value->get()}, {queries, own_keys, own_values}};
        const auto of_heads = [&](int64_t number, void* rows) {
          return NormRotateStore{BFLOAT16, 0, number, key_dim, number * key_dim, rows, has_head_norms ? head_weight.as<void>() : nullptr, kind, 0, 1e-6, 0,
                       half, pairing, cosines.as<uint16_t>() + begin * half, sines.as<uint16_t>() + begin * half, -1};
        };
        NormRotateStore to_query = of_heads(heads, queries), to_key = of_heads(kv_heads, own_keys);
        to_key.table = 0, to_key.to = to_keys;
        NormRotateStore to_value = {BFLOAT16, 0, kv_heads, value_dim, kv_heads * value_dim, own_values};
        to_value.table = 1, to_value.to = to_values;
        Attend attend = {{BFLOAT16, heads, kv_heads, key_dim, value_dim, 0, window, 0, queries, key_dim, heads * key_dim, seen, nullptr, 0.1},
                         0, 1, 0, to_keys, to_values};
        Product out_of = {0, 1, seen, {last->get()}, {added}}, gates = {0, 2, normed, {gate->get(), up->get()}, {of_gate, of_up}};
        Gate gated = {BFLOAT16, 0, inner, 1, inner, inner, IDENTITY, 1.0, of_gate, of_up, curve(), of_gate};
        Product to_width = {0, 1, of_gate, {down->get()}, {added}};
        Sum sum = {BFLOAT16, 0, width, 1.0, residual, added, residual};
        std::vector<Operation> operations = {{NORM, 0, &norm}, {PRODUCT, 0, &into}, {NORM_ROTATE_STORE, 0, &to_query}, {NORM_ROTATE_STORE, 0, &to_key},
                                             {NORM_ROTATE_STORE, 0, &to_value}, {ATTEND, 0, &attend}, {PRODUCT, 0, &out_of}};
        if (has_second_norms) operations.push_back({NORM, 0, &second});
        operations.insert(operations.end(), {{SUM, 0, &sum}, {NORM, 0, &norm}, {PRODUCT, 0, &gates}, {GATE, 0, &gated}, {PRODUCT, 0, &to_width}});
        if (has_second_norms) operations.push_back({NORM, 0, &second});
        operations.push_back({SUM, 0, &sum});
        char *key_pages[] = {some_keys.as<char>()}, *value_pages[] = {some_values.as<char>()}, *const* const tables[] = {key_pages, value_pages};
        if (!run_plan(operators, operations, count, way ? 1 : 1 + seed % 3, {{start + begin, count, 0, nullptr, 0, tables}}))
          fail("a layer fails", operators->name);
        memcpy(outs[way].as<uint16_t>() + begin * width, residual, count * width * 2);
        copy_tokens(some_keys, there, all_keys[way], tokens, kv_heads, key_dim);
        copy_tokens(some_values, there, all_values[way], tokens, kv_heads, value_dim);
        begin = end;
      }
    }
    require_same(BFLOAT16, outs[1].as<void>(), outs[0].as<void>(), num_rows * width, "two steps give other bits", operators->name);
    require_same(BFLOAT16, all_keys[1].as<void>(), all_keys[0].as<void>(), of_keys, "two steps leave other keys", operators->name);
    require_same(BFLOAT16, all_values[1].as<void>(), all_values[0].as<void>(), of_values, "two steps leave other values", operators->name);
  }
  return 0;
}
