// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pool/block_list.h"
#include "pool/block_pool.h"
#include "pool/block_table.h"

namespace hybrid_kv {

// What a step needs of one block table. Of the new blocks, the last `num_written` are real and null
// blocks stand for the others. A `num_written` above the number of new blocks means all of them.
struct Target {
  std::int64_t num_blocks;  // length of the table after the step
  std::int64_t num_written;
};

// A prefix hit of one request: the blocks of each attention type, of which the first `num_skipped`
// are not needed. The lists and the pool must outlive it.
class PrefixHits {
 public:
  struct Hit {
    const BlockList* list;
    std::size_t num_skipped;
  };

  // Throws std::invalid_argument unless the lists are of this pool, with one count of 0 to 2^32 - 1
  // each.
  PrefixHits(const BlockPool& pool, const std::vector<const BlockList*>& lists,
             const std::vector<std::int64_t>& num_skipped);

  std::size_t size() const { return hits_.size(); }
  const Hit& operator[](std::size_t i) const { return hits_[i]; }

  // Physical ids of the needed blocks that nothing references: free until the hit is adopted.
  // Throws std::invalid_argument if a needed block is stale.
  std::int64_t count_evictable_ids() const;

 private:
  const BlockPool& pool_;
  std::vector<Hit> hits_;
};

// The block tables of one request. Each operation applies to all tables or changes nothing.
class RequestTables {
 public:
  // Throws std::invalid_argument unless the tables are of this pool and in ascending order of type.
  // The tables and the pool must outlive it.
  RequestTables(const std::shared_ptr<BlockPool>& pool, std::vector<BlockTable*> tables);

  // Physical ids that allocate() takes for the targets after the hits were adopted. Throws
  // std::invalid_argument for bad targets, as allocate(), and for hits of other types.
  std::int64_t num_missing_ids(const std::vector<Target>& targets, const PrefixHits& hits) const;

  // Starts the tables with a prefix hit and references its needed blocks; null blocks stand for the
  // others. Throws std::invalid_argument, with nothing changed, if a table is not empty, a block of
  // the hit is stale, or the hits are of other types.
  void adopt(const PrefixHits& hits);

  // Appends the missing blocks. Returns the new ones, one list per table; nullopt, with nothing
  // changed, if fewer than `num_kept` physical ids would stay free. Throws std::invalid_argument
  // unless there is one target per table, num_blocks is from 0 to 2^32 - 1, and num_written and
  // num_kept are at least 0.
  std::optional<std::vector<BlockList>> allocate(const std::vector<Target>& targets,
                                                 std::int64_t num_kept);

 private:
  void check_targets(const std::vector<Target>& targets) const;
  void check_types(const PrefixHits& hits) const;

  const std::shared_ptr<BlockPool>& pool_;
  std::vector<BlockTable*> tables_;
};

}  // namespace hybrid_kv
