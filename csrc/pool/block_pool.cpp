// SPDX-License-Identifier: Apache-2.0
#include "pool/block_pool.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <unordered_set>

namespace hybrid_kv {
namespace {

std::int64_t checked_positive(const char* name, std::int64_t value) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (value < 1 || value > kMax) {
    throw std::invalid_argument(std::string(name) + " must be from 1 to " + std::to_string(kMax) +
                                ", got " + std::to_string(value));
  }
  return value;
}

}  // namespace

BlockPool::BlockPool(std::int64_t num_blocks, std::vector<TypeShape> types, bool records_evictions)
    : types_(std::move(types)),
      blank_(num_blocks),
      records_evictions_(records_evictions),
      num_indices_(types_.size()),
      unused_(types_.size()),
      num_evictable_(types_.size()),
      num_evicted_(types_.size()) {
  constexpr std::size_t kMaxTypes = std::numeric_limits<std::uint8_t>::max();
  if (types_.size() > kMaxTypes) {
    throw std::invalid_argument("types must hold at most " + std::to_string(kMaxTypes) +
                                " attention types, got " + std::to_string(types_.size()));
  }
  std::size_t max_blocks = 1, max_ids = 0;
  std::vector<std::size_t> max_of_type;
  for (const TypeShape& type : types_) {
    checked_positive("num_groups", type.num_groups);
    checked_positive("block_size", type.block_size);
    checked_positive("hashes_per_block", type.hashes_per_block);
    const std::size_t max = blank_.size() / static_cast<std::size_t>(type.num_groups);
    max_of_type.push_back(max);
    max_blocks += max;
    max_ids += max * static_cast<std::size_t>(type.num_groups);
  }
  if (max_blocks > static_cast<std::size_t>(std::numeric_limits<BlockIndex>::max()) ||
      max_ids > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("num_blocks must be small enough for 32-bit indices with " +
                                std::to_string(types_.size()) + " attention types, got " +
                                std::to_string(num_blocks));
  }
  blocks_.reserve(max_blocks);
  ids_.reserve(max_ids);
  blocks_.emplace_back();  // the null block
  for (const std::size_t max : max_of_type) {
    indexes_.push_back(std::make_unique<PrefixIndex>(blocks_, max));
  }
}

const TypeShape& BlockPool::shape(std::int64_t type_id) const {
  if (type_id < 0 || static_cast<std::size_t>(type_id) >= types_.size()) {
    throw std::invalid_argument("type_id must be at least 0 and below " +
                                std::to_string(types_.size()) + ", got " + std::to_string(type_id));
  }
  return types_[static_cast<std::size_t>(type_id)];
}

const Block& BlockPool::checked(BlockHandle handle) const {
  const Block& found = block(handle.index);
  if (found.generation != handle.generation) {
    throw std::invalid_argument("a block must be live, got one that was freed or evicted");
  }
  return found;
}

std::size_t BlockPool::num_evicted_ids() const {
  std::size_t num_ids = 0;
  for (std::size_t i = 0; i < num_types(); ++i) num_ids += num_evicted_[i] * num_groups(i);
  return num_ids;
}

TypeCounts BlockPool::counts(std::size_t type_id) const {
  const std::size_t num_live = num_indices_[type_id] - unused_[type_id].size();
  const std::size_t num_evictable = num_evictable_[type_id], groups = num_groups(type_id);
  return {(num_live - num_evictable) * groups, num_evictable * groups,
          num_evicted_[type_id] * groups};
}

void BlockPool::make_room(std::size_t type_id, std::size_t num_blocks) {
  const std::size_t groups = num_groups(type_id), num_ids = num_blocks * groups;
  if (num_blocks > num_free() / groups) {
    throw std::logic_error("the blocks to allocate must be free, got more blocks than are free");
  }
  // An estimate, because the evicted blocks may be of other types.
  const std::size_t to_evict =
      blank_.size() < num_ids ? (num_ids - blank_.size() - 1) / groups + 1 : 0;
  BlockIndex ahead = evictable_.first();
  std::size_t num_ahead = 0;
  std::array<std::uint32_t, kAhead> hashes;  // in the indexes, of the blocks ahead
  for (std::size_t i = 0; blank_.size() < num_ids; ++i) {
    for (; num_ahead < std::min(i + kAhead, to_evict) && ahead != kNullBlock; ++num_ahead) {
      const Block& block = at(ahead);
      const PrefixIndex& index = *indexes_[block.type_id];
      hashes[num_ahead % kAhead] = index.hash(block.digest);
      index.prefetch_slot(hashes[num_ahead % kAhead]);
      ahead = block.next;
      __builtin_prefetch(&at(ahead), 1);
    }
    const BlockIndex oldest = evictable_.first();
    remove_from_evictable(oldest);
    uncache(oldest, i < num_ahead ? hashes[i % kAhead] : hash_of(oldest));
    dissolve(oldest);
  }
}

BlockIndex BlockPool::allocate(std::size_t type_id) {
  BlockIndex index;
  if (unused_[type_id].empty()) {
    index = static_cast<BlockIndex>(blocks_.size());
    blocks_.emplace_back();
    ++num_indices_[type_id];
    at(index).type_id = static_cast<std::uint8_t>(type_id);
    at(index).ids = static_cast<std::uint32_t>(ids_.size());
    ids_.resize(ids_.size() + num_groups(type_id));
  } else {
    std::vector<BlockIndex>& unused = unused_[type_id];
    index = unused.back();
    unused.pop_back();
    if (unused.size() > kAhead) __builtin_prefetch(&at(unused[unused.size() - kAhead]), 1);
  }
  Block& block = at(index);
  block.is_live = true;
  block.ref_cnt = 1;
  blank_.take(num_groups(type_id), ids_.data() + block.ids);
  return index;
}

