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
  if (pool_) free();  // a table that was moved from has no pool
}

void BlockTable::throw_cached_already(std::int64_t i) {
  throw std::invalid_argument("block " + std::to_string(i) + " is in the prefix cache already");
}

void BlockTable::check_range(std::int64_t begin, std::int64_t end) const {
  if (begin < 0 || begin > end || static_cast<std::size_t>(end) > size()) {
    throw std::invalid_argument("blocks " + std::to_string(begin) + " to " + std::to_string(end) +
                                " are not all in the block table, which holds " +
                                std::to_string(size()));
  }
}

void BlockTable::grow(std::size_t num_null, std::size_t num_real) {
  pool_->make_room(type_id_, num_real);
  blocks_.resize(blocks_.size() + num_null, kNullBlock);
  for (std::size_t i = 0; i < num_real; ++i) blocks_.push_back(pool_->allocate(type_id_));
}

void BlockTable::check_adoptable(const BlockList& hit) const {
  if (!blocks_.empty()) throw std::invalid_argument("the request already holds KV cache blocks");
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
  num_cached_ = blocks_.size();
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
  num_released_ = num_cached_ = 0;
}

std::vector<BlockHandle> BlockTable::detach() {
  std::vector<BlockHandle> detached = handles(0, static_cast<std::int64_t>(size()));
  for (const BlockIndex index : blocks_) pool_->detach(index);
  blocks_.clear();
  num_released_ = num_cached_ = 0;
  return detached;
}

void BlockTable::set_num_cached(std::int64_t end) {
  check_range(0, end);
  num_cached_ = static_cast<std::size_t>(end);
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
  return static_cast<std::int64_t>(end) *
         pool_->shape(static_cast<std::int64_t>(type_id_)).block_size;
}

}  // namespace hybrid_kv
