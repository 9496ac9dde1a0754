// The operators of layers with a state, token by token: a depthwise causal convolution, the delta rule, and the state space
// of Mamba 2. Each number is one chain of operations over the tokens up to its own. So the state of a sequence has the same
// bits however its tokens are cut into steps, and whatever the rest of the batch is.

#pragma once

#include <atomic>

#include "interface.h"
#include "memory.h"
#include "parts.h"

namespace diskprefix {
namespace {

// Returns NaN for NaN: a NaN decay must not become 0, which would silently clear the state.
inline Floats exp_of(Floats x) {
  const Floats limited = larger(x * all(LOG2_E), all(-127.0f));
  const Floats power = exp2(limited > all(126.0f) ? all(126.0f) : limited);
  return x == x ? power : x;
}

inline Floats silu(Floats x) { return x / (all(1.0f) + exp_of(-x)); }

// Channels of a convolution that one thread computes together: a cache line.
constexpr int64_t CHANNELS = 4 * LANES;
constexpr int64_t MAX_KERNEL = 16;

// The tokens of one sequence, for the channels from `first` on. `window` is a ring buffer with the last inputs of these
// channels and the current one.
template <class Type>
class ConvolvedChannels {
  typedef typename Type::Stored Stored;

 public:
  ConvolvedChannels(const Convolution& call, int64_t first)
      : call_(call), first_(first), width_(least(CHANNELS, call.channels - first)), kernel_(call.kernel) {
    for (int64_t lane = 0; lane < CHANNELS; ++lane) {
      const bool is_there = lane < width_;
      for (int64_t k = 0; k < kernel_; ++k)
        ((float*)weights_[k])[lane] = is_there ? Type::one(((const Stored*)call.weight)[(first + lane) * kernel_ + k]) : 0.0f;
      ((float*)bias_)[lane] = is_there && call.bias ? Type::one(((const Stored*)call.bias)[first + lane]) : 0.0f;
    }
  }

  void run(const StateRun& run, int64_t row) {
    const Stored* before = (const Stored*)run.before + first_ * kernel_;
    Stored* state = (Stored*)run.state + first_ * kernel_;
    for (int64_t k = 0; k < kernel_; ++k)
      for (int64_t lane = 0; lane < width_; ++lane) ((float*)window_[k])[lane] = Type::one(before[lane * kernel_ + k]);
    // The window begins with the second number of the state; the first belongs to the token that leaves the window.
    int64_t oldest = 0;
    for (int64_t token = 0; token < run.num_rows; ++token) {
      const int64_t number = row + token;
      oldest = oldest + 1 == kernel_ ? 0 : oldest + 1;
      step((const Stored*)call_.rows + number * call_.row_stride + first_, (Stored*)call_.out + number * call_.channels + first_, oldest);
    }
    for (int64_t k = 0; k < kernel_; ++k) {
      const float* numbers = (const float*)window_[(oldest + k) % kernel_];
      for (int64_t lane = 0; lane < width_; ++lane) state[lane * kernel_ + k] = Type::narrowed(numbers[lane]);
    }
  }

 private:
  const Convolution& call_;
  const int64_t first_, width_, kernel_;
  Floats weights_[MAX_KERNEL][CHANNELS / LANES], window_[MAX_KERNEL][CHANNELS / LANES] = {}, bias_[CHANNELS / LANES];

