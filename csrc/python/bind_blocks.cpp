// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "pool/block_list.h"
#include "pool/block_table.h"
#include "python/blocks.h"

namespace nb = nanobind;

namespace hybrid_kv {

nb::object to_bytes(const Digest& digest) {
  return nb::bytes(reinterpret_cast<const char*>(digest.bytes.data()), digest.size);
}

namespace {

// GroupedKVCacheBlock

nb::object block_ids_of_view(const BlockView& self) {
  const std::size_t num_groups = self.pool->num_groups(self.type_id);
  nb::object ids = checked(PyTuple_New(static_cast<Py_ssize_t>(num_groups)));
  for (std::size_t group = 0; group < num_groups; ++group) {
    const long id = self.is_null() ? 0 : self.pool->ids(self.block())[group];
    PyTuple_SET_ITEM(ids.ptr(), static_cast<Py_ssize_t>(group),
                     checked(PyLong_FromLong(id)).release().ptr());
  }
  return ids;
}

std::uint32_t ref_cnt(const BlockView& self) { return self.block().ref_cnt; }

std::uint32_t num_detached(const BlockView& self) {
  self.block();
  return self.pool->num_detached(self.handle.index);
}

nb::object block_hash(const BlockView& self) {
  const Block& block = self.block();
  return block.is_cached() ? to_bytes(block.digest) : nb::none();
}

std::string repr(const BlockView& self) {
  const std::string type = "GroupedKVCacheBlock(type " + std::to_string(self.type_id) + ", ";
  if (self.is_null()) return type + "null)";
  if (self.pool->block(self.handle.index).generation != self.handle.generation) {
    return type + "freed or evicted)";
  }
  const Block& block = self.block();
  const std::string state = block.is_cached() ? "cached" : "not cached";
  return type + "ids " + nb::cast<std::string>(nb::repr(block_ids_of_view(self))) + ", ref_cnt " +
         std::to_string(block.ref_cnt) + ", " + state + ")";
}

std::int64_t hash(const BlockView& self) {
  return static_cast<std::int64_t>(self.handle.generation) << 32 | self.handle.index;
}

bool equals(const BlockView& self, nb::handle other) {
  BlockView* view = nullptr;
  return nb::try_cast(other, view) && view != nullptr && view->pool == self.pool &&
         view->type_id == self.type_id && view->handle.index == self.handle.index &&
         view->handle.generation == self.handle.generation;
}

void bind_view(nb::module_& m) {
  nb::class_<BlockView>(m, "GroupedKVCacheBlock")
      .def_ro("type_id", &BlockView::type_id)
      .def_prop_ro("is_null", &BlockView::is_null)
      .def_prop_ro("block_ids", &block_ids_of_view)
      .def_prop_ro("ref_cnt", &ref_cnt)
      .def_prop_ro("num_detached", &num_detached)
      .def_prop_ro("block_hash", &block_hash)
      .def("__repr__", &repr)
      .def("__hash__", &hash)
      .def("__eq__", &equals, nb::arg("other").none());
}

// BlockList

BlockView item(const BlockList& self, Py_ssize_t index) {
  const Py_ssize_t size = static_cast<Py_ssize_t>(self.blocks.size());
  if (index < -size || index >= size) throw nb::index_error("block index out of range");
  const auto i = static_cast<std::size_t>(index < 0 ? index + size : index);
  return {self.pool, self.type_id, self.blocks[i]};
}

nb::object iterate(nb::handle self) { return checked(PySeqIter_New(self.ptr())); }

BlockList truncated(const BlockList& self, nb::handle num_blocks) {
  return self.truncated(to_count("num_blocks", num_blocks, 0));
}

nb::object block_ids_of_list(const BlockList& self) {
  const BlockPool& pool = *self.pool;
  const std::size_t num_groups = pool.num_groups(self.type_id);
  const nb::object null = checked(PyLong_FromLong(0));
  nb::object groups = checked(PyList_New(static_cast<Py_ssize_t>(num_groups)));
  for (std::size_t group = 0; group < num_groups; ++group) {
    PyObject* ids = PyList_New(static_cast<Py_ssize_t>(self.blocks.size()));
    if (ids == nullptr) throw nb::python_error();
    PyList_SET_ITEM(groups.ptr(), static_cast<Py_ssize_t>(group), ids);
    for (std::size_t i = 0; i < self.blocks.size(); ++i) {
      const BlockHandle handle = self.blocks[i];
      PyObject* id = handle.index == kNullBlock
                         ? null.inc_ref().ptr()
                         : PyLong_FromLong(pool.ids(pool.checked(handle))[group]);
      if (id == nullptr) throw nb::python_error();
      PyList_SET_ITEM(ids, static_cast<Py_ssize_t>(i), id);
    }
  }
  return groups;
}

void bind_list(nb::module_& m) {
  nb::class_<BlockList>(m, "BlockList")
      .def("__len__", [](const BlockList& self) { return self.blocks.size(); })
      .def("__getitem__", &item, nb::arg("index"))
      .def("__iter__", &iterate)
      .def("__add__", &BlockList::operator+, nb::arg("other"))
      .def("truncated", &truncated, nb::arg("num_blocks"))
      .def("block_ids", &block_ids_of_list);
}

// BlockTable

void set_num_decided(BlockTable& self, nb::handle end) { self.set_num_decided(to_int64(end)); }

std::size_t release_before(BlockTable& self, nb::handle end) {
  return self.release_before(to_int64(end));
}

void cache(BlockTable& self, nb::handle begin, nb::handle end, nb::handle block_hashes) {
  const std::int64_t first = to_int64(begin), last = to_int64(end);
  self.cache(first, last, HashList(block_hashes, self.shape()));
}

BlockList detach(BlockTable& self) {
  const std::shared_ptr<BlockPool> pool = self.pool();
  return {pool, self.type_id(), self.detach()};
}

BlockList blocks(const BlockTable& self, nb::handle begin) {
  const std::int64_t first = to_int64(begin);
  return {self.pool(), self.type_id(), self.handles(first, static_cast<std::int64_t>(self.size()))};
}

void bind_table(nb::module_& m) {
  nb::class_<BlockTable>(m, "BlockTable")
      .def("__len__", &BlockTable::size)
      .def_prop_ro("type_id", &BlockTable::type_id)
      .def_prop_ro("num_released", &BlockTable::num_released)
      .def_prop_rw("num_decided", &BlockTable::num_decided, &set_num_decided)
      .def("release_before", &release_before, nb::arg("end"))
      .def("cache", &cache, nb::arg("begin"), nb::arg("end"), nb::arg("block_hashes"))
      .def("free", &BlockTable::free)
      .def("detach", &detach)
      .def("blocks", &blocks, nb::arg("begin") = 0)
      .def("num_cached_tokens", &BlockTable::num_cached_tokens);
}

}  // namespace

void bind_blocks(nb::module_& m) {
  bind_view(m);
  bind_list(m);
  bind_table(m);
}

}  // namespace hybrid_kv
