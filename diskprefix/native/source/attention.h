// Attention over the memory of several sequences. A row's bits depend only on the tokens that it sees.
//
// Keys are processed in tiles of `KEY_TILE` tokens, counted from position 0 of a sequence. Each tile gives a row a
// maximum, a sum of weights and a weighted sum of values, from that tile alone. They are merged into the state of the row
// in ascending order of the tiles. A tile that a row does not see leaves the state unchanged. So the work can be cut
// anywhere, for any number of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <new>

#include "interface.h"
#include "memory.h"
#include "product.h"

namespace diskprefix {
namespace {

constexpr int64_t KEY_TILE = 256;
constexpr int64_t KEYS = 32;                // the number of keys computed in a tile is a multiple of it
constexpr int64_t BLOCK = 32;               // rows of a product
constexpr int64_t MIN_CHUNK = 64;           // keys and values are packed once for a chunk of rows
constexpr int64_t MAX_CHUNK = 512;
constexpr int64_t STRIDE = KEY_TILE + 16;   // of the rows of scores and weights; not a power of two
constexpr int64_t PART_BYTES = 16384;       // 8-bit rows are widened in parts of about this size, which stay in the cache
constexpr int64_t ALONE = 8192;             // one thread is faster if each tile has fewer row elements than this
constexpr float NOTHING = -1e30f;           // the maximum of no scores; finite, because inf - inf is NaN
constexpr float HIDDEN = -__builtin_inff();
constexpr float NO_NUMBER = __builtin_nanf("");

// Returns the row of a token and a head, null if its page is missing.
template <class Element>
Element* row_of(const Run& run, const Rows& rows, int64_t head, int64_t token) {
  char* page = rows.pages[token / run.page_tokens];
  const int64_t at = head * rows.head_stride + token % run.page_tokens * rows.token_stride;
  return page ? (Element*)(page + rows.offset) + at : nullptr;
}

typedef int8_t Codes __attribute__((vector_size(LANES)));

// Stores numbers in 8 bits. If one of the 32 numbers of a block is not finite, the scale of the block is NaN.
template <class Type>
inline void store_q8(const typename Type::Stored* from, int64_t count, Q8Block* to) {
  for (; count > 0; count -= 32, from += 32, ++to) {
    Floats numbers[32 / LANES];
    Ints largest = {};
    for (int64_t i = 0; i < 32; i += LANES) {
      numbers[i / LANES] = some_of<Type>(from + i, most(0, count - i));
      const Ints size = (Ints)numbers[i / LANES] & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    // Compared as integers, infinity and NaN are the largest.
    int32_t top = 0;
    for (int lane = 0; lane < LANES; ++lane) top = top > largest[lane] ? top : largest[lane];
    uint16_t scales[LANES];
    BFloat16::put(scales, top < 0x7f800000 ? (Floats)all_ints(top) / all(127.0f) : all(NO_NUMBER));
    const float scale = BFloat16::one(to->scale = scales[0]), inverse = scale < 1e-36f ? 0.0f : 1.0f / scale;
    for (int64_t i = 0; i < 32; i += LANES) {
      // Adding 1.5 × 2^23 rounds a number to an integer.
      const Ints codes = (Ints)(numbers[i / LANES] * all(inverse) + all(12582912.0f)) - 0x4b400000;
      store(to->codes + i, __builtin_convertvector(codes, Codes));
    }
  }
}

// The inverse of `store_q8`: factors of a product, code × scale, exact in float32, rounded in bfloat16.
template <class Product>
inline void widen_q8(const Q8Block* from, int64_t count, typename Product::Factor* to) {
  for (; count >= 32; count -= 32, ++from, to += 32) {
    __builtin_prefetch((const char*)from + PREFETCH_BYTES, 0, 2);
    const Floats scale = all(BFloat16::one(from->scale));
    for (int64_t i = 0; i < 32; i += 2 * LANES)
      Product::put_factors(to + i, __builtin_convertvector(wide_ints(from->codes + i), Floats) * scale,
                           __builtin_convertvector(wide_ints(from->codes + i + LANES), Floats) * scale);
  }
  if (count > 0) {
    typename Product::Factor some[32];
    widen_q8<Product>(from, 32, some);
    memcpy(to, some, count * sizeof *some);
  }
}

// Returns the position after the last token that a row sees.
inline int64_t end_visible(const Run& run, int64_t position) {
  for (int64_t i = 0; i < run.num_spans; ++i)
    if (position >= run.spans[i].begin && position < run.spans[i].end) return run.spans[i].end;
  return position + 1;
}

// The state of rows: the largest score × log2(e), the sum of weights, and the weighted sums of values, with room for a
// multiple of 16 rows.
struct State {
  float *high, *sum, *taken;
  int64_t columns;

  State from(int64_t row) const { return {high + row, sum + row, taken + row * columns, columns}; }

  void clear(int64_t num_rows) const {
    for (int64_t row = 0; row < up_to(num_rows, 16); ++row) high[row] = NOTHING, sum[row] = 0.0f;
    memset(taken, 0, num_rows * columns * sizeof(float));
  }

  // Adds a tile. The state of a row that does not see it is unchanged.
  void merge(const State& tile, int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; row += LANES) {
      const Floats before = loaded<Floats>(high + row), other = loaded<Floats>(tile.high + row);
      const Floats highest = larger(before, other), kept = exp2(before - highest), added = exp2(other - highest);
      store(high + row, highest);
      store(sum + row, fma(loaded<Floats>(tile.sum + row), added, loaded<Floats>(sum + row) * kept));
      for (int64_t i = 0; i < least(LANES, num_rows - row); ++i)
        merge_taken(tile.taken + (row + i) * columns, taken + (row + i) * columns, all(added[i]), all(kept[i]));
    }
  }

  void merge_taken(const float* from, float* to, Floats added, Floats kept) const {
    for (int64_t i = 0; i < columns; i += LANES)
      store(to + i, fma(loaded<Floats>(from + i), added, loaded<Floats>(to + i) * kept));
  }
};

// Rows of one key-value head of a run, and the tiles that they see: the rows of all query heads of the group, token by
// token. `piece` tiles make a unit of work.
struct Task {
  int64_t run, head, row, num_rows, first_tile, num_tiles, piece, first_unit, num_units;
  float* tile_results;  // the result of each tile, if there are several units
  std::atomic<int64_t> open_units;
};

template <class Type, class Product>
class Computation {
  typedef typename Type::Stored Stored;
  typedef typename Product::Factor Factor;

