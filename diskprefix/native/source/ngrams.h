// Rows of a table that the last tokens of a sequence name. The table may be many times larger than the memory, so rows are
// read from its file. The file is not mapped: a page of a mapped one that is cut short would end the process.

#pragma once

#include <unistd.h>

#include <atomic>

#include "memory.h"
#include "parts.h"

namespace diskprefix {
namespace {

constexpr int64_t MAX_NGRAM = 8;

// Reads `count` bytes at `offset`. Returns false if the file ends before, or cannot be read.
inline bool read_at(int64_t file, int64_t offset, char* to, int64_t count) {
  while (count > 0) {
    const ssize_t size = pread((int)file, to, count, offset);
    if (size <= 0) return false;
    to += size, offset += size, count -= size;
  }
  return true;
}

class NGramRows {
 public:
  NGramRows(const NGrams& call, const StateRun& run, int64_t row) : call_(call), run_(run), row_(row), before_(call.size - 1) {}

  // Finds the rows of the table for each token, [rows, (size - 1) × heads], and the state after the last token.
  void find(int64_t* numbers) {
    int64_t tokens[MAX_NGRAM];  // the last tokens of the sequence, the latest one first
    for (int64_t i = 0; i < before_; ++i) tokens[i] = (int64_t)((const float*)run_.before)[before_ - 1 - i] - 1;
    for (int64_t row = 0; row < run_.num_rows; ++row) {
      for (int64_t i = before_; i > 0; --i) tokens[i] = tokens[i - 1];
      tokens[0] = call_.ids[row_ + row];
      if (call_.out) find_row(tokens, numbers + row * before_ * call_.heads);
      if (row + 1 == run_.num_rows) break;
    }
    for (int64_t i = 0; i < before_; ++i) ((float*)run_.state)[before_ - 1 - i] = (float)(tokens[i] + 1);
  }

 private:
  const NGrams& call_;
  const StateRun& run_;
  const int64_t row_, before_;

  void find_row(const int64_t* tokens, int64_t* numbers) const {
    uint64_t mixed = (uint64_t)tokens[0] * (uint64_t)call_.multipliers[0];
    bool is_hidden = false;
    for (int64_t i = 1, head = 0; i < call_.size; ++i) {
      is_hidden |= tokens[i] < 0 || tokens[i] == call_.end;
      mixed ^= (uint64_t)(is_hidden ? call_.end : tokens[i]) * (uint64_t)call_.multipliers[i];
      for (const int64_t last = head + call_.heads; head < last; ++head) {
        const int64_t rest = (int64_t)mixed % call_.sizes[head];
        numbers[head] = (rest < 0 ? rest + call_.sizes[head] : rest) + call_.offsets[head];
      }
    }
  }
};

// Copies a row of the table to `out` in the type `Type`. Returns false if it cannot be read.
template <class From, class Type>
inline bool put_table_row(const NGrams& call, int64_t number, char* buffer, typename Type::Stored* out) {
  int64_t part = 0, end = call.num_parts;
  while (end - part > 1) {
    const int64_t middle = (part + end) / 2;
    (call.parts[middle].first <= number ? part : end) = middle;
  }
  const TablePart& in = call.parts[part];
  const int64_t row_bytes = call.width * sizeof(typename From::Stored), at = in.offset + (number - in.first) * row_bytes;
  if (!in.content && !read_at(in.file, at, buffer, row_bytes)) return false;
  const typename From::Stored* row = (const typename From::Stored*)(in.content ? (const char*)in.content + at : buffer);
  for (int64_t i = 0; i < call.width; i += LANES) put_some<Type>(out + i, some_of<From>(row + i, call.width - i), call.width - i);
  return true;
}

int32_t ngrams(const NGrams* call, const StateRun* runs) {
  static thread_local Memory memory;
  const int64_t of_row = (call->size - 1) * call->heads;
  if (call->size > MAX_NGRAM || !memory.reserve(Memory::size_of<int64_t>(call->num_rows * of_row))) return 1;
  int64_t* numbers = memory.take<int64_t>(call->num_rows * of_row);
  for (int64_t run = 0, row = 0; run < call->num_runs; row += runs[run++].num_rows)
    NGramRows(*call, runs[run], row).find(numbers + row * of_row);
  if (!call->out) return 0;
  std::atomic<int32_t> failed{0};
  // Few in a part: threads that wait for the disk at the same time wait less.
  spread(call->num_threads, call->num_rows * of_row, 4, [&](int64_t begin, int64_t end) {
    static thread_local Memory of_thread;
    if (!of_thread.reserve(Memory::size_of<float>(call->width))) return (void)(failed = 1);
    char* buffer = of_thread.take<char>(call->width * sizeof(float));
    with_type(call->dtype, [&](auto type) {
      with_type(call->stored, [&](auto stored) {
        typedef typename decltype(type)::Stored Stored;
        for (int64_t i = begin; i < end; ++i)
          if (!put_table_row<decltype(stored), decltype(type)>(*call, numbers[i], buffer, (Stored*)call->out + i * call->width))
            failed = 3;
      });
    });
  });
  return failed;
}

}  // namespace
}  // namespace diskprefix
