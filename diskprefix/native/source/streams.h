// Row-wise steps of decoders with several streams of hidden states, and of sparse gates.

#pragma once

#include <cmath>

#include "parts.h"

namespace diskprefix {
namespace {

template <class Type>
inline void mix_row(const Mix& call, int64_t row) {
  typedef typename Type::Stored Stored;
  const Stored* factors = (const Stored*)call.factors + row * call.factors_stride;
  const int64_t at = row * call.width;
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t left = call.width - i;
    Floats total = {};
    for (int64_t number = 0; number < call.count; ++number) {
      const Floats factor = rounded_to<Type>(all(Type::one(factors[number]) + (float)call.offset));
      total += some_of<Type>((const Stored*)call.rows[number] + at + i, left) * factor;
    }
    put_some<Type>((Stored*)call.out + at + i, rounded_to<Type>(total) + some_of<Type>((const Stored*)call.base + at + i, left), left);
  }
}

template <class Type>
inline float mean_square(const typename Type::Stored* row, int64_t width) {
  Total<1> squares;
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats numbers = some_of<Type>(row + i, width - i);
    squares.from(i) = fma(numbers, numbers, squares.from(i));
  }
  return squares.sum() / (float)width;
}

template <class Type>
inline void match_rms_of_row(const RmsMatching& call, int64_t row) {
  typedef typename Type::Stored Stored;
  Stored* to = (Stored*)call.rows + row * call.width;
  const float square = mean_square<Type>(to, call.width);
  const float wanted = sqrtf(mean_square<Type>((const Stored*)call.like + row * call.width, call.width));
  weigh<Type>(to, wanted / sqrtf(square > 1e-5f ? square : 1e-5f), call.width);
}

template <class Type>
inline void sparsify_gate_row(const GateSparsity& call, int64_t row) {
  typedef typename Type::Stored Stored;
  Stored* numbers = (Stored*)call.rows + row * call.width;
  double sum = 0.0, squares = 0.0;
  for (int64_t i = 0; i < call.width; ++i) sum += Type::one(numbers[i]);
  const double mean = sum / (double)call.width;
  for (int64_t i = 0; i < call.width; ++i) squares += (Type::one(numbers[i]) - mean) * (Type::one(numbers[i]) - mean);
  const Floats least = rounded_to<Type>(all((float)(mean + sqrt(squares / (double)call.width) * call.deviations)));
  for (int64_t i = 0; i < call.width; i += LANES) {
    float above[LANES];
    store(above, some_of<Type>(numbers + i, call.width - i) - least);
    for (float& number : above) number = number < 0.0f ? 0.0f : number;
    put_some<Type>(numbers + i, loaded<Floats>(above), call.width - i);
  }
}

}  // namespace
}  // namespace diskprefix
