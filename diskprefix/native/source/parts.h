// The steps between the products of a layer: norms, rotary embedding, gates. A row's result depends on no other row.

#pragma once

#include "interface.h"
#include "vector.h"

namespace diskprefix {
namespace {

// Calls `work(begin, end)` for parts of [0, count), of `grain` or more each.
template <class Body>
inline void spread(int64_t num_threads, int64_t count, int64_t grain, const Body& body) {
  if (num_threads == 1 || count <= grain) return body(0, count);
  const Work call = [](int64_t begin, int64_t end, void* self) { (*(const Body*)self)(begin, end); };
  share(num_threads, count, grain, call, (void*)&body);
}

// Loads LANES numbers, or the `left` remaining ones and zeros.
template <class Type>
inline Floats some_of(const typename Type::Stored* from, int64_t left) {
  if (left >= LANES) return Type::load(from);
  typename Type::Stored padded[LANES] = {};
  memcpy(padded, from, left * sizeof *from);
  return Type::load(padded);
}

template <class Type>
inline void put_some(typename Type::Stored* to, Floats numbers, int64_t left) {
  if (left >= LANES) return Type::put(to, numbers);
  typename Type::Stored padded[LANES];
  Type::put(padded, numbers);
  memcpy(to, padded, left * sizeof *to);
}

// Rounds to the stored type.
template <class Type>
inline Floats rounded_to(Floats numbers) {
  typename Type::Stored stored[LANES];
  Type::put(stored, numbers);
  return Type::load(stored);
}

template <class Type>
inline void weigh(typename Type::Stored* row, float weight, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) put_some<Type>(row + i, some_of<Type>(row + i, width - i) * all(weight), width - i);
}

template <class Type>
inline void layer_norm_row(const typename Type::Stored* row, const typename Type::Stored* weight, int64_t width, float epsilon,
                           typename Type::Stored* to) {
  Total<1> total, squares;
  for (int64_t i = 0; i < width; i += LANES) total.from(i) += some_of<Type>(row + i, width - i);
  const Floats mean = all(total.sum() / (float)width);
  const auto centred = [&](int64_t i) {
    float numbers[LANES] = {};
    put_some<Float32>(numbers, some_of<Type>(row + i, width - i) - mean, width - i);
    return loaded<Floats>(numbers);
  };
  for (int64_t i = 0; i < width; i += LANES) squares.from(i) = fma(centred(i), centred(i), squares.from(i));
  const Floats factor = all(1.0f / __builtin_sqrtf(squares.sum() / (float)width + epsilon));
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats weights = some_of<Type>(weight + i, width - i), biases = some_of<Type>(weight + width + i, width - i);
    put_some<Type>(to + i, centred(i) * factor * weights + biases, width - i);
  }
}

template <class Type>
inline void norm_row(const typename Type::Stored* row, const typename Type::Stored* weight, int64_t kind, int64_t width,
                     float epsilon, typename Type::Stored* to) {
  if (kind == LAYER) return layer_norm_row<Type>(row, weight, width, epsilon, to);
  Total<4> squares;
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats numbers = some_of<Type>(row + i, width - i);
    squares.from(i) = fma(numbers, numbers, squares.from(i));
  }
  const Floats factor = all(1.0f / __builtin_sqrtf(squares.sum() / (float)width + epsilon));
  for (int64_t i = 0; i < width; i += LANES) {
    Floats numbers = some_of<Type>(row + i, width - i) * factor, weights = some_of<Type>(weight + i, width - i);
    if (kind == ROUNDED) numbers = rounded_to<Type>(numbers);
    if (kind == ONE_MORE) weights += all(1.0f);
    put_some<Type>(to + i, numbers * weights, width - i);
  }
}

template <class Type>
inline void put_norm(const Norm& call, int64_t row) {
  typedef typename Type::Stored Stored;
  norm_row<Type>((const Stored*)call.rows + row * call.width, (const Stored*)call.weight, call.kind, call.width,
                 (float)call.epsilon, (Stored*)call.out + row * call.width);
}

// Looks up LANES numbers, or the `left` remaining ones, in a curve: a table with one extra entry.
inline Floats curve_at(const uint16_t* numbers, const uint16_t* curve, int64_t left) {
  uint16_t values[LANES] = {};
#if defined(__AVX512F__)
  if (left == LANES) {
    const __m512i at = _mm512_cvtepu16_epi32(loaded<__m256i>(numbers));
    store(values, _mm512_cvtepi32_epi16(_mm512_i32gather_epi32(at, curve, 2)));
  } else
#endif
    for (int64_t lane = 0; lane < left; ++lane) values[lane] = curve[numbers[lane]];
  return BFloat16::load(values);
}

// out = curve(gate) × up, or curve(gate) × up_curve(up), or curve(gate) without `up`.
inline void gate_row(const uint16_t* gate, const uint16_t* up, const uint16_t* curve, int64_t width, uint16_t* out,
                     const uint16_t* up_curve = nullptr) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int64_t left = least(LANES, width - i);
    Floats product = curve_at(gate + i, curve, left);
    if (up) product *= up_curve ? curve_at(up + i, up_curve, left) : some_of<BFloat16>(up + i, left);
    put_some<BFloat16>(out + i, product, left);
  }
}

}  // namespace
}  // namespace diskprefix
