// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "pool/block.h"
#include "pool/keyed_hash.h"

namespace hybrid_kv {

// The cached blocks of one attention type by block hash.
//
// Several blocks may have the same hash: requests that compute the same prefix at the same time
// keep their own blocks, because the block ids of a request never change. Lookups return the oldest
// block with the hash, and the next oldest once that block is evicted.
//
// A hash table with linear probing and a secret hash. It is sized once for the whole pool and at
// most half full, so it is never rebuilt, and memory that was never touched costs nothing.
class PrefixIndex {
 public:
  // `blocks` holds the digests and must outlive the index. The index can hold `max_blocks` blocks.
  PrefixIndex(std::vector<Block>& blocks, std::size_t max_blocks);

  // Where a digest belongs. The functions below take it where the caller has it already.
  std::uint32_t hash(const Digest& digest) const { return hash_(digest); }

  // The oldest block with the digest; kNullBlock if there is none.
  BlockIndex find(const Digest& digest) const { return find(digest, hash(digest)); }
  BlockIndex find(const Digest& digest, std::uint32_t hash) const {
    return slots_[locate(digest, hash)].block;
  }

  // prefetch_slot() prefetches what find() reads first. prefetch_block() needs the slot, and
  // prefetches the block in it.
  void prefetch_slot(std::uint32_t hash) const { __builtin_prefetch(&slots_[hash & mask_]); }
  void prefetch_block(std::uint32_t hash) const {
    __builtin_prefetch(&at(slots_[hash & mask_].block));
  }

  void insert(BlockIndex index, std::uint32_t hash);
  // The block must be in the index.
  void remove(BlockIndex index, std::uint32_t hash);

  // All blocks in the index, for checks.
  std::vector<BlockIndex> all() const;
  // How many slots a search reads for each entry, in the order of all().
  std::vector<std::size_t> probe_lengths() const;

 private:
  struct Slot {
    std::uint32_t hash;
    BlockIndex block;  // kNullBlock: empty
  };
  struct Free {
    void operator()(Slot* slots) const { std::free(slots); }
  };

  Block& at(BlockIndex index) const { return blocks_[static_cast<std::size_t>(index)]; }
  const Digest& digest(BlockIndex index) const { return at(index).digest; }
  std::size_t next(std::size_t slot) const { return (slot + 1) & mask_; }
  // The slot of the digest's oldest block, or the empty slot for a new one.
  std::size_t locate(const Digest& wanted, std::uint32_t hash) const {
    std::size_t slot = hash & mask_;
    while (slots_[slot].block != kNullBlock &&
           (slots_[slot].hash != hash || !(digest(slots_[slot].block) == wanted))) {
      slot = next(slot);
    }
    return slot;
  }
  void erase(std::size_t slot);

  std::vector<Block>& blocks_;
  KeyedHash hash_;
  std::size_t mask_;
  std::unique_ptr<Slot[], Free> slots_;
};

}  // namespace hybrid_kv
