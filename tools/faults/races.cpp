// The operators of one variant under ThreadSanitizer. VARIANT is its name, and the folder of the operators' sources is
// among those of includes. `races SECONDS` prints how many calls there were, and how many gave another result than one
// thread alone does. It exits with 2 if the CPU cannot compute the variant. The sanitizer chooses the exit code of races.
//
// Several threads call all operators at once, on the same inputs. There are fewer teams of threads than callers, so teams
// go from hand to hand, and some end and are made anew. A team gives its parts of the work as torch does. It orders nothing
// but the beginning and the end of a call, so that the sanitizer sees each order that the operators need.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

// While it is set, threads get no memory of their own.
static std::atomic<bool> has_no_memory{false};

static void* memory_of_a_thread(size_t alignment, size_t bytes) {
  if (!has_no_memory.load(std::memory_order_relaxed)) return aligned_alloc(alignment, bytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that others fail, too
  return nullptr;
}

#define aligned_alloc memory_of_a_thread
#include "variant.cpp"
#undef aligned_alloc
#include "library.cpp"

using namespace diskprefix;

namespace {

constexpr int CALLERS = 3, TEAMS = 2, THREADS = 4;
constexpr int CALLS_OF_A_TEAM = 40;

// Threads that wait for work. The calling one works as well.
class Team {
 public:
  explicit Team(int num_threads) : size_(num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.push_back(std::make_unique<Worker>(i));
  }

  ~Team() {
    for (auto& worker : workers_) worker->start(nullptr);
    for (auto& worker : workers_) worker->thread.join();
  }

  int size() const { return size_; }

  void run(int64_t begin, int64_t end, int64_t grain, Work work, void* context) {
    const int64_t threads = least(size_, (end - begin + grain - 1) / grain), part = (end - begin + threads - 1) / threads;
    arrived_.store(0, std::memory_order_relaxed);
    unfinished_.store(threads - 1, std::memory_order_relaxed);
    const std::function<void(int)> each = [=](int number) {
      // All begin at once: one that comes late would find the work done. That orders nothing.
      arrived_.fetch_add(1, std::memory_order_relaxed);
      while (arrived_.load(std::memory_order_relaxed) < threads) std::this_thread::yield();
      const int64_t first = begin + number * part;
      if (first < end) work(first, least(first + part, end), context);
      if (number) unfinished_.fetch_sub(1, std::memory_order_release);
    };
    for (int64_t i = 0; i < threads - 1; ++i) workers_[i]->start(&each);
    each(0);
    while (unfinished_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  struct Worker {
    explicit Worker(int number) : thread([this, number] { serve(number); }) {}

    void start(const std::function<void(int)>* work) {
      const std::lock_guard<std::mutex> lock(mutex);
      next = work, has_next = true;
      changed.notify_one();
    }

    void serve(int number) {
      for (;;) {
        const std::function<void(int)>* work;
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [this] { return has_next; });
          work = next, has_next = false;
        }
        if (!work) return;
        (*work)(number);
      }
    }

    std::mutex mutex;
    std::condition_variable changed;
    const std::function<void(int)>* next = nullptr;
    bool has_next = false;
    std::thread thread;  // the last one: it uses the others
  };

  const int size_;
  std::atomic<int64_t> arrived_{0}, unfinished_{0};
  std::vector<std::unique_ptr<Worker>> workers_;
};

thread_local Team* my_team = nullptr;

int32_t parallel_for(int64_t begin, int64_t end, int64_t grain, Work work, void* context) {
  my_team->run(begin, end, grain, work, context);
  return 0;
}

template <class Number>
std::vector<uint8_t> bytes_of(const std::vector<Number>& numbers) {
  return std::vector<uint8_t>((const uint8_t*)numbers.data(), (const uint8_t*)(numbers.data() + numbers.size()));
}

// Numbers around 1, so that sums stay finite.
std::vector<float> floats(int64_t count, int seed) {
  std::mt19937 random(seed);
  std::vector<float> found(count);
  for (float& number : found) number = (int32_t)(random() % 2001 - 1000) / 1000.0f;
  return found;
}

std::vector<uint16_t> halves(int64_t count, int seed) {
  std::vector<uint16_t> found;
  for (float number : floats(count, seed)) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    found.push_back(bits >> 16);
  }
  return found;
}

int64_t num_threads() { return my_team ? my_team->size() : 1; }

[[noreturn]] void fail(const char* name, const char* why) {
  fprintf(stderr, "races: %s: %s\n", name, why);
  exit(1);
}

// A type of a GGUF file: random content of it, and how it is packed.
struct FileType {
  int64_t type, bits, has_zeros, scales, block_weights, block_bytes, unit_bytes;

  std::vector<uint8_t> of(int64_t rows, int64_t columns, int seed) const {
    std::mt19937 random(seed);
    std::vector<uint8_t> found(rows * columns / block_weights * block_bytes);
    for (uint8_t& byte : found) byte = random();
    // The scales of a block, float16 at its beginning, are small.
    for (size_t at = 0; at < found.size(); at += block_bytes)
      for (int i = 0; i < (has_zeros ? 2 : 1); ++i) found[at + 2 * i + 1] = 0x14;
    return found;
  }
};

constexpr FileType Q8_0{8, 8, 0, IN_FLOAT16, 32, 34, 16 * 2 + 16 * 32};
constexpr FileType Q4_K{12, 4, 1, IN_BYTES, 256, 144, 2 * 16 * (2 + 8) + 16 * 128};

int32_t packed(const FileType& kind, int64_t rows, int64_t columns, const void* content, int file, std::vector<uint8_t>& out) {
  out.assign(rows / 16 * (columns / kind.block_weights) * kind.unit_bytes, 0);
  const Packing call = {kind.type, rows / 16, columns, file, 0, content, nullptr, nullptr, out.data(), num_threads(),
                        parallel_for};
  return pack(&call);
}

struct Weights {
  std::vector<uint8_t> packed_;
  std::vector<float> table;
  Matrix matrix;

  Weights(const FileType& kind, int64_t rows, int64_t columns, int seed) {
    if (packed(kind, rows, columns, kind.of(rows, columns, seed).data(), -1, packed_)) fail("pack", "it fails");
    for (int i = 0; i < 64; ++i) table.push_back(i % 16);
    matrix = {rows, columns, kind.bits, 32, kind.has_zeros, kind.scales, 0, packed_.data(),
              kind.bits == 8 ? nullptr : table.data(), nullptr};
  }
};

// What all callers read.
constexpr int64_t ROWS = 40, WIDTH = 256, INNER = 512, HEADS = 6, KV_HEADS = 2, DIM = 32, TOKENS = 2600;
constexpr int64_t EXPERTS = 4, CHOSEN = 2;
const std::vector<uint16_t> rows_of_step = halves(ROWS * WIDTH, 1), norm_weight = halves(WIDTH, 2), curve = halves(65537, 3);
const std::vector<uint16_t> keys_of_tokens = halves(KV_HEADS * TOKENS * DIM, 4),
    values_of_tokens = halves(KV_HEADS * TOKENS * DIM, 5);
const std::vector<uint16_t> queries = halves(HEADS * ROWS * DIM, 6), waves = halves(ROWS * DIM, 7),
    many_rows = halves(400 * WIDTH, 8);
const std::vector<float> exact_queries = floats(HEADS * ROWS * DIM, 6), exact_keys = floats(KV_HEADS * TOKENS * DIM, 4),
                         exact_values = floats(KV_HEADS * TOKENS * DIM, 5), decays = floats(ROWS * HEADS, 9),
                         skips = floats(HEADS, 10);
const Weights in8(Q8_0, INNER, WIDTH, 11), in4(Q4_K, INNER, WIDTH, 12), down(Q8_0, WIDTH, INNER, 13);
const Weights for_queries(Q4_K, HEADS * DIM, WIDTH, 14), for_keys(Q8_0, KV_HEADS * DIM, WIDTH, 15),
    for_values(Q8_0, KV_HEADS * DIM, WIDTH, 16), for_last(Q8_0, WIDTH, HEADS * DIM, 17);
constexpr int64_t PACKED_ROWS = 160, PACKED_COLUMNS = 16384;
const std::vector<uint8_t> content = Q8_0.of(PACKED_ROWS, PACKED_COLUMNS, 18);
FILE* file_of_content = nullptr;

// What an operator returned, and all that it wrote.
struct Result {
  int32_t failed;
  std::vector<uint8_t> bytes;
};

template <class Number>
Result result(int32_t failed, const std::vector<Number>& numbers) {
  return {failed, bytes_of(numbers)};
}

template <class Number>
Result attended(int64_t dtype, const Number* query, const Number* keys, const Number* values, std::vector<Run> runs,
                int64_t window) {
  for (Run& run : runs) {
    run.keys = keys, run.values = values;
    run.key_head_stride = run.value_head_stride = TOKENS * DIM, run.key_token_stride = run.value_token_stride = DIM;
  }
  std::vector<Number> out(ROWS * HEADS * DIM);
  const Attention call = {dtype, HEADS, KV_HEADS, DIM, DIM, (int64_t)runs.size(), window, 0, query, ROWS * DIM, DIM, out.data(),
                          nullptr, 0.2, 0, num_threads(), parallel_for};
  return result(attention(&call, runs.data()), out);
}

Result attended_in_bfloat16(const std::vector<Run>& runs) {
  return attended(BFLOAT16, queries.data(), keys_of_tokens.data(), values_of_tokens.data(), runs, 0);
}

Result attended_in_float32(const std::vector<Run>& runs) {
  return attended(FLOAT32, exact_queries.data(), exact_keys.data(), exact_values.data(), runs, 2100);
}

Result multiplied(int64_t num_rows, std::vector<const Weights*> matrices) {
  std::vector<uint16_t> out(num_rows * INNER * matrices.size());
  Product call = {num_rows, (int64_t)matrices.size(), rows_of_step.data(), {}, {}, num_threads(), parallel_for};
  for (size_t i = 0; i < matrices.size(); ++i)
    call.matrices[i] = &matrices[i]->matrix, call.outs[i] = out.data() + i * num_rows * INNER;
  return result(product(&call), out);
}

Gated gated_of(int64_t num_rows, const void* rows, void* out) {
  return {num_rows, rows, &in4.matrix, &in8.matrix, &down.matrix, curve.data(), out, num_threads(), parallel_for};
}

// Attention that writes keys and values behind those of 300 tokens.
struct Cache {
  std::vector<uint16_t> keys, values;
  Run run;

  explicit Cache(int64_t num_rows) : keys(KV_HEADS * 512 * DIM), values(keys.size()) {
    std::copy(keys_of_tokens.begin(), keys_of_tokens.begin() + keys.size(), keys.begin());
    std::copy(values_of_tokens.begin(), values_of_tokens.begin() + values.size(), values.begin());
    run = {300, num_rows, 0, keys.data(), 512 * DIM, DIM, values.data(), 512 * DIM, DIM};
  }
};

AttentionBlock block_of(int64_t num_rows, void* out) {
  const Attention attend = {BFLOAT16, HEADS, KV_HEADS, DIM, DIM, 1, 0, 0, nullptr, 0, 0, nullptr, nullptr, 0.2, 0,
                            num_threads(), parallel_for};
  return {num_rows, rows_of_step.data(), &for_queries.matrix, &for_keys.matrix, &for_values.matrix, &for_last.matrix,
          norm_weight.data(), norm_weight.data(), ROUNDED, 1e-5, DIM, waves.data(), waves.data(), out, attend};
}

Norm norm_of_step(int64_t num_rows, const std::vector<uint16_t>& rows, void* out) {
  return {BFLOAT16, ROUNDED, num_rows, WIDTH, rows.data(), norm_weight.data(), out, 1e-5, num_threads(), parallel_for};
}

Result whole_layer(int64_t num_rows) {
  Cache memory(num_rows);
  std::vector<uint16_t> out(num_rows * WIDTH);
  const Norm norm = norm_of_step(num_rows, rows_of_step, nullptr);
  const Layer call = {rows_of_step.data(), out.data(), block_of(num_rows, nullptr), gated_of(num_rows, nullptr, nullptr),
                      {norm, norm, norm, norm}};
  const int32_t failed = layer(&call, &memory.run);
  out.insert(out.end(), memory.keys.begin(), memory.keys.end());
  return result(failed, out);
}

Result mixed(int64_t num_rows) {
  std::vector<const Matrix*> gates(EXPERTS, &in4.matrix), ups(EXPERTS, &in8.matrix), downs(EXPERTS, &down.matrix);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < num_rows * CHOSEN; ++i) chosen.push_back((i * 7 + i / 3) % EXPERTS);
  std::vector<uint16_t> out(num_rows * WIDTH);
  const std::vector<float> weights(chosen.size(), 0.5f);
  const Experts call = {num_rows, CHOSEN, EXPERTS, rows_of_step.data(), chosen.data(), weights.data(), gates.data(),
                        ups.data(), downs.data(), curve.data(), nullptr, out.data(), num_threads(), parallel_for};
  return result(experts(&call), out);
}

