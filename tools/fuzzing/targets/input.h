// What all targets share: choices by the fuzzer's bytes, memory whose end is the end of a page, a loop that cuts its range as
// it likes (under ThreadSanitizer each part is a thread, and nothing orders them), and comparisons of bits.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "interface.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define HAS_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define HAS_TSAN
#endif
#endif

extern "C" const diskprefix::Operators* diskprefix_operators(const char* name);

using namespace diskprefix;

[[noreturn]] inline void fail(const char* what, const char* variant) {
  fprintf(stderr, "WRONG: %s (%s)\n", what, variant);
  abort();
}

// The operators of all variants that this CPU has, the best one first.
inline const std::vector<const Operators*>& variants() {
  static const std::vector<const Operators*> found = [] {
    std::vector<const Operators*> list;
    for (const char* name : {"amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_i8mm", "neon_dot", "baseline"})
      if (const Operators* operators = diskprefix_operators(name)) list.push_back(operators);
    if (list.empty()) fail("no operators", "none");
    return list;
  }();
  return found;
}

inline bool is_called(const Operators* operators, const char* name) { return !strcmp(operators->name, name); }

// Whether its bits are those of all other such variants.
inline bool has_common_bits(const Operators* operators) { return !is_called(operators, "amx"); }

// Choices are made by the first bytes, values by random numbers with a seed. Without bytes, choices are the least ones.
class Input {
 public:
  Input(const uint8_t* bytes, size_t size) : at_(bytes), end_(bytes + size) { state_ = number(0, 65535); }

  int64_t number(int64_t least, int64_t most) {
    const uint64_t range = most - least + 1;
    uint64_t found = 0;
    for (uint64_t bound = 1; bound < range && at_ < end_; bound <<= 8) found = found << 8 | *at_++;
    return least + (int64_t)(found % range);
  }

  bool flag() { return number(0, 1); }

  template <class Value, size_t COUNT>
  Value one_of(const Value (&list)[COUNT]) {
    return list[number(0, COUNT - 1)];
  }

  size_t left() const { return end_ - at_; }
  const uint8_t* rest() const { return at_; }

  uint64_t random() {
    uint64_t mixed = state_ += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
  }

  float random_float() { return (float)(int64_t)(random() >> 40) / (1 << 23) - 1.0f; }

 private:
  const uint8_t *at_, *end_;
  uint64_t state_ = 0;
};

// Memory that ends at the end of a page, with none behind it: what reads a byte too much crashes, by tiles or with a plain
// library too. ASan also sees what lies before it.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : pages_((bytes + PAGE - 1) / PAGE) {
    std::vector<char*>& kept = spare()[pages_];
    if (kept.empty()) {
      map_ = (char*)mmap(nullptr, (pages_ + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (map_ == MAP_FAILED || mprotect(map_ + pages_ * PAGE, PAGE, PROT_NONE)) fail("no memory", "none");
    } else {
      map_ = kept.back();
      kept.pop_back();
    }
    data_ = map_ + pages_ * PAGE - bytes;
#if defined(HAS_ASAN)
    __asan_unpoison_memory_region(map_, pages_ * PAGE);
    __asan_poison_memory_region(map_, data_ - map_);
#endif
  }
  Guarded(const Guarded&) = delete;
  Guarded(Guarded&& other) : pages_(other.pages_), map_(other.map_), data_(other.data_) { other.map_ = nullptr; }
  ~Guarded() {
    if (map_) spare()[pages_].push_back(map_);
  }

  template <class Value>
  Value* as() const {
    return (Value*)data_;
  }
  size_t size() const { return map_ + pages_ * PAGE - data_; }

  // Other numbers each time: what is never written differs from call to call.
  Guarded& marked() {
    static uint8_t mark = 0;
    memset(data_, mark = mark * 5 + 77, size());
    return *this;
  }
  Guarded& filled(Input& input) {
    for (size_t i = 0; i < size(); ++i) data_[i] = (char)(input.random() >> 56);
    return *this;
  }
  // Infinite numbers, and those that are none, become finite ones.
  Guarded& finite(int64_t dtype) {
    for (size_t i = 0; dtype == FLOAT32 && i < size(); i += 4)
      if ((as<uint32_t>()[i / 4] & 0x7f800000) == 0x7f800000) as<uint32_t>()[i / 4] ^= 0x800000;
    const uint16_t exponent = dtype == BFLOAT16 ? 0x7f80 : 0x7c00, lowest = dtype == BFLOAT16 ? 0x80 : 0x400;
    for (size_t i = 0; dtype != FLOAT32 && i < size(); i += 2)
      if ((as<uint16_t>()[i / 2] & exponent) == exponent) as<uint16_t>()[i / 2] ^= lowest;
    return *this;
  }
  Guarded& copied(const void* from) {
    if (size()) memcpy(data_, from, size());
    return *this;
  }

 private:
  static constexpr size_t PAGE = 4096;
  size_t pages_;
  char *map_, *data_;

  static std::map<size_t, std::vector<char*>>& spare() {
    static auto* kept = new std::map<size_t, std::vector<char*>>;
    return *kept;
  }
};

