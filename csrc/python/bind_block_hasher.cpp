// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "hashing/block_hasher.h"
#include "hashing/sha256.h"
#include "python/convert.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

// From this many tokens on, the interpreter lock is released. For fewer tokens, that costs more
// than it gains, because another thread may keep the lock for milliseconds.
constexpr std::size_t kManyTokens = 4096;

// Whether the object is an int of one internal digit, as tokens are. Sets `value` if so.
bool is_small_int(PyObject* object, Py_ssize_t& value) {
#if defined(Py_LIMITED_API)
  // The limited API hides the digits.
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongAndOverflow(object, &overflow);
  if (overflow != 0) return false;
#elif PY_VERSION_HEX >= 0x030C0000
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

// Throws OverflowError for more than 32 bits. Accepts only plain ints, because a subclass could run
// Python code that changes the list.
std::int32_t to_token(PyObject* item) {
  Py_ssize_t token = 0;
  if (is_small_int(item, token)) return static_cast<std::int32_t>(token);
  if (!PyLong_CheckExact(item)) throw_type_error("tokens must be ints", item);
  int overflow = 0;
  token = PyLong_AsLongAndOverflow(item, &overflow);
  if (overflow != 0 || token != static_cast<std::int32_t>(token)) {
    PyErr_SetString(PyExc_OverflowError, "tokens must fit in 32 bits, got one that does not");
    throw nb::python_error();
  }
  return static_cast<std::int32_t>(token);
}

nb::object to_list(const std::vector<std::uint8_t>& digests, std::size_t size) {
  const std::size_t count = digests.size() / size;
  nb::object list = checked(PyList_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t i = 0; i < count; ++i) {
    const char* data = reinterpret_cast<const char*>(digests.data()) + i * size;
    PyObject* bytes = PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(size));
    if (bytes == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), bytes);
  }
  return list;
}

nb::object hash_blocks(const BlockHasher& self, nb::bytes parent, nb::list tokens,
                       std::int64_t start, nb::bytes rest) {
  const auto num_all = static_cast<std::int64_t>(tokens.size());
  if (start < 0 || start > num_all) {
    throw std::invalid_argument("start must be from 0 to " + std::to_string(num_all) + ", got " +
                                std::to_string(start));
  }
  const std::size_t block = self.block_size(), size = self.digest_size();
  const std::size_t count = static_cast<std::size_t>(num_all - start) / block;
  BlockHasher::Chain chain(self, {parent.c_str(), parent.size()}, {rest.c_str(), rest.size()});

  // Copies all tokens before other Python code, or another thread, can change the list.
  std::vector<std::int32_t> ids(count * block);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = to_token(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(i) + start));
  }
  std::vector<std::uint8_t> digests(count * size);
  {
    std::optional<nb::gil_scoped_release> released;
    if (ids.size() >= kManyTokens) released.emplace();
    for (std::size_t i = 0; i < count; ++i) {
      chain.next(ids.data() + i * block, digests.data() + i * size);
    }
  }
  return to_list(digests, size);
}

nb::bytes sha256_portable(nb::bytes message) {
  std::vector<std::uint8_t> padded(message.size() + kSha256Padding);
  std::copy_n(message.c_str(), message.size(), padded.begin());
  const auto digest = sha256_in_place_portable(padded.data(), message.size());
  return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

}  // namespace

void bind_block_hasher(nb::module_& m) {
  nb::class_<BlockHasher>(m, "BlockHasher")
      .def(nb::init<const std::string&, std::int64_t>(), nb::arg("algorithm"),
           nb::arg("block_size"))
      .def("hash_blocks", &hash_blocks, nb::arg("parent"), nb::arg("tokens"), nb::arg("start"),
           nb::arg("rest"));
  m.def("sha256_portable", &sha256_portable, nb::arg("message"));
}

}  // namespace hybrid_kv