Result of_heads(int64_t num_rows, int64_t is_turned) {
  std::vector<uint16_t> out(HEADS * num_rows * DIM);
  const HeadProduct call = {BFLOAT16, is_turned, HEADS, num_rows, DIM, DIM, queries.data(), ROWS * DIM, DIM,
                            keys_of_tokens.data(), DIM * DIM, DIM, out.data(), num_rows * DIM, DIM, num_threads(),
                            parallel_for};
  return result(head_products(&call), out);
}

Result packed_content(const void* from, FILE* file) {
  std::vector<uint8_t> out;
  const int32_t failed = packed(Q8_0, PACKED_ROWS, PACKED_COLUMNS, from, file ? fileno(file) : -1, out);
  return {failed, out};
}

Result with_states(bool is_delta) {
  const int64_t first = 25, size = HEADS * DIM * DIM;
  std::vector<float> states(2 * size, 0.25f), out(ROWS * HEADS * DIM);
  const StateRun runs[] = {{first, states.data()}, {ROWS - first, states.data() + size}};
  int32_t failed;
  if (is_delta) {
    const DeltaRule call = {FLOAT32, 2, HEADS, HEADS, DIM, DIM, 1, exact_queries.data(), exact_keys.data(),
                            exact_values.data(), HEADS * DIM, HEADS * DIM, HEADS * DIM, decays.data(), decays.data(), out.data(),
                            1e-6, num_threads(), parallel_for};
    failed = delta_rule(&call, runs);
  } else {
    const StateSpace call = {FLOAT32, 2, HEADS, KV_HEADS, DIM, DIM, exact_queries.data(), exact_keys.data(),
                             exact_values.data(), HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, decays.data(), skips.data(),
                             skips.data(), out.data(), num_threads(), parallel_for};
    failed = state_space(&call, runs);
  }
  out.insert(out.end(), states.begin(), states.end());
  return result(failed, out);
}

