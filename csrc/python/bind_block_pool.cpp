// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pool/block_list.h"
#include "pool/block_table.h"
#include "pool/request_tables.h"
#include "python/blocks.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

// A conversion to C++ may run Python code (an __index__), and so may the creation of a Python
// object (a garbage collection). That code may change any table. So each function here converts all
// of its arguments, then calls the core once, and only then creates Python objects.

// Tables, lists and views share the pool: it lives as long as any of them.
struct PyPool {
  std::shared_ptr<BlockPool> pool;
};

// Conversions of arguments

std::size_t to_type(const PyPool& self, nb::handle type_id) {
  const std::int64_t number = to_int64(type_id);
  self.pool->shape(number);
  return static_cast<std::size_t>(number);
}

HashList to_hashes(const PyPool& self, std::size_t type_id, nb::handle block_hashes) {
  return HashList(block_hashes, self.pool->shape(static_cast<std::int64_t>(type_id)));
}

// The objects in a tuple, which keeps them alive.
template <typename T>
std::vector<T*> to_pointers(const char* rule, nb::handle objects) {
  if (!PyTuple_Check(objects.ptr())) throw_type_error(rule, objects);
  std::vector<T*> found;
  found.reserve(static_cast<std::size_t>(PyTuple_GET_SIZE(objects.ptr())));
  for (nb::handle item : nb::borrow<nb::tuple>(objects)) {
    T* object = nullptr;
    if (!nb::try_cast(item, object, false) || object == nullptr) {
      const std::string found_type = name_of_type(item.type());
      throw nb::type_error((rule + (", got a tuple with an item of type " + found_type)).c_str());
    }
    found.push_back(object);
  }
  return found;
}

std::vector<BlockTable*> to_tables(nb::handle tables) {
  return to_pointers<BlockTable>("tables must be a tuple of BlockTable", tables);
}

std::vector<const BlockList*> to_lists(nb::handle hits) {
  return to_pointers<const BlockList>("hits must be a tuple of BlockList", hits);
}

std::vector<std::int64_t> to_num_skipped(nb::handle num_skipped) {
  return to_int64s("num_skipped must be a sequence of ints", num_skipped);
}

std::vector<Target> to_targets(nb::handle targets) {
  const char* rule = "targets must be a sequence of pairs (num_blocks, num_written)";
  const nb::object pairs = to_sequence(rule, targets);
  std::vector<Target> found;
  found.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(pairs.ptr())));
  // Reads the size in each round, and holds the items: an __index__ could change a list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(pairs.ptr()); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(pairs.ptr(), i));
    const nb::object pair = to_sequence(rule, item);
    if (PySequence_Fast_GET_SIZE(pair.ptr()) != 2) {
      throw std::invalid_argument("a target must be a pair (num_blocks, num_written), got " +
                                  std::to_string(PySequence_Fast_GET_SIZE(pair.ptr())) + " items");
    }
    const nb::object num_blocks = nb::borrow(PySequence_Fast_GET_ITEM(pair.ptr(), 0));
    const nb::object num_written = nb::borrow(PySequence_Fast_GET_ITEM(pair.ptr(), 1));
    const std::int64_t blocks = to_int64(num_blocks);
    found.push_back({blocks, to_int64(num_written)});
  }
  return found;
}

// Conversions of results

template <typename T>
nb::object to_tuple(std::vector<T> items) {
  nb::object tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  for (std::size_t i = 0; i < items.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i),
                     nb::cast(std::move(items[i])).release().ptr());
  }
  return tuple;
}

template <typename T>
nb::object to_list(std::vector<T> items) {
  nb::list list;
  for (T& item : items) list.append(std::move(item));
  return list;
}

nb::object to_views(const PyPool& self, const std::vector<BlockIndex>& indices) {
  std::vector<BlockView> views;
  views.reserve(indices.size());
  for (const BlockIndex index : indices) {
    views.push_back({self.pool, self.pool->block(index).type_id, self.pool->handle(index)});
  }
  return to_list(std::move(views));
}

// BlockPool

