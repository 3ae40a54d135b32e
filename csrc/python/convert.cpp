// SPDX-License-Identifier: Apache-2.0
#include "python/convert.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

std::string type_error_text(const char* rule, nb::handle value) {
  return std::string(rule) + ", got " + name_of_type(value.type());
}

}  // namespace

std::string name_of_type(nb::handle type) {
#ifdef Py_LIMITED_API
  return nb::type_name(type).c_str();
#else
  return reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name;
#endif
}

std::int64_t to_int64(nb::handle value) {
  // Includes subclasses of int, whose __index__ Python does not call either.
  if (!PyLong_Check(value.ptr())) return to_int64(checked(PyNumber_Index(value.ptr())));
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow < 0) return std::numeric_limits<std::int64_t>::min();
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  return number;
}

std::vector<std::int64_t> to_int64s(const char* rule, nb::handle sequence) {
  const nb::object items = to_sequence(rule, sequence);
  std::vector<std::int64_t> numbers;
  numbers.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
  // Reads the size in each round: an __index__ could shorten the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(items.ptr(), i));
    numbers.push_back(to_int64(item));
  }
  return numbers;
}

std::size_t to_count(const char* name, nb::handle value, std::int64_t least) {
  const std::int64_t number = to_int64(value);
  if (number < least) {
    throw std::invalid_argument(std::string(name) + " must be at least " + std::to_string(least) +
                                ", got " + std::to_string(number));
  }
  return static_cast<std::size_t>(number);
}

nb::object to_sequence(const char* rule, nb::handle value) {
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) return nb::borrow(value);
  return checked(PySequence_Fast(value.ptr(), type_error_text(rule, value).c_str()));
}

void throw_type_error(const char* rule, nb::handle value) {
  throw nb::type_error(type_error_text(rule, value).c_str());
}

nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

}  // namespace hybrid_kv
