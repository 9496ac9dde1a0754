// Convolutions, the delta rule and Mamba 2: the same bits of results and states in one step of all tokens and in two, and
// however many sequences and threads there are.

#include "input.h"

namespace {

// What one of the operators takes: inputs with so many numbers in each row, and states of so many.
struct Scan {
  int64_t out_dtype, of_out, of_state, state_dtype;
  std::vector<std::pair<int64_t, int64_t>> inputs;  // dtype and width of a row
  bool (*run)(const Operators* operators, const Scan& scan, const std::vector<const void*>& inputs, void* out, const std::vector<StateRun>& runs,
              int64_t rows, int64_t threads);
  int64_t dtype, kernel, heads, groups, dim, value_dim, decay_dim;
  bool has_bias, has_silu;
  double epsilon;
  const void *weight, *bias;
};

// Runs one operation over states. The sequences have tokens before these: without any, a plan makes the state zeros.
template <class Planned, class Call>
bool run_over(const Operators* operators, OperationKind kind, const Call& call, const std::vector<StateRun>& runs, int64_t rows, int64_t threads) {
  Planned planned = {call};
  std::vector<PlanRun> places;
  for (const StateRun& run : runs)
    places.push_back({1, run.num_rows, 0, nullptr, 0, nullptr, (char* const*)&run.before, (char* const*)&run.state});
  return run_plan(operators, {{kind, 0, &planned}}, rows, threads, places);
}

bool convolve(const Operators* operators, const Scan& scan, const std::vector<const void*>& inputs, void* out,
              const std::vector<StateRun>& runs, int64_t rows, int64_t threads) {
  const Convolution call = {scan.dtype, 0, 0, scan.dim, scan.kernel, scan.has_silu, scan.dim, inputs[0], scan.weight,
                            scan.has_bias ? scan.bias : nullptr, out};
  return run_over<PlannedConvolution>(operators, CONVOLVE, call, runs, rows, threads);
}

bool delta(const Operators* operators, const Scan& scan, const std::vector<const void*>& inputs, void* out,
           const std::vector<StateRun>& runs, int64_t rows, int64_t threads) {
  const DeltaRule call = {scan.dtype, 0, scan.heads, scan.groups, scan.dim, scan.value_dim, scan.decay_dim,
                          inputs[0], inputs[1], inputs[2], scan.groups * scan.dim, scan.groups * scan.dim, scan.heads * scan.value_dim,
                          (const float*)inputs[3], (const float*)inputs[4], out, scan.epsilon};
  return run_over<PlannedDeltaRule>(operators, DELTA_RULE, call, runs, rows, threads);
}

bool mamba(const Operators* operators, const Scan& scan, const std::vector<const void*>& inputs, void* out,
           const std::vector<StateRun>& runs, int64_t rows, int64_t threads) {
  const StateSpace call = {scan.dtype, 0, scan.heads, scan.groups, scan.dim, scan.value_dim,
                           inputs[0], inputs[1], inputs[2], scan.heads * scan.dim, scan.groups * scan.value_dim, scan.groups * scan.value_dim,
                           (const float*)inputs[3], (const float*)scan.weight, scan.has_bias ? (const float*)scan.bias : nullptr, out};
  return run_over<PlannedStateSpace>(operators, STATE_SPACE, call, runs, rows, threads);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  const int64_t SIZES[] = {1, 3, 4, 15, 16, 17, 32, 40, 65};
  Scan scan = {};
  const int64_t kind = input.number(0, 2);
  scan.dtype = input.number(0, 1), scan.dim = input.one_of(SIZES), scan.value_dim = input.one_of(SIZES);
  scan.groups = input.number(1, 2), scan.heads = scan.groups * input.number(1, 3), scan.kernel = input.number(1, 16);
  scan.has_bias = input.flag(), scan.has_silu = input.flag(), scan.epsilon = input.flag() ? 1e-6 : 0.0;
  scan.decay_dim = input.flag() ? scan.dim : 1;
  const bool wild = input.number(0, 3) == 3;
  const int64_t seed = input.number(0, 255), num_runs = input.number(1, 3);
  if (kind == 0) scan.run = convolve, scan.out_dtype = scan.state_dtype = scan.dtype, scan.of_out = scan.dim, scan.of_state = scan.dim * scan.kernel, scan.inputs = {{scan.dtype, scan.dim}};
  if (kind == 1)
    scan.run = delta, scan.out_dtype = scan.dtype, scan.state_dtype = FLOAT32, scan.of_out = scan.heads * scan.value_dim,
    scan.of_state = scan.heads * scan.dim * scan.value_dim,
    scan.inputs = {{scan.dtype, scan.groups * scan.dim}, {scan.dtype, scan.groups * scan.dim}, {scan.dtype, scan.heads * scan.value_dim},
                   {FLOAT32, scan.heads * scan.decay_dim}, {FLOAT32, scan.heads}};
  if (kind == 2)
    scan.run = mamba, scan.out_dtype = scan.state_dtype = FLOAT32, scan.of_out = scan.heads * scan.dim,
    scan.of_state = scan.heads * scan.dim * scan.value_dim,
    scan.inputs = {{scan.dtype, scan.heads * scan.dim}, {scan.dtype, scan.groups * scan.value_dim}, {scan.dtype, scan.groups * scan.value_dim},
                   {FLOAT32, scan.heads}};
  const int64_t weight_dtype = kind == 0 ? scan.dtype : FLOAT32;
  const Guarded weight = numbers(input, weight_dtype, kind == 0 ? scan.dim * scan.kernel : scan.heads, wild);
  const Guarded bias = numbers(input, weight_dtype, kind == 0 ? scan.dim : scan.heads, wild);
  scan.weight = weight.as<void>(), scan.bias = bias.as<void>();
  std::vector<int64_t> lengths;
  int64_t rows = 0;
  for (int64_t i = 0; i < num_runs; ++i) lengths.push_back(input.number(1, 12)), rows += lengths.back();
  std::vector<Guarded> of_inputs;
  for (const auto& [dtype, width] : scan.inputs) of_inputs.push_back(numbers(input, dtype, rows * width, wild));
  const int64_t state_bytes = scan.of_state * bytes_of(scan.state_dtype), out_bytes = scan.of_out * bytes_of(scan.out_dtype);
  std::vector<Guarded> states;
  for (int64_t i = 0; i < num_runs; ++i) states.push_back(numbers(input, scan.state_dtype, scan.of_state, wild));
  for (const Operators* operators : variants()) {
    cut() = seed;
    Guarded whole(rows * out_bytes);
    std::vector<Guarded> ended;
    std::vector<StateRun> runs;
    std::vector<const void*> at;
    for (int64_t i = 0; i < num_runs; ++i) {
      ended.emplace_back(state_bytes);
      runs.push_back({lengths[i], states[i].as<void>(), ended.back().marked().as<void>()});
    }
    for (const Guarded& one : of_inputs) at.push_back(one.as<void>());
    if (!scan.run(operators, scan, at, whole.marked().as<void>(), runs, rows, 1 + seed % 3)) fail("a recurrence fails", operators->name);
    int64_t before = 0;
    for (int64_t i = 0; i < num_runs; before += lengths[i++]) {
      // The same tokens of one sequence in two steps.
      Guarded state(state_bytes), out(lengths[i] * out_bytes);
      state.copied(states[i].as<void>()), out.marked();
      const int64_t middle = seed % (lengths[i] + 1);
      for (int part = 0; part < 2; ++part) {
        const int64_t begin = part ? middle : 0, end = part ? lengths[i] : middle;
        if (begin == end) continue;
        std::vector<const void*> from;
        std::vector<Guarded> exact;
        for (size_t k = 0; k < of_inputs.size(); ++k) {
          const int64_t of_row = scan.inputs[k].second * bytes_of(scan.inputs[k].first);
          exact.emplace_back((end - begin) * of_row);
          from.push_back(exact.back().copied(of_inputs[k].as<char>() + (before + begin) * of_row).as<void>());
        }
        if (!scan.run(operators, scan, from, out.as<char>() + begin * out_bytes, {{end - begin, state.as<void>(), state.as<void>()}}, end - begin, 1))
          fail("a part of a recurrence fails", operators->name);
      }
      require_same(scan.out_dtype, out.as<void>(), whole.as<char>() + before * out_bytes, lengths[i] * scan.of_out, "two steps give other bits",
                   operators->name);
      require_same(scan.state_dtype, state.as<void>(), ended[i].as<void>(), scan.of_state, "two steps leave another state", operators->name);
    }
  }
  return 0;
}
