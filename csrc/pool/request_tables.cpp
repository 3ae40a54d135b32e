// SPDX-License-Identifier: Apache-2.0
#include "pool/request_tables.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace hybrid_kv {
namespace {

// More blocks than any sequence has. The number of their physical ids fits in 64 bits.
constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::uint32_t>::max();

std::int64_t checked_blocks(const char* name, std::int64_t value) {
  if (value < 0 || value > kMaxBlocks) {
    throw std::invalid_argument(std::string(name) + " must be from 0 to " +
                                std::to_string(kMaxBlocks) + ", got " + std::to_string(value));
  }
  return value;
}

void check_at_least_0(const char* name, std::int64_t value) {
  if (value < 0) {
    throw std::invalid_argument(std::string(name) + " must be at least 0, got " +
                                std::to_string(value));
  }
}

// The new blocks of a table: null blocks, then real ones.
struct NewBlocks {
  std::size_t num_null;
  std::size_t num_real;
};

NewBlocks new_blocks(const Target& target, std::size_t num_held) {
  const std::int64_t num_new =
      std::max<std::int64_t>(target.num_blocks - static_cast<std::int64_t>(num_held), 0);
  const std::int64_t num_real = std::min(num_new, target.num_written);
  return {static_cast<std::size_t>(num_new - num_real), static_cast<std::size_t>(num_real)};
}

// Adds the physical ids of `num_blocks` blocks. Saturates at a number that exceeds any pool.
void add_ids(std::int64_t& num_ids, std::size_t num_blocks, std::size_t num_groups) {
  const auto more = static_cast<std::int64_t>(num_blocks * num_groups);
  if (__builtin_add_overflow(num_ids, more, &num_ids)) {
    num_ids = std::numeric_limits<std::int64_t>::max();
  }
}

}  // namespace

PrefixHit::PrefixHit(const BlockPool& pool, const std::vector<const BlockList*>& lists,
                     const std::vector<std::int64_t>& num_skipped)
    : pool_(pool) {
  if (lists.size() != num_skipped.size()) {
    throw std::invalid_argument("num_skipped must hold one count per hit, got " +
                                std::to_string(num_skipped.size()) + " for " +
                                std::to_string(lists.size()) + " hits");
  }
  parts_.reserve(lists.size());
  for (std::size_t i = 0; i < lists.size(); ++i) {
    if (lists[i]->pool.get() != &pool) {
      throw std::invalid_argument("hits must be block lists of this pool, got one of another pool");
    }
    const std::int64_t skipped = checked_blocks("num_skipped", num_skipped[i]);
    parts_.push_back({lists[i], static_cast<std::size_t>(skipped)});
  }
}

std::int64_t PrefixHit::count_evictable_ids() const {
  std::int64_t num_ids = 0;
  for (const Part& hit : parts_) {
    std::size_t num_blocks = 0;
    for (std::size_t i = hit.num_skipped; i < hit.list->blocks.size(); ++i) {
      pool_.checked(hit.list->blocks[i]);
      num_blocks += pool_.is_evictable(hit.list->blocks[i].index);
    }
    add_ids(num_ids, num_blocks, pool_.num_groups(hit.list->type_id));
  }
  return num_ids;
}

RequestTables::RequestTables(const std::shared_ptr<BlockPool>& pool,
                             std::vector<BlockTable*> tables)
    : pool_(pool), tables_(std::move(tables)) {
  const BlockTable* previous = nullptr;
  for (const BlockTable* table : tables_) {
    if (table->pool() != pool_) {
      throw std::invalid_argument(
          "tables must be block tables of this pool, got one of another pool");
    }
    if (previous != nullptr && table->type_id() <= previous->type_id()) {
      throw std::invalid_argument("tables must be in ascending order of type_id, got " +
                                  std::to_string(previous->type_id()) + " before " +
                                  std::to_string(table->type_id()));
    }
    previous = table;
  }
}

void RequestTables::check_targets(const std::vector<Target>& targets) const {
  if (targets.size() != tables_.size()) {
    throw std::invalid_argument("targets must hold one pair per block table, got " +
                                std::to_string(targets.size()) + " for " +
                                std::to_string(tables_.size()) + " tables");
  }
  for (const Target& target : targets) {
    checked_blocks("a target's num_blocks", target.num_blocks);
    check_at_least_0("a target's num_written", target.num_written);
  }
}

void RequestTables::check_types(const PrefixHit& hits) const {
  bool same = hits.size() == tables_.size();
  for (std::size_t i = 0; same && i < hits.size(); ++i) {
    same = hits[i].list->type_id == tables_[i]->type_id();
  }
  if (same) return;
  std::string of_tables, of_hits;
  for (const BlockTable* table : tables_) of_tables += " " + std::to_string(table->type_id());
  for (std::size_t i = 0; i < hits.size(); ++i) {
    of_hits += " " + std::to_string(hits[i].list->type_id);
  }
  throw std::invalid_argument(
      "hits must have the types of the tables in the same order, which are" + of_tables + ", got" +
      of_hits);
}

std::int64_t RequestTables::num_missing_ids(const std::vector<Target>& targets,
                                            const PrefixHit& hits) const {
  check_targets(targets);
  check_types(hits);
  std::int64_t num_ids = 0;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const std::size_t num_held = tables_[i]->size() + hits[i].list->blocks.size();
    const NewBlocks added = new_blocks(targets[i], std::max(num_held, hits[i].num_skipped));
    add_ids(num_ids, added.num_real, pool_->num_groups(tables_[i]->type_id()));
  }
  return num_ids;
}

void RequestTables::adopt(const PrefixHit& hits) {
  check_types(hits);
  for (std::size_t i = 0; i < tables_.size(); ++i) tables_[i]->check_adoptable(*hits[i].list);
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    tables_[i]->adopt(*hits[i].list, hits[i].num_skipped);
  }
}

std::optional<std::vector<BlockList>> RequestTables::allocate(const std::vector<Target>& targets,
                                                              std::int64_t num_kept_free) {
  check_targets(targets);
  check_at_least_0("num_kept_free", num_kept_free);
  // Count for all types before any type takes blocks, because all take from the same pool.
  std::int64_t num_ids = 0;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const NewBlocks added = new_blocks(targets[i], tables_[i]->size());
    add_ids(num_ids, added.num_real, pool_->num_groups(tables_[i]->type_id()));
  }
  const auto num_free = static_cast<std::int64_t>(pool_->num_free());
  if (num_kept_free > num_free || num_ids > num_free - num_kept_free) return std::nullopt;

  std::vector<BlockList> lists;
  lists.reserve(tables_.size());
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    BlockTable& table = *tables_[i];
    const std::size_t begin = table.size();
    const NewBlocks added = new_blocks(targets[i], begin);
    table.grow(added.num_null, added.num_real);
    lists.push_back(
        {pool_, table.type_id(),
         table.handles(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(table.size()))});
  }
  return lists;
}

}  // namespace hybrid_kv
