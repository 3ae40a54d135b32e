// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool/block_pool.h"

namespace hybrid_kv {

// Blocks of one attention type, as they were when somebody looked; holds no references.
struct BlockList {
  std::shared_ptr<BlockPool> pool;
  std::size_t type_id;
  std::vector<BlockHandle> blocks;
};

// A request's logical blocks of one attention type, in token order.
//
// |  released  |  cached or left out of the cache  |  not final yet  |
// 0      num_released                          num_cached         size()
//
// The null block stands in the place of released blocks, and of those that no step has written.
class BlockTable {
 public:
  BlockTable(std::shared_ptr<BlockPool> pool, std::int64_t type_id);
  BlockTable(BlockTable&&) = default;
  // Releases what it still holds.
  ~BlockTable();

  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  std::size_t type_id() const { return type_id_; }
  std::size_t size() const { return blocks_.size(); }
  std::size_t num_released() const { return num_released_; }
  std::size_t num_cached() const { return num_cached_; }
  const std::vector<BlockIndex>& blocks() const { return blocks_; }

  // Appends null blocks, and after them new ones with one reference each, for which enough ids must
  // be free.
  void grow(std::size_t num_null, std::size_t num_real);

  // Throws std::invalid_argument if the table is not empty, or if a block of the hit was evicted
  // since the lookup.
  void check_adoptable(const BlockList& hit) const;
  // Starts the table with a prefix hit, of which the first `num_skipped` blocks are not needed;
  // needs check_adoptable().
  void adopt(const BlockList& hit, std::size_t num_skipped);

  // Releases the blocks before `end` that are still held, so that the last of them is reused first.
  // Throws std::invalid_argument for a negative end; one past the table means all.
  // Returns how many leading blocks are released now.
  std::size_t release_before(std::int64_t end);

  // Releases all, so that the tail of the sequence is reused first.
  void free();

  // The references become the caller's, for BlockPool::release_detached; the table is empty then.
  std::vector<BlockHandle> detach();

  // Enters the blocks [begin, end) in the prefix cache, null blocks left out. `digest_at(i)` is the
  // hash at the end of block i. Throws std::invalid_argument, with nothing changed, for a range
  // outside of the table or a block that is cached already.
  template <typename DigestAt>
  void cache(std::int64_t begin, std::int64_t end, const DigestAt& digest_at) {
    check_range(begin, end);
    std::vector<Digest> digests;
    digests.reserve(static_cast<std::size_t>(end - begin));
    for (std::int64_t i = begin; i < end; ++i) {
      digests.push_back(digest_at(static_cast<std::size_t>(i)));
      const BlockIndex index = blocks_[static_cast<std::size_t>(i)];
      if (index != kNullBlock && !pool_->can_cache(index)) throw_cached_already(i);
    }
    for (std::size_t i = 0; i < digests.size(); ++i) {
      if (i + kAhead < digests.size()) pool_->prefetch_slot(type_id_, digests[i + kAhead]);
      const BlockIndex index = blocks_[static_cast<std::size_t>(begin) + i];
      if (index != kNullBlock) pool_->cache(index, digests[i]);
    }
    num_cached_ = std::max(num_cached_, static_cast<std::size_t>(end));
  }
  // The decision to cache the blocks before `end`, or not, has been taken.
  void set_num_cached(std::int64_t end);

  // Blocks [begin, end) as handles.
  std::vector<BlockHandle> handles(std::int64_t begin, std::int64_t end) const;

  // Length in tokens of the longest prefix that ends at a cached block.
  std::int64_t num_cached_tokens() const;

 private:
  void check_range(std::int64_t begin, std::int64_t end) const;
  [[noreturn]] static void throw_cached_already(std::int64_t i);

  std::shared_ptr<BlockPool> pool_;
  std::size_t type_id_;
  std::vector<BlockIndex> blocks_;
  std::size_t num_released_ = 0;
  std::size_t num_cached_ = 0;  // blocks for which the decision to cache them has been taken
};

}  // namespace hybrid_kv
