// Products of each head's rows with a matrix of that head. A row's result depends on no other row: each number is one sum
// in a fixed order, whatever the number of rows and of threads.

#pragma once

#include "attention.h"

namespace diskprefix {
namespace {

template <class Type, class Multiply>
class HeadProducts {
  typedef typename Type::Stored Stored;
  typedef typename Multiply::Factor Factor;

 public:
  explicit HeadProducts(const HeadProduct& call)
      : call_(call),
        inner_(up_to(call.inner, call.is_turned ? Multiply::INNER : KEYS)),
        columns_(up_to(call.outer, KEYS)) {}

  bool run() {
    return spread(call_.num_threads, call_.parallel_for, call_.num_heads, 1,
                  [this](int64_t begin, int64_t end) { multiply(begin, end); }) &&
           !failed_;
  }

 private:
  const HeadProduct& call_;
  const int64_t inner_, columns_;
  std::atomic<bool> failed_{false};

  // Few rows are multiplied with a matrix as it lies in memory.
  bool has_few() const {
    if (call_.num_rows > Multiply::FEW_ROWS) return false;
    return call_.is_turned ? call_.inner == inner_ && call_.outer == columns_ : Multiply::TAKES_VALUES;
  }

  void multiply(int64_t begin, int64_t end) {
    static thread_local Memory memory;
    const int64_t rows = up_to(least(BLOCK, call_.num_rows), 16);
    if (!memory.reserve(Memory::size_of<Factor>(rows * inner_) + Memory::size_of<Factor>(16 * inner_) +
                        Memory::size_of<Factor>(inner_ * columns_) + Memory::size_of<float>(rows * columns_))) {
      failed_ = true;
      return;
    }
    Factor *left = memory.take<Factor>(rows * inner_), *turned = memory.take<Factor>(16 * inner_);
    Factor* packed = memory.take<Factor>(inner_ * columns_);
    float* sums = memory.take<float>(rows * columns_);
    typename Multiply::Scope scope(call_.num_rows);
    for (int64_t head = begin; head < end; ++head) {
      const Stored* matrix = (const Stored*)call_.matrices + head * call_.matrix_stride;
      if (!has_few()) pack(matrix, packed);
      for (int64_t row = 0; row < call_.num_rows; row += BLOCK) {
        const int64_t count = least(BLOCK, call_.num_rows - row);
        for (int64_t i = 0; i < count; ++i)
          Multiply::pack_row((const Stored*)call_.rows + head * call_.head_stride + (row + i) * call_.row_stride, call_.inner,
                             inner_, left + i * inner_);
        if (has_few()) multiply_few(matrix, left, turned, count, sums);
        else Multiply::multiply(left, inner_, packed, inner_, columns_, sums, columns_, count, inner_, columns_);
        put(sums, head, row, count);
      }
    }
  }

  void pack(const Stored* matrix, Factor* packed) const {
    if (call_.is_turned)
      Multiply::pack_turned(matrix, call_.line_stride, call_.outer, columns_, call_.inner, inner_, packed);
    else
      Multiply::pack_plain(matrix, call_.line_stride, call_.inner, inner_, call_.outer, columns_, packed);
  }

  void multiply_few(const Stored* matrix, const Factor* left, Factor* turned, int64_t count, float* sums) const {
    if constexpr (Multiply::FEW_ROWS > 0)
      if (call_.is_turned) {
        Multiply::turn_rows(left, count, inner_, turned);
        Multiply::multiply_tokens(turned, count, inner_, matrix, call_.line_stride, columns_, sums, columns_);
      }
    if constexpr (Multiply::TAKES_VALUES)
      if (!call_.is_turned)
        Multiply::multiply_values(left, inner_, count, matrix, call_.line_stride, call_.inner, call_.outer, sums, columns_);
  }

  void put(const float* sums, int64_t head, int64_t row, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      Stored* to = (Stored*)call_.out + head * call_.out_head_stride + (row + i) * call_.out_row_stride;
      // A zero is always +0, whatever was added to it.
      for (int64_t at = 0; at < call_.outer; at += LANES)
        put_some<Type>(to + at, loaded<Floats>(sums + i * columns_ + at) + all(0.0f), call_.outer - at);
    }
  }
};

template <class Type, class Multiply>
int32_t head_products_of(const HeadProduct* call) {
  return !HeadProducts<Type, Multiply>(*call).run();
}

int32_t head_products(const HeadProduct* call) {
  switch (call->dtype) {
    case FLOAT32:
      return head_products_of<Float32, VectorProduct<Float32>>(call);
    case FLOAT16:
      return head_products_of<Float16, VectorProduct<Float16>>(call);
    default:
      return head_products_of<BFloat16, ProductOfBFloat16>(call);
  }
}

}  // namespace
}  // namespace diskprefix
