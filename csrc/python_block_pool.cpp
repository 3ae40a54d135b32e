// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "python_blocks.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

// What Python holds: tables, lists and views keep the pool alive.
struct PyPool {
  std::shared_ptr<BlockPool> pool;
};

nb::object to_views(const std::shared_ptr<BlockPool>& pool, const std::vector<BlockIndex>& indices) {
  nb::list views;
  for (const BlockIndex index : indices) {
    views.append(BlockView{pool, pool->block(index).type_id, pool->handle(index)});
  }
  return views;
}

std::size_t to_type(const BlockPool& pool, nb::handle type_id) {
  const std::int64_t number = to_int64(type_id);
  pool.shape(number);
  return static_cast<std::size_t>(number);
}

void init_pool(PyPool* self, nb::handle num_blocks, nb::handle types, bool records_evictions) {
  std::vector<TypeShape> shapes;
  for (nb::handle type : nb::iter(types)) {
    const std::vector<std::int64_t> shape = to_ids(type);
    if (shape.size() != 4) {
      throw std::invalid_argument("an attention type is described by num_groups, block_size, "
                                  "hashes_per_block and holds_states");
    }
    shapes.push_back({shape[0], shape[1], shape[2], shape[3] != 0});
  }
  new (self) PyPool{
      std::make_shared<BlockPool>(to_int64(num_blocks), std::move(shapes), records_evictions)};
}

// The tables of one request in a tuple, in the order of their types. Python holds them meanwhile.
std::vector<BlockTable*> to_tables(const PyPool& pool, nb::handle tables) {
  if (!PyTuple_Check(tables.ptr())) throw nb::type_error("block tables must be a tuple");
  std::vector<BlockTable*> found;
  for (nb::handle item : nb::borrow<nb::tuple>(tables)) {
    BlockTable* table = nullptr;
    if (!nb::try_cast(item, table, false) || table == nullptr) {
      throw nb::type_error("block tables must be a tuple of BlockTable");
    }
    if (table->pool() != pool.pool) throw std::invalid_argument("a block table is of another pool");
    if (!found.empty() && table->type_id() <= found.back()->type_id()) {
      throw std::invalid_argument("block tables must be in the order of their types, each once");
    }
    found.push_back(table);
  }
  return found;
}

// No sequence is longer; within it no number of physical ids overflows.
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::uint32_t>::max();

std::int64_t to_num_tokens(nb::handle value) {
  const std::int64_t number = static_cast<std::int64_t>(to_count("num_tokens", value, 0));
  if (number > kMaxTokens) {
    throw std::invalid_argument("num_tokens is " + std::to_string(number) + "; accepted are values up to " +
                                std::to_string(kMaxTokens));
  }
  return number;
}

std::int64_t num_groups(const PyPool& pool, std::size_t type_id) {
  return static_cast<std::int64_t>(pool.pool->num_groups(type_id));
}

// A prefix hit in one attention type, of which the first `num_skipped` blocks are not needed.
struct TypeHit {
  const BlockList* blocks;
  std::int64_t num_skipped;
};

// One for each type, from two tuples. Python holds the lists meanwhile.
std::vector<TypeHit> to_hits(const PyPool& self, nb::handle hits, nb::handle num_skipped) {
  const std::vector<std::int64_t> skipped = to_ids(num_skipped);
  if (!PyTuple_Check(hits.ptr())) throw nb::type_error("hits must be a tuple of BlockList");
  std::vector<TypeHit> found;
  for (nb::handle item : nb::borrow<nb::tuple>(hits)) {
    BlockList* list = nullptr;
    if (!nb::try_cast(item, list, false) || list == nullptr) {
      throw nb::type_error("hits must be a tuple of BlockList");
    }
    if (list->pool != self.pool) throw std::invalid_argument("a hit is of another pool");
    if (found.size() == skipped.size()) break;
    const std::int64_t num_skipped_blocks = skipped[found.size()];
    if (num_skipped_blocks < 0 || num_skipped_blocks > kMaxTokens) {
      throw std::invalid_argument("num_skipped is " + std::to_string(num_skipped_blocks) +
                                  "; accepted are values from 0 to " + std::to_string(kMaxTokens));
    }
    found.push_back({list, num_skipped_blocks});
  }
  if (found.size() != skipped.size() || nb::len(hits) != skipped.size()) {
    throw std::invalid_argument("there must be one hit, and one num_skipped, per attention type");
  }
  return found;
}

