// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "python/blocks.h"

namespace nb = nanobind;

namespace hybrid_kv {

nb::object to_bytes(const Digest& digest) {
  return nb::bytes(reinterpret_cast<const char*>(digest.bytes.data()), digest.size);
}

std::size_t to_count(const char* name, nb::handle value, std::int64_t least) {
  const std::int64_t number = to_int64(value);
  if (number < least) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(number) +
                                "; accepted are values of " + std::to_string(least) + " and above");
  }
  return static_cast<std::size_t>(number);
}

namespace {

// One list per group of the type, each with one physical id per block.
nb::object block_ids(const BlockList& list) {
  const BlockPool& pool = *list.pool;
  const std::size_t num_groups = pool.num_groups(list.type_id);
  const nb::object null = checked(PyLong_FromLong(0));
  nb::object groups = checked(PyList_New(static_cast<Py_ssize_t>(num_groups)));
  for (std::size_t group = 0; group < num_groups; ++group) {
    PyObject* ids = PyList_New(static_cast<Py_ssize_t>(list.blocks.size()));
    if (ids == nullptr) throw nb::python_error();
    PyList_SET_ITEM(groups.ptr(), static_cast<Py_ssize_t>(group), ids);
    for (std::size_t i = 0; i < list.blocks.size(); ++i) {
      const BlockHandle handle = list.blocks[i];
      PyObject* id = handle.index == kNullBlock
                         ? null.inc_ref().ptr()
                         : PyLong_FromLong(pool.ids(pool.checked(handle))[group]);
      if (id == nullptr) throw nb::python_error();
      PyList_SET_ITEM(ids, static_cast<Py_ssize_t>(i), id);
    }
  }
  return groups;
}

nb::object ids_of(const BlockView& view) {
  const std::size_t num_groups = view.pool->num_groups(view.type_id);
  nb::object ids = checked(PyTuple_New(static_cast<Py_ssize_t>(num_groups)));
  for (std::size_t group = 0; group < num_groups; ++group) {
    const long id = view.is_null() ? 0 : view.pool->ids(view.block())[group];
    PyTuple_SET_ITEM(ids.ptr(), static_cast<Py_ssize_t>(group),
                     checked(PyLong_FromLong(id)).release().ptr());
  }
  return ids;
}

nb::object hash_of(const BlockView& view) {
  const Block& block = view.block();
  return block.is_cached() ? to_bytes(block.digest) : nb::none();
}

}  // namespace

std::string describe(const BlockView& view) {
  const std::string type = "GroupedKVCacheBlock(type " + std::to_string(view.type_id) + ", ";
  if (view.is_null()) return type + "null)";
  if (view.pool->block(view.handle.index).generation != view.handle.generation) {
    return type + "given to others since)";
  }
  const Block& block = view.block();
  const std::string state = block.is_cached() ? "cached" : "not cached";
  return type + "ids " + nb::cast<std::string>(nb::repr(ids_of(view))) + ", ref_cnt " +
         std::to_string(block.ref_cnt) + ", " + state + ")";
}

