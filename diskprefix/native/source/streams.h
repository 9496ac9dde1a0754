// Row-wise steps of decoders with several streams of hidden states, and of sparse gates.

#pragma once

#include <cmath>

#include "parts.h"
#include "rows.h"

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

template <class Type>
inline float rounded_one(float number) {
  return Type::one(Type::narrowed(number));
}

template <class Type>
inline void mean_of_streams(const StreamMean& call, int64_t row) {
  typedef typename Type::Stored Stored;
  const int64_t start = row * call.count * call.width;
  const Stored *gates = (const Stored*)call.gates + start, *streams = (const Stored*)call.streams + start;
  const auto opened = [&](int64_t at, int64_t left) {
    if constexpr (sizeof(Stored) == 2) return curve_at((const uint16_t*)gates + at, call.curve, least(LANES, left));
    float open[LANES] = {};
    for (int64_t lane = 0; lane < least(LANES, left); ++lane) open[lane] = activated(Type::one(gates[at + lane]), SIGMOID);
    return loaded<Floats>(open);
  };
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t left = call.width - i;
    Floats total = {};
    for (int64_t at = i; at < call.count * call.width; at += call.width)
      total += rounded_to<Type>(opened(at, left) * some_of<Type>(streams + at, left));
    put_some<Type>((Stored*)call.out + row * call.width + i, total / all((float)call.count), left);
  }
}

template <class Type>
inline void add_to_streams(const StreamSum& call, int64_t row) {
  typedef typename Type::Stored Stored;
  const Stored* from = (const Stored*)call.rows + row * call.width;
  for (int64_t number = 0; number < call.count; ++number) {
    const int64_t at = row * call.count + number;
    const float gate = rounded_one<Type>(Type::one(((const Stored*)call.gates)[at]) / (float)call.count);
    const Floats factor = all(2.0f * rounded_one<Type>(activated(gate, SIGMOID)));
    Stored* to = (Stored*)call.streams + at * call.width;
    for (int64_t i = 0; i < call.width; i += LANES) {
      const int64_t left = call.width - i;
      put_some<Type>(to + i, some_of<Type>(to + i, left) + rounded_to<Type>(some_of<Type>(from + i, left) * factor), left);
    }
  }
}

template <class Type>
inline void gate_streams(const StreamGate& call, int64_t row) {
  typedef typename Type::Stored Stored;
  const Stored* from = (const Stored*)call.rows + row * call.width;
  for (int64_t at = row * call.count; at < (row + 1) * call.count; ++at) {
    const Stored *key = (const Stored*)call.keys + at * call.width, *query = (const Stored*)call.queries + at * call.width;
    Total<4> total;
    for (int64_t i = 0; i < call.width; i += LANES) {
      const int64_t left = call.width - i;
      total.from(i) += rounded_to<Type>(some_of<Type>(key + i, left) * some_of<Type>(query + i, left));
    }
    const float score = rounded_one<Type>(rounded_one<Type>(total.sum()) / __builtin_sqrtf((float)call.width));
    const float size = score < 0.0f ? -score : score;
    const float root = rounded_one<Type>(__builtin_sqrtf(size < 1e-6f ? 1e-6f : size));
    const float gate = score > 0.0f ? root : score < 0.0f ? -root : score;
    const Floats open = all(rounded_one<Type>(activated(gate, SIGMOID)));
    for (int64_t i = 0; i < call.width; i += LANES) {
      const int64_t left = call.width - i;
      put_some<Type>((Stored*)call.out + at * call.width + i, some_of<Type>(from + i, left) * open, left);
    }
  }
}

}  // namespace
}  // namespace diskprefix
