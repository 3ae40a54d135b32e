// SPDX-License-Identifier: Apache-2.0
// What the bindings of the pool and of the block tables share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>

#include "pool/block_pool.h"
#include "python/convert.h"

namespace hybrid_kv {

// `GroupedKVCacheBlock`: one block of a snapshot. Holds no reference.
struct BlockView {
  std::shared_ptr<BlockPool> pool;
  std::size_t type_id;
  BlockHandle handle;

  // Throws std::invalid_argument if the block was freed or evicted after the snapshot.
  const Block& block() const { return pool->checked(handle); }
  bool is_null() const { return handle.index == kNullBlock; }
};

inline Digest to_digest(PyObject* value) {
  if (!PyBytes_Check(value)) throw_type_error("a block hash must be bytes", value);
  return Digest(PyBytes_AS_STRING(value), static_cast<std::size_t>(PyBytes_GET_SIZE(value)));
}
nanobind::object to_bytes(const Digest& digest);

// A request's block hashes, read in place. No Python code may run while a HashList is alive,
// because it could change the list. So convert numbers first: they may have an __index__.
class HashList {
 public:
  HashList(nanobind::handle hashes, const TypeShape& shape)
      : hashes_(hashes), scale_(static_cast<std::size_t>(shape.hashes_per_block)) {
    if (!PyList_Check(hashes.ptr())) throw_type_error("block_hashes must be a list", hashes);
  }

  std::size_t num_blocks() const {
    return static_cast<std::size_t>(PyList_GET_SIZE(hashes_.ptr())) / scale_;
  }
  Digest operator()(std::size_t i) const { return to_digest(at(i)); }
  // A hash may lie across two cache lines.
  void prefetch(std::size_t i) const {
    const char* object = reinterpret_cast<const char*>(at(i));
    __builtin_prefetch(object);
    __builtin_prefetch(object + kBytesHeader + Digest::kMaxSize - 1);
  }

 private:
#ifdef Py_LIMITED_API
  // The limited API hides the type: a header, a cached hash, and the final null byte.
  static constexpr std::size_t kBytesHeader = sizeof(PyVarObject) + sizeof(Py_ssize_t) + 1;
#else
  static constexpr std::size_t kBytesHeader = sizeof(PyBytesObject);
#endif

  PyObject* at(std::size_t i) const {
    return PyList_GET_ITEM(hashes_.ptr(), static_cast<Py_ssize_t>((i + 1) * scale_ - 1));
  }

  nanobind::handle hashes_;
  std::size_t scale_;
};

}  // namespace hybrid_kv
