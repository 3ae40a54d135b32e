// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool/block.h"
#include "pool/block_ids.h"
#include "pool/lookups.h"
#include "pool/prefix_index.h"

namespace hybrid_kv {

// Sizes of an attention type.
struct TypeShape {
  std::int64_t num_groups;        // physical blocks per logical block
  std::int64_t block_size;        // tokens per block
  std::int64_t hashes_per_block;  // the last of them is the hash of the block
};

// Physical ids of an attention type.
struct TypeCounts {
  std::size_t num_referenced;
  std::size_t num_evictable;
  std::size_t num_evicted;  // from the prefix cache, since start-up
};

// The physical blocks of all attention types, and the grouped blocks made of them.
//
// Every id except the null block's is in exactly one place: blank, in an evictable block (cached,
// not referenced), or in a referenced block. Blank ids are allocated first; then evictable blocks
// are evicted, each as a whole, in LRU order.
//
// The cost of an operation does not depend on the size of the pool or on its age, unless a comment
// says so.
class BlockPool {
 public:
  // Throws std::invalid_argument for a size or shape that is out of range.
  BlockPool(std::int64_t num_blocks, std::vector<TypeShape> types, bool records_evictions);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  std::size_t num_types() const { return types_.size(); }
  // Throws std::invalid_argument for an unknown type.
  const TypeShape& shape(std::int64_t type_id) const;
  std::size_t num_groups(std::size_t type_id) const {
    return static_cast<std::size_t>(types_[type_id].num_groups);
  }

  std::size_t num_free() const { return blank_.size() + num_evictable_ids_; }
  std::size_t num_evictable_ids() const { return num_evictable_ids_; }
  std::size_t num_evicted_ids() const;
  TypeCounts counts(std::size_t type_id) const;
  const BlankBlockIds& blank() const { return blank_; }
  const PrefixIndex& index(std::size_t type_id) const { return *indexes_[type_id]; }

  const Block& block(BlockIndex index) const { return blocks_[static_cast<std::size_t>(index)]; }
  BlockHandle handle(BlockIndex index) const { return {index, block(index).generation}; }
  // Throws std::invalid_argument for a stale handle.
  const Block& checked(BlockHandle handle) const;
  const std::int32_t* ids(const Block& block) const { return ids_.data() + block.ids; }
  bool is_evictable(BlockIndex index) const {
    return index != kNullBlock && block(index).ref_cnt == 0;
  }

  // Evicts until the ids for `num_blocks` blocks of a type are blank. Throws std::logic_error, with
  // nothing changed, if fewer are free.
  void make_room(std::size_t type_id, std::size_t num_blocks);
  // A new block with one reference; needs make_room().
  BlockIndex allocate(std::size_t type_id);
  // Adds a reference.
  void touch(BlockIndex index);
  // Drops one reference to each block, null blocks excepted. The first block is reused first.
  void release(const std::vector<BlockIndex>& indices);
  // Turns one reference of a table into a detached reference, which the caller owns.
  void detach(BlockIndex index);
  // Drops a detached reference. Throws std::invalid_argument if the block has none.
  void release_detached(BlockHandle handle);
  // Detached references to a block.
  std::uint32_t num_detached(BlockIndex index) const {
    const auto found = detached_.find(index);
    return found == detached_.end() ? 0 : found->second;
  }

  bool can_cache(BlockIndex index) const {
    return block(index).ref_cnt > 0 && !block(index).is_cached();
  }

  // Enters a referenced block in the prefix cache. The hash covers the prefix up to its end.
  void cache(BlockIndex index, const Digest& digest, std::uint32_t hash);
  // Removes every block that holds one of the ids from the prefix cache. Visits all blocks.
  void evict(const std::vector<std::int64_t>& physical_ids);
  // Empties the prefix cache. Visits all blocks.
  void clear_cache();