void check_same_types(const std::vector<BlockTable*>& tables, const std::vector<TypeHit>& hits) {
  bool same = tables.size() == hits.size();
  for (std::size_t i = 0; same && i < hits.size(); ++i) {
    same = hits[i].blocks->type_id == tables[i]->type_id();
  }
  if (!same) throw std::invalid_argument("the hits and block tables are of different types");
}

std::int64_t count_evictable_ids(const PyPool& self, nb::handle hits, nb::handle num_skipped) {
  std::int64_t num_ids = 0;
  for (const TypeHit& hit : to_hits(self, hits, num_skipped)) {
    std::int64_t num_blocks = 0;
    for (std::size_t i = static_cast<std::size_t>(hit.num_skipped); i < hit.blocks->blocks.size(); ++i) {
      self.pool->checked(hit.blocks->blocks[i]);
      num_blocks += self.pool->is_evictable(hit.blocks->blocks[i].index);
    }
    num_ids += num_blocks * num_groups(self, hit.blocks->type_id);
  }
  return num_ids;
}

std::int64_t num_missing_ids(const PyPool& self, nb::handle tables, nb::handle num_tokens,
                             nb::handle hits, nb::handle num_skipped, nb::handle max_blocks,
                             nb::handle num_states) {
  const std::int64_t tokens = to_num_tokens(num_tokens);
  const std::int64_t states = static_cast<std::int64_t>(to_count("num_states", num_states, 1));
  std::vector<std::int64_t> most;
  if (!max_blocks.is_none()) most = to_ids(max_blocks);
  const std::vector<BlockTable*> found = to_tables(self, tables);
  const std::vector<TypeHit> adopted = to_hits(self, hits, num_skipped);
  check_same_types(found, adopted);
  if (!most.empty() && most.size() != found.size()) {
    throw std::invalid_argument("there must be one max_blocks per attention type");
  }
  std::int64_t num_ids = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    std::int64_t num_blocks = self.pool->num_blocks_for(found[i]->type_id(), tokens);
    if (!most.empty()) num_blocks = std::min(num_blocks, most[i]);
    const std::size_t num_there = found[i]->size() + adopted[i].blocks->blocks.size();
    num_blocks -= std::max(static_cast<std::int64_t>(num_there), adopted[i].num_skipped);
    const std::size_t type_id = found[i]->type_id();
    num_blocks = self.pool->num_not_null(type_id, std::max<std::int64_t>(num_blocks, 0), states);
    num_ids += num_blocks * num_groups(self, type_id);
  }
  return num_ids;
}

// All types, or none if one of them refuses.
void adopt(const PyPool& self, nb::handle tables, nb::handle hits, nb::handle num_skipped) {
  const std::vector<BlockTable*> found = to_tables(self, tables);
  const std::vector<TypeHit> adopted = to_hits(self, hits, num_skipped);
  check_same_types(found, adopted);
  for (std::size_t i = 0; i < found.size(); ++i) found[i]->check_adoptable(*adopted[i].blocks);
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i]->adopt(*adopted[i].blocks, static_cast<std::size_t>(adopted[i].num_skipped));
  }
}

// Tokens for which every type has slots; -1 for a model without any type.
std::int64_t num_slots(const PyPool& self, nb::handle tables) {
  std::int64_t least = -1;
  for (const BlockTable* table : to_tables(self, tables)) {
    const std::int64_t slots = table->num_slots();
    least = least < 0 ? slots : std::min(least, slots);
  }
  return least;
}

