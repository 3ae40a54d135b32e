// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "hashing/block_hasher.h"
#include "hashing/sha256.h"
#include "python/convert.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

// From here on others may run meanwhile. Below, giving the lock away would cost more than it gives:
// a thread that takes it may keep it for milliseconds.
constexpr std::size_t kManyTokens = 4096;

// Whether it is an int of few digits, as every token is; its value then.
bool is_small_int(PyObject* object, Py_ssize_t& value) {
#if PY_VERSION_HEX >= 0x030C0000
  auto* number = reinterpret_cast<PyLongObject*>(object);
  if (!PyLong_CheckExact(object) || !PyUnstable_Long_IsCompact(number)) return false;
  value = PyUnstable_Long_CompactValue(number);
#else
  const Py_ssize_t signed_count = Py_SIZE(object);
  if (!PyLong_CheckExact(object) || signed_count < -1 || signed_count > 1) return false;
  value =
      signed_count * static_cast<Py_ssize_t>(reinterpret_cast<PyLongObject*>(object)->ob_digit[0]);
#endif
  return value == static_cast<std::int32_t>(value);
}

// OverflowError for what is no 32-bit integer. Takes only real ints, so that no Python code can run
// in here and change the list.
std::int32_t to_token(PyObject* item) {
  Py_ssize_t token = 0;
  if (is_small_int(item, token)) return static_cast<std::int32_t>(token);
  if (!PyLong_CheckExact(item)) throw nb::type_error("tokens must be ints");
  int overflow = 0;
  token = PyLong_AsLongAndOverflow(item, &overflow);
  if (overflow != 0 || token != static_cast<std::int32_t>(token)) {
    PyErr_SetString(PyExc_OverflowError, "tokens must fit in 32 bits");
    throw nb::python_error();
  }
  return static_cast<std::int32_t>(token);
}

// To be filled before any Python code can see it.
nb::object new_list(std::size_t size) {
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(size)));
  if (!list.is_valid()) throw nb::python_error();
  return list;
}

void set_bytes(const nb::object& list, std::size_t index, const std::uint8_t* data,
               std::size_t size) {
  PyObject* bytes =
      PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data), static_cast<Py_ssize_t>(size));
  if (bytes == nullptr) throw nb::python_error();
  PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(index), bytes);
}

nb::object hash_blocks(const BlockHasher& hasher, nb::bytes parent, nb::list tokens,
                       std::int64_t start, nb::bytes rest) {
  const auto num_all = static_cast<std::int64_t>(tokens.size());
  if (start < 0 || start > num_all) {
    throw std::invalid_argument("start must be from 0 to " + std::to_string(num_all) + ", not " +
                                std::to_string(start));
  }
  const std::size_t block = hasher.block_size(), size = hasher.digest_size();
  const std::size_t count = static_cast<std::size_t>(num_all - start) / block;
  BlockHasher::Chain chain(hasher, {parent.c_str(), parent.size()}, {rest.c_str(), rest.size()});

  std::size_t next = static_cast<std::size_t>(start);
  const auto copy = [&](std::vector<std::int32_t>& ids) {
    for (std::int32_t& id : ids) {
      id = to_token(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(next++)));
    }
  };
  if (count * block < kManyTokens) {
    // Needs no copy of all tokens: no Python code runs before the end.
    const nb::object hashes = new_list(count);
    std::vector<std::int32_t> ids(block);
    std::uint8_t digest[32];
    for (std::size_t i = 0; i < count; ++i) {
      copy(ids);
      chain.next(ids.data(), digest);
      set_bytes(hashes, i, digest, size);
    }
    return hashes;
  }
  // All tokens before the lock is released: then another thread may change the list.
  std::vector<std::int32_t> ids(count * block);
  copy(ids);
  std::vector<std::uint8_t> digests(count * size);
  {
    nb::gil_scoped_release released;
    for (std::size_t i = 0; i < count; ++i) {
      chain.next(ids.data() + i * block, digests.data() + i * size);
    }
  }
  const nb::object hashes = new_list(count);
  for (std::size_t i = 0; i < count; ++i) {
    set_bytes(hashes, i, digests.data() + i * size, size);
  }
  return hashes;
}

}  // namespace

void bind_block_hasher(nb::module_& m) {
  nb::class_<BlockHasher>(m, "BlockHasher", "Chained hashes of full blocks of tokens.")
      .def(nb::init<const std::string&, std::int64_t>(), nb::arg("algorithm"),
           nb::arg("block_size"))
      .def("hash_blocks", &hash_blocks, nb::arg("parent"), nb::arg("tokens"), nb::arg("start"),
           nb::arg("rest"), "Hash the full blocks of tokens[start:].");

  m.def(
      "sha256_portable",
      [](nb::bytes message) {
        std::vector<std::uint8_t> padded(message.size() + kSha256Padding);
        std::copy_n(message.c_str(), message.size(), padded.begin());
        const auto digest = sha256_in_place_portable(padded.data(), message.size());
        return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
      },
      nb::arg("message"), "SHA-256 without the processor's SHA instructions, for tests.");
}

}  // namespace hybrid_kv