 public:
  Computation(const Attention& call, const Run* runs)
      : call_(call),
        runs_(runs),
        group_(call.num_heads / call.num_kv_heads),
        inner_(up_to(call.key_dim, Product::INNER)),
        columns_(up_to(call.value_dim, Product::COLUMNS)),
        scale_((call.softcap ? 1.0 : call.scale) * LOG2_E) {}

  bool run() {
    static thread_local Memory of_tasks, of_partials;
    if (!plan(of_tasks) || !give_partials(of_partials)) return false;
    const int64_t threads = total_numbers_ < ALONE ? 1 : least(call_.num_threads, num_units_);
    spread(threads, threads, 1, [this](int64_t, int64_t) { work(); });
    return !failed_;
  }

 private:
  const Attention& call_;
  const Run* runs_;
  const int64_t group_, inner_, columns_;
  const float scale_;
  Task* tasks_ = nullptr;
  int64_t num_tasks_ = 0, num_units_ = 0, total_tiles_ = 0, total_numbers_ = 0;
  int64_t chunk_ = MIN_CHUNK;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};

  static constexpr int64_t WEIGHTS = STRIDE * sizeof(float) / sizeof(Factor);  // the stride of weights

  struct Scratch {
    Factor *queries, *transposed, *keys, *values;
    Factor* gathered;  // the keys of a tile that lie in several pages or in 8 bits, then its values
    float* scores;  // weights overwrite the scores of their row
    State state, tile;
    Span* visible;  // the tokens that each row sees
    const int32_t** chosen;  // the blocks that each row sees, null for a row that sees all
  };

