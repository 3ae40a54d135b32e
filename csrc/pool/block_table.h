// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pool/block_list.h"
#include "pool/block_pool.h"

namespace hybrid_kv {

// A request's logical blocks of one attention type, in token order.
//
// |  released  |  cached, or left out of the cache  |  undecided  |
// 0      num_released                         num_decided     size()
//
// The null block stands for blocks that the request does not hold: released, skipped by a hit or a
// load, or between two states.
class BlockTable {
 public:
  BlockTable(std::shared_ptr<BlockPool> pool, std::int64_t type_id);
  BlockTable(BlockTable&&) = default;
  // Releases all blocks.
  ~BlockTable();

  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  std::size_t type_id() const { return type_id_; }
  const TypeShape& shape() const { return pool_->shape(static_cast<std::int64_t>(type_id_)); }
  std::size_t size() const { return blocks_.size(); }
  std::size_t num_released() const { return num_released_; }
  // Leading blocks for which caching is decided: each is cached or left out.
  std::size_t num_decided() const { return num_decided_; }
  const std::vector<BlockIndex>& blocks() const { return blocks_; }

  // Appends null blocks, then new blocks with one reference each. Enough ids must be free.
  void grow(std::size_t num_null, std::size_t num_real);

  // Throws std::invalid_argument if the table is not empty or a block of the hit is stale.
  void check_adoptable(const BlockList& hit) const;
  // Starts the table with `num_skipped` null blocks, then the rest of a prefix hit. With a load,
  // `num_skipped` can exceed the hit, which may be empty. Call
  // check_adoptable() first.
  void adopt(const BlockList& hit, std::size_t num_skipped);

  // Releases the blocks before `end`. The last of them is reused first. An `end` beyond the table
  // releases all. Throws std::invalid_argument for a negative `end`. Returns num_released().
  std::size_t release_before(std::int64_t end);

  // Releases all blocks. The last block of the sequence is reused first.
  void free();

  // Empties the table. The caller owns its references and drops them with
  // BlockPool::release_detached().
  std::vector<BlockHandle> detach();

  // Enters the blocks [begin, end) in the prefix cache, null blocks excepted. `hashes(i)` is the
  // hash at the end of block i, for i < hashes.num_blocks(). Throws std::invalid_argument, with
  // nothing changed, for a range outside of the table or of the hashes, or a block that is cached
  // already.
  template <typename Hashes>
  void cache(std::int64_t begin, std::int64_t end, const Hashes& hashes) {
    check_range(begin, end);
    check_num_hashes(hashes.num_blocks(), end);
    const PrefixIndex& prefixes = pool_->index(type_id_);
    std::vector<std::pair<Digest, std::uint32_t>> digests;  // and their hashes in the index
    digests.reserve(static_cast<std::size_t>(end - begin));
    for (std::int64_t i = begin; i < end; ++i) {
      const Digest digest = hashes(static_cast<std::size_t>(i));
      digests.emplace_back(digest, prefixes.hash(digest));
      const BlockIndex index = blocks_[static_cast<std::size_t>(i)];
      if (index != kNullBlock && !pool_->can_cache(index)) throw_cached_already(i);
    }
    for (std::size_t i = 0; i < digests.size(); ++i) {
      if (i + kAhead < digests.size()) prefixes.prefetch_slot(digests[i + kAhead].second);
      const BlockIndex index = blocks_[static_cast<std::size_t>(begin) + i];
      if (index != kNullBlock) pool_->cache(index, digests[i].first, digests[i].second);
    }
    num_decided_ = std::max(num_decided_, static_cast<std::size_t>(end));
  }
  // Records that caching is decided for the blocks before `end`: each is cached or left out.
  void set_num_decided(std::int64_t end);

  // Blocks [begin, end) as handles.
  std::vector<BlockHandle> handles(std::int64_t begin, std::int64_t end) const;

  // Tokens of the longest prefix that ends with a cached block.
  std::int64_t num_cached_tokens() const;

 private:
  void check_range(std::int64_t begin, std::int64_t end) const;
  static void check_num_hashes(std::size_t num_hashes, std::int64_t end);
  [[noreturn]] static void throw_cached_already(std::int64_t i);

  std::shared_ptr<BlockPool> pool_;
  std::size_t type_id_;
  std::vector<BlockIndex> blocks_;
  std::size_t num_released_ = 0;
  std::size_t num_decided_ = 0;
};

}  // namespace hybrid_kv
