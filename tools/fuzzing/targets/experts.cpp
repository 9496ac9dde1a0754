// The chosen experts of a mixture: a number that no expert has is refused, and a row has the same bits alone. With one
// expert of weight 1 it is the gated product.

#include "forms.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  const int64_t num_rows = input.number(1, 20), num_chosen = input.number(1, 3), num_experts = input.number(1, 4);
  const QuantForm &first = FORMS[input.number(0, FORMS.size() - 1)], &second = FORMS[input.number(0, FORMS.size() - 1)];
  const int64_t odd = input.number(0, 7);  // an expert that is not there: below all of them, or above
  const bool wild = input.number(0, 3) == 3, has_up = input.flag(), has_up_curve = input.flag();
  const int64_t width = first.is_wide() || input.flag() ? 256 : 32 * input.number(1, 3);
  const int64_t inner = second.is_wide() ? 256 : 32 * input.number(1, 3), seed = input.number(0, 255);
  const int64_t begin = input.number(0, num_rows - 1), end = input.number(begin + 1, num_rows);
  std::vector<std::unique_ptr<TestMatrix>> kept;
  std::vector<const Matrix*> gate, up, down;
  const auto made = [&](std::vector<const Matrix*>& list, const QuantForm& form, int64_t rows, int64_t columns) {
    kept.push_back(TestMatrix::random(input, form, rows, columns, wild));
    list.push_back(kept.back()->get());
  };
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    made(gate, first, inner, width), made(up, first, inner, width), made(down, second, width, inner);
  }
  const Guarded rows = numbers(input, BFLOAT16, num_rows * width, wild), weights = numbers(input, FLOAT32, num_rows * num_chosen, wild);
  Guarded chosen(num_rows * num_chosen * sizeof(int64_t));
  for (int64_t i = 0; i < num_rows * num_chosen; ++i) chosen.as<int64_t>()[i] = input.random() % num_experts;
  const bool is_sound = odd < 6;
  if (!is_sound) chosen.as<int64_t>()[input.random() % (num_rows * num_chosen)] = odd == 6 ? -1 : num_experts;
  const Experts all = {num_rows, num_chosen, num_experts, 0, rows.as<void>(), chosen.as<int64_t>(), weights.as<float>(), gate.data(),
                       has_up ? up.data() : nullptr, down.data(), curve(), has_up_curve ? curve() : nullptr, nullptr, 0};
  for (const Operators* operators : variants()) {
    cut() = seed;
    Guarded whole(num_rows * width * 2), some((end - begin) * width * 2);
    Experts call = all;
    call.out = whole.marked().as<void>(), call.num_threads = 1 + seed % 4;
    const int32_t refused = run_alone(operators, {EXPERTS, 0, &call}, num_rows, call.num_threads);
    if (refused != (is_sound ? 0 : 2)) fail("experts are refused, or should be", operators->name);
    if (refused) continue;
    Experts alone = call;
    alone.num_rows = end - begin, alone.num_threads = 1, alone.out = some.marked().as<void>();
    alone.rows = rows.as<uint16_t>() + begin * width, alone.chosen += begin * num_chosen, alone.weights += begin * num_chosen;
    if (run_alone(operators, {EXPERTS, 0, &alone}, end - begin, 1)) fail("experts of some rows fail", operators->name);
    require_same(BFLOAT16, some.as<void>(), whole.as<uint16_t>() + begin * width, (end - begin) * width, "rows have other bits alone",
                 operators->name);
    if (num_chosen > 1 || num_experts > 1 || !has_up || has_up_curve || wild) continue;
    Guarded ones(num_rows * sizeof(float)), gated(num_rows * width * 2), of_gate(num_rows * inner * 2), of_up(num_rows * inner * 2);
    std::fill_n(ones.as<float>(), num_rows, 1.0f);
    call.weights = ones.as<float>();
    Product into = {0, 2, rows.as<void>(), {gate[0], up[0]}, {of_gate.marked().as<void>(), of_up.marked().as<void>()}};
    Gate gates = {BFLOAT16, 0, inner, 1, inner, inner, IDENTITY, 1.0, of_gate.as<void>(), of_up.as<void>(), curve(), of_gate.as<void>()};
    Product out_of = {0, 1, of_gate.as<void>(), {down[0]}, {gated.marked().as<void>()}};
    const std::vector<Operation> operations = {{PRODUCT, 0, &into}, {GATE, 0, &gates}, {PRODUCT, 0, &out_of}};
    if (run_alone(operators, {EXPERTS, 0, &call}, num_rows, call.num_threads) || !run_plan(operators, operations, num_rows, call.num_threads)) fail("gated products fail", operators->name);
    // The sum of experts makes a zero positive.
    for (int64_t i = 0; i < num_rows * width; ++i)
      if (uint16_t a = whole.as<uint16_t>()[i], b = gated.as<uint16_t>()[i]; a != b && (a | b) & 0x7fff)
        fail("the only expert is not the gated product", operators->name);
  }
  return 0;
}