  int64_t first_visible(int64_t position) const {
    if (call_.window) return most(0, position - call_.window + 1);
    return call_.chunk ? position - position % call_.chunk : 0;
  }

  int64_t position_of(const Task& task, int64_t row) const { return runs_[task.run].start + (task.row + row) / group_; }

  // Returns the position after the last token that a row of the task sees.
  int64_t end_of(const Task& task) const { return end_visible(runs_[task.run], position_of(task, task.num_rows - 1)); }

  // Makes tasks for all rows. A task of few rows may be cut into several units of tiles.
  bool plan(Memory& memory) {
    int64_t all_rows = 0, most_tasks = 0;
    for (int64_t run = 0; run < call_.num_runs; ++run) all_rows += runs_[run].num_rows * call_.num_heads;
    // Large chunks pack rarely. With three chunks for each thread, all threads end at about the same time.
    chunk_ = least(MAX_CHUNK, most(MIN_CHUNK, up_to(all_rows / (3 * call_.num_threads), BLOCK)));
    for (int64_t run = 0; run < call_.num_runs; ++run)
      most_tasks += (runs_[run].num_rows * group_ + MIN_CHUNK - 1) / MIN_CHUNK * call_.num_kv_heads;
    if (!memory.reserve(Memory::size_of<Task>(most_tasks))) return false;
    tasks_ = memory.take<Task>(most_tasks);
    for (int64_t run = 0; run < call_.num_runs; ++run) {
      const int64_t rows = runs_[run].num_rows * group_, chunks = (rows + chunk_ - 1) / chunk_;
      const int64_t even = up_to((rows + chunks - 1) / chunks, BLOCK);
      for (int64_t row = 0; row < rows; row += even)
        for (int64_t head = 0; head < call_.num_kv_heads; ++head) add_task(run, row, least(even, rows - row), head);
    }
    const int64_t fair = most(1, total_tiles_ / (4 * call_.num_threads));
    for (int64_t i = 0; i < num_tasks_; ++i) {
      Task& task = tasks_[i];
      task.piece = task.num_rows <= BLOCK && call_.num_threads > 1 ? least(fair, task.num_tiles) : task.num_tiles;
      task.first_unit = num_units_;
      task.num_units = (task.num_tiles + task.piece - 1) / task.piece;
      task.open_units.store(task.num_units, std::memory_order_relaxed);
      num_units_ += task.num_units;
    }
    return true;
  }

  void add_task(int64_t run, int64_t row, int64_t num_rows, int64_t head) {
    Task& task = *new (&tasks_[num_tasks_++]) Task();
    task.run = run, task.head = head, task.row = row, task.num_rows = num_rows;
    task.first_tile = first_visible(position_of(task, 0)) / KEY_TILE;
    task.num_tiles = (end_of(task) - 1) / KEY_TILE + 1 - task.first_tile;
    total_tiles_ += task.num_tiles;
    total_numbers_ += task.num_tiles * num_rows * (call_.key_dim + call_.value_dim);
  }

  int64_t partial_size(const Task& task) const { return up_to(task.num_rows, 16) * (columns_ + 2); }

  State partial(const Task& task, int64_t tile) const {
    float* high = task.tile_results + tile * partial_size(task);
    float* sum = high + up_to(task.num_rows, 16);
    return {high, sum, sum + up_to(task.num_rows, 16), columns_};
  }

  bool give_partials(Memory& memory) {
    int64_t bytes = 64;
    for (int64_t i = 0; i < num_tasks_; ++i)
      if (tasks_[i].num_units > 1) bytes += Memory::size_of<float>(partial_size(tasks_[i]) * tasks_[i].num_tiles);
    if (!memory.reserve(bytes)) return false;
    for (int64_t i = 0; i < num_tasks_; ++i) {
      const bool is_cut = tasks_[i].num_units > 1;
      tasks_[i].tile_results = is_cut ? memory.take<float>(partial_size(tasks_[i]) * tasks_[i].num_tiles) : nullptr;
    }
    return true;
  }