Result convolved_rows() {
  constexpr int64_t KERNEL = 4, CHANNELS_IN_ALL = 1024, COUNT = 100;
  std::vector<uint16_t> state(CHANNELS_IN_ALL * KERNEL, 0x3f80), out(COUNT * CHANNELS_IN_ALL);
  const StateRun run = {COUNT, state.data()};
  const Convolution call = {BFLOAT16, 1, COUNT, CHANNELS_IN_ALL, KERNEL, 1, many_rows.data(), queries.data(), nullptr,
                            out.data(), num_threads(), parallel_for};
  const int32_t failed = convolution(&call, &run);
  out.insert(out.end(), state.begin(), state.end());
  return result(failed, out);
}

Result in_planes() {
  std::vector<uint16_t> joined(many_rows.size());
  std::vector<uint8_t> data(many_rows.size() * 2);
  Planes call = {BFLOAT16, 0, 400, WIDTH, WIDTH * 2, 0, nullptr, data.data()};
  int32_t failed = 0;
  for (int i = 0; i < 5; ++i) {
    call.values = (void*)many_rows.data(), call.num_bytes = data.size();
    failed |= split(&call);
    call.values = joined.data();
    failed |= join(&call);
  }
  return result(failed, joined);
}

struct Job {
  const char* name;
  bool needs_memory;  // of each thread
  std::function<Result()> run;
};

