// An indexer chooses the blocks of earlier tokens that a token attends to. Each complete block has one key: it lies in memory
// where the key of its last token was, which nothing reads after that. So what a token chooses depends only on the tokens
// before it.

#pragma once

#include <algorithm>

#include "attention.h"
#include "rows.h"

namespace diskprefix {
namespace {

template <class Type>
inline void pool_block(const PoolKeys& call, const Run& run, int64_t number, float* sums, typename Type::Stored* angles) {
  typedef typename Type::Stored Stored;
  const int64_t first = number * call.block, half = call.half;
  Stored* to = row_of<Stored>(run, run.keys, 0, first + call.block - 1);
  for (int64_t i = 0; i < call.dim; i += LANES) {
    Floats sum = {};
    for (int64_t token = first; token < first + call.block; ++token)
      sum += some_of<Type>(row_of<Stored>(run, run.keys, 0, token) + i, call.dim - i);
    store(sums + i, sum / all((float)call.block));
  }
  for (int64_t i = 0; i < call.dim; i += LANES) put_some<Type>(to + i, loaded<Floats>(sums + i), call.dim - i);
  norm_row<Type>(to, (const Stored*)call.norm, call.norm_kind, call.dim, (float)call.epsilon, to);
  const Angles position = {call.dtype, 1, half, 1, &first, call.frequencies, nullptr, call.factor, angles, angles + half, 1};
  put_angles<Type>(position, 0);
  rotate<Type>(to, angles, angles + half, half, HALVES);
}

inline int32_t pool_keys(const PoolKeys& call, const Run* runs, int64_t num_runs) {
  std::atomic<bool> has_failed{false};
  for (int64_t number = 0; number < num_runs; ++number) {
    const Run& run = runs[number];
    const int64_t first = run.start / call.block, end = (run.start + run.num_rows) / call.block;
    if (first == end) continue;
    spread(call.num_threads, end - first, 8, [&](int64_t from, int64_t to) {
      static thread_local Memory memory;
      if (!memory.reserve(Memory::size_of<float>(call.dim + LANES) + Memory::size_of<float>(2 * call.half)))
        return (void)(has_failed = true);
      float *sums = memory.take<float>(call.dim + LANES), *angles = memory.take<float>(2 * call.half);
      with_type(call.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        for (int64_t block = from; block < to; ++block) pool_block<decltype(type)>(call, run, first + block, sums, (Stored*)angles);
      });
    });
  }
  return has_failed;
}

// Computes the scores of blocks `begin` to `end` - 1 for a row of queries.
template <class Type>
inline void score_blocks(const ChooseBlocks& call, const Run& run, const typename Type::Stored* query, int64_t begin, int64_t end,
                         float* scores) {
  typedef typename Type::Stored Stored;
  for (int64_t block = begin; block < end; ++block) {
    const Stored* key = row_of<Stored>(run, run.keys, 0, (block + 1) * call.block - 1);
    float sum = 0.0f;
    for (int64_t head = 0; head < call.num_heads; ++head) {
      Total<4> total;
      for (int64_t i = 0; i < call.dim; i += LANES) {
        const int64_t left = call.dim - i;
        total.from(i) = fma(some_of<Type>(query + head * call.dim + i, left), some_of<Type>(key + i, left), total.from(i));
      }
      const float score = total.sum();
      sum += score > 0.0f ? score : 0.0f;  // never NaN, so that the order of scores is total
    }
    scores[block] = sum;
  }
}

// Puts the blocks with the largest scores into `chosen`, in ascending order. `order` has room for a number of each block.
inline void choose_largest(const float* scores, int64_t count, int64_t num_chosen, int32_t* order, int32_t* chosen) {
  for (int64_t i = 0; i < count; ++i) order[i] = (int32_t)i;
  const auto is_before = [scores](int32_t a, int32_t b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); };
  std::nth_element(order, order + num_chosen, order + count, is_before);
  std::sort(order, order + num_chosen);
  memcpy(chosen, order, num_chosen * sizeof *chosen);
}

inline int32_t choose_blocks(const ChooseBlocks& call, const Run* runs, int64_t num_runs) {
  std::atomic<bool> has_failed{false};
  const bool shares_rows = call.num_rows >= call.num_threads;
  const auto in_row = [&](const Run& run, int64_t before, int64_t row, int64_t num_threads) {
    static thread_local Memory memory;
    const int64_t count = (run.start + row + 1) / call.block;
    if (count <= call.num_chosen) return;
    if (!memory.reserve(Memory::size_of<float>(count) + Memory::size_of<int32_t>(count))) return (void)(has_failed = true);
    float* scores = memory.take<float>(count);
    int32_t* order = memory.take<int32_t>(count);
    spread(num_threads, count, 128, [&](int64_t begin, int64_t end) {
      with_type(call.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        const Stored* query = (const Stored*)call.query + (before + row) * call.num_heads * call.dim;
        score_blocks<decltype(type)>(call, run, query, begin, end, scores);
      });
    });
    choose_largest(scores, count, call.num_chosen, order, call.chosen + (before + row) * call.num_chosen);
  };
  for (int64_t number = 0, before = 0; number < num_runs; before += runs[number++].num_rows) {
    const Run& run = runs[number];
    if (shares_rows)
      spread(call.num_threads, run.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) in_row(run, before, row, 1);
      });
    else
      for (int64_t row = 0; row < run.num_rows; ++row) in_row(run, before, row, call.num_threads);
  }
  return has_failed;
}

}  // namespace
}  // namespace diskprefix
