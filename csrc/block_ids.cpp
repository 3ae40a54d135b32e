// SPDX-License-Identifier: Apache-2.0
#include "block_ids.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace hybrid_kv {
namespace {

std::int32_t checked_num_blocks(std::int64_t num_blocks) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (num_blocks < 1 || num_blocks > kMax) {
    throw std::invalid_argument("num_blocks must be from 1 to " + std::to_string(kMax) + ", not " +
                                std::to_string(num_blocks));
  }
  return static_cast<std::int32_t>(num_blocks);
}

}  // namespace

BlankBlockIds::BlankBlockIds(std::int64_t num_blocks)
    : num_blocks_(checked_num_blocks(num_blocks)),
      stack_(static_cast<std::size_t>(num_blocks_) - 1),
      bitmap_(word(num_blocks_) + 1, ~std::uint64_t{0}) {
  // Bits for id 0 and past the last id stay set; is_valid() keeps every reader away from them.
  std::int32_t id = num_blocks_;
  for (std::int32_t& slot : stack_) slot = --id;
}

void BlankBlockIds::check_take(std::int64_t n) const {
  if (n < 0) {
    throw std::invalid_argument("cannot take " + std::to_string(n) + " block ids: " +
                                std::to_string(size()) + " are available, and the count is negative");
  }
  if (static_cast<std::size_t>(n) > size()) {
    throw std::invalid_argument("cannot take " + std::to_string(n) + " block ids: only " +
                                std::to_string(size()) + " are available");
  }
}

void BlankBlockIds::take(std::int64_t n) {
  const std::size_t left = stack_.size() - static_cast<std::size_t>(n);
  for (std::size_t i = left; i < stack_.size(); ++i) unmark(stack_[i]);
  stack_.resize(left);
}

void BlankBlockIds::give_back(const std::vector<std::int64_t>& ids) {
  // The constructor filled the stack once, so it has room for every id: nothing below allocates.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t id = ids[i];
    if (is_valid(id) && !is_blank(id)) {
      mark(id);
      continue;
    }
    for (std::size_t j = 0; j < i; ++j) unmark(ids[j]);
    std::string reason = "comes twice";
    if (!is_valid(id)) {
      reason = "is not in 1 to " + std::to_string(num_blocks_ - 1);
    } else if (is_blank(id)) {
      reason = "is blank already";
    }
    throw std::invalid_argument("cannot give back block id " + std::to_string(id) + ": it " + reason);
  }
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    stack_.push_back(static_cast<std::int32_t>(*id));
  }
}

}  // namespace hybrid_kv
