// SPDX-License-Identifier: Apache-2.0
// The Python face of the native core: conversions only, no rules of its own.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "block_ids.h"
#include "python.h"

namespace nb = nanobind;
using hybrid_kv::BlankBlockIds;

namespace {

// An int, or anything with __index__. What does not fit is clamped, and so is out of every range
// that the core accepts: the caller then gets ValueError as for any other wrong number.
std::int64_t to_int64(nb::handle value) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow < 0) return std::numeric_limits<std::int64_t>::min();
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  return number;
}

std::vector<std::int64_t> to_ids(nb::handle sequence) {
  const nb::object fast = nb::steal(PySequence_Fast(sequence.ptr(), "block ids must be a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  std::vector<std::int64_t> ids;
  ids.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
  // The size is read each time: an __index__ written in Python could shorten the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.ptr()); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(fast.ptr(), i));
    ids.push_back(to_int64(item));
  }
  return ids;
}

// The next n ids as a list, without a vector in between.
nb::object next_ids(const BlankBlockIds& blank, std::int64_t n) {
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(n)));
  if (!list.is_valid()) throw nb::python_error();
  for (std::int64_t i = 0; i < n; ++i) {
    PyObject* id = PyLong_FromLong(blank.peek(static_cast<std::size_t>(i)));
    if (id == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), id);
  }
  return list;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native core of the hybrid KV cache.";

  nb::class_<BlankBlockIds>(m, "BlankBlockIds",
                            "The physical block ids that hold nothing reusable: a stack.")
      .def(
          "__init__",
          [](BlankBlockIds* self, nb::handle num_blocks) {
            new (self) BlankBlockIds(to_int64(num_blocks));
          },
          nb::arg("num_blocks"))
      .def(
          "take",
          [](BlankBlockIds& self, nb::handle n) {
            const std::int64_t count = to_int64(n);
            self.check_take(count);
            nb::object ids = next_ids(self, count);  // can fail, so before anything is taken
            self.take(count);
            return ids;
          },
          nb::arg("n"), "Take n ids, the most recently returned first.")
      .def(
          "give_back",
          [](BlankBlockIds& self, nb::handle ids) { self.give_back(to_ids(ids)); }, nb::arg("ids"),
          "Return ids; the first is the next to be taken. All or nothing.")
      .def("to_list",
           [](const BlankBlockIds& self) {
             return next_ids(self, static_cast<std::int64_t>(self.size()));
           },
           "All blank ids, in the order in which they would be taken.")
      .def_prop_ro("num_blocks", &BlankBlockIds::num_blocks)
      .def("__len__", &BlankBlockIds::size)
      .def("__contains__",
           [](const BlankBlockIds& self, nb::handle id) { return self.contains(to_int64(id)); });
  hybrid_kv::bind_block_hasher(m);
}
