// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_kv {

// The blank physical block ids, which hold nothing reusable, as a stack.
//
// Ids run from 1 to num_blocks - 1; id 0 is the null block and never allocated. Correctness does
// not depend on which id a caller gets. Last in, first out reuses the same few ids.
class BlankBlockIds {
 public:
  // Throws std::invalid_argument unless 1 <= num_blocks <= 2^31 - 1.
  explicit BlankBlockIds(std::int64_t num_blocks);

  std::size_t size() const { return size_; }
  std::int32_t num_blocks() const { return static_cast<std::int32_t>(stack_.size()) + 1; }
  // The id that is taken after `i` others; needs i < size().
  std::int32_t peek(std::size_t i) const { return stack_[size_ - 1 - i]; }

  // Takes the ids peek(0), ..., peek(n - 1) into `ids`; needs n <= size().
  void take(std::size_t n, std::int32_t* ids) {
    size_ -= n;
    std::reverse_copy(stack_.data() + size_, stack_.data() + size_ + n, ids);
  }

  // Makes `ids` blank; ids[0] is the next to be taken. The caller returns each id once. Throws
  // std::logic_error for more ids than were taken.
  void give_back(const std::int32_t* ids, std::size_t n) {
    if (n > stack_.size() - size_) throw_too_many();
    std::reverse_copy(ids, ids + n, stack_.data() + size_);
    size_ += n;
  }

 private:
  [[noreturn]] static void throw_too_many();

  std::vector<std::int32_t> stack_;  // has room for all ids; the first `size_` entries are blank
  std::size_t size_;
};

}  // namespace hybrid_kv
