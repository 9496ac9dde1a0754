// Rows times up to three matrices of any forms: the same bits for a row beside all others and alone, however the threads
// cut the work, and in all variants but that for rows of bfloat16. Rows that are looked up have the same numbers
// everywhere.

#include "forms.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  const int64_t num_rows = input.number(0, 40), num_matrices = input.number(1, 3), threads = input.number(1, 4);
  const int64_t begin = input.number(0, num_rows), end = input.number(begin, num_rows);
  const bool wild = input.number(0, 3) == 3, is_plain = input.number(0, 7) == 7;
  const int64_t seed = input.number(0, 255);
  row_bits() = input.flag() ? 15 : 8;
  std::vector<const QuantForm*> forms;
  bool is_wide = false;
  for (int64_t i = 0; i < num_matrices; ++i) {
    forms.push_back(&FORMS[input.number(0, FORMS.size() - 1)]);
    is_wide |= forms.back()->is_wide();
  }
  const int64_t columns = is_wide && !is_plain ? 256 * input.number(1, 2) : 32 * input.number(1, 12);
  std::vector<std::unique_ptr<TestMatrix>> matrices;
  for (const QuantForm* form : forms) {
    const int64_t rows = 16 * input.number(1, 5);
    matrices.push_back(is_plain ? TestMatrix::plain(input, rows, columns, wild) : TestMatrix::random(input, *form, rows, columns, wild));
  }
  const Guarded rows = numbers(input, BFLOAT16, num_rows * columns, wild);
  std::vector<std::vector<uint16_t>> expected(num_matrices), looked_up(num_matrices);
  for (const Operators* operators : variants()) {
    cut() = seed;
    std::vector<Guarded> outs;
    Product call = {num_rows, num_matrices, rows.as<void>(), {}, {}, threads};
    for (int64_t i = 0; i < num_matrices; ++i) {
      outs.emplace_back(num_rows * matrices[i]->get()->rows * 2);
      call.matrices[i] = matrices[i]->get(), call.outs[i] = outs[i].marked().as<void>();
    }
    if (run_alone(operators, {PRODUCT, 0, &call}, num_rows, threads)) fail("a product fails", operators->name);
    for (int64_t i = 0; i < num_matrices; ++i) {
      const Matrix& matrix = *matrices[i]->get();
      Guarded some((end - begin) * columns * 2), out((end - begin) * matrix.rows * 2);
      some.copied(rows.as<uint16_t>() + begin * columns);
      Product alone = {end - begin, 1, some.as<void>(), {&matrix}, {out.marked().as<void>()}, 1};
      if (run_alone(operators, {PRODUCT, 0, &alone}, end - begin, 1)) fail("a product of some rows fails", operators->name);
      require_same(BFLOAT16, out.as<void>(), outs[i].as<uint16_t>() + begin * matrix.rows, (end - begin) * matrix.rows,
                   "rows have other bits alone", operators->name);
      std::vector<uint16_t> found(outs[i].as<uint16_t>(), outs[i].as<uint16_t>() + num_rows * matrix.rows);
      if (has_common_bits(operators) && !wild) {
        if (expected[i].empty()) expected[i] = found;
        require_same(BFLOAT16, found.data(), expected[i].data(), found.size(), "another variant multiplies otherwise",
                     operators->name);
      }
      // For AMX the codes lie in another order.
      if (is_plain || !has_common_bits(operators)) continue;
      Guarded ids(3 * sizeof(int64_t)), numbers_of_rows(3 * columns * 2);
      for (int64_t id = 0; id < 3; ++id) ids.as<int64_t>()[id] = (seed + 7 * id) % matrix.rows;
      const Lookup look = {3, ids.as<int64_t>(), &matrix, numbers_of_rows.marked().as<void>(), threads};
      if (operators->look_up(&look)) fail("looking rows up fails", operators->name);
      std::vector<uint16_t> numbers_found(numbers_of_rows.as<uint16_t>(), numbers_of_rows.as<uint16_t>() + 3 * columns);
      if (looked_up[i].empty()) looked_up[i] = numbers_found;
      require_same(BFLOAT16, numbers_found.data(), looked_up[i].data(), numbers_found.size(), "other numbers of a row", operators->name);
    }
  }
  return 0;
}
