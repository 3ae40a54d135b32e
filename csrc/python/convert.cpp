// SPDX-License-Identifier: Apache-2.0
#include "python/convert.h"

#include <limits>

namespace nb = nanobind;

namespace hybrid_kv {

std::int64_t to_int64(nb::handle value) {
  // An int subclass, too: its __index__ is never called.
  if (!PyLong_Check(value.ptr())) return to_int64(checked(PyNumber_Index(value.ptr())));
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow < 0) return std::numeric_limits<std::int64_t>::min();
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  return number;
}

std::vector<std::int64_t> to_ids(nb::handle sequence) {
  const nb::object fast =
      nb::steal(PySequence_Fast(sequence.ptr(), "block ids must be a sequence"));
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

nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

}  // namespace hybrid_kv
