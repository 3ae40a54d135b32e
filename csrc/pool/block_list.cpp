// SPDX-License-Identifier: Apache-2.0
#include "pool/block_list.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hybrid_kv {

BlockList BlockList::truncated(std::size_t num_blocks) const {
  const auto num_kept = static_cast<std::ptrdiff_t>(std::min(num_blocks, blocks.size()));
  return {pool, type_id, {blocks.begin(), blocks.begin() + num_kept}};
}

BlockList BlockList::operator+(const BlockList& other) const {
  if (other.pool != pool) {
    throw std::invalid_argument(
        "the added blocks must be of the same pool, got those of another pool");
  }
  if (other.type_id != type_id) {
    throw std::invalid_argument("the added blocks must be of type " + std::to_string(type_id) +
                                ", got type " + std::to_string(other.type_id));
  }
  BlockList sum = *this;
  sum.blocks.insert(sum.blocks.end(), other.blocks.begin(), other.blocks.end());
  return sum;
}

}  // namespace hybrid_kv
