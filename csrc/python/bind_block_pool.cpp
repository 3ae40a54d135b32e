// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "pool/request_tables.h"
#include "python/blocks.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

// What Python holds: tables, lists and views keep the pool alive.
struct PyPool {
  std::shared_ptr<BlockPool> pool;
};

nb::object to_views(const std::shared_ptr<BlockPool>& pool,
                    const std::vector<BlockIndex>& indices) {
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
    if (shape.size() != 3) {
      throw std::invalid_argument(
          "an attention type must be num_groups, block_size and hashes_per_block, got " +
          std::to_string(shape.size()) + " numbers");
    }
    shapes.push_back({shape[0], shape[1], shape[2]});
  }
  new (self) PyPool{
      std::make_shared<BlockPool>(to_int64(num_blocks), std::move(shapes), records_evictions)};
}

// Below, every argument is converted first: a conversion may run Python code (an __index__), which
// may change any table. Then the core counts and takes in one go, and only then Python objects are
// made: that may run Python code, too (a garbage collection).

// The objects in a tuple, which keeps them alive meanwhile.
template <typename T>
std::vector<T*> to_pointers(nb::handle objects, const char* error) {
  if (!PyTuple_Check(objects.ptr())) throw nb::type_error(error);
  std::vector<T*> found;
  found.reserve(static_cast<std::size_t>(PyTuple_GET_SIZE(objects.ptr())));
  for (nb::handle item : nb::borrow<nb::tuple>(objects)) {
    T* object = nullptr;
    if (!nb::try_cast(item, object, false) || object == nullptr) throw nb::type_error(error);
    found.push_back(object);
  }
  return found;
}

std::vector<BlockTable*> to_tables(nb::handle tables) {
  return to_pointers<BlockTable>(tables, "block tables must be a tuple of BlockTable");
}

std::vector<const BlockList*> to_lists(nb::handle hits) {
  return to_pointers<const BlockList>(hits, "hits must be a tuple of BlockList");
}

// A tuple or list as it is, any other iterable as a list.
nb::object to_sequence(nb::handle value, const char* error) {
  return checked(PySequence_Fast(value.ptr(), error));
}

std::vector<Target> to_targets(nb::handle targets) {
  const char* error = "targets must be a sequence of pairs of num_blocks and num_written";
  const nb::object pairs = to_sequence(targets, error);
  std::vector<Target> found;
  found.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(pairs.ptr())));
  // Sizes are read each time, and items are held: an __index__ could change a list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(pairs.ptr()); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(pairs.ptr(), i));
    const nb::object pair = to_sequence(item, error);
    if (PySequence_Fast_GET_SIZE(pair.ptr()) != 2) {
      throw std::invalid_argument("a target must be num_blocks and num_written, got " +
                                  std::to_string(PySequence_Fast_GET_SIZE(pair.ptr())) +
                                  " numbers");
    }
    const nb::object num_blocks = nb::borrow(PySequence_Fast_GET_ITEM(pair.ptr(), 0));
    const nb::object num_written = nb::borrow(PySequence_Fast_GET_ITEM(pair.ptr(), 1));
    const std::int64_t blocks = to_int64(num_blocks);
    found.push_back({blocks, to_int64(num_written)});
  }
  return found;
}

std::int64_t count_evictable_ids(const PyPool& self, nb::handle hits, nb::handle num_skipped) {
  const std::vector<const BlockList*> lists = to_lists(hits);
  return PrefixHits(*self.pool, lists, to_ids(num_skipped)).count_evictable_ids();
}

std::int64_t num_missing_ids(const PyPool& self, nb::handle tables, nb::handle targets,
                             nb::handle hits, nb::handle num_skipped) {
  std::vector<BlockTable*> found = to_tables(tables);
  const std::vector<const BlockList*> lists = to_lists(hits);
  const std::vector<Target> wanted = to_targets(targets);
  const PrefixHits adopted(*self.pool, lists, to_ids(num_skipped));
  return RequestTables(self.pool, std::move(found)).num_missing_ids(wanted, adopted);
}

void adopt(const PyPool& self, nb::handle tables, nb::handle hits, nb::handle num_skipped) {
  std::vector<BlockTable*> found = to_tables(tables);
  const std::vector<const BlockList*> lists = to_lists(hits);
  const PrefixHits adopted(*self.pool, lists, to_ids(num_skipped));
  RequestTables(self.pool, std::move(found)).adopt(adopted);
}

nb::object allocate(const PyPool& self, nb::handle tables, nb::handle targets,
                    nb::handle num_kept) {
  std::vector<BlockTable*> found = to_tables(tables);
  const std::vector<Target> wanted = to_targets(targets);
  const std::int64_t kept = to_int64(num_kept);
  auto added = RequestTables(self.pool, std::move(found)).allocate(wanted, kept);
  if (!added) return nb::none();
  nb::object lists = checked(PyTuple_New(static_cast<Py_ssize_t>(added->size())));
  for (std::size_t i = 0; i < added->size(); ++i) {
    PyTuple_SET_ITEM(lists.ptr(), static_cast<Py_ssize_t>(i),
                     nb::cast(std::move((*added)[i])).release().ptr());
  }
  return lists;
}

}  // namespace

