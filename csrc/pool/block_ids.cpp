// SPDX-License-Identifier: Apache-2.0
#include "pool/block_ids.h"

#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hybrid_kv {
namespace {

std::int64_t checked_num_blocks(std::int64_t num_blocks) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (num_blocks < 1 || num_blocks > kMax) {
    throw std::invalid_argument("num_blocks must be from 1 to " + std::to_string(kMax) + ", got " +
                                std::to_string(num_blocks));
  }
  return num_blocks;
}

}  // namespace

BlankBlockIds::BlankBlockIds(std::int64_t num_blocks)
    : stack_(static_cast<std::size_t>(checked_num_blocks(num_blocks)) - 1), size_(stack_.size()) {
  std::iota(stack_.rbegin(), stack_.rend(), 1);
}

void BlankBlockIds::throw_too_many() {
  throw std::logic_error("the returned block ids must be in use, got more ids than are in use");
}

}  // namespace hybrid_kv
