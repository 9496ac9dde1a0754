// A step of a model, written down as operator calls over buffers at fixed addresses. Each step sets its number of rows in
// every call, and runs the calls in order.

#pragma once

#include <utility>

#include "dense.h"
#include "experts.h"
#include "indexer.h"
#include "matrix.h"
#include "ngrams.h"
#include "recurrence.h"
#include "routing.h"
#include "rows.h"
#include "streams.h"

namespace diskprefix {
namespace {

class PlannedStep {
 public:
  explicit PlannedStep(const PlanStep& step) : step_(step) {}

  int32_t run(const Operation* operations, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      if (const int32_t failed = compute(operations[i])) return failed;
    return 0;
  }

 private:
  const PlanStep& step_;

  // Returns the call with the fields that every step sets.
  template <class Call>
  Call* set(const Operation& operation) const {
    Call* call = (Call*)operation.call;
    call->num_rows = operation.is_of_logits ? step_.num_logits : step_.num_rows;
    call->num_threads = step_.num_threads;
    return call;
  }

  template <class Body>
  int32_t in_parts(int64_t count, int64_t grain, const Body& body) const {
    spread(step_.num_threads, count, grain, body);
    return 0;
  }

  template <class Body>
  int32_t each_row(int64_t count, int64_t grain, const Body& body) const {
    return in_parts(count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(row);
    });
  }

  template <class Call>
  int32_t each(const Call& call, void (*of_floats)(const Call&, int64_t), void (*of_bfloats)(const Call&, int64_t),
               int64_t grain = 8) const {
    return each_row(call.num_rows, grain, [&](int64_t row) { (call.dtype == FLOAT32 ? of_floats : of_bfloats)(call, row); });
  }

  int32_t compute(const Operation& operation) {
    switch (operation.kind) {
      case LOOK_UP:
        return look_up(set<Lookup>(operation));
      case PICK:
        return pick(*set<Pick>(operation));
      case NORM:
        return norm(*set<Norm>(operation));
      case PRODUCT:
        return product(set<Product>(operation));
      case HEAD_PRODUCT:
        return head_product(set<HeadProduct>(operation));
      case DENSE:
        return dense(set<DenseProduct>(operation));
      case ANGLES:
        return each(*set<Angles>(operation), put_angles<Float32>, put_angles<BFloat16>, 16);
      case NORM_ROTATE_STORE:
        return norm_rotate_store(*set<NormRotateStore>(operation), operation.is_of_logits);
      case ATTEND:
        return attend(*(Attend*)operation.call, operation.is_of_logits);
      case GATE:
        return each(*set<Gate>(operation), gate_floats, gate_bfloats);
      case SUM:
        return add(*set<Sum>(operation));
      case COPY:
        return copy(*set<Copy>(operation));
      case SCATTER:
        return scatter(*set<Scatter>(operation));
      case ROUTE:
        return route(*set<Router>(operation));
      case EXPERTS:
        return experts(set<Experts>(operation));
      case DENSE_EXPERTS:
        return dense_experts(*set<DenseExperts>(operation));
      case WIDEN:
        return widen(*set<Widening>(operation));
      case SCALE_BY_POSITION:
        return each(*set<PositionScaling>(operation), scale_row_by_position<Float32>, scale_row_by_position<BFloat16>);
      case MIX:
        return each(*set<Mix>(operation), mix_row<Float32>, mix_row<BFloat16>);
      case MATCH_RMS:
        return each(*set<RmsMatching>(operation), match_rms_of_row<Float32>, match_rms_of_row<BFloat16>);
      case SPARSIFY_GATE:
        return each(*set<GateSparsity>(operation), sparsify_gate_row<Float32>, sparsify_gate_row<BFloat16>);
      case CONVOLVE:
        return convolve(*(const PlannedConvolution*)operation.call);
      case DELTA_RULE:
        return delta_rule_in(*(const PlannedDeltaRule*)operation.call);
      case STEP_SIZES:
        return each(*set<StepSizes>(operation), put_step_sizes<Float32>, put_step_sizes<BFloat16>);
      case GATED_NORM:
        return each(*set<GatedNorm>(operation), gate_and_norm<Float32>, gate_and_norm<BFloat16>, 1);
      case STATE_SPACE:
        return state_space_in(*(const PlannedStateSpace*)operation.call);
      case MEAN_STREAMS:
        return each(*set<StreamMean>(operation), mean_of_streams<Float32>, mean_of_streams<BFloat16>);
      case ADD_TO_STREAMS:
        return each(*set<StreamSum>(operation), add_to_streams<Float32>, add_to_streams<BFloat16>);
      case GATE_STREAMS:
        return each(*set<StreamGate>(operation), gate_streams<Float32>, gate_streams<BFloat16>);
      case NGRAMS:
        return ngrams_in(*(const PlannedNGrams*)operation.call);
      case POOL_KEYS:
        return over_keys(*set<PoolKeys>(operation), pool_keys, operation.is_of_logits);
      case CHOOSE_BLOCKS:
        return over_keys(*set<ChooseBlocks>(operation), choose_blocks, operation.is_of_logits);
    }
    return 1;
  }

