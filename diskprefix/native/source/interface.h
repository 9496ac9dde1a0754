// The structures that Python and the variants share. The modules of `native` describe the same ones. Strides count
// elements.

#pragma once

#include <cstdint>

namespace diskprefix {

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef void (*Work)(int64_t begin, int64_t end, void* context);

// Calls `work` with parts of [0, count), of `grain` or more each, on so many threads.
void share(int64_t num_threads, int64_t count, int64_t grain, Work work, void* context);

// The rows of one layer, [kv_heads, tokens, dim], in the pages of a sequence. The row of token t is in page t /
// page_tokens: `offset` bytes behind its start, and head × `head_stride` + (t % page_tokens) × `token_stride` elements.
// With `in_eights` an element is an `Eights` of 32 numbers.
struct Rows {
  char* const* pages;
  int64_t offset, head_stride, token_stride, in_eights;
};

// Numbers of 8 bits: each is its code × `scale`, a bfloat16, rounded to the type of the model.
struct Eights {
  uint16_t scale;
  int8_t codes[32];
};

// Positions from `begin` to `end` of a sequence.
struct Span {
  int64_t begin, end;
};

// Consecutive tokens of one sequence: `num_rows` rows of the query, the first at position `start`. Pages of which no row
// sees a token may be null. A row in one of the spans, which are in order and end before the run does, sees all tokens up
// to the end of that span, as far back as another row does.
struct Run {
  int64_t start, num_rows, page_tokens;
  Rows keys, values;
  const Span* spans;
  int64_t num_spans;
};

struct Attention {
  int64_t dtype, num_heads, num_kv_heads, key_dim, value_dim, num_runs;
  // A token sees the last `window` tokens, or those of its chunk of `chunk` tokens, or if both are 0 all up to itself.
  int64_t window, chunk;
  const void* query;  // [heads, rows, key_dim]
  int64_t query_head_stride, query_row_stride;
  void* out;           // [rows, heads, value_dim]
  const float* sinks;  // one for each head, or null
  double scale, softcap;  // without soft cap 0
  int64_t num_threads;
};

// How scales, and zeros where there are some, are stored: numbers of the groups, exponents of 2, or small integers that are
// multiplied by a float16 of 256 columns: bytes, or the halves of one byte for both. Shared ones are that float16 alone.
enum Scales : int64_t { IN_FLOAT16 = 0, IN_EXPONENTS = 1, IN_BYTES = 2, IN_NIBBLES = 3, SHARED = 4, IN_FLOAT8 = 5 };

// A matrix [rows, columns]: in bfloat16 row after row (`bits` is 16), or in blocks of quants, see
// model/quants/forms.py. Codes stand for the numbers in `table`, 64 of them; they follow each other without `has_table`.
struct Matrix {
  int64_t rows, columns, bits, group, has_zeros, scales, has_table;
  const void* weights;
  const float* table;
  const float* bias;  // [rows], or null
};

constexpr int64_t MAX_MATRICES = 3, MAX_GROUPS = 64, MAX_STREAMS = 4;

// Rows of a quantised matrix, bfloat16 [num_rows, columns].
struct Lookup {
  int64_t num_rows;
  const int64_t* ids;
  const Matrix* matrix;
  void* out;
  int64_t num_threads;
};

// Strips of a packed matrix, made of rows of a GGUF tensor. Row i is row `order[i]` of the content, or row i if `order` is
// null. `type` is the number of the type in the file. Types that choose several weights together have a grid of codes. If
// `content` is null, it is that of an open file from `offset` on. Scales in 8 bits are multiplied by `factors`, one for each
// packed row, or by 1 if it is null.
struct Packing {
  int64_t type, strips, columns, file, offset;
  const void *content, *grid;
  const int32_t* order;
  const float* factors;
  void* out;
  int64_t num_threads;
};

// The same rows, bfloat16 [num_rows, columns], times each of several matrices: bfloat16 [num_rows, rows of the matrix].
struct Product {
  int64_t num_rows, num_matrices;
  const void* rows;
  const Matrix* matrices[MAX_MATRICES];
  void* outs[MAX_MATRICES];
  int64_t num_threads;
};

// The rows of each head, in bfloat16, times its matrix. Numbers of a row and of a result lie side by side.
struct HeadProduct {
  int64_t num_rows, num_heads;
  const void* rows;
  int64_t head_stride, row_stride;
  const Matrix* const* matrices;
  void* out;
  int64_t out_head_stride, out_row_stride, num_threads;
};

// The rows of each head times a matrix of that head: [num_rows, inner] → [num_rows, outer]. The matrix has lines of `outer`
// numbers, or if it is turned of `inner`. Numbers of a line, of a row and of a result lie side by side.
struct DenseProduct {
  int64_t dtype, is_turned, num_heads, num_rows, inner, outer;
  const void* rows;
  int64_t head_stride, row_stride;
  const void* matrices;
  int64_t matrix_stride, line_stride;
  const float* bias;  // [outer], or null
  void* out;
  int64_t out_head_stride, out_row_stride, num_threads;
};

// The use of weights in a norm by the root of the mean square: the normed number is rounded first, or it is not, or the
// weight is one more than the stored one. In a layer norm numbers are taken less their mean, and behind the weights as many
// biases follow.
enum NormKind : int64_t { ROUNDED = 0, UNROUNDED = 1, ONE_MORE = 2, LAYER = 3 };

// Rows of `width` numbers side by side.
struct Norm {
  int64_t dtype, kind, num_rows, width;
  const void* rows;
  const void* weight;
  void* out;
  double epsilon;
  int64_t num_threads;
};

// For each row the experts that its router chose: down × (curve(gate × row) × up_curve(up × row)), rounded to bfloat16,
// times the weight of the expert, rounded again, and added up in float32 in the order in which they are named. Without
// `up` it is down × curve(gate × row). A curve is a table with the value
// for each of the 65,536 bfloat16 numbers, and one number more; `up_curve` may be null. `rows` and `out` are
// bfloat16 [num_rows, width], `chosen` and `weights` [num_rows, num_chosen]; `gate`, `up` and `down` hold the address of
// each expert's matrix. With `weighs_rows` the row is multiplied by the weight, instead of the result.
struct Experts {
  int64_t num_rows, num_chosen, num_experts, weighs_rows;
  const void* rows;
  const int64_t* chosen;
  const float* weights;
  const Matrix *const *gate, *const *up, *const *down;
  const uint16_t *curve, *up_curve;
  void* out;
  int64_t num_threads;
};

// Consecutive tokens of one sequence, at least one, the state before them, and where the state behind them goes, which may
// be the same memory.
struct StateRun {
  int64_t num_rows;
  const void* before;
  void* state;
};

// A convolution of each channel alone with its last `kernel` inputs, rows [num_rows, channels] with a stride from row to row
// to the same side by side. `weight` is [channels, kernel], `bias` [channels] or null, a state [channels, kernel], all of one
// dtype. With `has_silu`, x × sigmoid(x) of the rounded number.
struct Convolution {
  int64_t dtype, num_runs, num_rows, channels, kernel, has_silu, row_stride;
  const void *rows, *weight, *bias;
  void* out;
  int64_t num_threads;
};

// The gated delta rule: queries and keys [rows, key_heads, key_dim], values and out [rows, heads, value_dim] of one
// dtype, with strides from row to row. Decays are logarithms [rows, heads, decay_dim]: 1 or one for each number of the
// key. States are float32 [heads, key_dim, value_dim]. Queries and keys get length 1 if `epsilon` is not 0.
struct DeltaRule {
  int64_t dtype, num_runs, heads, key_heads, key_dim, value_dim, decay_dim;
  const void *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;
  const float *decay, *beta;
  void* out;
  double epsilon;
  int64_t num_threads;
};

// Mamba 2: rows [rows, heads, dim], `into` and `from` [rows, groups, state_dim] (B and C) of one dtype, `steps` [rows,
// heads], `decay` and `skip` [heads] (A and D, which may be null) and out [rows, heads, dim] in float32. States are
// float32 [heads, dim, state_dim].
struct StateSpace {
  int64_t dtype, num_runs, heads, groups, dim, state_dim;
  const void *rows, *into, *from;
  int64_t row_stride, into_stride, from_stride;
  const float *steps, *decay, *skip;
  void* out;
  int64_t num_threads;
};

// -- a plan ------------------------------------------------------------------------------------------------------------

// The cosines and sines of rotary positions, [num_rows, half], times `factor`. Positions are int64 [axes, num_rows], with
// `axis_stride` numbers from axis to axis. `axes` has the axis of each frequency; null: all are of the first.
struct Angles {
  int64_t dtype, num_rows, half, axis_stride;
  const int64_t* positions;
  const float* frequencies;
  const int64_t* axes;
  double factor;
  void *cosines, *sines;
  int64_t num_threads;
};

// Rows [num_rows, num_heads, dim], changed in place: each head gets its norm, without weight none, and is turned by
// `cosines` and `sines`, [num_rows, half], from number `rotary_first` on, without `half` not at all. The norm's weights of
// the next head are `norm_stride` behind. Number i is turned with number half + i; if `is_paired` is 1 neighbours are, if it
// is 2 neighbours that are parted into halves then. The head goes to memory `to` of page table number `table`, if that is
// not negative.
struct Heads {
  int64_t dtype, num_rows, num_heads, dim, row_stride;
  void* rows;
  const void* norm;
  int64_t norm_kind, norm_stride;
  double epsilon;
  int64_t rotary_first, half, is_paired;
  const void *cosines, *sines;
  int64_t table;
  Rows to;
  int64_t num_threads;
};

// Attention over keys in page table number `table` and values in another or the same. What a step decides is not set.
struct Attend {
  Attention attention;
  int64_t table, value_table, sees_pictures;
  Rows keys, values;
};

enum Function : int64_t { IDENTITY = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4, SQUARED_RELU = 5, SIGMOID = 6, TANH = 7,
  SOFTPLUS = 8, LIMITED_SILU = 9, LIMITED_AND_ONE = 10 };

// Rows [num_rows, width] of `factor` × function(gate / factor) × up, without `up` of the function alone. bfloat16 has
// `curve`, a table as in `Experts`. `gate` and `up` have strides from row to row; a number of gate counts for `each` of up.
struct Gate {
  int64_t dtype, num_rows, width, each, gate_stride, up_stride, function;
  double factor;
  const void *gate, *up;
  const uint16_t* curve;
  void* out;
  int64_t num_threads;
};

// Rows [num_rows, width]: one + other × factor, without `one` other × factor. A factor that is not 1 rounds the product.
struct Sum {
  int64_t dtype, num_rows, width;
  double factor;
  const void *one, *other;
  void* out;
  int64_t num_threads;
};

// Rows of these numbers, `row_bytes` each, one behind the other.
struct Pick {
  int64_t num_rows, row_bytes;
  const void* rows;
  const int64_t* numbers;
  void* out;
  int64_t num_threads;
};

// Puts rows of `from` in the place of rows with these numbers, or with `adds` adds them. A step may have none of them.
struct Scatter {
  int64_t dtype, num_rows, width, adds, count;
  const int64_t* numbers;
  const void* from;
  void* rows;
  int64_t num_threads;
};

// Scores of experts: of all of them, or numbers that get theirs among those that are chosen.
enum Scores : int64_t { SOFTMAX = 0, OF_SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2, SIGMOID_OF_CHOSEN = 3, SPARSE_MIXER = 4 };

// The `num_chosen` experts with the largest score + bias for rows of `logits`, [num_rows, num_experts], and their weights,
// [num_rows, num_chosen]. With `groups`, only experts of the `groups_chosen` best ones: a group counts its `of_group`
// largest. Weights are scores, divided by their sum or `floor` if they are normed, times `factor` and the scale of the
// expert. A softcap is one of logits. A sparse mixer weighs each expert among those left that are nearer to it than `threshold`, relative to them.
struct Router {
  int64_t dtype, num_rows, num_experts, num_chosen, scores, groups, groups_chosen, of_group, is_normed;
  const void* logits;
  const float *bias, *scales;  // [num_experts], or null
  double floor, factor, softcap, threshold;
  int64_t* chosen;
  float* weights;
  int64_t num_threads;
};

// What `Experts` does, of matrices that lie side by side, [num_experts, outer, width] and [num_experts, width, inner], or
// with the last two exchanged if they are turned. Numbers of up are `up_shift` behind those of gate, which are `step` apart;
// without up it is 0. Biases are [num_experts, outer] and [num_experts, width], or null. float32 has functions, bfloat16
// curves.
struct DenseExperts {
  int64_t dtype, num_rows, num_chosen, num_experts, width, inner, outer, is_turned, step, up_shift, weighs_rows;
  int64_t function, up_function;
  double slope, limit;
  const void* rows;
  const int64_t* chosen;
  const float* weights;
  const void *first, *last;
  const float *first_bias, *last_bias;
  const uint16_t *curve, *up_curve;
  void* out;
  int64_t num_threads;
};

// bfloat16 rows [num_rows, width], side by side, in float32; with `narrows` the other way round.
struct Widening {
  int64_t num_rows, width, narrows;
  const void* rows;
  void* out;
  int64_t num_threads;
};

// Rows [num_rows, width], in place, times 1 + factor × log(1 + floor((position + offset) / period)).
struct Tempering {
  int64_t dtype, num_rows, width, offset, period;
  double factor;
  const int64_t* positions;
  void* rows;
  int64_t num_threads;
};

// For each row and head, `num_bytes` bytes from one place to another, each with bytes from row to row and head to head.
struct Copy {
  int64_t num_rows, num_heads, num_bytes;
  const char* source;
  int64_t row_bytes, head_bytes;
  char* out;
  int64_t out_row_bytes, out_head_bytes, num_threads;
};

// Where the states of an operation are: `num_bytes` behind `offset` bytes in the pages of states number `group`.
struct StatePlace {
  int64_t group, offset, num_bytes;
};

// Operations over states. A run that may be computed again keeps what no other of them computes: these inputs of its rows
// lie behind `kept` bytes for each row that it keeps.
struct PlannedConvolution {
  Convolution call;
  StatePlace place;
  int64_t kept;
};

struct PlannedDeltaRule {
  DeltaRule call;
  StatePlace place;
  int64_t kept_decay, kept_beta;
};

struct PlannedStateSpace {
  StateSpace call;
  StatePlace place;
  int64_t kept;
};

// float32 rows [num_rows, width] of factors × softplus(rows + bias), of which none is below `least` or above `most` before
// the factors. Rows have a stride, `bias` and `factors`
// may be null.
struct StepSizes {
  int64_t dtype, num_rows, width, row_stride;
  double least, most;
  const void* rows;
  const float *bias, *factors;
  float* out;
  int64_t num_threads;
};

// Rows [num_rows, width] of function(gate) × the norm of each `group` numbers; with `gates_first` of the norm of function(gate)
// × rows. `rows` are float32 and change; weights are [num_weights], for a group or for a row, or null: then there is no norm.
struct GatedNorm {
  int64_t dtype, num_rows, width, group, gates_first, function, gate_stride, num_weights;
  double epsilon;
  float* rows;
  const void* gate;
  const float* weight;
  void* out;
  int64_t num_threads;
};

// base + Σ (factor + offset) × rows over the first `count` of `rows`, each [num_rows, width]. A row has `count` factors.
struct Mix {
  int64_t dtype, num_rows, width, count;
  const void* rows[MAX_STREAMS];
  const void* factors;
  int64_t factor_stride;
  double offset;
  const void* base;
  void* out;
  int64_t num_threads;
};

// Rows [num_rows, width], in place, with the root mean square that those of `like` have.
struct Leveling {
  int64_t dtype, num_rows, width;
  const void* like;
  void* rows;
  int64_t num_threads;
};

// Rows [num_rows, width], in place, minus their mean and so many standard deviations, and no number below 0.
struct CutOff {
  int64_t dtype, num_rows, width;
  double deviations;
  void* rows;
  int64_t num_threads;
};

enum OperationKind : int64_t {
  LOOK_UP = 0, PICK = 1, NORM = 2, PRODUCT = 3, DENSE = 4, ANGLES = 5, HEADS = 6, ATTEND = 7, GATE = 8, SUM = 9, SCATTER = 10,
  ROUTE = 11, EXPERTS = 12, DENSE_EXPERTS = 13, WIDEN = 14, COPY = 15, TEMPER = 16, MIX = 17, LEVEL = 18, CUT_OFF = 19,
  CONVOLVE = 20, DELTA_RULE = 21, STEP_SIZES = 22, GATED_NORM = 23, STATE_SPACE = 24, HEAD_PRODUCT = 25
};

// A call of an operator, by its structure, over all rows of a step or over those that get logits.
struct Operation {
  int64_t kind, is_of_logits;
  void* call;
};

struct Plan {
  int64_t num_operations;
  const Operation* operations;
};

// A sequence of a step: a `Run`, with the addresses of the pages' addresses of each page table, and the pages of states
// before the step and behind it. Its last rows get logits. `kept`, if it is not null, has room for inputs of `kept_rows` rows.
struct PlanRun {
  int64_t start, num_rows, num_logits;
  const Span* spans;
  int64_t num_spans;
  char* const* const* tables;
  char *const *befores, *const *states;
  char* kept;
  int64_t kept_rows;
};

// With `is_replay`, the operations are those over states, of one run: their inputs are what it kept.
struct PlanStep {
  int64_t num_rows, num_logits, num_runs, page_tokens, is_replay;
  const PlanRun* runs;
  int64_t num_threads;
};

// Rows of `width` values, `stride` bytes apart, and the same values in planes: `num_bytes`, with `bits` in a code.
// Splitting gets the room in `num_bytes` and sets both; it returns 1 if they do not fit. Joining returns 1 for data
// that splitting does not write.
struct Planes {
  int64_t dtype, bits, num_rows, width, stride, num_bytes;
  void *values, *data;
};

// The operators, as one variant computes them. They return 0, or 1 if there is not enough memory. `run` returns 2 if
// there is no expert of a number. `require_matrix` returns 1 if no product takes the matrix: its form is unknown, it has
// parts of blocks, or its weights have other than `num_bytes` bytes.
struct Operators {
  const char* name;
  int32_t (*require_matrix)(const Matrix* matrix, const int64_t* num_bytes);
  int32_t (*attention)(const Attention* call, const Run* runs);
  int32_t (*pack)(const Packing* call);
  int32_t (*look_up)(const Lookup* call);
  int32_t (*run)(const Plan* plan, const PlanStep* step);
  int32_t (*split)(Planes* call);
  int32_t (*join)(Planes* call);
};

}  // namespace diskprefix