void bind_block_pool(nb::module_& m) {
  nb::class_<PyPool>(m, "BlockPool",
                     "The physical KV cache blocks, and the grouped blocks made of them.")
      .def("__init__", &init_pool, nb::arg("num_blocks"), nb::arg("types"),
           nb::arg("records_evictions") = false)
      .def(
          "new_table",
          [](const PyPool& self, nb::handle type_id) {
            return BlockTable(self.pool, to_int64(type_id));
          },
          nb::arg("type_id"), "An empty block table for a request.")
      .def(
          "new_tables",
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
      .def(
          "new_list",
          [](const PyPool& self, nb::handle type_id) {
            return BlockList{self.pool, to_type(*self.pool, type_id), {}};
          },
          nb::arg("type_id"), "No blocks.")
      .def(
          "find_prefix",
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
          nb::arg("type_id"), nb::arg("block_hashes"), nb::arg("max_blocks"),
          nb::arg("alignment") = 1, nb::arg("begin") = 0,
          "The blocks of the longest prefix, of at most `max_blocks` and a multiple of "
          "`alignment`,\n"
          "that are all cached from index `begin` on; null blocks stand for those before.")
      .def(
          "find_last_run",
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
      .def("num_missing_ids", &num_missing_ids, nb::arg("tables"), nb::arg("targets"),
           nb::arg("hits"), nb::arg("num_skipped"),
           "Physical ids that tables need, after adopting hits, to reach their targets.")
      .def("adopt", &adopt, nb::arg("tables"), nb::arg("hits"), nb::arg("num_skipped"),
           "Start a request's tables with a prefix hit; nothing changes if one type refuses.")
      .def("allocate", &allocate, nb::arg("tables"), nb::arg("targets"), nb::arg("num_kept") = 0,
           "Append the blocks that are missing; returns the new ones, a list per table. None, and "
           "no\n"
           "change, if fewer than `num_kept` physical ids would stay free.")
      .def(
          "get_num_free_blocks", [](const PyPool& self) { return self.pool->num_free(); },
          "Number of physical ids that can be allocated: blank and evictable ones.")
      .def_prop_ro("num_evictable_ids",
                   [](const PyPool& self) { return self.pool->num_evictable_ids(); })
      .def_prop_ro(
          "num_evicted_ids", [](const PyPool& self) { return self.pool->num_evicted_ids(); },
          "Physical ids evicted from the prefix cache since start-up.")
      .def(
          "release_detached",
          [](const PyPool& self, const BlockView& block) {
            if (block.pool != self.pool)
              throw std::invalid_argument("the block is of another pool");
            self.pool->release_detached(block.handle);
          },
          nb::arg("block"), "Drop one reference, which `BlockTable.detach` handed out.")
      .def(
          "evict", [](const PyPool& self, nb::handle ids) { self.pool->evict(to_ids(ids)); },
          nb::arg("block_ids"), "Take the blocks that hold one of the ids out of the prefix cache.")
      .def(
          "clear_cache", [](const PyPool& self) { self.pool->clear_cache(); },
          "Empty the prefix cache.")
      .def(
          "take_evictions",
          [](const PyPool& self) {
            nb::list evictions;
            for (const auto& [type_id, digest] : self.pool->take_evictions()) {
              evictions.append(nb::make_tuple(type_id, to_bytes(digest)));
            }
            return evictions;
          },
          "Types and hashes of the blocks evicted since the last call, if they are recorded.")
      .def(
          "find",
          [](const PyPool& self, nb::handle type_id, nb::handle block_hash) -> nb::object {
            const std::size_t type = to_type(*self.pool, type_id);
            const BlockIndex index = self.pool->index(type).find(to_digest(block_hash.ptr()));
            if (index == kNullBlock) return nb::none();
            return nb::cast(BlockView{self.pool, type, self.pool->handle(index)});
          },
          nb::arg("type_id"), nb::arg("block_hash"), "The cached block with a hash, or None.")
      .def(
          "cached_blocks",
          [](const PyPool& self, nb::handle type_id) {
            return to_views(self.pool, self.pool->index(to_type(*self.pool, type_id)).all());
          },
          nb::arg("type_id"), "All blocks in a type's prefix index, for checks.")
      .def(
          "live_blocks",
          [](const PyPool& self) { return to_views(self.pool, self.pool->live_blocks()); },
          "All blocks that own physical ids, for checks.")
      .def(
          "evictable_blocks",
          [](const PyPool& self) { return to_views(self.pool, self.pool->evictable_blocks()); },
          "The evictable blocks, the next to be evicted first, for checks.")
      .def(
          "blank_ids",
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