  void step(const Stored* row, Stored* out, int64_t oldest) {
    const int64_t newest = oldest ? oldest - 1 : kernel_ - 1;
    for (int64_t part = 0; part * LANES < width_; ++part) {
      const int64_t left = width_ - part * LANES;
      window_[newest][part] = some_of<Type>(row + part * LANES, left);
      Floats sum = bias_[part];
      for (int64_t k = 0, at = oldest; k < kernel_; ++k, at = at + 1 == kernel_ ? 0 : at + 1)
        sum = fma(weights_[k][part], window_[at][part], sum);
      if (call_.has_silu) sum = silu(rounded_to<Type>(sum));
      put_some<Type>(out + part * LANES, sum, left);
    }
  }
};

int32_t convolution(const Convolution* call, const StateRun* runs) {
  if (call->kernel > MAX_KERNEL) return 1;
  const int64_t blocks = (call->channels + CHANNELS - 1) / CHANNELS;
  const int64_t grain = 1 + 16384 / (1 + call->num_rows * CHANNELS);
  spread(call->num_threads, blocks, grain, [&](int64_t begin, int64_t end) {
    with_type(call->dtype, [&](auto type) {
      for (int64_t block = begin; block < end; ++block) {
        ConvolvedChannels<decltype(type)> channels(*call, block * CHANNELS);
        for (int64_t run = 0, row = 0; run < call->num_runs; row += runs[run++].num_rows) channels.run(runs[run], row);
      }
    });
  });
  return 0;
}

// Computes each head of each sequence. Returns 1 if there is not enough memory.
template <template <class> class Head, class Call>
inline int32_t for_heads(const Call& call, const StateRun* runs) {
  std::atomic<bool> has_failed{false};
  spread(call.num_threads, call.num_runs * call.heads, 1, [&](int64_t begin, int64_t end) {
    int64_t run = 0, row = 0;
    for (int64_t item = begin; item < end; ++item) {
      while (run < item / call.heads) row += runs[run++].num_rows;
      with_type(call.dtype, [&](auto type) {
        if (!Head<decltype(type)>(call, runs[run], row, item % call.heads).run()) has_failed = true;
      });
    }
  });
  return has_failed;
}

template <class Type>
inline void to_floats(const void* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += LANES)
    put_some<Float32>(to + i, some_of<Type>((const typename Type::Stored*)from + i, count - i), count - i);
}

// Normalises to length 1 if `epsilon` is not 0, then multiplies by `scale`.
inline void to_length(float* numbers, int64_t count, float epsilon, float scale) {
  Floats factor = all(scale);
  if (epsilon) {
    Total<1> squares;
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats some = some_of<Float32>(numbers + i, count - i);
      squares.from(i) = fma(some, some, squares.from(i));
    }
    factor = all(1.0f / __builtin_sqrtf(squares.sum() + epsilon) * scale);
  }
  for (int64_t i = 0; i < count; i += LANES)
    put_some<Float32>(numbers + i, some_of<Float32>(numbers + i, count - i) * factor, count - i);
}

// Vectors of columns of a state that are computed together, and partial sums of a result.
constexpr int64_t COLUMNS = 2, SUMS = 4;
constexpr int64_t OF_STATE = COLUMNS * LANES;

// One token of the delta rule for some columns of a head's state [key_dim, value_dim], whose rows are `stride` apart:
//   state = decay × before;  state += key × (beta × (value − key · state));  out = query · state
// With `decays` each row has its own decay.
inline void delta_step(const float* before, float* state, int64_t stride, int64_t key_dim, const float* query, const float* key, const float* decays,
                       float decay, const Floats* values, float beta, Floats* out) {
  Floats sums[SUMS][COLUMNS] = {}, delta[COLUMNS];
  for (int64_t row = 0; row < key_dim; row += SUMS)
    for (int64_t sum = 0; sum < least(SUMS, key_dim - row); ++sum) {
      const Floats factor = all(key[row + sum]), kept = all(decays ? decays[row + sum] : decay);
      for (int64_t column = 0; column < COLUMNS; ++column)
        sums[sum][column] =
            fma(factor, kept * loaded<Floats>(before + (row + sum) * stride + column * LANES), sums[sum][column]);
    }
  for (int64_t column = 0; column < COLUMNS; ++column) {
    const Floats known = (sums[0][column] + sums[1][column]) + (sums[2][column] + sums[3][column]);
    delta[column] = (values[column] - known) * all(beta);
    for (int64_t sum = 0; sum < SUMS; ++sum) sums[sum][column] = Floats{};
  }
  for (int64_t row = 0; row < key_dim; row += SUMS)
    for (int64_t sum = 0; sum < least(SUMS, key_dim - row); ++sum) {
      const Floats factor = all(key[row + sum]), asked = all(query[row + sum]), kept = all(decays ? decays[row + sum] : decay);
      for (int64_t column = 0; column < COLUMNS; ++column) {
        const int64_t at = (row + sum) * stride + column * LANES;
        const Floats next = fma(factor, delta[column], kept * loaded<Floats>(before + at));
        store(state + at, next);
        sums[sum][column] = fma(asked, next, sums[sum][column]);
      }
    }
  for (int64_t column = 0; column < COLUMNS; ++column)
    out[column] = (sums[0][column] + sums[1][column]) + (sums[2][column] + sums[3][column]);
}