inline uint16_t bfloat16_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return bits >> 16;
}

// A normal float16 between 2^-10 and 2^-3, of either sign.
inline uint16_t small_half(Input& input) {
  const uint64_t random = input.random();
  return (random & 0x83ff) | (5 + (random >> 16) % 7) << 10;
}

inline int64_t bytes_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// Chooses the type and the sizes of values that are written in planes. Returns the bytes from the first row to the last.
inline int64_t choose_form(Input& input, Planes& call, int64_t most_dtype) {
  call.dtype = input.number(0, most_dtype);
  call.num_rows = input.number(1, 4), call.width = input.number(1, 5000);
  const int64_t item = bytes_of(call.dtype), row_bytes = call.width * item;
  call.stride = row_bytes + input.number(0, 3) * item;
  return (call.num_rows - 1) * call.stride + row_bytes;
}

// Numbers of a model, or any bits if the input is `wild`: infinite ones too, and those that are none.
inline Guarded numbers(Input& input, int64_t dtype, int64_t count, bool wild) {
  Guarded made(count * bytes_of(dtype));
  if (wild) made.filled(input);
  else
    for (int64_t i = 0; i < count; ++i) {
      const float number = input.random_float();
      if (dtype == FLOAT32) made.as<float>()[i] = number;
      else made.as<uint16_t>()[i] = dtype == BFLOAT16 ? bfloat16_of(number) : small_half(input);
    }
  return made;
}

inline bool is_none(int64_t dtype, const void* at) {
  if (dtype == FLOAT32) {
    uint32_t bits;
    memcpy(&bits, at, 4);
    return (bits & 0x7fffffff) > 0x7f800000;
  }
  uint16_t bits;
  memcpy(&bits, at, 2);
  return (bits & 0x7fff) > (dtype == BFLOAT16 ? 0x7f80 : 0x7c00);
}

// Any two that are no numbers are the same.
inline void require_same(int64_t dtype, const void* one, const void* other, int64_t count, const char* what,
                         const char* variant) {
  const int64_t size = bytes_of(dtype);
  if (!count || !memcmp(one, other, count * size)) return;
  for (int64_t i = 0; i < count; ++i) {
    const char *a = (const char*)one + i * size, *b = (const char*)other + i * size;
    if (memcmp(a, b, size) && !(is_none(dtype, a) && is_none(dtype, b))) fail(what, variant);
  }
}

// How `share` cuts its next ranges.
inline uint64_t& cut() {
  static uint64_t seed = 0;
  return seed;
}

// Takes the place of the threads of `team.cpp`.
void diskprefix::share(int64_t, int64_t end, int64_t, Work work, void* context) {
  int64_t begin = 0;
  std::vector<std::pair<int64_t, int64_t>> parts;
  while (begin < end && parts.size() < 7) {
    cut() = cut() * 6364136223846793005 + 1442695040888963407;
    const int64_t size = 1 + (int64_t)((cut() >> 33) % (uint64_t)(end - begin));
    parts.push_back({begin, begin + size});
    begin += size;
  }
  if (begin < end) parts.push_back({begin, end});
  std::reverse(parts.begin(), parts.end());
#if defined(HAS_TSAN)
  std::vector<std::thread> threads;
  for (const auto& part : parts) threads.emplace_back(work, part.first, part.second, context);
  for (auto& thread : threads) thread.join();
#else
  for (const auto& part : parts) work(part.first, part.second, context);
#endif
}

// Runs one operation. Returns 0, or what the executor says: 1 without memory, 2 for a number that no expert has.
inline int32_t run_alone(const Operators* operators, const Operation& operation, int64_t rows, int64_t threads) {
  const Plan plan = {1, &operation};
  const PlanStep step = {rows, 0, 0, 1 << 20, 0, nullptr, threads};
  return operators->run(&plan, &step);
}

// Runs operations as a plan: they compute `rows` rows, those of `runs` where sequences matter.
inline bool run_plan(const Operators* operators, const std::vector<Operation>& operations, int64_t rows, int64_t threads,
                     const std::vector<PlanRun>& runs = {}) {
  const Plan plan = {(int64_t)operations.size(), operations.data()};
  const PlanStep step = {rows, 0, (int64_t)runs.size(), 1 << 20, 0, runs.data(), threads};
  return !operators->run(&plan, &step);
}
