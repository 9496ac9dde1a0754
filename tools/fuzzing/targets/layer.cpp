// Norms, attention with the products around it, gated products, one behind the other: the same bits for tokens of one
// step and of two, the same keys and values in memory, and the same whatever the threads do.

#include "forms.h"

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
  const int64_t rotary_dim = input.flag() ? key_dim : 8, kind = input.number(0, 2);
  const auto query = TestMatrix::random(input, form, heads * key_dim, width, false), key = TestMatrix::random(input, form, kv_heads * key_dim, width, false);
  const auto value = TestMatrix::random(input, form, kv_heads * value_dim, width, false), last = TestMatrix::random(input, form, width, unit, false);
  const auto gate = TestMatrix::random(input, form, inner, width, false), up = TestMatrix::random(input, form, inner, width, false);
  const auto down = TestMatrix::random(input, form, width, inner, false);
  const Guarded rows = numbers(input, BFLOAT16, num_rows * width, false), weight = numbers(input, BFLOAT16, width, false);
  const Guarded head_weight = numbers(input, BFLOAT16, key_dim, false);
  const Guarded cosines = numbers(input, BFLOAT16, num_rows * rotary_dim, false), sines = numbers(input, BFLOAT16, num_rows * rotary_dim, false);
  const int64_t tokens = start + num_rows, of_keys = kv_heads * tokens * key_dim, of_values = kv_heads * tokens * value_dim;
  const Guarded keys = numbers(input, BFLOAT16, of_keys, false), values = numbers(input, BFLOAT16, of_values, false);
  for (const Operators* operators : variants()) {
    cut() = seed;
    Guarded outs[2] = {Guarded(num_rows * width * 2), Guarded(num_rows * width * 2)};
    Guarded all_keys[2] = {Guarded(of_keys * 2), Guarded(of_keys * 2)}, all_values[2] = {Guarded(of_values * 2), Guarded(of_values * 2)};
    for (int way = 0; way < 2; ++way) {
      outs[way].marked();
      all_keys[way].copied(keys.as<void>()), all_values[way].copied(values.as<void>());
      const int64_t ends[] = {way ? middle : num_rows, num_rows};
      int64_t begin = 0;
      for (int64_t end : ends) {
        if (begin == end) continue;
        const int64_t count = end - begin, threads = way ? 1 : 1 + seed % 3;
        // No token after the last one may be read.
        const int64_t there = start + end;
        Guarded some_keys(kv_heads * there * key_dim * 2), some_values(kv_heads * there * value_dim * 2);
        for (int64_t head = 0; head < kv_heads; ++head) {
          memcpy(some_keys.as<uint16_t>() + head * there * key_dim, all_keys[way].as<uint16_t>() + head * tokens * key_dim, there * key_dim * 2);
          memcpy(some_values.as<uint16_t>() + head * there * value_dim, all_values[way].as<uint16_t>() + head * tokens * value_dim, there * value_dim * 2);
        }
        char *of_keys_at[] = {some_keys.as<char>()}, *of_values_at[] = {some_values.as<char>()};
        const Run run = {start + begin, count, 1 << 20, {of_keys_at, 0, there * key_dim, key_dim}, {of_values_at, 0, there * value_dim, value_dim}};
        Guarded part(count * width * 2);
        memcpy(part.as<void>(), rows.as<uint16_t>() + begin * width, count * width * 2);
        AttentionBlock block = {};
        block.rows = block.out = part.as<void>();
        block.num_rows = count, block.query = query->get(), block.key = key->get(), block.value = value->get(), block.last = last->get();
        if (has_head_norms) block.query_norm = block.key_norm = head_weight.as<void>();
        block.norm_kind = kind, block.norm_epsilon = 1e-6, block.rotary_dim = rotary_dim;
        block.cosines = cosines.as<uint16_t>() + begin * rotary_dim, block.sines = sines.as<uint16_t>() + begin * rotary_dim;
        Attention& attention = block.attention;
        attention.dtype = BFLOAT16, attention.num_heads = heads, attention.num_kv_heads = kv_heads, attention.key_dim = key_dim;
        attention.value_dim = value_dim, attention.num_runs = 1, attention.window = window, attention.scale = 0.1;
        attention.num_threads = threads, attention.parallel_for = parallel_for;
        const Gated gated = {count, part.as<void>(), gate->get(), up->get(), down->get(), curve(), part.as<void>(), threads, parallel_for};
        const Norm norm = {BFLOAT16, kind, count, width, part.as<void>(), weight.as<void>(), part.as<void>(), 1e-6, threads, parallel_for};
        const bool attends = !operators->norm(&norm) && !operators->attention_block(&block, &run);
        if (!attends || (has_second_norms && operators->norm(&norm))) fail("attention fails", operators->name);
        if (operators->norm(&norm) || operators->gated(&gated)) fail("gated products fail", operators->name);
        memcpy(outs[way].as<uint16_t>() + begin * width, part.as<void>(), count * width * 2);
        for (int64_t head = 0; head < kv_heads; ++head) {
          memcpy(all_keys[way].as<uint16_t>() + head * tokens * key_dim, some_keys.as<uint16_t>() + head * there * key_dim, there * key_dim * 2);
          memcpy(all_values[way].as<uint16_t>() + head * tokens * value_dim, some_values.as<uint16_t>() + head * there * value_dim, there * value_dim * 2);
        }
        begin = end;
      }
    }
    require_same(BFLOAT16, outs[1].as<void>(), outs[0].as<void>(), num_rows * width, "two steps give other bits", operators->name);
    require_same(BFLOAT16, all_keys[1].as<void>(), all_keys[0].as<void>(), of_keys, "two steps leave other keys", operators->name);
    require_same(BFLOAT16, all_values[1].as<void>(), all_values[0].as<void>(), of_values, "two steps leave other values", operators->name);
  }
  return 0;
}
