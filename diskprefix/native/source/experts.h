// The chosen experts of a mixture, for all rows of a step in one call. A row's result depends on no other row.
//
// Rows are sorted by expert, so that each matrix is read once. The gate and up products of all experts are one loop over
// the threads, the down products another.

#pragma once

#include "matrix.h"
#include "parts.h"

namespace diskprefix {
namespace {
namespace matrices {

class Mixture {
 public:
  explicit Mixture(const Experts& call)
      : call_(call), pairs_(call.num_rows * call.num_chosen), width_(call.gate[0]->columns), inner_(call.gate[0]->rows),
        num_first_(call.up ? 2 : 1) {}

  // Returns the operator's result; see `Operators`.
  int32_t run() {
    if (!pairs_) return 0;
    static thread_local Memory indices, memory;
    if (!indices.reserve(Memory::size_of<int64_t>(call_.num_experts + 1) + 2 * Memory::size_of<int64_t>(pairs_) +
                         Memory::size_of<Group>(pairs_) + Memory::size_of<Part>(3 * pairs_)))
      return 1;
    if (!sort(indices)) return 2;
    const int64_t packed = place_packed();
    if (!memory.reserve(Memory::size_of<uint16_t>(pairs_ * width_) + 2 * Memory::size_of<uint16_t>(pairs_ * inner_) + packed))
      return 1;
    rows_ = memory.take<uint16_t>(pairs_ * width_);
    gate_ = memory.take<uint16_t>(pairs_ * inner_), up_ = memory.take<uint16_t>(pairs_ * inner_);
    packed_ = memory.take<uint8_t>(packed);
    each_group(width_, [this](Group& group) { gather(group); });
    if (!multiply_all(first_parts_, num_first_ * num_groups_, call_.num_threads)) return 1;
    each_group(inner_, [this](Group& group) { gate(group); });
    if (!multiply_all(last_parts_, num_groups_, call_.num_threads)) return 1;
    add_up();
    return 0;
  }

 private:
  // A chosen expert, and its range of the rows sorted by expert.
  struct Group {
    int64_t expert, first, count, packed;
  };

  const Experts& call_;
  const int64_t pairs_, width_, inner_, num_first_;
  int64_t num_groups_ = 0;
  int64_t *pair_at_ = nullptr, *place_of_ = nullptr;
  Group* groups_ = nullptr;
  Part *first_parts_ = nullptr, *last_parts_ = nullptr;
  uint16_t *rows_ = nullptr, *gate_ = nullptr, *up_ = nullptr;
  uint8_t* packed_ = nullptr;

  // Sorts the pairs of a row and one of its experts. Returns false if an expert does not exist.
  bool sort(Memory& memory) {
    int64_t* counts = memory.take<int64_t>(call_.num_experts + 1);
    pair_at_ = memory.take<int64_t>(pairs_), place_of_ = memory.take<int64_t>(pairs_);
    groups_ = memory.take<Group>(pairs_);
    first_parts_ = memory.take<Part>(3 * pairs_), last_parts_ = first_parts_ + 2 * pairs_;
    memset(counts, 0, (call_.num_experts + 1) * sizeof *counts);
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      if ((uint64_t)call_.chosen[pair] >= (uint64_t)call_.num_experts) return false;
      ++counts[call_.chosen[pair] + 1];
    }
    for (int64_t expert = 0; expert < call_.num_experts; ++expert) {
      if (counts[expert + 1]) groups_[num_groups_++] = {expert, counts[expert], counts[expert + 1], 0};
      counts[expert + 1] += counts[expert];
    }
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      const int64_t place = counts[call_.chosen[pair]]++;
      pair_at_[place] = pair, place_of_[pair] = place;
    }
    return true;
  }

  // Gives each group its place in the memory for packed rows, and returns the number of bytes in all.
  int64_t place_packed() {
    int64_t bytes = 0;
    for (int64_t i = 0; i < num_groups_; ++i) {
      groups_[i].packed = bytes;
      bytes += up_to(Multiply::packed_bytes(groups_[i].count, most(width_, inner_)), 64);
    }
    return bytes;
  }

  template <class Body>
  void each_group(int64_t width, const Body& body) {
    const int64_t grain = 1 + 65536 * num_groups_ / (pairs_ * width);
    spread(call_.num_threads, num_groups_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(groups_[i]);
    });
  }

  Part part_of(const Group& group, const Matrix& matrix, const uint16_t* rows, uint16_t* out) const {
    return Part(matrix, rows, packed_ + group.packed, group.count, out, matrix.rows);
  }

  void gather(const Group& group) {
    uint16_t* to = rows_ + group.first * width_;
    for (int64_t i = 0; i < group.count; ++i) {
      const int64_t pair = pair_at_[group.first + i];
      memcpy(to + i * width_, (const uint16_t*)call_.rows + pair / call_.num_chosen * width_, width_ * 2);
      if (call_.weighs_rows) weigh<BFloat16>(to + i * width_, call_.weights[pair], width_);
    }
    Part* parts = first_parts_ + (&group - groups_) * num_first_;
    parts[0] = part_of(group, *call_.gate[group.expert], to, gate_ + group.first * inner_);
    if (call_.up) parts[1] = part_of(group, *call_.up[group.expert], to, up_ + group.first * inner_);
    pack_rows(parts, num_first_, 0, group.count);
  }

  // The experts' results replace the rows.
  void gate(const Group& group) {
    uint16_t *gate = gate_ + group.first * inner_, *up = up_ + group.first * inner_;
    for (int64_t i = 0; i < group.count; ++i)
      gate_row(gate + i * inner_, call_.up ? up + i * inner_ : nullptr, call_.curve, inner_, gate + i * inner_, call_.up_curve);
    Part& part = last_parts_[&group - groups_];
    part = part_of(group, *call_.down[group.expert], gate, rows_ + group.first * width_);
    pack_rows(&part, 1, 0, group.count);
  }

  void add_up() const {
    const int64_t grain = 1 + 65536 / (width_ * call_.num_chosen);
    spread(call_.num_threads, call_.num_rows, grain, [this](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) add_up_row(row);
    });
  }

  void add_up_row(int64_t row) const {
    uint16_t* out = (uint16_t*)call_.out + row * width_;
    for (int64_t i = 0; i < width_; i += LANES) {
      Floats total = {};
      for (int64_t pair = row * call_.num_chosen; pair < (row + 1) * call_.num_chosen; ++pair) {
        const Floats computed = BFloat16::load(rows_ + place_of_[pair] * width_ + i);
        const Floats weighted = call_.weighs_rows ? computed : rounded_to<BFloat16>(computed * all(call_.weights[pair]));
        total = pair == row * call_.num_chosen ? weighted : total + weighted;
      }
      BFloat16::put(out + i, total);
    }
  }
};

}  // namespace matrices

int32_t experts(const Experts* call) { return matrices::Mixture(*call).run(); }

}  // namespace
}  // namespace diskprefix