template <class Type>
class DeltaHead {
  typedef typename Type::Stored Stored;

 public:
  DeltaHead(const DeltaRule& call, const StateRun& run, int64_t row, int64_t head) : call_(call), run_(run), row_(row), head_(head) {}

  bool run() {
    static thread_local Memory memory;
    const int64_t keys = call_.key_dim, rows = run_.num_rows, decays = rows * call_.decay_dim;
    if (!memory.reserve(2 * Memory::size_of<float>(rows * keys) + Memory::size_of<float>(decays) +
                        Memory::size_of<float>(keys * OF_STATE)))
      return false;
    queries_ = memory.take<float>(rows * keys), keys_ = memory.take<float>(rows * keys);
    decays_ = memory.take<float>(decays);
    float* block = memory.take<float>(keys * OF_STATE);
    prepare();
    const float* before = (const float*)run_.before + head_ * keys * call_.value_dim;
    float* state = (float*)run_.state + head_ * keys * call_.value_dim;
    for (int64_t column = 0; column < call_.value_dim; column += OF_STATE) {
      const int64_t width = least(OF_STATE, call_.value_dim - column);
      // With many tokens, process all of them for a part of the state that stays in the cache.
      if (rows < 4 && width == OF_STATE) {
        tokens(before + column, state + column, call_.value_dim, column, width);
        continue;
      }
      memset(block, 0, keys * OF_STATE * sizeof *block);
      for (int64_t i = 0; i < keys; ++i) memcpy(block + i * OF_STATE, before + i * call_.value_dim + column, width * 4);
      tokens(block, block, OF_STATE, column, width);
      for (int64_t i = 0; i < keys; ++i) memcpy(state + i * call_.value_dim + column, block + i * OF_STATE, width * 4);
    }
    return true;
  }

 private:
  const DeltaRule& call_;
  const StateRun& run_;
  const int64_t row_, head_;
  float *queries_ = nullptr, *keys_ = nullptr, *decays_ = nullptr;

  void prepare() {
    const int64_t keys = call_.key_dim, of_key = head_ / (call_.heads / call_.key_heads);
    const float scale = 1.0f / __builtin_sqrtf((float)keys);
    for (int64_t i = 0; i < run_.num_rows; ++i) {
      const int64_t row = row_ + i;
      to_floats<Type>((const Stored*)call_.query + row * call_.query_stride + of_key * keys, keys, queries_ + i * keys);
      to_floats<Type>((const Stored*)call_.key + row * call_.key_stride + of_key * keys, keys, keys_ + i * keys);
      to_length(queries_ + i * keys, keys, (float)call_.epsilon, scale);
      to_length(keys_ + i * keys, keys, (float)call_.epsilon, 1.0f);
      const float* decays = call_.decay + (row * call_.heads + head_) * call_.decay_dim;
      for (int64_t k = 0; k < call_.decay_dim; k += LANES) {
        const int64_t left = call_.decay_dim - k;
        put_some<Float32>(decays_ + i * call_.decay_dim + k, exp_of(some_of<Float32>(decays + k, left)), left);
      }
    }
  }

