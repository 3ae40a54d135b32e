// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "pool/block_pool.h"

namespace hybrid_kv {

// A snapshot of blocks of one attention type. Holds no references.
struct BlockList {
  std::shared_ptr<BlockPool> pool;
  std::size_t type_id;
  std::vector<BlockHandle> blocks;

  // The first blocks, at most `num_blocks`.
  BlockList truncated(std::size_t num_blocks) const;
  // Throws std::invalid_argument for blocks of another pool or attention type.
  BlockList operator+(const BlockList& other) const;
};

}  // namespace hybrid_kv