// Types in turn, but all or nothing: what one takes must not be missing for the next.
nb::object allocate(const PyPool& self, nb::handle tables, nb::handle num_tokens,
                    nb::handle num_kept, nb::handle num_states) {
  const std::int64_t tokens = to_num_tokens(num_tokens);
  const std::int64_t kept = static_cast<std::int64_t>(to_count("num_kept", num_kept, 0));
  const std::int64_t states = static_cast<std::int64_t>(to_count("num_states", num_states, 1));
  const std::vector<BlockTable*> found = to_tables(self, tables);
  std::int64_t missing = 0;
  for (const BlockTable* table : found) {
    const std::size_t type_id = table->type_id();
    const std::int64_t num_blocks =
        self.pool->num_not_null(type_id, table->num_missing(tokens), states);
    missing += num_blocks * num_groups(self, type_id);
  }
  const std::int64_t num_free = static_cast<std::int64_t>(self.pool->num_free());
  if (kept > num_free || missing > num_free - kept) return nb::none();
  nb::object lists = checked(PyTuple_New(static_cast<Py_ssize_t>(found.size())));
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::int64_t size = static_cast<std::int64_t>(found[i]->size());
    found[i]->allocate(found[i]->num_missing(tokens), states);
    BlockList added{self.pool, found[i]->type_id(),
                    found[i]->handles(size, static_cast<std::int64_t>(found[i]->size()))};
    PyTuple_SET_ITEM(lists.ptr(), static_cast<Py_ssize_t>(i),
                     nb::cast(std::move(added)).release().ptr());
  }
  return lists;
}

}  // namespace

