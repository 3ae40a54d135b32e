// SPDX-License-Identifier: Apache-2.0
// What the bindings of the pool and of the block tables share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "pool/block_pool.h"
#include "pool/block_table.h"
#include "python/convert.h"

namespace hybrid_kv {

// `GroupedKVCacheBlock`: a block as it was when somebody looked; holds no reference.
struct BlockView {
  std::shared_ptr<BlockPool> pool;
  std::size_t type_id;
  BlockHandle handle;

  const Block& block() const { return pool->checked(handle); }
  bool is_null() const { return handle.index == kNullBlock; }
};

inline Digest to_digest(PyObject* value) {
  if (!PyBytes_Check(value)) throw nanobind::type_error("a block hash must be bytes");
  const std::size_t size = static_cast<std::size_t>(PyBytes_GET_SIZE(value));
  if (size == 0 || size > Digest::kMaxSize) {
    throw std::invalid_argument("a block hash has " + std::to_string(size) +
                                " bytes; accepted are 1 to " + std::to_string(Digest::kMaxSize));
  }
  return Digest(PyBytes_AS_STRING(value), size);
}
nanobind::object to_bytes(const Digest& digest);
// A number of at least `least`; std::invalid_argument names it otherwise.
std::size_t to_count(const char* name, nanobind::handle value, std::int64_t least);
std::string describe(const BlockView& view);

// A request's block hashes, read in place. No Python may run while one is alive, so numbers, whose
// __index__ could change the list, are converted before.
class HashList {
 public:
  HashList(nanobind::handle hashes, const TypeShape& shape)
      : hashes_(hashes), scale_(static_cast<std::size_t>(shape.hashes_per_block)) {
    if (!PyList_Check(hashes.ptr())) throw nanobind::type_error("block hashes must be a list");
  }

  std::size_t num_blocks() const {
    return static_cast<std::size_t>(PyList_GET_SIZE(hashes_.ptr())) / scale_;
  }
  Digest operator()(std::size_t i) const { return to_digest(at(i)); }
  // Starts to load a hash, which may lie across two cache lines.
  void prefetch(std::size_t i) const {
    const char* object = reinterpret_cast<const char*>(at(i));
    __builtin_prefetch(object);
    __builtin_prefetch(object + sizeof(PyBytesObject) + Digest::kMaxSize - 1);
  }

 private:
  PyObject* at(std::size_t i) const {
    return PyList_GET_ITEM(hashes_.ptr(), static_cast<Py_ssize_t>((i + 1) * scale_ - 1));
  }

  nanobind::handle hashes_;
  std::size_t scale_;
};

}  // namespace hybrid_kv
