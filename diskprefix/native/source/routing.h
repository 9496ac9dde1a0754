// The router of a mixture, and experts whose matrices are not packed. A row's result depends on no other row.

#pragma once

#include "dense.h"
#include "rows.h"

namespace diskprefix {
namespace {

// The order in which experts are chosen; NaN comes first.
inline bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

// Takes the `count` largest of the numbers that are left, in descending order; of equal numbers the first.
template <class Take>
inline void take_largest(const float* numbers, int64_t num_numbers, bool* is_left, int64_t count, const Take& take) {
  for (int64_t rank = 0; rank < count; ++rank) {
    int64_t best = -1;
    for (int64_t i = 0; i < num_numbers; ++i)
      if (is_left[i] && (best < 0 || is_larger(numbers[i], numbers[best]))) best = i;
    is_left[best] = false;
    take(rank, best);
  }
}

inline void softmax(float* numbers, int64_t count) {
  float largest = numbers[0], sum = 0.0f;
  for (int64_t i = 1; i < count; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
  for (int64_t i = 0; i < count; ++i) sum += numbers[i] = (float)functions::exp(numbers[i] - largest);
  for (int64_t i = 0; i < count; ++i) numbers[i] /= sum;
}

inline void sigmoids(float* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = activated(numbers[i], SIGMOID);
}

// Returns the part of `best` in the softmax over `best` and the remaining numbers near it.
inline float part_of_near(const float* numbers, int64_t count, const bool* is_left, float best, float threshold) {
  float sum = 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float size = __builtin_fabsf(numbers[i]), distance = (best - numbers[i]) / (size > best ? size : best);
    if (is_left[i] && !(distance > threshold)) sum += (float)functions::exp(numbers[i] - best);
  }
  return 1.0f / sum;
}

// `scores`, `choice` and `is_left` are scratch memory of [num_experts].
template <class Type>
inline void route_row(const Router& call, int64_t row, float* scores, float* choice, bool* is_left) {
  const int64_t count = call.num_experts, of_group = count / call.groups;
  const auto* logits = (const typename Type::Stored*)call.logits + row * count;
  const float softcap = call.softcap;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = Type::one(logits[i]);
    if (softcap) scores[i] = softcap * (float)functions::tanh(scores[i] / softcap);
  }
  if (call.scores == SOFTMAX) softmax(scores, count);
  if (call.scores == OF_SIGMOID) sigmoids(scores, count);
  for (int64_t i = 0; i < count; ++i) choice[i] = call.bias ? scores[i] + call.bias[i] : scores[i];
  memset(is_left, 1, count);
  if (call.groups > 1) {
    float group_scores[MAX_GROUPS];
    bool is_group_left[MAX_GROUPS];
    for (int64_t group = 0; group < call.groups; ++group) {
      float sum = 0.0f;
      take_largest(choice + group * of_group, of_group, is_left + group * of_group, call.of_group,
                   [&](int64_t, int64_t at) { sum += choice[group * of_group + at]; });
      group_scores[group] = sum, is_group_left[group] = true;
    }
    memset(is_left, 0, count);
    take_largest(group_scores, call.groups, is_group_left, call.groups_chosen,
                 [&](int64_t, int64_t group) { memset(is_left + group * of_group, 1, of_group); });
  }
  int64_t* chosen = call.chosen + row * call.num_chosen;
  float *weights = call.weights + row * call.num_chosen, sum = 0.0f;
  take_largest(choice, count, is_left, call.num_chosen,
               [&](int64_t rank, int64_t expert) {
                 chosen[rank] = expert, weights[rank] = scores[expert];
                 if (call.scores == SPARSE_MIXER) weights[rank] = part_of_near(scores, count, is_left, scores[expert], call.threshold);
               });
  if (call.scores == SOFTMAX_OF_CHOSEN) softmax(weights, call.num_chosen);
  if (call.scores == SIGMOID_OF_CHOSEN) sigmoids(weights, call.num_chosen);
  for (int64_t i = 0; i < call.num_chosen; ++i) sum += weights[i];
  const float divisor = !call.is_normed ? 1.0f : sum < (float)call.floor ? (float)call.floor : sum;
  for (int64_t i = 0; i < call.num_chosen; ++i) {
    weights[i] = weights[i] / divisor * (float)call.factor;
    if (call.scales) weights[i] *= call.scales[chosen[i]];
  }
}

int32_t route(const Router& call) {
  std::atomic<bool> has_failed{false};
  spread(call.num_threads, call.num_rows, 16, [&](int64_t begin, int64_t end) {
    static thread_local Memory memory;
    if (!memory.reserve(2 * Memory::size_of<float>(call.num_experts) + Memory::size_of<bool>(call.num_experts))) {
      has_failed = true;
      return;
    }
    float *scores = memory.take<float>(call.num_experts), *choice = memory.take<float>(call.num_experts);
    bool* is_left = memory.take<bool>(call.num_experts);
    for (int64_t row = begin; row < end; ++row)
      call.dtype == FLOAT32 ? route_row<Float32>(call, row, scores, choice, is_left)
                            : route_row<BFloat16>(call, row, scores, choice, is_left);
  });
  return has_failed;
}

// Computes the products of the experts, one expert after the other.
template <class Type>
class DenseMixture {
  typedef typename Type::Stored Stored;

