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

void BlankBlockIds::throw_not_given_out(std::int64_t id) {
  throw std::logic_error("block id " + std::to_string(id) + " is given back, but was not in use");
}

}  // namespace hybrid_kv
