// Products of rows with matrices in float32, bfloat16 or float16. Each head has its matrix; a linear layer is one head. A
// row's result depends on no other row: each number is one sum in a fixed order, whatever the number of rows and of
// threads.
//
// A thread takes panels of columns of a result, packs that part of the matrix once, and multiplies all rows with it.

#pragma once

#include <atomic>
#include <type_traits>

#include "interface.h"
#include "memory.h"
#include "product.h"

namespace diskprefix {
namespace {

template <class Type, class Multiply>
class DenseProducts {
  typedef typename Type::Stored Stored;
  typedef typename Multiply::Factor Factor;
  static constexpr int64_t PANEL = 64, ROWS = 96;
  static constexpr int64_t WIDE = 256;  // with few rows, because longer parts of the matrix's lines are read faster
  static constexpr int64_t UNIT = 32;  // the number of columns computed in a panel is a multiple of it
  static constexpr int64_t CHUNK = 1024;  // inner numbers of a panel that are multiplied with ROWS rows while they are in the cache

 public:
  explicit DenseProducts(const DenseProduct& call)
      : call_(call),
        inner_(up_to(call.inner, Multiply::INNER)),
        rows_(up_to(call.num_rows, 16)),
        width_(width_of(call)),
        panels_((call.outer + width_ - 1) / width_) {}

  bool run() {
    if (!call_.num_rows || !pack_rows()) return !call_.num_rows;
    const int64_t threads = least(call_.num_threads, call_.num_heads * panels_);
    spread(threads, threads, 1, [this](int64_t, int64_t) { work(); });
    return !failed_;
  }

 private:
  const DenseProduct& call_;
  const int64_t inner_, rows_, width_, panels_;
  Factor* packed_rows_ = nullptr;  // [heads, rows_, inner_]; null: rows are used as they lie in memory
  std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};

  static int64_t width_of(const DenseProduct& call) {
    const int64_t of_thread = call.num_heads * call.outer / call.num_threads;
    if (call.num_rows > Multiply::FEW_ROWS) return PANEL;
    return of_thread >= 2 * WIDE ? WIDE : of_thread < PANEL ? UNIT : PANEL;
  }

  const Stored* row(int64_t head, int64_t number) const {
    return (const Stored*)call_.rows + head * call_.head_stride + number * call_.row_stride;
  }

  bool pack_rows() {
    if (std::is_same<Stored, Factor>::value && call_.inner == inner_ && call_.num_rows % Multiply::WHOLE_ROWS == 0) return true;
    static thread_local Memory memory;
    if (!memory.reserve(Memory::size_of<Factor>(call_.num_heads * rows_ * inner_))) return false;
    packed_rows_ = memory.take<Factor>(call_.num_heads * rows_ * inner_);
    const int64_t count = call_.num_heads * call_.num_rows, grain = 1 + 32768 / inner_;
    spread(call_.num_threads, count, grain, [this](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / call_.num_rows, number = i % call_.num_rows;
        Multiply::pack_row(row(head, number), call_.inner, inner_, packed_rows_ + (head * rows_ + number) * inner_);
      }
    });
    return true;
  }

  void work() {
    static thread_local Memory memory;
    if (!memory.reserve(Memory::size_of<Factor>(16 * inner_) + Memory::size_of<Factor>(inner_ * width_) +
                        Memory::size_of<float>(ROWS * PANEL))) {
      failed_ = true;
      return;
    }
    Factor *transposed = memory.take<Factor>(16 * inner_), *packed = memory.take<Factor>(inner_ * width_);
    float* sums = memory.take<float>(ROWS * PANEL);
    typename Multiply::Scope scope(call_.num_rows);
    for (int64_t unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < call_.num_heads * panels_;)
      multiply(unit / panels_, unit % panels_ * width_, transposed, packed, sums);
  }

  void multiply(int64_t head, int64_t column, Factor* transposed, Factor* packed, float* sums) const {
    const int64_t present = least(width_, call_.outer - column), columns = up_to(present, UNIT);
    const Stored* matrix =
        (const Stored*)call_.matrices + head * call_.matrix_stride + column * (call_.is_transposed ? call_.line_stride : 1);
    // Few rows are multiplied with a matrix as it lies in memory.
    const bool fits = call_.is_transposed ? call_.inner == inner_ && present == columns : takes_values<Multiply>(present);
    const bool is_few = call_.num_rows <= Multiply::FEW_ROWS && fits;
    if (!is_few) pack(matrix, present, columns, packed);
    for (int64_t first = 0; first < call_.num_rows; first += ROWS) {
      const int64_t count = least(ROWS, call_.num_rows - first);
      const Factor* left = packed_rows_ ? packed_rows_ + (head * rows_ + first) * inner_ : (const Factor*)row(head, first);
      const int64_t stride = packed_rows_ ? inner_ : call_.row_stride;
      if (is_few) multiply_few(matrix, left, stride, count, present, columns, transposed, sums);
      for (int64_t begin = 0; !is_few && begin < inner_; begin += CHUNK)
        Multiply::multiply(left, stride, packed, inner_, columns, sums, columns, count, least(begin + CHUNK, inner_), columns, begin);
      put(sums, columns, head, first, count, column, present);
    }
  }

  void pack(const Stored* matrix, int64_t present, int64_t columns, Factor* packed) const {
    if (call_.is_transposed)
      Multiply::pack_transposed(matrix, call_.line_stride, present, columns, call_.inner, inner_, packed);
    else
      Multiply::pack_plain(matrix, call_.line_stride, call_.inner, inner_, present, columns, packed);
  }

  void multiply_few(const Stored* matrix, const Factor* left, int64_t stride, int64_t count, int64_t present, int64_t columns,
                    Factor* transposed, float* sums) const {
    if (call_.is_transposed) {
      Multiply::transpose_rows(left, stride, count, inner_, transposed);
      Multiply::multiply_tokens(transposed, count, inner_, matrix, call_.line_stride, columns, sums, columns);
    }
    if constexpr (Multiply::VALUES > 0)
      if (!call_.is_transposed)
        Multiply::multiply_values(left, stride, count, matrix, call_.line_stride, call_.inner, present, sums, columns, false);
  }

  void put(const float* sums, int64_t stride, int64_t head, int64_t first, int64_t count, int64_t column, int64_t present) const {
    for (int64_t i = 0; i < count; ++i) {
      Stored* to = (Stored*)call_.out + head * call_.out_head_stride + (first + i) * call_.out_row_stride + column;
      for (int64_t at = 0; at < present; at += LANES) {
        // Makes -0 into +0.
        Floats total = loaded<Floats>(sums + i * stride + at) + all(0.0f);
        if (call_.bias) total += some_of<Float32>(call_.bias + column + at, present - at);
        put_some<Type>(to + at, total, present - at);
      }
    }
  }
};

int32_t dense(const DenseProduct* call) {
  if (call->dtype == FLOAT32) return !DenseProducts<Float32, VectorProduct<Float32>>(*call).run();
  return !DenseProducts<BFloat16, ProductOfBFloat16>(*call).run();
}

}  // namespace
}  // namespace diskprefix