  void tokens(const float* before, float* state, int64_t stride, int64_t column, int64_t width) const {
    const int64_t keys = call_.key_dim;
    for (int64_t i = 0; i < run_.num_rows; ++i) {
      const int64_t row = row_ + i, of_row = row * call_.heads + head_;
      const Stored* value = (const Stored*)call_.value + row * call_.value_stride + head_ * call_.value_dim + column;
      Stored* out = (Stored*)call_.out + of_row * call_.value_dim + column;
      Floats values[COLUMNS], results[COLUMNS];
      for (int64_t part = 0; part < COLUMNS; ++part)
        values[part] = part * LANES < width ? some_of<Type>(value + part * LANES, width - part * LANES) : Floats{};
      const float* decays = call_.decay_dim > 1 ? decays_ + i * call_.decay_dim : nullptr;
      delta_step(i ? state : before, state, stride, keys, queries_ + i * keys, keys_ + i * keys, decays, decays_[i * call_.decay_dim], values,
                 call_.beta[of_row], results);
      for (int64_t part = 0; part * LANES < width; ++part) put_some<Type>(out + part * LANES, results[part], width - part * LANES);
    }
  }
};

int32_t delta_rule(const DeltaRule* call, const StateRun* runs) { return for_heads<DeltaHead>(*call, runs); }

// Rows of a head's state that process all tokens before the next ones do.
constexpr int64_t STATE_ROWS = 16;

// A head's state [dim, state_dim]:
//   state = exp(step × decay) × state + (step × x) ⊗ B;  out = C · state
template <class Type>
class StateSpaceHead {
  typedef typename Type::Stored Stored;

 public:
  StateSpaceHead(const StateSpace& call, const StateRun& run, int64_t row, int64_t head)
      : call_(call), run_(run), row_(row), head_(head) {}

  bool run() {
    static thread_local Memory memory;
    const int64_t width = call_.state_dim, rows = run_.num_rows, group = head_ / (call_.heads / call_.groups);
    if (!memory.reserve(2 * Memory::size_of<float>(rows * width) + Memory::size_of<float>(rows) +
                        Memory::size_of<float>(rows * call_.dim)))
      return false;
    into_ = memory.take<float>(rows * width), from_ = memory.take<float>(rows * width);
    decays_ = memory.take<float>(rows), inputs_ = memory.take<float>(rows * call_.dim);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = row_ + i;
      to_floats<Type>((const Stored*)call_.into + row * call_.into_stride + group * width, width, into_ + i * width);
      to_floats<Type>((const Stored*)call_.from + row * call_.from_stride + group * width, width, from_ + i * width);
      to_floats<Type>((const Stored*)call_.rows + row * call_.row_stride + head_ * call_.dim, call_.dim, inputs_ + i * call_.dim);
      decays_[i] = exp_of(all(call_.steps[row * call_.heads + head_] * call_.decay[head_]))[0];
    }
    const float* before = (const float*)run_.before + head_ * call_.dim * width;
    float* state = (float*)run_.state + head_ * call_.dim * width;
    for (int64_t first = 0; first < call_.dim; first += STATE_ROWS)
      for (int64_t i = 0; i < rows; ++i) step(i ? state : before, state, i, first, least(first + STATE_ROWS, call_.dim));
    return true;
  }

 private:
  const StateSpace& call_;
  const StateRun& run_;
  const int64_t row_, head_;
  float *into_ = nullptr, *from_ = nullptr, *decays_ = nullptr, *inputs_ = nullptr;

  void step(const float* before, float* state, int64_t token, int64_t first, int64_t end) const {
    const int64_t width = call_.state_dim, of_row = (row_ + token) * call_.heads + head_;
    const float *into = into_ + token * width, *from = from_ + token * width, *inputs = inputs_ + token * call_.dim;
    const Floats decay = all(decays_[token]);
    for (int64_t row = first; row < end; ++row) {
      const float input = inputs[row];
      const Floats added = all(input * call_.steps[of_row]);
      Total<4> total;
      for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        const Floats next = fma(added, some_of<Float32>(into + i, left), decay * some_of<Float32>(before + row * width + i, left));
        put_some<Float32>(state + row * width + i, next, left);
        total.from(i) = fma(next, some_of<Float32>(from + i, left), total.from(i));
      }
      const float output = total.sum();
      ((float*)call_.out)[of_row * call_.dim + row] = call_.skip ? output + input * call_.skip[head_] : output;
    }
  }
};

int32_t state_space(const StateSpace* call, const StateRun* runs) { return for_heads<StateSpaceHead>(*call, runs); }

}  // namespace
}  // namespace diskprefix
