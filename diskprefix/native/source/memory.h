// Memory that a thread keeps from call to call.

#pragma once

#include <cstdint>
#include <cstdlib>

#include "vector.h"

namespace diskprefix {
namespace {

class Memory {
 public:
  ~Memory() { free(start_); }

  // Makes room for `bytes`. Memory taken before is no longer valid.
  bool reserve(int64_t bytes) {
    if (bytes > size_) {
      free(start_);
      start_ = (char*)aligned_alloc(64, up_to(bytes, 64));
      size_ = start_ ? bytes : 0;
    }
    used_ = 0;
    return start_ || !bytes;
  }

  template <class Number>
  Number* take(int64_t count) {
    Number* taken = (Number*)(start_ + used_);
    used_ += size_of<Number>(count);
    return taken;
  }

  template <class Number>
  static int64_t size_of(int64_t count) {
    return up_to(count * sizeof(Number), 64);
  }

 private:
  char* start_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace
}  // namespace diskprefix
