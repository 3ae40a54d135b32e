// SPDX-License-Identifier: Apache-2.0
#include "pool/block_table.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace hybrid_kv {

BlockTable::BlockTable(std::shared_ptr<BlockPool> pool, std::int64_t type_id)
    : pool_(std::move(pool)), type_id_(static_cast<std::size_t>(type_id)) {
  pool_->shape(type_id);
}

BlockTable::~BlockTable() {
  if (pool_) free();  // a moved-from table has no pool
}

void BlockTable::throw_cached_already(std::int64_t i) {
  throw std::invalid_argument("blocks to cache must not be cached yet, got block " +
                              std::to_string(i) + ", which is cached");
}

void BlockTable::check_range(std::int64_t begin, std::int64_t end) const {
  if (begin < 0 || begin > end || static_cast<std::size_t>(end) > size()) {
    throw std::invalid_argument("a range of blocks must be within 0 to " + std::to_string(size()) +
                                ", got " + std::to_string(begin) + " to " + std::to_string(end));
  }
}

void BlockTable::check_num_hashes(std::size_t num_hashes, std::int64_t end) {
  if (num_hashes < static_cast<std::size_t>(end)) {
    throw std::invalid_argument("block_hashes must cover " + std::to_string(end) +
                                " blocks, got hashes for " + std::to_string(num_hashes));
  }
}

void BlockTable::grow(std::size_t num_null, std::size_t num_real) {
  pool_->make_room(type_id_, num_real);
  blocks_.resize(blocks_.size() + num_null, kNullBlock);
  for (std::size_t i = 0; i < num_real; ++i) blocks_.push_back(pool_->allocate(type_id_));
}

void BlockTable::check_adoptable(const BlockList& hit) const {
  if (!blocks_.empty()) {
    throw std::invalid_argument("a block table must be empty to adopt a hit, got one with " +
                                std::to_string(blocks_.size()) + " blocks");
  }
  for (const BlockHandle& handle : hit.blocks) pool_->checked(handle);
}

void BlockTable::adopt(const BlockList& hit, std::size_t num_skipped) {
  blocks_.reserve(hit.blocks.size() + 1);
  blocks_.assign(num_skipped, kNullBlock);
  for (std::size_t i = num_skipped; i < hit.blocks.size(); ++i) {
    pool_->touch(hit.blocks[i].index);
    blocks_.push_back(hit.blocks[i].index);
  }
  num_released_ = num_skipped;
  num_decided_ = blocks_.size();
}

std::size_t BlockTable::release_before(std::int64_t end) {
  check_range(0, std::min(end, static_cast<std::int64_t>(size())));
  const std::size_t stop = std::min(static_cast<std::size_t>(end), size());
  if (stop <= num_released_) return num_released_;
  const auto first = blocks_.begin() + static_cast<std::ptrdiff_t>(num_released_);
  const auto last = blocks_.begin() + static_cast<std::ptrdiff_t>(stop);
  pool_->release({std::make_reverse_iterator(last), std::make_reverse_iterator(first)});
  std::fill(first, last, kNullBlock);
  return num_released_ = stop;
}

void BlockTable::free() {
  std::reverse(blocks_.begin(), blocks_.end());
  pool_->release(std::exchange(blocks_, {}));
  num_released_ = num_decided_ = 0;
}

std::vector<BlockHandle> BlockTable::detach() {
  std::vector<BlockHandle> detached = handles(0, static_cast<std::int64_t>(size()));
  for (const BlockIndex index : blocks_) pool_->detach(index);
  blocks_.clear();
  num_released_ = num_decided_ = 0;
  return detached;
}

void BlockTable::set_num_decided(std::int64_t end) {
  check_range(0, end);
  num_decided_ = static_cast<std::size_t>(end);
}

std::vector<BlockHandle> BlockTable::handles(std::int64_t begin, std::int64_t end) const {
  check_range(begin, end);
  std::vector<BlockHandle> found;
  found.reserve(static_cast<std::size_t>(end - begin));
  for (std::int64_t i = begin; i < end; ++i) {
    found.push_back(pool_->handle(blocks_[static_cast<std::size_t>(i)]));
  }
  return found;
}

std::int64_t BlockTable::num_cached_tokens() const {
  std::size_t end = size();
  while (end > 0 && !pool_->block(blocks_[end - 1]).is_cached()) --end;
  return static_cast<std::int64_t>(end) * shape().block_size;
}

}  // namespace hybrid_kv