 public:
  explicit DenseMixture(const DenseExperts& call) : call_(call), pairs_(call.num_rows * call.num_chosen) {}

  int32_t run() {
    static thread_local Memory memory;
    const int64_t count = call_.num_rows;
    if (!memory.reserve(Memory::size_of<int64_t>(count) + 2 * Memory::size_of<Stored>(count * call_.width) +
                        Memory::size_of<Stored>(count * call_.outer) + Memory::size_of<Stored>(count * call_.inner) +
                        Memory::size_of<Stored>(pairs_ * call_.width)))
      return 1;
    pair_at_ = memory.take<int64_t>(count);
    rows_ = memory.take<Stored>(count * call_.width), last_ = memory.take<Stored>(count * call_.width);
    first_ = memory.take<Stored>(count * call_.outer), gated_ = memory.take<Stored>(count * call_.inner);
    found_ = memory.take<Stored>(pairs_ * call_.width);
    for (int64_t expert = 0; expert < call_.num_experts; ++expert)
      if (compute(expert)) return 1;
    each_row(count, [this](int64_t row) { add_up(row); });
    return 0;
  }

 private:
  const DenseExperts& call_;
  const int64_t pairs_;
  int64_t* pair_at_ = nullptr;
  Stored *rows_ = nullptr, *first_ = nullptr, *gated_ = nullptr, *last_ = nullptr, *found_ = nullptr;

  template <class Body>
  void each_row(int64_t count, const Body& body) const {
    spread(call_.num_threads, count, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(row);
    });
  }

  int32_t compute(int64_t expert) const {
    const int64_t width = call_.width;
    int64_t count = 0;
    for (int64_t pair = 0; pair < pairs_; ++pair)
      if (call_.chosen[pair] == expert) pair_at_[count++] = pair;
    if (!count) return 0;
    for (int64_t i = 0; i < count; ++i) {
      memcpy(rows_ + i * width, (const Stored*)call_.rows + pair_at_[i] / call_.num_chosen * width, width * sizeof(Stored));
      if (call_.weighs_rows) weigh<Type>(rows_ + i * width, call_.weights[pair_at_[i]], width);
    }
    if (multiply(expert, count, rows_, width, call_.first, call_.outer, call_.first_bias, first_)) return 1;
    each_row(count, [this](int64_t i) { gate(first_ + i * call_.outer, gated_ + i * call_.inner); });
    if (multiply(expert, count, gated_, call_.inner, call_.last, width, call_.last_bias, last_)) return 1;
    each_row(count, [=](int64_t i) { memcpy(found_ + pair_at_[i] * width, last_ + i * width, width * sizeof(Stored)); });
    return 0;
  }

  int32_t multiply(int64_t expert, int64_t count, const Stored* rows, int64_t inner, const void* matrices, int64_t outer,
                   const float* biases, Stored* out) const {
    const DenseProduct call = {
        call_.dtype, !call_.is_transposed, 1, count, inner, outer, rows, 0, inner,
        (const Stored*)matrices + expert * inner * outer, 0, call_.is_transposed ? outer : inner,
        biases ? biases + expert * outer : nullptr, out, 0, outer, call_.num_threads};
    return dense(&call);
  }

  float value(Stored stored, int64_t function, const uint16_t* curve) const {
    if constexpr (sizeof(Stored) == 4)
      return activated(stored, function, call_.slope, call_.limit);
    else
      return Type::one(curve ? curve[stored] : stored);
  }

  void gate(const Stored* first, Stored* to) const {
    for (int64_t i = 0; i < call_.inner; i += LANES) {
      float gate[LANES] = {}, up[LANES] = {};
      const int64_t left = least(LANES, call_.inner - i);
      for (int64_t lane = 0; lane < left; ++lane) {
        const Stored* at = first + (i + lane) * call_.step;
        gate[lane] = value(*at, call_.function, call_.curve);
        up[lane] = call_.up_shift ? value(at[call_.up_shift], call_.up_function, call_.up_curve) : 1.0f;
      }
      put_some<Type>(to + i, loaded<Floats>(gate) * loaded<Floats>(up), left);
    }
  }

  // Adds up in the order of `chosen`, as `Experts` does.
  void add_up(int64_t row) const {
    for (int64_t i = 0; i < call_.width; i += LANES) {
      Floats total = {};
      for (int64_t number = 0; number < call_.num_chosen; ++number) {
        const int64_t pair = row * call_.num_chosen + number;
        const Floats computed = some_of<Type>(found_ + pair * call_.width + i, call_.width - i);
        const Floats weighted = call_.weighs_rows ? computed : rounded_to<Type>(computed * all(call_.weights[pair]));
        total = number ? total + weighted : weighted;
      }
      put_some<Type>((Stored*)call_.out + row * call_.width + i, total, call_.width - i);
    }
  }
};

}  // namespace
}  // namespace diskprefix