void BlockPool::touch(BlockIndex index) {
  if (index == kNullBlock) return;
  Block& block = at(index);
  if (block.ref_cnt == 0) remove_from_evictable(index);
  ++block.ref_cnt;
}

void BlockPool::release(const std::vector<BlockIndex>& indices) {
  std::vector<BlockIndex> unneeded;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + kAhead < indices.size()) __builtin_prefetch(&at(indices[i + kAhead]), 1);
    const BlockIndex index = indices[i];
    if (index == kNullBlock) continue;
    Block& block = at(index);
    if (block.ref_cnt == 0) {
      throw std::logic_error("a released block must be referenced, got one without references");
    }
    if (--block.ref_cnt > 0) continue;
    if (block.is_cached()) {
      add_to_evictable(index);
    } else {
      unneeded.push_back(index);
    }
  }
  // From the last to the first, because the ids that become blank last are taken first.
  for (auto index = unneeded.rbegin(); index != unneeded.rend(); ++index) dissolve(*index);
}

void BlockPool::detach(BlockIndex index) {
  if (index != kNullBlock) ++detached_[index];
}

void BlockPool::release_detached(BlockHandle handle) {
  if (handle.index == kNullBlock) return;
  checked(handle);
  const auto found = detached_.find(handle.index);
  if (found == detached_.end()) {
    throw std::invalid_argument("a block must have a detached reference, got one without");
  }
  if (--found->second == 0) detached_.erase(found);
  release({handle.index});
}

void BlockPool::cache(BlockIndex index, const Digest& digest, std::uint32_t hash) {
  if (!can_cache(index)) {
    throw std::logic_error(
        "a block to cache must be referenced and not cached yet, got another block");
  }
  Block& block = at(index);
  block.digest = digest;
  indexes_[block.type_id]->insert(index, hash);
}

void BlockPool::evict(const std::vector<std::int64_t>& physical_ids) {
  for (const std::int64_t id : physical_ids) {
    if (id < 0 || id >= blank_.num_blocks()) {
      throw std::invalid_argument("block_ids must be from 0 to " +
                                  std::to_string(blank_.num_blocks() - 1) + ", got " +
                                  std::to_string(id));
    }
  }
  // Visits all blocks. A map from ids to blocks would cost more than this call, which is rare: it
  // follows a failed load of a KV connector.
  const std::unordered_set<std::int64_t> wanted(physical_ids.begin(), physical_ids.end());
  for (const BlockIndex index : live_blocks()) {
    const Block& block = at(index);
    const std::int32_t* first = ids(block);
    bool is_wanted = false;
    for (std::size_t i = 0; i < num_groups(block.type_id); ++i) {
      is_wanted = is_wanted || wanted.count(first[i]) > 0;
    }
    if (!block.is_cached() || !is_wanted) continue;
    if (block.ref_cnt == 0) remove_from_evictable(index);
    uncache(index, hash_of(index));
    if (block.ref_cnt == 0) dissolve(index);
  }
}

void BlockPool::clear_cache() {
  for (const BlockIndex index : live_blocks()) {
    if (!at(index).is_cached()) continue;
    indexes_[at(index).type_id]->remove(index, hash_of(index));
    at(index).digest = Digest{};
  }
  while (!evictable_.is_empty()) {
    const BlockIndex index = evictable_.last();
    remove_from_evictable(index);
    dissolve(index);
  }
}

std::uint32_t BlockPool::hash_of(BlockIndex index) const {
  return indexes_[block(index).type_id]->hash(block(index).digest);
}

void BlockPool::uncache(BlockIndex index, std::uint32_t hash) {
  Block& block = at(index);
  if (records_evictions_) evictions_.emplace_back(block.type_id, block.digest);
  indexes_[block.type_id]->remove(index, hash);
  block.digest = Digest{};
  ++num_evicted_[block.type_id];
}

void BlockPool::add_to_evictable(BlockIndex index) {
  evictable_.append(blocks_, index);
  const std::size_t type_id = at(index).type_id;
  num_evictable_ids_ += num_groups(type_id);
  ++num_evictable_[type_id];
}

void BlockPool::remove_from_evictable(BlockIndex index) {
  evictable_.remove(blocks_, index);
  const std::size_t type_id = at(index).type_id;
  num_evictable_ids_ -= num_groups(type_id);
  --num_evictable_[type_id];
}

void BlockPool::dissolve(BlockIndex index) {
  Block& block = at(index);
  if (!block.is_live) throw std::logic_error("a block must own ids to be freed, got one without");
  blank_.give_back(ids(block), num_groups(block.type_id));
  block.is_live = false;
  ++block.generation;
  unused_[block.type_id].push_back(index);
}

std::vector<BlockIndex> BlockPool::live_blocks() const {
  std::vector<BlockIndex> found;
  for (std::size_t i = 1; i < blocks_.size(); ++i) {
    if (blocks_[i].is_live) found.push_back(static_cast<BlockIndex>(i));
  }
  return found;
}

std::vector<BlockIndex> BlockPool::evictable_blocks() const {
  std::vector<BlockIndex> found;
  for (BlockIndex index = evictable_.first(); index != 0; index = block(index).next) {
    found.push_back(index);
  }
  return found;
}

}  // namespace hybrid_kv
