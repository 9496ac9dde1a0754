// The parts of a layer, each in one call: attention with the products around it, and the gated products behind it.
// Values between them stay in memory of the calling thread.

#pragma once

#include "attention.h"
#include "matrix.h"
#include "parts.h"

namespace diskprefix {
namespace {

int32_t gated(const Gated* call) {
  static thread_local Memory memory;
  const int64_t rows = call->num_rows, inner = call->down->columns;
  if (!memory.reserve(2 * Memory::size_of<uint16_t>(rows * inner))) return 1;
  uint16_t *gate = memory.take<uint16_t>(rows * inner), *up = memory.take<uint16_t>(rows * inner);
  const Product first = {rows, 2, call->rows, {call->gate, call->up}, {gate, up}, call->num_threads, call->parallel_for};
  if (product(&first)) return 1;
  const bool is_done = spread(call->num_threads, call->parallel_for, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) gate_row(gate + row * inner, up + row * inner, call->curve, inner);
  });
  const Product last = {rows, 1, gate, {call->down}, {call->out}, call->num_threads, call->parallel_for};
  return !is_done || product(&last);
}

class Block {
 public:
  Block(const AttentionBlock& call, const Run* runs)
      : call_(call), runs_(runs), heads_(call.attention.num_heads), kv_heads_(call.attention.num_kv_heads),
        key_dim_(call.attention.key_dim), value_dim_(call.attention.value_dim) {}

  bool run() {
    static thread_local Memory memory;
    const int64_t rows = call_.num_rows, of_queries = rows * heads_ * key_dim_, of_keys = rows * kv_heads_ * key_dim_,
                  of_values = rows * kv_heads_ * value_dim_, of_results = rows * heads_ * value_dim_;
    if (!memory.reserve(Memory::size_of<uint16_t>(of_queries) + Memory::size_of<uint16_t>(of_keys) +
                        Memory::size_of<uint16_t>(of_values) + Memory::size_of<uint16_t>(of_results)))
      return false;
    queries_ = memory.take<uint16_t>(of_queries), keys_ = memory.take<uint16_t>(of_keys);
    values_ = memory.take<uint16_t>(of_values);
    uint16_t* results = memory.take<uint16_t>(of_results);
    const int64_t threads = call_.attention.num_threads;
    const ParallelFor parallel_for = call_.attention.parallel_for;
    const Product first = {rows, 3, call_.rows, {call_.query, call_.key, call_.value}, {queries_, keys_, values_}, threads, parallel_for};
    if (product(&first)) return false;
    if (!spread(threads, parallel_for, rows, 16, [this](int64_t begin, int64_t end) { to_memory(begin, end); })) return false;
    Attention attend = call_.attention;
    attend.dtype = BFLOAT16, attend.query = queries_, attend.out = results;
    attend.query_head_stride = key_dim_, attend.query_row_stride = heads_ * key_dim_;
    if (attention(&attend, runs_)) return false;
    const Product last = {rows, 1, results, {call_.last}, {call_.out}, threads, parallel_for};
    return !product(&last);
  }

 private:
  const AttentionBlock& call_;
  const Run* runs_;
  const int64_t heads_, kv_heads_, key_dim_, value_dim_;
  uint16_t *queries_ = nullptr, *keys_ = nullptr, *values_ = nullptr;

  void to_memory(int64_t begin, int64_t end) const {
    int64_t run = 0, before = 0;
    for (int64_t row = begin; row < end; ++row) {
      while (row >= before + runs_[run].num_rows) before += runs_[run++].num_rows;
      const uint16_t* cosines = (const uint16_t*)call_.cosines + row * call_.rotary_dim;
      const uint16_t* sines = (const uint16_t*)call_.sines + row * call_.rotary_dim;
      for (int64_t head = 0; head < heads_; ++head)
        prepare(queries_ + (row * heads_ + head) * key_dim_, call_.query_norm, cosines, sines);
      for (int64_t head = 0; head < kv_heads_; ++head) {
        uint16_t* key = keys_ + (row * kv_heads_ + head) * key_dim_;
        prepare(key, call_.key_norm, cosines, sines);
        put(runs_[run], head, row - before, key, values_ + (row * kv_heads_ + head) * value_dim_);
      }
    }
  }

  void prepare(uint16_t* head, const void* weight, const uint16_t* cosines, const uint16_t* sines) const {
    if (weight)
      norm_row<BFloat16>(head, (const uint16_t*)weight, call_.norm_kind, key_dim_, (float)call_.norm_epsilon, head);
    turn_head(head, cosines, sines, call_.rotary_dim);
  }

  void put(const Run& run, int64_t head, int64_t row, const uint16_t* key, const uint16_t* value) const {
    memcpy(row_of<uint16_t>(run, run.keys, head, run.start + row), key, key_dim_ * 2);
    memcpy(row_of<uint16_t>(run, run.values, head, run.start + row), value, value_dim_ * 2);
  }
};

int32_t attention_block(const AttentionBlock* call, const Run* runs) { return !Block(*call, runs).run(); }

}  // namespace
}  // namespace diskprefix