  void work() {
    static thread_local Memory memory;
    Scratch scratch;
    if (!take_scratch(memory, scratch)) {
      failed_ = true;
      return;
    }
    int64_t number = 0;
    for (int64_t unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < num_units_;) {
      while (unit >= tasks_[number].first_unit + tasks_[number].num_units) ++number;
      compute(tasks_[number], unit - tasks_[number].first_unit, scratch);
    }
  }

  bool take_scratch(Memory& memory, Scratch& scratch) const {
    const int64_t rows = chunk_;
    const int64_t bytes = Memory::size_of<Factor>(rows * inner_) + Memory::size_of<Factor>(16 * inner_) +
                          Memory::size_of<Factor>(KEY_TILE * inner_) +
                          Memory::size_of<Factor>(KEY_TILE * columns_) + Memory::size_of<float>(BLOCK * STRIDE) +
                          2 * Memory::size_of<float>(BLOCK) + Memory::size_of<float>(BLOCK * columns_) +
                          2 * Memory::size_of<float>(rows) + Memory::size_of<float>(rows * columns_) +
                          Memory::size_of<Span>(rows) + Memory::size_of<const int32_t*>(rows) +
                          Memory::size_of<Factor>(KEY_TILE * most(call_.key_dim, call_.value_dim));
    if (!memory.reserve(bytes)) return false;
    scratch.queries = memory.take<Factor>(rows * inner_);
    scratch.transposed = memory.take<Factor>(16 * inner_);
    scratch.keys = memory.take<Factor>(KEY_TILE * inner_);
    scratch.values = memory.take<Factor>(KEY_TILE * columns_);
    scratch.scores = memory.take<float>(BLOCK * STRIDE);
    scratch.tile = state_in(memory, BLOCK);
    scratch.state = state_in(memory, rows);
    scratch.visible = memory.take<Span>(rows);
    scratch.chosen = memory.take<const int32_t*>(rows);
    scratch.gathered = memory.take<Factor>(KEY_TILE * most(call_.key_dim, call_.value_dim));
    return true;
  }

  State state_in(Memory& memory, int64_t rows) const {
    float *high = memory.take<float>(rows), *sum = memory.take<float>(rows);
    return {high, sum, memory.take<float>(rows * columns_), columns_};
  }

