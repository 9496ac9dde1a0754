// The forms of quantised matrices (`runtime/plan/quants/quant_form.py`), and matrices of any of them.

#pragma once

#include <memory>

#include "input.h"

struct QuantForm {
  int64_t bits, group, has_zeros, scales;
  std::vector<float> numbers;  // without any, those that follow each other

  bool is_nested() const { return scales == IN_BYTES || scales == IN_NIBBLES || scales == SHARED; }
  int64_t unit_columns() const { return is_nested() ? 256 : scales == IN_FLOAT8 ? 64 : group > 32 ? group : 32; }
  // Whether rows of matrices are not of any number of blocks.
  bool is_wide() const { return unit_columns() > 32; }
  int64_t shared_bytes() const { return is_nested() ? 16 * 2 * (1 + has_zeros) : scales == IN_FLOAT8 ? 16 * 4 : 0; }
  int64_t number_bytes() const {
    const int64_t of_group = scales == IN_FLOAT16 ? 2 : scales == SHARED ? 0 : 1;
    return 16 * (unit_columns() / group) * of_group * (has_zeros && scales != IN_NIBBLES ? 2 : 1);
  }
  int64_t unit_bytes() const { return shared_bytes() + number_bytes() + 16 * unit_columns() * bits / 8; }
  int64_t bytes(int64_t rows, int64_t columns) const { return rows / 16 * (columns / unit_columns()) * unit_bytes(); }

  std::vector<float> table() const {
    std::vector<float> found(64);
    const int64_t count = numbers.empty() ? 1 << bits : numbers.size(), least = has_zeros ? 0 : -(1 << (bits - 1));
    for (int64_t i = 0; i < 64; ++i) found[i] = numbers.empty() ? (float)(least + i % count) : numbers[i % count];
    return found;
  }
};

inline const std::vector<float> BINARY = {-1, 1}, TERNARY = {-1, 0, 1, 2}, IQ1 = {-.875f, .125f, 1.125f, .125f, -1.125f, -.125f, .875f, -.125f},
                                IQ2 = {1, 3.125f, 5.375f, 0, -1, -3.125f, -5.375f, 0},
                                IQ3_SMALL = {1, 3, 5, 7, 9, 11, 13, 15.5f, -1, -3, -5, -7, -9, -11, -13, -15.5f},
                                IQ3 = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
                                IQ4 = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
                                FP4 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline const std::vector<QuantForm> FORMS = {
    {4, 32, 1, IN_FLOAT16, {}},   {8, 32, 0, IN_FLOAT16, {}},
    {4, 32, 0, IN_FLOAT16, {}},   {5, 32, 0, IN_FLOAT16, {}},      {5, 32, 1, IN_FLOAT16, {}}, {2, 16, 1, IN_NIBBLES, {}},
    {3, 16, 0, IN_BYTES, {}},     {6, 16, 0, IN_BYTES, {}},        {4, 32, 1, IN_BYTES, {}},   {5, 32, 1, IN_BYTES, {}},
    {2, 32, 0, SHARED, TERNARY},  {3, 16, 0, IN_BYTES, IQ1},       {3, 32, 0, IN_BYTES, IQ1},  {3, 16, 0, IN_BYTES, IQ2},
    {3, 32, 0, IN_BYTES, IQ2},    {4, 32, 0, IN_BYTES, IQ3_SMALL}, {4, 32, 0, IN_BYTES, IQ3},  {4, 32, 0, IN_BYTES, IQ4},
    {4, 32, 0, IN_FLOAT16, IQ4},  {4, 32, 0, IN_EXPONENTS, FP4},   {4, 16, 0, IN_FLOAT8, FP4}, {2, 64, 0, IN_FLOAT16, TERNARY},
    {1, 128, 0, IN_FLOAT16, BINARY}};

// The bits of the rows that matrices are multiplied with.
inline int64_t& row_bits() {
  static int64_t bits = 8;
  return bits;
}

// A matrix with its memory.
class TestMatrix {
 public:
  TestMatrix(const QuantForm& form, int64_t rows, int64_t columns, Guarded weights, Guarded bias, bool has_bias)
      : weights_(std::move(weights)), table_(64 * sizeof(float)), bias_(std::move(bias)),
        described_{rows, columns, form.bits, form.group, form.has_zeros, form.scales, !form.numbers.empty(), row_bits(),
                   weights_.as<void>(), nullptr, has_bias ? bias_.as<float>() : nullptr} {
    described_.table = table_.copied(form.table().data()).as<float>();
  }
  const Matrix* get() const { return &described_; }

  // Any codes, and scales that are small numbers unless the input is wild.
  static std::unique_ptr<TestMatrix> random(Input& input, const QuantForm& form, int64_t rows, int64_t columns, bool wild) {
    Guarded weights(form.bytes(rows, columns));
    weights.filled(input);
    for (uint8_t* unit = weights.as<uint8_t>(); !wild && unit < weights.as<uint8_t>() + weights.size(); unit += form.unit_bytes()) {
      for (int64_t i = 0; form.is_nested() && i < form.shared_bytes() / 2; ++i) put(unit + 2 * i, small_half(input));
      for (int64_t i = 0; form.scales == IN_FLOAT8 && i < 16; ++i) put(unit + 4 * i, 0.01f * (i + 1));
      uint8_t* numbers = unit + form.shared_bytes();
      for (int64_t i = 0; i < form.number_bytes(); ++i) {
        if (form.scales == IN_FLOAT16 && i % 2 == 0) put(numbers + i, small_half(input));
        if (form.scales == IN_EXPONENTS) numbers[i] = 118 + numbers[i] % 8;
      }
    }
    return with(input, form, rows, columns, std::move(weights), wild);
  }

  // In bfloat16.
  static std::unique_ptr<TestMatrix> plain(Input& input, int64_t rows, int64_t columns, bool wild) {
    return with(input, {16, 0, 0, IN_FLOAT16, {0}}, rows, columns, numbers(input, BFLOAT16, rows * columns, wild), wild);
  }

 private:
  Guarded weights_, table_, bias_;
  Matrix described_;

  template <class Value>
  static void put(uint8_t* to, Value value) {
    memcpy(to, &value, sizeof value);
  }

  static std::unique_ptr<TestMatrix> with(Input& input, const QuantForm& form, int64_t rows, int64_t columns, Guarded weights,
                                          bool wild) {
    const bool has_bias = input.flag();
    return std::make_unique<TestMatrix>(form, rows, columns, std::move(weights), numbers(input, FLOAT32, has_bias ? rows : 0, wild),
                                        has_bias);
  }
};

// The curve of a gate, and one number more.
inline const uint16_t* curve() {
  static const Guarded* made = [] {
    auto* table = new Guarded(65537 * 2);
    for (int64_t i = 0; i < 65537; ++i) table->as<uint16_t>()[i] = (uint16_t)(i & 0x8000 ? 0 : i);
    return table;
  }();
  return made->as<uint16_t>();
}