void init(PyPool* self, nb::handle num_blocks, nb::handle types, bool records_evictions) {
  const std::int64_t blocks = to_int64(num_blocks);
  const char* rule = "types must be a sequence of (num_groups, block_size, hashes_per_block)";
  std::vector<TypeShape> shapes;
  for (nb::handle type : nb::iter(to_sequence(rule, types))) {
    const std::vector<std::int64_t> shape = to_int64s(rule, type);
    if (shape.size() != 3) {
      throw std::invalid_argument(
          "a type must be (num_groups, block_size, hashes_per_block), got " +
          std::to_string(shape.size()) + " items");
    }
    shapes.push_back({shape[0], shape[1], shape[2]});
  }
  new (self) PyPool{std::make_shared<BlockPool>(blocks, std::move(shapes), records_evictions)};
}

BlockTable new_table(const PyPool& self, nb::handle type_id) {
  return BlockTable(self.pool, to_int64(type_id));
}

nb::object new_tables(const PyPool& self) {
  std::vector<BlockTable> tables;
  tables.reserve(self.pool->num_types());
  for (std::size_t i = 0; i < self.pool->num_types(); ++i) {
    tables.emplace_back(self.pool, static_cast<std::int64_t>(i));
  }
  return to_tuple(std::move(tables));
}

BlockList new_list(const PyPool& self, nb::handle type_id) {
  return {self.pool, to_type(self, type_id), {}};
}

BlockList find_prefix(const PyPool& self, nb::handle type_id, nb::handle block_hashes,
                      nb::handle max_blocks, nb::handle alignment, nb::handle begin) {
  const std::size_t type = to_type(self, type_id);
  const std::size_t most = to_count("max_blocks", max_blocks, 0);
  const std::size_t unit = to_count("alignment", alignment, 1);
  const std::size_t first = to_count("begin", begin, 0);
  const HashList hashes = to_hashes(self, type, block_hashes);
  return {self.pool, type, self.pool->find_prefix(type, hashes, most, unit, first)};
}

BlockList find_last_run(const PyPool& self, nb::handle type_id, nb::handle block_hashes,
                        nb::handle max_blocks, nb::handle length, nb::handle alignment) {
  const std::size_t type = to_type(self, type_id);
  const std::size_t most = to_count("max_blocks", max_blocks, 0);
  const std::size_t num_last = to_count("length", length, 1);
  const std::size_t unit = to_count("alignment", alignment, 1);
  const HashList hashes = to_hashes(self, type, block_hashes);
  return {self.pool, type, self.pool->find_last_run(type, hashes, most, num_last, unit)};
}

std::int64_t count_evictable_ids(const PyPool& self, nb::handle hits, nb::handle num_skipped) {
  const std::vector<const BlockList*> lists = to_lists(hits);
  const std::vector<std::int64_t> skipped = to_num_skipped(num_skipped);
  return PrefixHit(*self.pool, lists, skipped).count_evictable_ids();
}

std::int64_t num_missing_ids(const PyPool& self, nb::handle tables, nb::handle targets,
                             nb::handle hits, nb::handle num_skipped) {
  std::vector<BlockTable*> all = to_tables(tables);
  const std::vector<Target> wanted = to_targets(targets);
  const std::vector<const BlockList*> lists = to_lists(hits);
  const std::vector<std::int64_t> skipped = to_num_skipped(num_skipped);
  return RequestTables(self.pool, std::move(all))
      .num_missing_ids(wanted, PrefixHit(*self.pool, lists, skipped));
}

void adopt(const PyPool& self, nb::handle tables, nb::handle hits, nb::handle num_skipped) {
  std::vector<BlockTable*> all = to_tables(tables);
  const std::vector<const BlockList*> lists = to_lists(hits);
  const std::vector<std::int64_t> skipped = to_num_skipped(num_skipped);
  RequestTables(self.pool, std::move(all)).adopt(PrefixHit(*self.pool, lists, skipped));
}

nb::object allocate(const PyPool& self, nb::handle tables, nb::handle targets,
                    nb::handle num_kept_free) {
  std::vector<BlockTable*> all = to_tables(tables);
  const std::vector<Target> wanted = to_targets(targets);
  const std::int64_t kept = to_int64(num_kept_free);
  std::optional<std::vector<BlockList>> added =
      RequestTables(self.pool, std::move(all)).allocate(wanted, kept);
  return added ? to_tuple(std::move(*added)) : nb::none();
}

void release_detached(const PyPool& self, const BlockView& block) {
  if (block.pool != self.pool) {
    throw std::invalid_argument("block must be a block of this pool, got one of another pool");
  }
  self.pool->release_detached(block.handle);
}

