// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_kv {

// The physical block ids that hold nothing reusable, as a stack.
//
// Ids run from 1 to num_blocks - 1; id 0 is the null block, which belongs to nobody. Which id a
// caller gets has no meaning for correctness. Last in, first out keeps the ids in use few and recent.
// A bit per id finds an id that is given back twice, which would put two requests in one block.
class BlankBlockIds {
 public:
  // Throws std::invalid_argument unless 1 <= num_blocks <= 2^31 - 1.
  explicit BlankBlockIds(std::int64_t num_blocks);

  std::size_t size() const { return stack_.size(); }
  std::int32_t num_blocks() const { return num_blocks_; }
  // The id that would be taken after `i` others; needs i < size().
  std::int32_t peek(std::size_t i) const { return stack_[stack_.size() - 1 - i]; }

  // Takes the ids that peek(0 .. n - 1) gave into `ids`; needs n <= size().
  void take(std::size_t n, std::int32_t* ids) {
    for (std::size_t i = 0; i < n; ++i) {
      ids[i] = stack_.back();
      stack_.pop_back();
      unmark(ids[i]);
    }
  }

  // ids[0] becomes the next id to be taken. Throws std::logic_error for an id that is blank already.
  void give_back(const std::int32_t* ids, std::size_t n) {
    for (std::size_t i = n; i-- > 0;) {
      if (!is_valid(ids[i]) || is_blank(ids[i])) throw_not_given_out(ids[i]);
      mark(ids[i]);
      stack_.push_back(ids[i]);
    }
  }

 private:
  bool is_valid(std::int64_t id) const { return 0 < id && id < num_blocks_; }
  bool is_blank(std::int64_t id) const { return (bitmap_[word(id)] & bit(id)) != 0; }
  void mark(std::int64_t id) { bitmap_[word(id)] |= bit(id); }
  void unmark(std::int64_t id) { bitmap_[word(id)] &= ~bit(id); }

  [[noreturn]] static void throw_not_given_out(std::int64_t id);

  static std::size_t word(std::int64_t id) { return static_cast<std::size_t>(id) / 64; }
  static std::uint64_t bit(std::int64_t id) { return std::uint64_t{1} << (id % 64); }

  std::int32_t num_blocks_;
  std::vector<std::int32_t> stack_;  // the next id to be taken is the last
  std::vector<std::uint64_t> bitmap_;
};

}  // namespace hybrid_kv
