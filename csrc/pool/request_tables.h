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

// What a step needs of one block table. The last `num_written` of the new blocks are real, and the
// others are null blocks. If `num_written` exceeds the number of new blocks, all are real.
struct Target {
  std::int64_t num_blocks;  // length of the table after the step
  std::int64_t num_written;
};

// A prefix hit of one request: the blocks of each attention type. The first `num_skipped` blocks of
// a type are not needed. The lists and the pool must outlive this object.
class PrefixHit {
 public:
  struct Part {
    const BlockList* list;
    std::size_t num_skipped;
  };

  // Throws std::invalid_argument unless the lists are of this pool, with one count of 0 to 2^32 - 1
  // each.
  PrefixHit(const BlockPool& pool, const std::vector<const BlockList*>& lists,
            const std::vector<std::int64_t>& num_skipped);

  std::size_t size() const { return parts_.size(); }
  const Part& operator[](std::size_t i) const { return parts_[i]; }

  // Physical ids of the needed blocks without references. They count as free until the hit is
  // adopted.
  // Throws std::invalid_argument if a needed block is stale.
  std::int64_t count_evictable_ids() const;

 private:
  const BlockPool& pool_;
  std::vector<Part> parts_;
};

// The block tables of one request. Each operation applies to all tables or changes nothing.
class RequestTables {
 public:
  // Throws std::invalid_argument unless the tables are of this pool and in ascending order of type.
  // The tables and the pool must outlive this object.
  RequestTables(const std::shared_ptr<BlockPool>& pool, std::vector<BlockTable*> tables);

  // Physical ids that allocate() takes for the targets after the hits were adopted. Throws
  // std::invalid_argument for bad targets, as allocate() does, and for hits of other types.
  std::int64_t num_missing_ids(const std::vector<Target>& targets, const PrefixHit& hits) const;

  // Starts the tables with a prefix hit and references its needed blocks. Null blocks replace the
  // others. Throws std::invalid_argument, with nothing changed, if a table is not empty, a block of
  // the hit is stale, or the hits are of other types.
  void adopt(const PrefixHit& hits);

  // Appends the missing blocks. Returns the new blocks, one list per table. Returns nullopt, with
  // nothing changed, if fewer than `num_kept_free` physical ids would stay free. Throws
  // std::invalid_argument unless there is one target per table, num_blocks is from 0 to 2^32 - 1,
  // and num_written and num_kept_free are at least 0.
  std::optional<std::vector<BlockList>> allocate(const std::vector<Target>& targets,
                                                 std::int64_t num_kept_free);

 private:
  void check_targets(const std::vector<Target>& targets) const;
  void check_types(const PrefixHit& hits) const;

  const std::shared_ptr<BlockPool>& pool_;
  std::vector<BlockTable*> tables_;
};

}  // namespace hybrid_kv