namespace {

void bind_view(nb::module_& m) {
  nb::class_<BlockView>(
      m, "GroupedKVCacheBlock",
      "One logical block: the physical blocks of all groups of an attention type\n"
      "for the same tokens. They are allocated, cached, freed and evicted together.\n"
      "\n"
      "A view, which holds no reference. ValueError once the block is given to others.")
      .def_ro("type_id", &BlockView::type_id)
      .def_prop_ro("is_null", &BlockView::is_null)
      .def_prop_ro("block_ids", &ids_of, "The physical id for each of the type's groups.")
      .def_prop_ro(
          "ref_cnt", [](const BlockView& self) { return self.block().ref_cnt; },
          "How many block tables (or detached lists) hold the block.")
      .def_prop_ro(
          "num_detached",
          [](const BlockView& self) {
            self.block();
            return self.pool->num_detached(self.handle.index);
          },
          "How many of the references callers hold, after `BlockTable.detach`.")
      .def_prop_ro("block_hash", &hash_of, "Its hash while it is in the prefix index, or None.")
      .def("__repr__", &describe)
      .def("__hash__",
           [](const BlockView& self) {
             return static_cast<std::int64_t>(self.handle.generation) << 32 | self.handle.index;
           })
      .def("__eq__", [](const BlockView& self, nb::handle other) {
        BlockView* view = nullptr;
        return nb::try_cast(other, view) && view != nullptr && view->pool == self.pool &&
               view->type_id == self.type_id && view->handle.index == self.handle.index &&
               view->handle.generation == self.handle.generation;
      });
}

void bind_list(nb::module_& m) {
  nb::class_<BlockList>(
      m, "BlockList", "Blocks of one attention type as they were at one time; holds no references.")
      .def("__len__", [](const BlockList& self) { return self.blocks.size(); })
      .def("__getitem__",
           [](const BlockList& self, Py_ssize_t i) {
             const Py_ssize_t size = static_cast<Py_ssize_t>(self.blocks.size());
             if (i < -size || i >= size) throw nb::index_error("block index out of range");
             return BlockView{self.pool, self.type_id,
                              self.blocks[static_cast<std::size_t>(i < 0 ? i + size : i)]};
           })
      .def(
          "truncated",
          [](const BlockList& self, nb::handle num_blocks) {
            const std::size_t n =
                std::min(to_count("num_blocks", num_blocks, 0), self.blocks.size());
            return BlockList{
                self.pool,
                self.type_id,
                {self.blocks.begin(), self.blocks.begin() + static_cast<std::ptrdiff_t>(n)}};
          },
          nb::arg("num_blocks"), "The first blocks, at most so many.")
      .def("__add__",
           [](const BlockList& self, const BlockList& other) {
             if (self.pool != other.pool || self.type_id != other.type_id) {
               throw std::invalid_argument("the blocks are of different pools or attention types");
             }
             BlockList sum = self;
             sum.blocks.insert(sum.blocks.end(), other.blocks.begin(), other.blocks.end());
             return sum;
           })
      .def("block_ids", &block_ids, "Physical ids: one list per group of the type.");
}

void bind_table(nb::module_& m) {
  nb::class_<BlockTable>(m, "BlockTable",
                         "A request's logical blocks of one attention type, in token order.")
      .def("__len__", &BlockTable::size)
      .def_prop_ro("type_id", &BlockTable::type_id)
      .def_prop_ro("num_released", &BlockTable::num_released)
      .def_prop_rw("num_cached", &BlockTable::num_cached,
                   [](BlockTable& self, nb::handle end) { self.set_num_cached(to_int64(end)); })
      .def(
          "release_before",
          [](BlockTable& self, nb::handle end) { return self.release_before(to_int64(end)); },
          nb::arg("end"),
          "Release the blocks before index `end`; the null block takes their place.\n"
          "Returns how many leading blocks are released now.")
      .def(
          "cache",
          [](BlockTable& self, nb::handle begin, nb::handle end, nb::handle block_hashes) {
            const std::int64_t start = to_int64(begin), stop = to_int64(end);
            const HashList hashes(block_hashes,
                                  self.pool()->shape(static_cast<std::int64_t>(self.type_id())));
            if (stop > static_cast<std::int64_t>(hashes.num_blocks())) {
              throw std::invalid_argument("there are hashes for " +
                                          std::to_string(hashes.num_blocks()) +
                                          " blocks, not for " + std::to_string(stop));
            }
            self.cache(start, stop, hashes);
          },
          nb::arg("begin"), nb::arg("end"), nb::arg("block_hashes"),
          "Enter the blocks from index `begin` to before `end` in the prefix cache.")
      .def("free", &BlockTable::free, "Release all blocks; the tail is reused first.")
      .def(
          "detach",
          [](BlockTable& self) {
            const std::shared_ptr<BlockPool> pool = self.pool();
            return BlockList{pool, self.type_id(), self.detach()};
          },
          "Empty the table; its references are the caller's, to be given to `release`.")
      .def(
          "blocks",
          [](const BlockTable& self, nb::handle begin) {
            const std::int64_t size = static_cast<std::int64_t>(self.size());
            return BlockList{self.pool(), self.type_id(), self.handles(to_int64(begin), size)};
          },
          nb::arg("begin") = 0, "The blocks from index `begin` on.")
      .def("num_cached_tokens", &BlockTable::num_cached_tokens,
           "Length in tokens of the longest prefix that ends at a cached block.");
}

}  // namespace

void bind_blocks(nb::module_& m) {
  bind_view(m);
  bind_list(m);
  bind_table(m);
}

}  // namespace hybrid_kv
