// The structures that Python and the variants share; `native/calls.py` repeats them. Strides count elements.

#pragma once

#include <cstdint>

namespace diskprefix {

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef void (*Work)(int64_t begin, int64_t end, void* context);

// Calls `work` with parts of [0, count), of `grain` or more each, on up to `num_threads` threads.
void share(int64_t num_threads, int64_t count, int64_t grain, Work work, void* context);

// The rows of one layer, [kv_heads, tokens, dim], in the pages of a sequence. The row of token t is in page t /
// page_tokens: `offset` bytes after its start, and head × `head_stride` + (t % page_tokens) × `token_stride` elements.
// With `in_q8` an element is a `Q8Block` of 32 numbers.
struct Rows {
  char* const* pages;
  int64_t offset, head_stride, token_stride, in_q8;
};

// 32 numbers in 8 bits: each is its code × `scale`, a bfloat16, rounded to the type of the model.
struct Q8Block {
  uint16_t scale;
  int8_t codes[32];
};

// Positions from `begin` to `end` of a sequence.
struct Span {
  int64_t begin, end;
};

// Consecutive tokens of one sequence: `num_rows` rows of the query, the first at position `start`. A page without a token
// that a row sees may be null. Spans are in order and end before the run does. A row inside a span sees the tokens up to
// the end of the span; how far back it sees is not changed.
struct Run {
  int64_t start, num_rows, page_tokens;
  Rows keys, values;
  const Span* spans;
  int64_t num_spans;
};

struct Attention {
  int64_t dtype, num_heads, num_kv_heads, key_dim, value_dim, num_runs;
  // A token sees the last `window` tokens, or its chunk of `chunk` tokens, or if both are 0 all tokens up to itself.
  int64_t window, chunk;
  const void* query;  // [heads, rows, key_dim]
  int64_t query_head_stride, query_row_stride;
  void* out;           // [rows, heads, value_dim]
  const float* sinks;  // one for each head, or null
  double scale, softcap;  // `softcap` 0: none
  int64_t num_threads;
  // Without `chosen` (null) a token sees all of these tokens. With it, it sees the `num_chosen` blocks of `block` tokens that
  // `chosen` names in ascending order, int32 [rows, num_chosen], and the tokens after its last complete block. If it has
  // no more complete blocks than that, it sees all of them, whatever `chosen` has.
  int64_t block, num_chosen;
  const int32_t* chosen;
};

// How scales (and zeros, if any) are stored: one float16 for each group; exponents of 2; or integers that are multiplied by
// one float16 for 256 columns, in bytes, or scale and zero in the nibbles of one byte. `SHARED`: that float16 alone.
// `IN_FLOAT8`: 8-bit floats that are multiplied by one float32 for each row of a unit.
enum Scales : int64_t { IN_FLOAT16 = 0, IN_EXPONENTS = 1, IN_BYTES = 2, IN_NIBBLES = 3, SHARED = 4, IN_FLOAT8 = 5 };

// A matrix [rows, columns]: in bfloat16 row after row (`bits` is 16), or in blocks of quants, see
// runtime/plan/quants/forms.py. Code i stands for `table[i]`, of 64 numbers; without `has_table` these are consecutive. The
// rows that quants are multiplied with become integers of `row_bits` bits, 8 or 15; with tiles of bfloat16 they stay as
// they are.
struct Matrix {
  int64_t rows, columns, bits, group, has_zeros, scales, has_table, row_bits;
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
// null. `type` is the number of the type in the file. Types whose codes stand for several weights have a grid of codes. If
// `content` is null, the content is read from an open file, at `offset`. Scales in 8 bits are multiplied by `factors`, one
// for each packed row; null: by 1.
struct Packing {
  int64_t type, strips, columns, file, offset;
  const void *content, *grid;
  const int32_t* order;
  const float* factors;
  void* out;
  int64_t num_threads;
};

// Rows, bfloat16 [num_rows, columns], times each of several matrices: bfloat16 [num_rows, rows of the matrix] each.
struct Product {
  int64_t num_rows, num_matrices;
  const void* rows;
  const Matrix* matrices[MAX_MATRICES];
  void* outs[MAX_MATRICES];
  int64_t num_threads;
};

// The rows of each head, in bfloat16, times its matrix. Rows and results are contiguous.
struct HeadProduct {
  int64_t num_rows, num_heads;
  const void* rows;
  int64_t head_stride, row_stride;
  const Matrix* const* matrices;
  void* out;
  int64_t out_head_stride, out_row_stride, num_threads;
};

// The rows of each head times its matrix: [num_rows, inner] → [num_rows, outer]. The matrix is [inner, outer], or
// [outer, inner] if it is transposed. Lines of the matrix, rows and results are contiguous.
struct DenseProduct {
  int64_t dtype, is_transposed, num_heads, num_rows, inner, outer;
  const void* rows;
  int64_t head_stride, row_stride;
  const void* matrices;
  int64_t matrix_stride, line_stride;
  const float* bias;  // [outer], or null
  void* out;
  int64_t out_head_stride, out_row_stride, num_threads;
};

// How an RMS norm applies its weights: the normed number is rounded before, or it is not, or the weight is the stored one
// plus 1. A layer norm subtracts the mean first; its biases follow its weights.
enum NormKind : int64_t { ROUNDED = 0, UNROUNDED = 1, ONE_MORE = 2, LAYER = 3 };

// Contiguous rows of `width` numbers.
struct Norm {
  int64_t dtype, kind, num_rows, width;
  const void* rows;
  const void* weight;
  void* out;
  double epsilon;
  int64_t num_threads;
};

// The experts that the router chose for each row: down × (curve(gate × row) × up_curve(up × row)), rounded to bfloat16,
// times the weight of the expert, rounded again, and added up in float32 in the order of `chosen`. Without `up` it is
// down × curve(gate × row). A curve is a table with a value for each of the 65,536 bfloat16 numbers, and one more entry;
// `up_curve` may be null. `rows` and `out` are bfloat16 [num_rows, width], `chosen` and `weights` [num_rows, num_chosen];
// `gate`, `up` and `down` hold the address of each expert's matrix. With `weighs_rows` the weight multiplies the row
// instead of the result.
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

// Consecutive tokens of one sequence, at least one; the state before them; and where to write the state after them, which
// may be the same memory.
struct StateRun {
  int64_t num_rows;
  const void* before;
  void* state;
};

// A depthwise causal convolution over the last `kernel` inputs of each channel: rows [num_rows, channels], `row_stride`
// apart, to contiguous rows. `weight` is [channels, kernel], `bias` [channels] or null, a state [channels, kernel], all of
// one dtype. With `has_silu`, x × sigmoid(x) of the rounded number.
struct Convolution {
  int64_t dtype, num_runs, num_rows, channels, kernel, has_silu, row_stride;
  const void *rows, *weight, *bias;
  void* out;
  int64_t num_threads;
};

// The gated delta rule: queries and keys [rows, key_heads, key_dim], values and out [rows, heads, value_dim] of one
// dtype, with strides from row to row. Decays are logarithms [rows, heads, decay_dim]; `decay_dim` is 1 or `key_dim`.
// States are float32 [heads, key_dim, value_dim]. Queries and keys are normalised to length 1 if `epsilon` is not 0.
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
// `axis_stride` numbers from axis to axis. `axes` has the axis of each frequency; null: axis 0 for all.
struct Angles {
  int64_t dtype, num_rows, half, axis_stride;
  const int64_t* positions;
  const float* frequencies;
  const int64_t* axes;
  double factor;
  void *cosines, *sines;
  int64_t num_threads;
};

// The two elements that frequency i rotates, counted from the first rotated one: i and half + i, or 2i and 2i + 1. The last
// kind moves them to i and half + i.
enum Pairing : int64_t { HALVES = 0, INTERLEAVED = 1, INTERLEAVED_TO_HALVES = 2 };

// Rows [num_rows, num_heads, dim], changed in place: each head is normed, unless `norm` is null, and rotated by `cosines` and
// `sines`, [num_rows, half], from element `rotary_first` on, unless `half` is 0. The norm's weights of two heads are
// `norm_stride` apart. The head is stored at `to` in page table number `table`, unless that is negative.
struct NormRotateStore {
  int64_t dtype, num_rows, num_heads, dim, row_stride;
  void* rows;
  const void* norm;
  int64_t norm_kind, norm_stride;
  double epsilon;
  int64_t rotary_first, half, pairing;
  const void *cosines, *sines;
  int64_t table;
  Rows to;
  int64_t num_threads;
};

// Attention over keys in page table number `table` and values in `value_table`. A step sets the fields that depend on it.
struct Attend {
  Attention attention;
  int64_t table, value_table, sees_pictures;
  Rows keys, values;
};

enum Function : int64_t { IDENTITY = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4, SQUARED_RELU = 5, SIGMOID = 6, TANH = 7,
  SOFTPLUS = 8, LIMITED_SILU = 9, LIMITED_AND_ONE = 10, EXPM1_EXCESS = 11 };

// Rows [num_rows, width] of `factor` × function(gate / factor) × up; without `up`, `factor` × function(gate / factor).
// bfloat16 has `curve`, a table as in `Experts`. `gate` and `up` have strides from row to row; each number of the gate
// multiplies `each` consecutive numbers of `up`.
struct Gate {
  int64_t dtype, num_rows, width, each, gate_stride, up_stride, function;
  double factor;
  const void *gate, *up;
  const uint16_t* curve;
  void* out;
  int64_t num_threads;
};

// Rows [num_rows, width]: first + second × factor; without `first`, second × factor. If `factor` is not 1, the product is
// rounded.
struct Sum {
  int64_t dtype, num_rows, width;
  double factor;
  const void *first, *second;
  void* out;
  int64_t num_threads;
};

// Copies rows `numbers[i]`, `row_bytes` each, to contiguous rows.
struct Pick {
  int64_t num_rows, row_bytes;
  const void* rows;
  const int64_t* numbers;
  void* out;
  int64_t num_threads;
};

// Replaces rows `numbers[i]` by rows of `from`, or with `adds` adds to them. `count` may be 0 in a step.
struct Scatter {
  int64_t dtype, num_rows, width, adds, count;
  const int64_t* numbers;
  const void* from;
  void* rows;
  int64_t num_threads;
};

// The scores of experts: over all experts, or over the chosen ones.
enum Scores : int64_t { SOFTMAX = 0, OF_SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2, SIGMOID_OF_CHOSEN = 3, SPARSE_MIXER = 4 };

// The `num_chosen` experts with the largest score + bias for rows of `logits`, [num_rows, num_experts], and their weights,
// [num_rows, num_chosen]. With `groups`, only experts of the `groups_chosen` best groups are chosen; a group is rated by the
// sum of its `of_group` largest. Weights are scores, divided by their sum (at least `floor`) if they are normed, times
// `factor` and the scale of the expert. `softcap` applies to logits. A sparse mixer's weight is the part of the expert in a
// softmax over itself and the experts not chosen yet whose logits are within a relative distance of `threshold`.
struct Router {
  int64_t dtype, num_rows, num_experts, num_chosen, scores, groups, groups_chosen, of_group, is_normed;
  const void* logits;
  const float *bias, *scales;  // [num_experts], or null
  double floor, factor, softcap, threshold;
  int64_t* chosen;
  float* weights;
  int64_t num_threads;
};

// As `Experts`, with contiguous matrices [num_experts, outer, width] and [num_experts, width, inner]; if they are
// transposed, with the last two dimensions swapped. Gate and up are in one row, `step` apart; up begins at offset
// `up_shift`, 0 without up. Biases are [num_experts, outer] and [num_experts, width], or null. float32 has functions,
// bfloat16 curves.
struct DenseExperts {
  int64_t dtype, num_rows, num_chosen, num_experts, width, inner, outer, is_transposed, step, up_shift, weighs_rows;
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

// Converts contiguous rows [num_rows, width] from bfloat16 to float32, with `narrows` from float32 to bfloat16.
struct Widening {
  int64_t num_rows, width, narrows;
  const void* rows;
  void* out;
  int64_t num_threads;
};

// Rows [num_rows, width], in place, times 1 + factor × log(1 + floor((position + offset) / period)).
struct PositionScaling {
  int64_t dtype, num_rows, width, offset, period;
  double factor;
  const int64_t* positions;
  void* rows;
  int64_t num_threads;
};

// Copies `num_bytes` bytes for each row and head. Both sides have their strides in bytes from row to row and head to head.
struct Copy {
  int64_t num_rows, num_heads, num_bytes;
  const char* source;
  int64_t row_bytes, head_bytes;
  char* out;
  int64_t out_row_bytes, out_head_bytes, num_threads;
};

// Where the states of an operation are: `num_bytes` at `offset` of the state pages of group number `group`.
struct StatePlace {
  int64_t group, offset, num_bytes;
};

// Operations over states. A run that may be replayed keeps their inputs, except inputs that another such operation
// computes. Those of one operation are at offset `kept` × the number of rows that the run keeps.
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

// float32 rows [num_rows, width] of factors × softplus(rows + bias), clamped to `least` and `most` before the factors. Rows
// have a stride. `bias` and `factors` may be null.
struct StepSizes {
  int64_t dtype, num_rows, width, row_stride;
  double least, most;
  const void* rows;
  const float *bias, *factors;
  float* out;
  int64_t num_threads;
};

// Rows [num_rows, width]: function(gate) × norm(rows), or with `gates_first` norm(function(gate) × rows). The norm is over
// each `group` numbers. `rows` are float32 and are overwritten. Weights are [num_weights], for a group or for a row; null:
// there is no norm.
struct GatedNorm {
  int64_t dtype, num_rows, width, group, gates_first, function, gate_stride, num_weights;
  double epsilon;
  float* rows;
  const void* gate;
  const float* weight;
  void* out;
  int64_t num_threads;
};

// base + Σ (factor[i] + offset) × rows[i] for i < `count`, each [num_rows, width]. A row has `count` factors.
struct Mix {
  int64_t dtype, num_rows, width, count;
  const void* rows[MAX_STREAMS];
  const void* factors;
  int64_t factors_stride;
  double offset;
  const void* base;
  void* out;
  int64_t num_threads;
};

// Rows [num_rows, width], in place, scaled to the root mean square of the rows of `like`.
struct RmsMatching {
  int64_t dtype, num_rows, width;
  const void* like;
  void* rows;
  int64_t num_threads;
};

// Rows [num_rows, width], in place: max(0, number - mean - `deviations` × the standard deviation of the row).
struct GateSparsity {
  int64_t dtype, num_rows, width;
  double deviations;
  void* rows;
  int64_t num_threads;
};

// Rows [num_rows, width]: the mean over `count` streams of sigmoid(gates) × streams, both [num_rows, count, width].
// bfloat16 has `curve`, the table of the sigmoid.
struct StreamMean {
  int64_t dtype, num_rows, width, count;
  const void *gates, *streams;
  const uint16_t* curve;
  void* out;
  int64_t num_threads;
};

// Adds 2 × sigmoid(gates / count) × rows to streams [num_rows, count, width], in place. `gates` are [num_rows, count].
struct StreamSum {
  int64_t dtype, num_rows, width, count;
  const void *gates, *rows;
  void* streams;
  int64_t num_threads;
};

// Streams [num_rows, count, width] of sigmoid(root(keys · queries / √width)) × rows, with the keys and queries of each stream
// and root(x) = sign(x) × √max(|x|, 1e-6).
struct StreamGate {
  int64_t dtype, num_rows, width, count;
  const void *keys, *queries, *rows;
  void* out;
  int64_t num_threads;
};

// Consecutive rows of a table, the first with the number `first`: in memory, or if `content` is null at `offset` of an open
// file.
struct TablePart {
  int64_t first, file, offset;
  const void* content;
};

// The rows of a table that the last tokens of a sequence name: for each token and each n of 2 to `size`, `heads` rows of
// `width` numbers, [rows, (size - 1) × heads × width]. A row's number is the exclusive or of the products of the last n
// tokens with `multipliers`, modulo one of `sizes`, plus one of `offsets`, both [(size - 1) × heads]. An `end` token, and no
// token, hide the tokens before it: these count as `end`. A state has the last `size` - 1 tokens, each plus 1, 0 for none.
// The table has numbers of the type `stored`. Without `out` only the state is computed.
struct NGrams {
  int64_t dtype, stored, num_runs, num_rows, size, heads, width, end, num_parts;
  const int64_t *ids, *multipliers, *sizes, *offsets;
  const TablePart* parts;
  void* out;
  int64_t num_threads;
};

struct PlannedNGrams {
  NGrams call;
  StatePlace place;
  int64_t kept;
};

// Replaces the key of the last token of each complete `block` of tokens, in page table number `table`, by one key for the
// block: the mean of its keys, normed, with its first 2 × `half` numbers rotated in halves by the position of its first
// token. Blocks are counted from position 0; those that the step completes are replaced.
struct PoolKeys {
  int64_t dtype, num_rows, dim, block, half, norm_kind;
  const void* norm;
  double epsilon, factor;
  const float* frequencies;
  int64_t table;
  Rows keys;
  int64_t num_threads;
};

// The `num_chosen` complete blocks with the largest Σ max(0, query · key of the block) over the query heads, for each row of
// queries [num_rows, num_heads, dim], in ascending order. Of equal blocks the first are chosen. `chosen` is not set for
// rows that have no more complete blocks.
struct ChooseBlocks {
  int64_t dtype, num_rows, num_heads, dim, block, num_chosen;
  const void* query;
  int64_t table;
  Rows keys;
  int32_t* chosen;
  int64_t num_threads;
};

enum OperationKind : int64_t {
  LOOK_UP = 0, PICK = 1, NORM = 2, PRODUCT = 3, DENSE = 4, ANGLES = 5, NORM_ROTATE_STORE = 6, ATTEND = 7, GATE = 8, SUM = 9, SCATTER = 10,
  ROUTE = 11, EXPERTS = 12, DENSE_EXPERTS = 13, WIDEN = 14, COPY = 15, SCALE_BY_POSITION = 16, MIX = 17, MATCH_RMS = 18, SPARSIFY_GATE = 19,
  CONVOLVE = 20, DELTA_RULE = 21, STEP_SIZES = 22, GATED_NORM = 23, STATE_SPACE = 24, HEAD_PRODUCT = 25,
  MEAN_STREAMS = 26, ADD_TO_STREAMS = 27, GATE_STREAMS = 28, NGRAMS = 29, POOL_KEYS = 30, CHOOSE_BLOCKS = 31
};

// A call of an operator, over all rows of a step or only over the rows that get logits.
struct Operation {
  int64_t kind, is_of_logits;
  void* call;
};

struct Plan {
  int64_t num_operations;
  const Operation* operations;
};

// A sequence of a step: a `Run`, with its page tables (arrays of page addresses) and its state pages before and after the
// step. Its last rows get logits. `kept`, if it is not null, has room for inputs of `kept_rows` rows.
struct PlanRun {
  int64_t start, num_rows, num_logits;
  const Span* spans;
  int64_t num_spans;
  char* const* const* tables;
  char *const *befores, *const *states;
  char* kept;
  int64_t kept_rows;
};

// With `is_replay`, the operations are those over states, for one run, and their inputs are the ones that it kept.
struct PlanStep {
  int64_t num_rows, num_logits, num_runs, page_tokens, is_replay;
  const PlanRun* runs;
  int64_t num_threads;
};

// Rows of `width` values, `stride` bytes apart, and the same values in planes: `num_bytes`, with `bits` in a code. Before
// splitting, `num_bytes` is the room for the planes; splitting sets `num_bytes` and `bits`, and returns 1 if the planes do
// not fit. Joining returns 1 for data that splitting cannot have written.
struct Planes {
  int64_t dtype, bits, num_rows, width, stride, num_bytes;
  void *values, *data;
};

// The operators of one variant. They return 0, or 1 if there is not enough memory. `run` returns 2 if a chosen expert does
// not exist, and 3 if a row of a table cannot be read from its file. `require_matrix` returns 1 if no product takes the matrix: its form is unknown, it does not consist of whole
// blocks, or its weights do not have `num_bytes` bytes.
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