const std::vector<Job> JOBS = {
    {"attention of few rows, cut into units", true, [] { return attended_in_bfloat16({{TOKENS - 1, 1, 0}, {2300, 3, 0}}); }},
    {"attention of many rows", true, [] { return attended_in_bfloat16({{2300, 39, 0}, {2100, 1, 0}}); }},
    {"attention in float32, with a window", true, [] { return attended_in_float32({{TOKENS - 9, 9, 0}, {2000, 31, 0}}); }},
    {"products of one row", true, [] { return multiplied(1, {&in4, &in8, &in4}); }},
    {"products of many rows", true, [] { return multiplied(ROWS, {&in8, &in4}); }},
    {"looking up", false, [] {
       std::vector<int64_t> ids;
       for (int64_t i = 0; i < 300; ++i) ids.push_back(i * 31 % INNER);
       std::vector<uint16_t> out(ids.size() * WIDTH);
       const Lookup call = {(int64_t)ids.size(), ids.data(), &in4.matrix, out.data(), num_threads(), parallel_for};
       return result(look_up(&call), out);
     }},
    {"a norm", false, [] {
       std::vector<uint16_t> out(many_rows.size());
       const Norm call = norm_of_step(400, many_rows, out.data());
       return result(norm(&call), out);
     }},
    {"gated products", true, [] {
       std::vector<uint16_t> out(ROWS * WIDTH);
       const Gated call = gated_of(ROWS, rows_of_step.data(), out.data());
       return result(gated(&call), out);
     }},
    {"attention with its products", true, [] {
       Cache memory(ROWS);
       std::vector<uint16_t> out(ROWS * WIDTH);
       const AttentionBlock call = block_of(ROWS, out.data());
       return result(attention_block(&call, &memory.run), out);
     }},
    {"a layer, one row", true, [] { return whole_layer(1); }},
    {"a layer, many rows", true, [] { return whole_layer(ROWS); }},
    {"experts, one row", true, [] { return mixed(1); }},
    {"experts, many rows", true, [] { return mixed(ROWS); }},
    {"products of heads", true, [] { return of_heads(ROWS, 0); }},
    {"turned products of heads", true, [] { return of_heads(3, 1); }},
    {"packing", false, [] { return packed_content(content.data(), nullptr); }},
    {"packing a file", true, [] { return packed_content(nullptr, file_of_content); }},
    {"a convolution", false, [] { return convolved_rows(); }},
    {"the delta rule", true, [] { return with_states(true); }},
    {"a state space", true, [] { return with_states(false); }},
    {"planes", false, [] { return in_planes(); }},
};