  // The blocks of the longest prefix of at most `max_blocks` blocks, a multiple of `alignment`,
  // that are all cached from index `begin` on. The blocks before `begin` are null blocks.
  // `hashes(i)` is the hash at the end of the type's i-th block, for i < hashes.num_blocks().
  template <typename Hashes>
  std::vector<BlockHandle> find_prefix(std::size_t type_id, const Hashes& hashes,
                                       std::size_t max_blocks, std::size_t alignment,
                                       std::size_t begin) const {
    const std::size_t num_blocks = std::min(max_blocks, hashes.num_blocks());
    std::vector<BlockHandle> found(std::min(begin, num_blocks));
    found.reserve(num_blocks);
    Lookups lookups(*indexes_[type_id], hashes, begin, num_blocks, Lookups<Hashes>::kForward);
    for (std::size_t i = begin; i < num_blocks; ++i) {
      const BlockIndex index = lookups.next();
      if (index == kNullBlock) break;
      found.push_back(handle(index));
    }
    found.resize(found.size() / alignment * alignment);
    return found;
  }

  // The longest prefix of at most `max_blocks` blocks, a multiple of `alignment`, whose last
  // `length` blocks are cached, or all if it is shorter. The blocks before them are null blocks.
  //
  // Tries ends from the right. A miss rules out every end whose last blocks include it, so each
  // block is looked up at most once.
  template <typename Hashes>
  std::vector<BlockHandle> find_last_run(std::size_t type_id, const Hashes& hashes,
                                         std::size_t max_blocks, std::size_t length,
                                         std::size_t alignment) const {
    const std::size_t num_blocks = std::min(max_blocks, hashes.num_blocks());
    std::vector<BlockHandle> found(num_blocks / alignment * alignment);
    std::size_t i = found.size();  // the next lookup is for block i - 1
    Lookups lookups(*indexes_[type_id], hashes, 0, i, Lookups<Hashes>::kBackward);
    while (!found.empty()) {
      const std::size_t first = found.size() > length ? found.size() - length : 0;
      bool all = true;
      while (all && i > first) {
        const BlockIndex index = lookups.next();
        all = index != kNullBlock;
        found[--i] = handle(index);
      }
      if (all) break;
      found.resize(i / alignment * alignment);
      for (; i > found.size(); --i) lookups.next();
    }
    return found;
  }

  // Type and hash of each block evicted since the last call, if the pool records evictions.
  std::vector<std::pair<std::size_t, Digest>> take_evictions() {
    return std::exchange(evictions_, {});
  }

  // For checks: the blocks that own ids, and the evictable blocks in the order of their eviction.
  std::vector<BlockIndex> live_blocks() const;
  std::vector<BlockIndex> evictable_blocks() const;

 private:
  Block& at(BlockIndex index) { return blocks_[static_cast<std::size_t>(index)]; }
  std::uint32_t hash_of(BlockIndex index) const;
  void uncache(BlockIndex index, std::uint32_t hash);
  void add_to_evictable(BlockIndex index);
  void remove_from_evictable(BlockIndex index);
  // Makes the block's ids blank and its index unused.
  void dissolve(BlockIndex index);

  std::vector<TypeShape> types_;
  BlankBlockIds blank_;
  bool records_evictions_;
  // Both are reserved for the most that the pool can hold, so nothing ever moves. Memory that was
  // never touched costs nothing.
  std::vector<Block> blocks_;
  std::vector<std::int32_t> ids_;
  std::vector<std::size_t> num_indices_;         // per type, in use or used before
  std::vector<std::vector<BlockIndex>> unused_;  // per type, indices to use again
  std::vector<std::unique_ptr<PrefixIndex>> indexes_;
  EvictionOrder evictable_;
  std::size_t num_evictable_ids_ = 0;
  std::vector<std::size_t> num_evictable_;  // per type, blocks
  std::vector<std::size_t> num_evicted_;    // per type, blocks since start-up
  std::unordered_map<BlockIndex, std::uint32_t> detached_;
  std::vector<std::pair<std::size_t, Digest>> evictions_;
};

}  // namespace hybrid_kv
