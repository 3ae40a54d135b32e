// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_kv {

// The physical block ids that hold nothing reusable, as a stack.
//
// Ids run from 1 to num_blocks - 1; id 0 is the null block, which belongs to nobody. Which id a
// caller gets has no meaning for correctness. Last in, first out keeps the ids in use few and
// recent.
class BlankBlockIds {
 public:
  // Throws std::invalid_argument unless 1 <= num_blocks <= 2^31 - 1.
  explicit BlankBlockIds(std::int64_t num_blocks);

  std::size_t size() const { return size_; }
  std::int32_t num_blocks() const { return static_cast<std::int32_t>(stack_.size()) + 1; }
  // The id that would be taken after `i` others; needs i < size().
  std::int32_t peek(std::size_t i) const { return stack_[size_ - 1 - i]; }

  // Takes the ids that peek(0 .. n - 1) gave into `ids`; needs n <= size().
  void take(std::size_t n, std::int32_t* ids) {
    size_ -= n;
    std::reverse_copy(stack_.data() + size_, stack_.data() + size_ + n, ids);
  }

  // ids[0] becomes the next id to be taken. Throws std::logic_error for more ids than were taken;
  // that none comes twice is the block's to see that owned them.
  void give_back(const std::int32_t* ids, std::size_t n) {
    if (n > stack_.size() - size_) throw_too_many();
    std::reverse_copy(ids, ids + n, stack_.data() + size_);
    size_ += n;
  }

 private:
  [[noreturn]] static void throw_too_many();

  std::vector<std::int32_t> stack_;  // room for all; the next id to be taken is the last of `size_`
  std::size_t size_;
};

}  // namespace hybrid_kv