  int32_t norm(const Norm& call) const { return each(call, put_norm<Float32>, put_norm<BFloat16>, 1 + 32768 / call.width); }

  int32_t pick(const Pick& call) const {
    return each_row(call.num_rows, 1 + 65536 / call.row_bytes, [&](int64_t row) {
      memcpy((char*)call.out + row * call.row_bytes, (const char*)call.rows + call.numbers[row] * call.row_bytes, call.row_bytes);
    });
  }

  int32_t add(const Sum& call) const {
    return in_parts(call.num_rows * call.width, 32768, [&](int64_t begin, int64_t end) {
      with_type(call.dtype, [&](auto type) { add_part<decltype(type)>(call, begin, end); });
    });
  }

  int32_t copy(const Copy& call) const {
    return each_row(call.num_rows, 16, [&](int64_t row) {
      for (int64_t head = 0; head < call.num_heads; ++head)
        memcpy(call.out + row * call.out_row_bytes + head * call.out_head_bytes,
               call.source + row * call.row_bytes + head * call.head_bytes, call.num_bytes);
    });
  }

  int32_t scatter(const Scatter& call) const {
    const int64_t row_bytes = call.width * (call.dtype == FLOAT32 ? 4 : 2);
    return each_row(call.count, 1 + 32768 / call.width, [&](int64_t i) {
      char *to = (char*)call.rows + call.numbers[i] * row_bytes, *from = (char*)call.from + i * row_bytes;
      if (!call.adds) return (void)memcpy(to, from, row_bytes);
      const Sum sum = {call.dtype, 1, call.width, 1.0, to, from, to};
      with_type(call.dtype, [&](auto type) { add_part<decltype(type)>(sum, 0, call.width); });
    });
  }

  int32_t dense_experts(const DenseExperts& call) const {
    return with_type(call.dtype, [&](auto type) { return DenseMixture<decltype(type)>(call).run(); });
  }