std::atomic<int64_t> num_calls{0}, num_wrong{0};

void check(const Job& job, const Result& found, const Result& expected) {
  num_calls.fetch_add(1, std::memory_order_relaxed);
  if (found.failed == expected.failed && found.bytes == expected.bytes) return;
  num_wrong.fetch_add(1, std::memory_order_relaxed);
  fprintf(stderr, "races: %s: another result than that of one thread\n", job.name);
}

// Teams that callers share: each call takes one that is free.
class Teams {
 public:
  std::unique_ptr<Team> take(std::mt19937& random) {
    std::unique_lock<std::mutex> lock(mutex_);
    returned_.wait(lock, [this] { return in_use_ < TEAMS; });
    ++in_use_;
    if (!free_.empty() && random() % CALLS_OF_A_TEAM) {
      std::unique_ptr<Team> found = std::move(free_.back());
      free_.pop_back();
      return found;
    }
    free_.clear();
    return std::make_unique<Team>(2 + random() % (THREADS - 1));
  }

  void give_back(std::unique_ptr<Team> team) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(team));
    --in_use_;
    returned_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Team>> free_;
  int in_use_ = 0;
};

void call_at_once(const std::vector<Result>& expected, double seconds) {
  Teams teams;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < CALLERS; ++caller)
    callers.emplace_back([&, caller] {
      std::mt19937 random(caller);
      // Each calls every operator at least once: first all of them the same, then any.
      for (size_t i = 0; i < JOBS.size() || std::chrono::steady_clock::now() < end; ++i) {
        const size_t number = i < JOBS.size() ? i : random() % JOBS.size();
        std::unique_ptr<Team> team = teams.take(random);
        my_team = team.get();
        check(JOBS[number], JOBS[number].run(), expected[number]);
        my_team = nullptr;
        teams.give_back(std::move(team));
      }
    });
  for (std::thread& caller : callers) caller.join();
}

// Threads that have no memory all say so. Those of a new team have none yet; the calling one has kept its own.
void call_without_memory() {
  for (const Job& job : JOBS) {
    if (!job.needs_memory) continue;
    Team team(THREADS);
    my_team = &team;
    has_no_memory.store(true, std::memory_order_relaxed);
    const Result found = job.run();
    has_no_memory.store(false, std::memory_order_relaxed);
    my_team = nullptr;
    num_calls.fetch_add(1, std::memory_order_relaxed);
    if (!found.failed) fail(job.name, "it does not fail without memory");
  }
}

}  // namespace

int main(int, char** arguments) {
  if (!diskprefix_operators(nullptr)) return 2;
  file_of_content = tmpfile();
  if (!file_of_content || fwrite(content.data(), 1, content.size(),
      file_of_content) != content.size() || fflush(file_of_content))
    fail("file", "it cannot be written");
  std::vector<Result> expected;
  for (const Job& job : JOBS) {
    expected.push_back(job.run());
    if (expected.back().failed) fail(job.name, "it fails");
  }
  call_at_once(expected, atof(arguments[1]));
  call_without_memory();
  printf("%lld %lld\n", (long long)num_calls, (long long)num_wrong);
}