void bind_block_pool(nb::module_& m) {
  nb::class_<PyPool>(m, "BlockPool", "The physical KV cache blocks, and the grouped blocks made of them.")
      .def("__init__", &init_pool, nb::arg("num_blocks"), nb::arg("types"),
           nb::arg("records_evictions") = false)
      .def("new_table",
           [](const PyPool& self, nb::handle type_id) {
             return BlockTable(self.pool, to_int64(type_id));
           },
           nb::arg("type_id"), "An empty block table for a request.")
      .def("new_tables",
           [](const PyPool& self) {
             const std::size_t num_types = self.pool->num_types();
             nb::object tables = checked(PyTuple_New(static_cast<Py_ssize_t>(num_types)));
             for (std::size_t i = 0; i < num_types; ++i) {
               BlockTable table(self.pool, static_cast<std::int64_t>(i));
               PyTuple_SET_ITEM(tables.ptr(), static_cast<Py_ssize_t>(i),
                                nb::cast(std::move(table)).release().ptr());
             }
             return tables;
           },
           "Empty block tables for a request, one per attention type.")
      .def("new_list",
           [](const PyPool& self, nb::handle type_id) {
             return BlockList{self.pool, to_type(*self.pool, type_id), {}};
           },
           nb::arg("type_id"), "No blocks.")
      .def("find_prefix",
           [](const PyPool& self, nb::handle type_id, nb::handle block_hashes, nb::handle max_blocks,
              nb::handle alignment, nb::handle begin) {
             const std::size_t type = to_type(*self.pool, type_id);
             const std::size_t most = to_count("max_blocks", max_blocks, 0);
             const std::size_t unit = to_count("alignment", alignment, 1);
             const std::size_t first = to_count("begin", begin, 0);
             const HashList hashes(block_hashes, self.pool->shape(static_cast<std::int64_t>(type)));
             const std::size_t n = std::min(most, hashes.num_blocks());
             return BlockList{self.pool, type, self.pool->find_prefix(type, n, unit, first, hashes)};
           },
           nb::arg("type_id"), nb::arg("block_hashes"), nb::arg("max_blocks"), nb::arg("alignment") = 1, nb::arg("begin") = 0,
           "The blocks of the longest prefix, of at most `max_blocks` and a multiple of `alignment`,\n"
           "that are all cached from index `begin` on; null blocks stand for those before.")
      .def("find_last_run",
           [](const PyPool& self, nb::handle type_id, nb::handle block_hashes, nb::handle max_blocks,
              nb::handle length, nb::handle alignment) {
             const std::size_t type = to_type(*self.pool, type_id);
             const std::size_t most = to_count("max_blocks", max_blocks, 0);
             const std::size_t run_length = to_count("length", length, 1);
             const std::size_t unit = to_count("alignment", alignment, 1);
             const HashList hashes(block_hashes, self.pool->shape(static_cast<std::int64_t>(type)));
             const std::size_t n = std::min(most, hashes.num_blocks());
             return BlockList{self.pool, type,
                              self.pool->find_last_run(type, n, run_length, unit, hashes)};
           },
           nb::arg("type_id"), nb::arg("block_hashes"), nb::arg("max_blocks"), nb::arg("length"),
           nb::arg("alignment"),
           "The longest prefix, of at most `max_blocks` and a multiple of `alignment`, whose last\n"
           "`length` blocks are cached; null blocks stand for those before.")
      .def("count_evictable_ids", &count_evictable_ids, nb::arg("hits"), nb::arg("num_skipped"),
           "Physical ids of a hit that nobody references, without the skipped blocks of each type.")
      .def("num_missing_ids", &num_missing_ids, nb::arg("tables"), nb::arg("num_tokens"),
           nb::arg("hits"), nb::arg("num_skipped"), nb::arg("max_blocks") = nb::none(),
           nb::arg("num_states") = 1,
           "Physical ids that tables need, after adopting hits, for `num_tokens` slots in every type.")
      .def("adopt", &adopt, nb::arg("tables"), nb::arg("hits"), nb::arg("num_skipped"),
           "Start a request's tables with a prefix hit; nothing changes if one type refuses.")
      .def("num_slots", &num_slots, nb::arg("tables"),
           "Tokens for which a request has slots in every type; -1 for a model without types.")
      .def("allocate", &allocate, nb::arg("tables"), nb::arg("num_tokens"), nb::arg("num_kept") = 0,
           nb::arg("num_states") = 1,
           "Append the blocks that are missing; returns the new ones, a list per table. None, and no\n"
           "change, if fewer than `num_kept` physical ids would stay free.")
      .def("get_num_free_blocks", [](const PyPool& self) { return self.pool->num_free(); },
           "Number of physical ids that can be allocated: blank and evictable ones.")
      .def_prop_ro("num_evictable_ids", [](const PyPool& self) { return self.pool->num_evictable_ids(); })
      .def_prop_ro("num_evicted_ids", [](const PyPool& self) { return self.pool->num_evicted_ids(); },
                   "Physical ids evicted from the prefix cache since start-up.")
      .def("release_detached",
           [](const PyPool& self, const BlockView& block) {
             if (block.pool != self.pool) throw std::invalid_argument("the block is of another pool");
             self.pool->release_detached(block.handle);
           },
           nb::arg("block"), "Drop one reference, which `BlockTable.detach` handed out.")
      .def("evict", [](const PyPool& self, nb::handle ids) { self.pool->evict(to_ids(ids)); },
           nb::arg("block_ids"), "Take the blocks that hold one of the ids out of the prefix cache.")
      .def("clear_cache", [](const PyPool& self) { self.pool->clear_cache(); },
           "Empty the prefix cache.")
      .def("take_evictions",
           [](const PyPool& self) {
             nb::list evictions;
             for (const auto& [type_id, digest] : self.pool->take_evictions()) {
               evictions.append(nb::make_tuple(type_id, to_bytes(digest)));
             }
             return evictions;
           },
           "Types and hashes of the blocks evicted since the last call, if they are recorded.")
      .def("find",
           [](const PyPool& self, nb::handle type_id, nb::handle block_hash) -> nb::object {
             const std::size_t type = to_type(*self.pool, type_id);
             const BlockIndex index = self.pool->index(type).find(to_digest(block_hash.ptr()));
             if (index == kNullBlock) return nb::none();
             return nb::cast(BlockView{self.pool, type, self.pool->handle(index)});
           },
           nb::arg("type_id"), nb::arg("block_hash"), "The cached block with a hash, or None.")
      .def("cached_blocks",
           [](const PyPool& self, nb::handle type_id) {
             return to_views(self.pool, self.pool->index(to_type(*self.pool, type_id)).all());
           },
           nb::arg("type_id"), "All blocks in a type's prefix index, for checks.")
      .def("live_blocks", [](const PyPool& self) { return to_views(self.pool, self.pool->live_blocks()); },
           "All blocks that own physical ids, for checks.")
      .def("evictable_blocks",
           [](const PyPool& self) { return to_views(self.pool, self.pool->evictable_blocks()); },
           "The evictable blocks, the next to be evicted first, for checks.")
      .def("blank_ids",
           [](const PyPool& self) {
             nb::list ids;
             for (std::size_t i = 0; i < self.pool->blank().size(); ++i) {
               ids.append(self.pool->blank().peek(i));
             }
             return ids;
           },
           "The ids that hold nothing reusable, the next to be taken first, for checks.");
}

}  // namespace hybrid_kv
