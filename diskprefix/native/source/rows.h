// The row-wise steps of a layer: rotary positions, keys and values to memory, gates, sums. A row's result depends on no
// other row.

#pragma once

#include "attention.h"
#include "functions.h"
#include "parts.h"
#include "recurrence.h"

namespace diskprefix {
namespace {

// Computes the rotary angles of the step's rows: angle i of a row is position × frequency i.
template <class Type>
inline void put_angles(const Angles& call, int64_t row) {
  typename Type::Stored* cosines = (typename Type::Stored*)call.cosines + row * call.half;
  typename Type::Stored* sines = (typename Type::Stored*)call.sines + row * call.half;
  for (int64_t i = 0; i < call.half; i += LANES) {
    float cosine[LANES] = {}, sine[LANES] = {};
    const int64_t left = least(LANES, call.half - i);
    for (int64_t lane = 0; lane < left; ++lane) {
      const int64_t axis = call.axes ? call.axes[i + lane] : 0;
      const functions::Rotation rotation((float)call.positions[axis * call.axis_stride + row] * call.frequencies[i + lane]);
      cosine[lane] = (float)rotation.cosine, sine[lane] = (float)rotation.sine;
    }
    const Floats factor = all((float)call.factor);
    put_some<Type>(cosines + i, loaded<Floats>(cosine) * factor, left);
    put_some<Type>(sines + i, loaded<Floats>(sine) * factor, left);
  }
}

constexpr int64_t MAX_ROTARY = 1024;

// Rotates 2 × `half` numbers of a head, as `NormRotateStore` says. Each product is rounded before the sum.
template <class Type>
inline void rotate(typename Type::Stored* head, const typename Type::Stored* cosines, const typename Type::Stored* sines,
                   int64_t half, int64_t pairing) {
  typename Type::Stored parted[MAX_ROTARY];
  if (pairing == INTERLEAVED_TO_HALVES) memcpy(parted, head, 2 * half * sizeof *head);
  const typename Type::Stored* from = pairing == INTERLEAVED_TO_HALVES ? parted : head;
  const auto times = [](Floats a, Floats b) { return rounded_to<Type>(a * b); };
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = least(LANES, half - i);
    const auto load = [left](const typename Type::Stored* from) { return some_of<Type>(from, left); };
    const Floats cosine = load(cosines + i), sine = load(sines + i);
    typename Type::Stored first[LANES] = {}, second[LANES] = {};
    if (pairing != HALVES)
      for (int64_t lane = 0; lane < left; ++lane) first[lane] = from[2 * (i + lane)], second[lane] = from[2 * (i + lane) + 1];
    const Floats a = pairing == HALVES ? load(head + i) : Type::load(first);
    const Floats b = pairing == HALVES ? load(head + half + i) : Type::load(second);
    const Floats to_a = times(a, cosine) + times(-b, sine), to_b = times(b, cosine) + times(a, sine);
    if (pairing != INTERLEAVED) {
      put_some<Type>(head + i, to_a, left);
      put_some<Type>(head + half + i, to_b, left);
      continue;
    }
    Type::put(first, to_a), Type::put(second, to_b);
    for (int64_t lane = 0; lane < left; ++lane) head[2 * (i + lane)] = first[lane], head[2 * (i + lane) + 1] = second[lane];
  }
}

template <class Type>
inline void put_heads(const NormRotateStore& call, const Run* runs, int64_t begin, int64_t end) {
  typedef typename Type::Stored Stored;
  int64_t run = 0, before = 0;
  for (int64_t row = begin; row < end; ++row) {
    while (runs && row >= before + runs[run].num_rows) before += runs[run++].num_rows;
    for (int64_t number = 0; number < call.num_heads; ++number) {
      Stored* head = (Stored*)call.rows + row * call.row_stride + number * call.dim;
      if (call.norm)
        norm_row<Type>(head, (const Stored*)call.norm + number * call.norm_stride, call.norm_kind, call.dim, (float)call.epsilon,
                       head);
      if (call.half)
        rotate<Type>(head + call.rotary_first, (const Stored*)call.cosines + row * call.half,
                     (const Stored*)call.sines + row * call.half, call.half, call.pairing);
      if (!runs) continue;
      const Rows& to = runs[run].keys;
      const int64_t token = runs[run].start + row - before;
      if (to.in_q8) store_q8<Type>(head, call.dim, row_of<Q8Block>(runs[run], to, number, token));
      else memcpy(row_of<Stored>(runs[run], to, number, token), head, call.dim * sizeof(Stored));
    }
  }
}

// Functions of one number in float32; bfloat16 has tables instead.
inline float activated(float x, int64_t function, float slope = 1.0f, float limit = 0.0f) {
  const float limited = x > limit ? limit : x;
  switch (function) {
    case SILU:
      return x / (1.0f + (float)functions::exp(-x));
    case GELU:
      return 0.5f * x * (1.0f + (float)functions::erf(x * 0.70710678f));
    case GELU_TANH:
      return 0.5f * x * (1.0f + (float)functions::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    case RELU:
      return x > 0.0f || x != x ? x : 0.0f;
    case SQUARED_RELU:
      return x > 0.0f || x != x ? x * x : 0.0f;
    case SIGMOID:
      return 1.0f / (1.0f + (float)functions::exp(-x));
    case TANH:
      return (float)functions::tanh(x);
    case EXPM1_EXCESS:
      return x > 0.0f ? 0.0f : (float)functions::expm1(x > -1e-6f ? -1e-6f : x) - x;
    case SOFTPLUS:
      return x > 20.0f ? x : (float)functions::log1p((float)functions::exp(x));
    case LIMITED_SILU:
      return limited / (1.0f + (float)functions::exp(-slope * limited));
    case LIMITED_AND_ONE:
      return (limited < -limit ? -limit : limited) + 1.0f;
    default:
      return x;
  }
}

inline void gate_floats(const Gate& call, int64_t row) {
  const float* gate = (const float*)call.gate + row * call.gate_stride;
  const float* up = call.up ? (const float*)call.up + row * call.up_stride : nullptr;
  float* out = (float*)call.out + row * call.width;
  for (int64_t i = 0; i < call.width; ++i) {
    const float activation = call.factor * activated(gate[i / call.each] / (float)call.factor, call.function);
    out[i] = up ? activation * up[i] : activation;
  }
}

inline void gate_bfloats(const Gate& call, int64_t row) {
  const uint16_t* gate = (const uint16_t*)call.gate + row * call.gate_stride;
  const uint16_t* up = call.up ? (const uint16_t*)call.up + row * call.up_stride : nullptr;
  uint16_t* out = (uint16_t*)call.out + row * call.width;
  if (call.each > 1) {
    memcpy(out, up, call.width * 2);
    for (int64_t i = 0; i < call.width; i += call.each)
      weigh<BFloat16>(out + i, BFloat16::one(call.curve[gate[i / call.each]]), call.each);
    return;
  }
  gate_row(gate, up, call.curve, call.width, out);
}

template <class Type>
inline void add_part(const Sum& call, int64_t begin, int64_t end) {
  typedef typename Type::Stored Stored;
  const Stored *first = (const Stored*)call.first, *second = (const Stored*)call.second;
  for (int64_t i = begin; i < end; i += LANES) {
    Floats sum = some_of<Type>(second + i, end - i);
    if (call.factor != 1.0) sum = rounded_to<Type>(sum * all((float)call.factor));
    if (first) sum = some_of<Type>(first + i, end - i) + sum;
    put_some<Type>((Stored*)call.out + i, sum, end - i);
  }
}

template <class Type>
inline void put_step_sizes(const StepSizes& call, int64_t row) {
  const typename Type::Stored* from = (const typename Type::Stored*)call.rows + row * call.row_stride;
  float* out = call.out + row * call.width;
  for (int64_t i = 0; i < call.width; ++i) {
    float size = activated(Type::one(from[i]) + (call.bias ? call.bias[i] : 0.0f), SOFTPLUS);
    if (size < (float)call.least) size = (float)call.least;
    if (size > (float)call.most) size = (float)call.most;
    out[i] = call.factors ? size * call.factors[i] : size;
  }
}

template <class Type>
inline void gate_and_norm(const GatedNorm& call, int64_t row) {
  typedef typename Type::Stored Stored;
  const Stored* gate = (const Stored*)call.gate + row * call.gate_stride;
  float* rows = call.rows + row * call.width;
  Stored* out = (Stored*)call.out + row * call.width;
  const auto gated = [&](int64_t i) {
    const Floats of_gate = some_of<Type>(gate + i, call.width - i), numbers = some_of<Float32>(rows + i, call.width - i);
    const Floats below = all(1.0f) + exp_of(-of_gate);
    return numbers * (call.function == SILU ? of_gate / below : all(1.0f) / below);
  };
  for (int64_t i = 0; call.gates_first && i < call.width; i += LANES) put_some<Float32>(rows + i, gated(i), call.width - i);
  for (int64_t i = 0; call.weight && i < call.width; i += call.group)
    norm_row<Float32>(rows + i, call.weight + i % call.num_weights, ROUNDED, call.group, (float)call.epsilon, rows + i);
  for (int64_t i = 0; i < call.width; i += LANES)
    put_some<Type>(out + i, call.gates_first ? some_of<Float32>(rows + i, call.width - i) : gated(i), call.width - i);
}

template <class Type>
inline void scale_row_by_position(const PositionScaling& call, int64_t row) {
  const float part = __builtin_floorf(((float)call.positions[row] + (float)call.offset) / (float)call.period);
  const float scale = 1.0f + (float)functions::log1p(part) * (float)call.factor;
  weigh<Type>((typename Type::Stored*)call.rows + row * call.width, scale, call.width);
}

}  // namespace
}  // namespace diskprefix