  int32_t widen(const Widening& call) const {
    const int64_t count = call.num_rows * call.width;
    return in_parts(count, 32768, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += LANES)
        if (call.narrows)
          put_some<BFloat16>((uint16_t*)call.out + i, some_of<Float32>((const float*)call.rows + i, end - i), end - i);
        else
          put_some<Float32>((float*)call.out + i, some_of<BFloat16>((const uint16_t*)call.rows + i, end - i), end - i);
    });
  }

  int32_t norm_rotate_store(const NormRotateStore& call, bool is_of_logits) const {
    static thread_local Memory memory;
    const Run* runs = nullptr;
    if (call.table >= 0 && !(runs = runs_in(memory, {call.table, call.table}, call.to, call.to, false, is_of_logits))) return 1;
    return in_parts(call.num_rows, 16, [&](int64_t begin, int64_t end) {
      with_type(call.dtype, [&](auto type) { put_heads<decltype(type)>(call, runs, begin, end); });
    });
  }

  int32_t attend(Attend& call, bool is_of_logits) const {
    static thread_local Memory memory;
    const Run* runs = runs_in(memory, {call.table, call.value_table}, call.keys, call.values, call.sees_pictures, is_of_logits);
    call.attention.num_runs = step_.num_runs;
    call.attention.num_threads = step_.num_threads;
    return !runs || attention(&call.attention, runs);
  }

  int32_t convolve(const PlannedConvolution& planned) const {
    Convolution call = planned.call;
    const int64_t size = call.dtype == FLOAT32 ? 4 : 2;
    call.num_rows = step_.num_rows;
    call.rows = kept(call.rows, call.channels * size, call.row_stride * size, planned.kept);
    if (step_.is_replay) call.row_stride = call.channels;
    return over_states(call, planned.place, convolution);
  }

  // Queries, keys and values come from the convolution before it.
  int32_t delta_rule_in(const PlannedDeltaRule& planned) const {
    DeltaRule call = planned.call;
    const int64_t of_beta = call.heads * 4, of_decay = of_beta * call.decay_dim;
    call.decay = (const float*)kept(call.decay, of_decay, of_decay, planned.kept_decay);
    call.beta = (const float*)kept(call.beta, of_beta, of_beta, planned.kept_beta);
    return over_states(call, planned.place, delta_rule);
  }

  // Its rows, B and C come from the convolution before it.
  int32_t state_space_in(const PlannedStateSpace& planned) const {
    StateSpace call = planned.call;
    call.steps = (const float*)kept(call.steps, call.heads * 4, call.heads * 4, planned.kept);
    return over_states(call, planned.place, state_space);
  }

  int32_t ngrams_in(const PlannedNGrams& planned) const {
    NGrams call = planned.call;
    call.num_rows = step_.num_rows;
    call.ids = (const int64_t*)kept(call.ids, 8, 8, planned.kept);
    if (step_.is_replay) call.out = nullptr;
    return over_states(call, planned.place, ngrams);
  }

  // Computes an operation over the keys of the step's sequences in a page table.
  template <class Call>
  int32_t over_keys(const Call& call, int32_t (*compute)(const Call&, const Run*, int64_t), bool is_of_logits) const {
    static thread_local Memory memory;
    const Run* runs = runs_in(memory, {call.table, call.table}, call.keys, call.keys, false, is_of_logits);
    return !runs || compute(call, runs, step_.num_runs);
  }

  // Returns the inputs of an operation over states: those that were kept in a replay, or else `rows`, which runs that may be
  // replayed keep.
  const void* kept(const void* rows, int64_t row_bytes, int64_t stride, int64_t offset) const {
    if (step_.is_replay) return step_.runs->kept + offset * step_.runs->kept_rows;
    const char* from = (const char*)rows;
    for (int64_t i = 0; i < step_.num_runs; from += step_.runs[i++].num_rows * stride) {
      const PlanRun& run = step_.runs[i];
      for (int64_t row = 0; run.kept && row < run.num_rows; ++row)
        memcpy(run.kept + offset * run.kept_rows + row * row_bytes, from + row * stride, row_bytes);
    }
    return rows;
  }

  // Computes the states of the step's sequences. A sequence begins with zeros.
  template <class Call>
  int32_t over_states(Call& call, const StatePlace& place, int32_t (*compute)(const Call*, const StateRun*)) const {
    static thread_local Memory memory;
    if (!memory.reserve(Memory::size_of<StateRun>(step_.num_runs))) return 1;
    StateRun* runs = memory.take<StateRun>(step_.num_runs);
    for (int64_t i = 0; i < step_.num_runs; ++i) {
      const PlanRun& run = step_.runs[i];
      char* before = run.befores[place.group] + place.offset;
      if (!run.start) memset(before, 0, place.num_bytes);
      runs[i] = {run.num_rows, before, run.states[place.group] + place.offset};
    }
    call.num_runs = step_.num_runs, call.num_threads = step_.num_threads;
    return compute(&call, runs);
  }

  // Returns the sequences of the step with the memory of one layer, null if there is not enough memory.
  const Run* runs_in(Memory& memory, std::pair<int64_t, int64_t> tables, const Rows& keys, const Rows& values, bool sees_pictures,
                     bool is_of_logits) const {
    if (!memory.reserve(Memory::size_of<Run>(step_.num_runs))) return nullptr;
    Run* runs = memory.take<Run>(step_.num_runs);
    for (int64_t i = 0; i < step_.num_runs; ++i) {
      const PlanRun& run = step_.runs[i];
      const int64_t count = is_of_logits ? run.num_logits : run.num_rows;
      runs[i] = {run.start + run.num_rows - count, count, step_.page_tokens, keys, values, run.spans, sees_pictures ? run.num_spans : 0};
      runs[i].keys.pages = run.tables[tables.first], runs[i].values.pages = run.tables[tables.second];
    }
    return runs;
  }
};

// Writes into the calls, so only one thread at a time may run a plan.
int32_t run(const Plan* plan, const PlanStep* step) { return PlannedStep(*step).run(plan->operations, plan->num_operations); }

}  // namespace
}  // namespace diskprefix
