// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "block_ids.h"
#include "prefix_index.h"

namespace hybrid_kv {

// What the pool needs to know of an attention type. Sizes are in tokens.
struct TypeShape {
  std::int64_t num_groups;        // physical blocks of one logical block
  std::int64_t block_size;
  std::int64_t hashes_per_block;  // a type with larger blocks reads each n-th block hash
};

// The physical blocks of all attention types, and the grouped blocks made of them.
//
// Every id except the null block's is in exactly one place: blank, in an evictable block (cached, not
// referenced), or in a referenced block. Blank ids are handed out first; then evictable blocks are
// evicted, each as a whole, the least recently released first.
//
// No operation's cost depends on the size of the pool or on how long it has been in use, except where
// a comment says so.
class BlockPool {
 public:
  // Throws std::invalid_argument for a size or shape that is out of range.
  BlockPool(std::int64_t num_blocks, std::vector<TypeShape> types, bool records_evictions);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  std::size_t num_types() const { return types_.size(); }
  // Throws std::invalid_argument for a type that the pool does not have.
  const TypeShape& shape(std::int64_t type_id) const;
  std::size_t num_groups(std::size_t type_id) const {
    return static_cast<std::size_t>(types_[type_id].num_groups);
  }

  std::size_t num_free() const { return blank_.size() + num_evictable_ids_; }
  std::size_t num_evictable_ids() const { return num_evictable_ids_; }
  std::int64_t num_evicted_ids() const { return num_evicted_ids_; }
  const BlankBlockIds& blank() const { return blank_; }
  const PrefixIndex& index(std::size_t type_id) const { return *indexes_[type_id]; }

  const Block& block(BlockIndex index) const { return blocks_[static_cast<std::size_t>(index)]; }
  BlockHandle handle(BlockIndex index) const { return {index, block(index).generation}; }
  // Throws std::invalid_argument for a block that was evicted or given back since.
  const Block& checked(BlockHandle handle) const;
  const std::int32_t* ids(const Block& block) const { return ids_.data() + block.ids; }
  bool is_evictable(BlockIndex index) const {
    return index != kNullBlock && block(index).ref_cnt == 0;
  }

  // Makes ids for `num_blocks` blocks of a type blank. Throws std::invalid_argument, with nothing
  // changed, if that many are not free.
  void make_room(std::size_t type_id, std::int64_t num_blocks);
  // A new block with one reference; needs make_room().
  BlockIndex allocate(std::size_t type_id);
  // Adds a reference.
  void touch(BlockIndex index);
  // Drops one reference to each block that is not null. What comes first is reused first.
  void release(const std::vector<BlockIndex>& indices);
  // One reference of a table's becomes the caller's.
  void detach(BlockIndex index);
  // Drops one that became the caller's. Throws std::invalid_argument if there is none.
  void release_detached(BlockHandle handle);

  bool can_cache(BlockIndex index) const {
    return block(index).ref_cnt > 0 && !block(index).is_cached();
  }

  // Enters a referenced block as holding the last tokens of a prefix of `num_tokens`.
  void cache(BlockIndex index, const Digest& digest, std::uint32_t num_tokens);
  // Takes every block that holds one of the ids out of the prefix cache. Looks at all blocks.
  void evict(const std::vector<std::int64_t>& physical_ids);
  // Empties the prefix cache. Looks at all blocks.
  void clear_cache();

  // The blocks of the longest prefix of at most `num_blocks` whose blocks are all cached.
  // `digest_at(i)` is the hash at the end of the type's i-th block.
  template <typename DigestAt>
  std::vector<BlockHandle> find_prefix(std::size_t type_id, std::size_t num_blocks,
                                       const DigestAt& digest_at) const {
    std::vector<BlockHandle> found;
    found.reserve(num_blocks);
    for (std::size_t i = 0; i < num_blocks; ++i) {
      // Slots lie anywhere in memory: several are fetched at a time.
      if (i + kAhead < num_blocks) indexes_[type_id]->prefetch(digest_at(i + kAhead));
      const BlockIndex index = indexes_[type_id]->find(digest_at(i));
      if (index == kNullBlock) break;
      found.push_back(handle(index));
    }
    return found;
  }

  // The longest prefix of at most `num_blocks`, a multiple of `alignment`, whose last `length` blocks
  // (or all, if it is shorter) are cached; null blocks stand for those before.
  //
  // Ends are tried from the right. A miss rules out every end whose last blocks it is among, so
  // each block is looked up at most once.
  template <typename DigestAt>
  std::vector<BlockHandle> find_last_run(std::size_t type_id, std::size_t num_blocks,
                                         std::size_t length, std::size_t alignment,
                                         const DigestAt& digest_at) const {
    std::vector<BlockHandle> run;  // from the right
    std::size_t end = num_blocks / alignment * alignment;
    while (end > 0) {
      const std::size_t first = end > length ? end - length : 0;
      run.clear();
      std::size_t i = end;
      while (i > first) {
        const BlockIndex index = indexes_[type_id]->find(digest_at(i - 1));
        if (index == kNullBlock) break;
        run.push_back(handle(index));
        --i;
      }
      if (i == first) {
        std::vector<BlockHandle> found(first);
        found.insert(found.end(), run.rbegin(), run.rend());
        return found;
      }
      end = (i - 1) / alignment * alignment;
    }
    return {};
  }

  // Evictions since the last call, as type and hash; recorded only if the pool was asked to.
  std::vector<std::pair<std::size_t, Digest>> take_evictions() { return std::move(evictions_); }

  // For checks: all blocks that own ids, and the evictable ones, the next to be evicted first.
  std::vector<BlockIndex> live_blocks() const;
  std::vector<BlockIndex> evictable_blocks() const;

 private:
  static constexpr std::size_t kAhead = 8;

  Block& at(BlockIndex index) { return blocks_[static_cast<std::size_t>(index)]; }
  void uncache(BlockIndex index);
  void make_evictable(BlockIndex index);
  void unmake_evictable(BlockIndex index);
  // The block's ids become blank, and its place can be used again.
  void dissolve(BlockIndex index);

  std::vector<TypeShape> types_;
  BlankBlockIds blank_;
  bool records_evictions_;
  // Reserved for the most that the pool can hold: nothing is moved later, and memory that was
  // never used costs nothing.
  std::vector<Block> blocks_;
  std::vector<std::int32_t> ids_;
  std::vector<std::vector<BlockIndex>> unused_;  // per type, places of blocks to use again
  std::vector<std::unique_ptr<PrefixIndex>> indexes_;
  EvictionOrder evictable_;
  std::size_t num_evictable_ids_ = 0;
  std::int64_t num_evicted_ids_ = 0;
  std::vector<std::pair<std::size_t, Digest>> evictions_;
};

}  // namespace hybrid_kv