void evict(const PyPool& self, nb::handle block_ids) {
  self.pool->evict(to_int64s("block_ids must be a sequence of ints", block_ids));
}

nb::object take_evictions(const PyPool& self) {
  nb::list evictions;
  for (const auto& [type_id, digest] : self.pool->take_evictions()) {
    evictions.append(nb::make_tuple(type_id, to_bytes(digest)));
  }
  return evictions;
}

// One tuple per type.
nb::object type_counts(const PyPool& self) {
  std::vector<nb::tuple> all;
  for (std::size_t i = 0; i < self.pool->num_types(); ++i) {
    const TypeCounts counts = self.pool->counts(i);
    all.push_back(nb::make_tuple(counts.num_referenced, counts.num_evictable, counts.num_evicted));
  }
  return to_tuple(std::move(all));
}

nb::object find(const PyPool& self, nb::handle type_id, nb::handle block_hash) {
  const std::size_t type = to_type(self, type_id);
  const BlockIndex index = self.pool->index(type).find(to_digest(block_hash.ptr()));
  if (index == kNullBlock) return nb::none();
  return nb::cast(BlockView{self.pool, type, self.pool->handle(index)});
}

nb::object cached_blocks(const PyPool& self, nb::handle type_id) {
  return to_views(self, self.pool->index(to_type(self, type_id)).all());
}

nb::object probe_lengths(const PyPool& self, nb::handle type_id) {
  const std::vector<std::size_t> lengths = self.pool->index(to_type(self, type_id)).probe_lengths();
  return to_list(std::vector<std::int32_t>(lengths.begin(), lengths.end()));
}

nb::object blank_ids(const PyPool& self) {
  std::vector<std::int32_t> ids(self.pool->blank().size());
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = self.pool->blank().peek(i);
  return to_list(std::move(ids));
}

}  // namespace

void bind_block_pool(nb::module_& m) {
  nb::class_<PyPool>(m, "BlockPool")
      .def("__init__", &init, nb::arg("num_blocks"), nb::arg("types"),
           nb::arg("records_evictions") = false)
      .def_prop_ro("num_evictable_ids",
                   [](const PyPool& self) { return self.pool->num_evictable_ids(); })
      .def_prop_ro("num_evicted_ids",
                   [](const PyPool& self) { return self.pool->num_evicted_ids(); })
      .def("type_counts", &type_counts)
      .def("new_table", &new_table, nb::arg("type_id"))
      .def("new_tables", &new_tables)
      .def("new_list", &new_list, nb::arg("type_id"))
      .def("get_num_free_blocks", [](const PyPool& self) { return self.pool->num_free(); })
      .def("count_evictable_ids", &count_evictable_ids, nb::arg("hits"), nb::arg("num_skipped"))
      .def("num_missing_ids", &num_missing_ids, nb::arg("tables"), nb::arg("targets"),
           nb::arg("hits"), nb::arg("num_skipped"))
      .def("adopt", &adopt, nb::arg("tables"), nb::arg("hits"), nb::arg("num_skipped"))
      .def("allocate", &allocate, nb::arg("tables"), nb::arg("targets"),
           nb::arg("num_kept_free") = 0)
      .def("find_prefix", &find_prefix, nb::arg("type_id"), nb::arg("block_hashes"),
           nb::arg("max_blocks"), nb::arg("alignment") = 1, nb::arg("begin") = 0)
      .def("find_last_run", &find_last_run, nb::arg("type_id"), nb::arg("block_hashes"),
           nb::arg("max_blocks"), nb::arg("length"), nb::arg("alignment"))
      .def("release_detached", &release_detached, nb::arg("block"))
      .def("evict", &evict, nb::arg("block_ids"))
      .def("clear_cache", [](const PyPool& self) { self.pool->clear_cache(); })
      .def("take_evictions", &take_evictions)
      .def("find", &find, nb::arg("type_id"), nb::arg("block_hash"))
      .def("cached_blocks", &cached_blocks, nb::arg("type_id"))
      .def("probe_lengths", &probe_lengths, nb::arg("type_id"))
      .def("live_blocks",
           [](const PyPool& self) { return to_views(self, self.pool->live_blocks()); })
      .def("evictable_blocks",
           [](const PyPool& self) { return to_views(self, self.pool->evictable_blocks()); })
      .def("blank_ids", &blank_ids);
}

}  // namespace hybrid_kv