  void compute(Task& task, int64_t unit, const Scratch& scratch) {
    {
      typename Product::Scope scope(task.num_rows);
      pack_queries(task, scratch);
      const int64_t first = unit * task.piece, end = least(first + task.piece, task.num_tiles);
      if (!task.tile_results) scratch.state.clear(task.num_rows);
      for (int64_t tile = first; tile < end; ++tile) attend_to(task, tile, scratch);
    }
    if (!task.tile_results) return finish(task, scratch.state);
    if (task.open_units.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    // The thread that ends last merges all results, in the order of the tiles.
    scratch.state.clear(task.num_rows);
    for (int64_t tile = 0; tile < task.num_tiles; ++tile) scratch.state.merge(partial(task, tile), task.num_rows);
    finish(task, scratch.state);
  }

  void pack_queries(const Task& task, const Scratch& scratch) const {
    int64_t before = 0;
    for (int64_t run = 0; run < task.run; ++run) before += runs_[run].num_rows;
    for (int64_t row = 0; row < task.num_rows; ++row) {
      const int64_t token = (task.row + row) / group_, head = task.head * group_ + (task.row + row) % group_;
      const Stored* from =
          (const Stored*)call_.query + head * call_.query_head_stride + (before + token) * call_.query_row_stride;
      Product::pack_row(from, call_.key_dim, inner_, scratch.queries + row * inner_);
      const int64_t position = runs_[task.run].start + token;
      scratch.visible[row] = {first_visible(position), end_visible(runs_[task.run], position)};
      const bool sees_all = !call_.chosen || (position + 1) / call_.block <= call_.num_chosen;
      scratch.chosen[row] = sees_all ? nullptr : call_.chosen + (before + token) * call_.num_chosen;
    }
    if (has_few(task)) Product::transpose_rows(scratch.queries, inner_, task.num_rows, inner_, scratch.transposed);
  }

  // Returns whether the keys are multiplied as they lie in memory.
  bool has_few(const Task& task) const { return task.num_rows <= Product::FEW_ROWS && call_.key_dim == inner_; }

  // Calls `body` with the rows of the first tokens of a tile, and their stride in elements. The rows are in a page, or in
  // `gathered`: copied there if they lie in several pages or if their page is missing, widened there if they are in 8 bits.
  template <class Body>
  static void with_rows(const Run& run, const Rows& rows, int64_t head, int64_t start, int64_t present, int64_t dim,
                        Factor* gathered, const Body& body) {
    if (rows.in_q8) {
      gather<Q8Block>(run, rows, head, start, present, dim, gathered, widen_q8<Product>);
      return body((const Factor*)gathered, dim);
    }
    const Stored* in_page = row_of<Stored>(run, rows, head, start);
    if (in_page && start % run.page_tokens + present <= run.page_tokens) return body(in_page, rows.token_stride);
    gather<Stored>(run, rows, head, start, present, dim, (Stored*)gathered,
                   [](const Stored* from, int64_t count, Stored* to) { memcpy(to, from, count * sizeof *to); });
    body((const Stored*)gathered, dim);
  }

  // Rows of missing pages, which no row sees, become zeros, because a weight of 0 does not hide a NaN.
  template <class Element, class Number, class Copy>
  static void gather(const Run& run, const Rows& rows, int64_t head, int64_t start, int64_t present, int64_t dim, Number* to,
                     const Copy& copy) {
    for (int64_t first = 0, count; first < present; first += count) {
      count = least(present - first, run.page_tokens - (start + first) % run.page_tokens);
      const Element* from = row_of<Element>(run, rows, head, start + first);
      for (int64_t token = 0; token < count; ++token, to += dim)
        if (from) copy(from + token * rows.token_stride, dim, to);
        else memset(to, 0, dim * sizeof *to);
    }
  }

  // Calls `body` for the tokens of a tile: for all at once, or in 8 bits for parts that stay in the cache.
  template <class Body>
  static void in_parts(const Rows& rows, int64_t count, int64_t dim, const Body& body) {
    const int64_t part = rows.in_q8 ? up_to(PART_BYTES / (dim * (int64_t)sizeof(Factor)), KEYS) : KEY_TILE;
    for (int64_t first = 0; first < count; first += part) body(first, least(part, count - first));
  }

  // Computes tile number `tile` of the task.
  void attend_to(const Task& task, int64_t tile, const Scratch& scratch) const {
    const Run& run = runs_[task.run];
    const int64_t start = (task.first_tile + tile) * KEY_TILE;
    const int64_t present = least(KEY_TILE, end_of(task) - start), num_keys = up_to(present, KEYS);
    const auto with = [&](const Rows& rows, int64_t first, int64_t count, int64_t dim, const auto& body) {
      with_rows(run, rows, task.head, start + first, count, dim, scratch.gathered, body);
    };
    const int64_t as_they_lie = has_few(task) ? present / KEYS * KEYS : 0;
    in_parts(run.keys, as_they_lie, call_.key_dim, [&](int64_t first, int64_t count) {
      with(run.keys, first, count, call_.key_dim, [&](const auto* keys, int64_t stride) {
        Product::multiply_tokens(scratch.transposed, task.num_rows, inner_, keys, stride, count, scratch.scores + first, STRIDE);
      });
    });
    if (const int64_t left = present - as_they_lie; left > 0)
      with(run.keys, as_they_lie, left, call_.key_dim, [&](const auto* keys, int64_t stride) {
        Product::pack_transposed(keys, stride, left, num_keys - as_they_lie, call_.key_dim, inner_, scratch.keys);
      });
    const bool packs_values = !has_few(task) || !takes_values<Product>(call_.value_dim);
    if (packs_values)
      with(run.values, 0, present, call_.value_dim, [&](const auto* values, int64_t stride) {
        Product::pack_plain(values, stride, present, num_keys, call_.value_dim, columns_, scratch.values);
      });
    for (int64_t row = 0; row < task.num_rows; row += BLOCK) {
      const int64_t num_rows = least(BLOCK, task.num_rows - row), end = scratch.visible[row + num_rows - 1].end;
      const int64_t seen = up_to(least(present, end - start), KEYS);
      if (seen <= 0) continue;
      // A task of few rows, which may be cut into units, has one block.
      const State result = task.tile_results ? partial(task, tile) : scratch.tile;
      weigh_block(scratch, row, num_rows, start, as_they_lie, seen, num_keys, result);
      const Factor* weights = (const Factor*)scratch.scores;
      if (packs_values)
        Product::multiply(weights, WEIGHTS, scratch.values, num_keys, columns_, result.taken, columns_, num_rows, seen, columns_);
      else if constexpr (Product::VALUES > 0)
        in_parts(run.values, present, call_.value_dim, [&](int64_t first, int64_t count) {
          with(run.values, first, count, call_.value_dim, [&](const auto* values, int64_t stride) {
            Product::multiply_values(weights + first, WEIGHTS, num_rows, values, stride, count, call_.value_dim, result.taken,
                                     columns_, first > 0);
          });
        });
      if (!task.tile_results) scratch.state.from(row).merge(result, num_rows);
    }
  }

  // Computes the weights of a block of rows for `seen` of the `num_keys` keys. The first `known` keys have their scores;
  // the others are packed.
  void weigh_block(const Scratch& scratch, int64_t row, int64_t num_rows, int64_t start, int64_t known, int64_t seen,
                    int64_t num_keys, const State& result) const {
    if (known < seen)
      Product::multiply(scratch.queries + row * inner_, inner_, scratch.keys, inner_, num_keys - known,
                        scratch.scores + known, STRIDE, num_rows, inner_, seen - known);
    float tops[BLOCK];
    for (int64_t i = 0; i < num_rows; ++i) {
      const Span visible = scratch.visible[row + i];
      if (const int32_t* chosen = scratch.chosen[row + i])
        hide_others(scratch.scores + i * STRIDE, seen, chosen, start, visible.end / call_.block * call_.block);
      tops[i] = largest_score(scratch.scores + i * STRIDE, seen, visible.begin - start, visible.end - start);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      result.high[i] = tops[i] * scale_ > NOTHING ? tops[i] * scale_ : NOTHING;
      result.sum[i] = weigh(scratch.scores + i * STRIDE, seen, tops[i]);
    }
  }

  // Hides the scores of the tokens before `rest` that are in none of the chosen blocks. The first score is that of token
  // `start`.
  void hide_others(float* scores, int64_t count, const int32_t* chosen, int64_t start, int64_t rest) const {
    const int32_t* block = std::lower_bound(chosen, chosen + call_.num_chosen, (int32_t)(start / call_.block));
    int64_t at = 0;
    for (; at < count && at + start < rest; ++block) {
      const bool is_there = block < chosen + call_.num_chosen;
      const int64_t begin = is_there ? *block * call_.block : rest;
      for (const int64_t end = least(count, begin - start); at < end; ++at) scores[at] = HIDDEN;
      if (!is_there) return;
      at = most(at, begin + call_.block - start);
    }
  }

  // Returns the largest score of a row that sees the keys from `first` up to `end`, and hides the other scores. Returns
  // NaN if one of them is NaN: a comparison's result would depend on where the block of rows ends.
  float largest_score(float* scores, int64_t count, int64_t first, int64_t end) const {
    if (call_.softcap) cap(scores, count);
    if (first > 0 || end < count) hide(scores, count, first, end);
    Floats highest[2] = {all(HIDDEN), all(HIDDEN)};
    Mask none = {};
    for (int64_t i = 0; i < count; i += 2 * LANES) {
      const Floats low = loaded<Floats>(scores + i), high = loaded<Floats>(scores + i + LANES);
      highest[0] = larger(highest[0], low), highest[1] = larger(highest[1], high);
      none |= unordered(low, high);
    }
    return has_any(none) ? NO_NUMBER : largest_of(larger(highest[0], highest[1]));
  }

  // Replaces a row of scores by weights, and returns their sum. If `top` is NaN, so is the sum, and so is the row's
  // result.
  float weigh(float* scores, int64_t count, float top) const {
    Factor* weights = (Factor*)scores;
    // Subtract first: the largest score then gives exactly 0, however large it is.
    const Floats scale = all(scale_), offset = all(top > HIDDEN ? top : 0.0f);
    Total<2> total;
    for (int64_t i = 0; i < count; i += 2 * LANES) {
      const Floats low = exp2((loaded<Floats>(scores + i) - offset) * scale);
      const Floats high = exp2((loaded<Floats>(scores + i + LANES) - offset) * scale);
      total.from(i) += low, total.from(i + LANES) += high;
      Product::put_factors(weights + i, low, high);
    }
    return top == top ? total.sum() : NO_NUMBER;
  }

  void cap(float* scores, int64_t count) const {
    const Floats scale = all((float)(call_.scale / call_.softcap)), limit = all((float)call_.softcap);
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, tanh(loaded<Floats>(scores + i) * scale) * limit);
  }

