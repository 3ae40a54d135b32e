// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pool/block_pool.h"
#include "pool/block_table.h"

namespace hybrid_kv {

// What a step needs of one block table. The last `num_written` of the new blocks are real; null
// blocks stand for the new ones before them. More than there are new blocks means all.
struct Target {
  std::int64_t num_blocks;  // length of the table after the step
  std::int64_t num_written;
};

// A prefix hit of one request: per attention type its blocks, of which the first `num_skipped` are
// not needed. The lists must outlive it.
class PrefixHits {
 public:
  struct Hit {
    const BlockList* list;
    std::size_t num_skipped;
  };

  // Throws std::invalid_argument for a list of another pool, unless there is one count per list, or
  // for a count that is not from 0 to 2^32 - 1.
  PrefixHits(const BlockPool& pool, const std::vector<const BlockList*>& lists,
             const std::vector<std::int64_t>& num_skipped);

  std::size_t size() const { return hits_.size(); }
  const Hit& operator[](std::size_t i) const { return hits_[i]; }

  // Physical ids of the needed blocks that count as free until the hit is adopted. Throws
  // std::invalid_argument if a needed block was evicted since the lookup.
  std::int64_t count_evictable_ids() const;

 private:
  const BlockPool& pool_;
  std::vector<Hit> hits_;
};

// The block tables of one request: each operation is for all of them, or changes nothing.
class RequestTables {
 public:
  // Throws std::invalid_argument unless the tables are the pool's, in ascending order of their
  // types. The pool and the tables must outlive it.
  RequestTables(const std::shared_ptr<BlockPool>& pool, std::vector<BlockTable*> tables);

  // Physical ids that are missing for the targets once the hits are adopted. Throws
  // std::invalid_argument for targets as allocate() does, and for hits of other types.
  std::int64_t num_missing_ids(const std::vector<Target>& targets, const PrefixHits& hits) const;

  // Starts the tables with a prefix hit and references its needed blocks; null blocks stand for the
  // others. Throws std::invalid_argument, with nothing changed, if a table is not empty, a block
  // was evicted since the lookup, or the hits are of other types.
  void adopt(const PrefixHits& hits);

  // Appends the blocks that are missing for the targets; returns the new ones, one list per table.
  // Nothing, and no change, if fewer than `num_kept` physical ids would stay free. Throws
  // std::invalid_argument unless there is one target per table, num_blocks is from 0 to 2^32 - 1,
  // and num_written and num_kept are at least 0.
  std::optional<std::vector<BlockList>> allocate(const std::vector<Target>& targets,
                                                 std::int64_t num_kept);

 private:
  void check_targets(const std::vector<Target>& targets) const;
  void check_types(const PrefixHits& hits) const;

  const std::shared_ptr<BlockPool>& pool_;
  std::vector<BlockTable*> tables_;
};

}  // namespace hybrid_kv
