// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <vector>

#include "block_hasher.h"
#include "python.h"
#include "sha256.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

// tokens[start:] as far as they fill blocks; OverflowError for what is no 32-bit integer.
std::vector<std::int32_t> to_tokens(nb::list list, std::int64_t start, std::size_t block_size) {
  const auto size = static_cast<std::int64_t>(list.size());
  if (start < 0 || start > size) {
    throw std::invalid_argument("start must be from 0 to " + std::to_string(size) + ", not " +
                                std::to_string(start));
  }
  const std::size_t count = static_cast<std::size_t>(size - start) / block_size * block_size;
  std::vector<std::int32_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Only real ints: nothing that is called here can run Python code and change the list.
    PyObject* item = PyList_GET_ITEM(list.ptr(), start + static_cast<Py_ssize_t>(i));
    if (!PyLong_CheckExact(item)) throw nb::type_error("tokens must be ints");
    int overflow = 0;
    const long token = PyLong_AsLongAndOverflow(item, &overflow);
    if (overflow != 0 || token != static_cast<std::int32_t>(token)) {
      PyErr_SetString(PyExc_OverflowError, "tokens must fit in 32 bits");
      throw nb::python_error();
    }
    tokens[i] = static_cast<std::int32_t>(token);
  }
  return tokens;
}

nb::object hash_blocks(const BlockHasher& hasher, nb::bytes parent, nb::list tokens,
                       std::int64_t start) {
  const std::string before(parent.c_str(), parent.size());
  const std::vector<std::int32_t> ids = to_tokens(tokens, start, hasher.block_size());
  std::vector<std::uint8_t> digests;
  {
    // A prompt of 100,000 tokens takes milliseconds: others may run meanwhile.
    nb::gil_scoped_release released;
    digests = hasher.hash(before, ids.data(), ids.size());
  }
  const std::size_t size = hasher.digest_size(), count = digests.size() / size;
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(count)));
  if (!list.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* digest = PyBytes_FromStringAndSize(
        reinterpret_cast<const char*>(digests.data() + i * size), static_cast<Py_ssize_t>(size));
    if (digest == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), digest);
  }
  return list;
}

}  // namespace

void bind_block_hasher(nb::module_& m) {
  nb::class_<BlockHasher>(m, "BlockHasher", "Chained hashes of full blocks of tokens.")
      .def(nb::init<const std::string&, std::int64_t>(), nb::arg("algorithm"),
           nb::arg("block_size"))
      .def("hash_blocks", &hash_blocks, nb::arg("parent"), nb::arg("tokens"), nb::arg("start"),
           "Hash the full blocks of tokens[start:].");

  m.def(
      "sha256_portable",
      [](nb::bytes message) {
        const auto digest = hybrid_kv::sha256_portable(
            reinterpret_cast<const std::uint8_t*>(message.c_str()), message.size());
        return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
      },
      nb::arg("message"), "SHA-256 without the processor's SHA instructions, for tests.");
}

}  // namespace hybrid_kv