  static void hide(float* scores, int64_t count, int64_t first, int64_t end) {
    const Ints from = all_ints((int32_t)most(first, -1)), to = all_ints((int32_t)least(end, count));
    for (int64_t i = 0; i < count; i += LANES) {
      if (i >= first && i + LANES <= end) continue;
      const Ints numbers = lane_numbers() + (int32_t)i;
      const Floats score = loaded<Floats>(scores + i);
      store(scores + i, (numbers >= from) & (numbers < to) ? score : all(HIDDEN));
    }
  }

  void finish(const Task& task, const State& state) const {
    int64_t before = 0;
    for (int64_t run = 0; run < task.run; ++run) before += runs_[run].num_rows;
    for (int64_t row = 0; row < task.num_rows; ++row) {
      const int64_t token = (task.row + row) / group_, head = task.head * group_ + (task.row + row) % group_;
      Floats total = all(state.sum[row]);
      if (call_.sinks) total += exp2(all(clamped(call_.sinks[head] * LOG2_E - state.high[row])));
      Stored* to = (Stored*)call_.out + ((before + token) * call_.num_heads + head) * call_.value_dim;
      for (int64_t i = 0; i < call_.value_dim; i += LANES) {
        // Makes -0 into +0.
        const Floats attended = loaded<Floats>(state.taken + row * columns_ + i) / total + all(0.0f);
        put_some<Type>(to + i, attended, call_.value_dim - i);
      }
    }
  }

  // Far above all scores, a sink makes their weights 0.
  static float clamped(float exponent) { return exponent < 126.0f ? exponent : 126.0f; }
};

template <class Type, class Product>
int32_t attention_of(const Attention* call, const Run* runs) {
  return Computation<Type, Product>(*call, runs).run() ? 0 : 1;
}

int32_t attention(const Attention* call, const Run* runs) {
  switch (call->dtype) {
    case FLOAT32:
      return attention_of<Float32, VectorProduct<Float32>>(call, runs);
    default:
      return attention_of<BFloat16, ProductOfBFloat16>(call, runs);
  }
}

}  // namespace
}  // namespace diskprefix
