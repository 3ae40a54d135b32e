// SPDX-License-Identifier: Apache-2.0
// Gates before the two calls that the scheduler makes for every request in every step. Most calls
// are no-ops. A gate detects them with one comparison, before any Python runs.
//
// Plain C API, because nanobind would process all twelve arguments of `allocate_slots` each time.
#include <nanobind/nanobind.h>

#include <limits>
#include <vector>

#include "python/convert.h"

namespace nb = nanobind;

namespace hybrid_kv {
namespace {

struct Names {
  nb::object request_id = nb::steal(PyUnicode_InternFromString("request_id"));
  nb::object num_computed_tokens = nb::steal(PyUnicode_InternFromString("num_computed_tokens"));
  nb::object num_lookahead_tokens = nb::steal(PyUnicode_InternFromString("num_lookahead_tokens"));
};

const Names& names() {
  static const Names* kNames = new Names;  // never freed: the module lives as long as the process
  return *kNames;
}

// A gate's tuple. The reference to the owner is weak, because the owner holds the gate: a cycle
// would keep the whole pool until a garbage collection, or forever in vLLM's engine core, which
// freezes its heap.
PyObject* owner(PyObject* self) { return PyTuple_GET_ITEM(self, 0); }
PyObject* method(PyObject* self) { return PyTuple_GET_ITEM(self, 1); }
PyObject* step_method(PyObject* self) { return PyTuple_GET_ITEM(self, 2); }
PyObject* next_events(PyObject* self) { return PyTuple_GET_ITEM(self, 3); }
PyObject* idle_answer(PyObject* self) { return PyTuple_GET_ITEM(self, 4); }

// The number of tokens at which a request has work to do. Returns -1, with or without an exception
// set, if the number is unknown.
long long next_event(PyObject* self, PyObject* request) {
  PyObject* request_id = PyObject_GetAttr(request, names().request_id.ptr());
  if (request_id == nullptr) return -1;
  PyObject* event = PyDict_GetItemWithError(next_events(self), request_id);
  Py_DECREF(request_id);
  return event == nullptr ? -1 : PyLong_AsLongLong(event);
}

// Calls a method of the owner.
PyObject* call(PyObject* self, PyObject* function, PyObject* const* args, Py_ssize_t nargs,
               PyObject* kwnames) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* strong = nullptr;
  PyWeakref_GetRef(owner(self), &strong);
  const nb::object holder = nb::steal(strong);
#else
  const nb::object holder = nb::borrow(PyWeakref_GetObject(owner(self)));
#endif
  if (!holder.is_valid() || holder.is_none()) {
    PyErr_SetString(PyExc_ReferenceError, "the KV cache manager no longer exists");
    return nullptr;
  }
  std::vector<PyObject*> all{holder.ptr()};
  all.insert(all.end(), args, args + nargs + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0));
  return PyObject_Vectorcall(function, all.data(), static_cast<std::size_t>(nargs) + 1, kwnames);
}

// Unusual or wrong calls fall through to the method, with the same arguments.
PyObject* call_method(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  PyErr_Clear();
  return call(self, method(self), args, nargs, kwnames);
}

// A token count. Returns -1, with or without an exception set, for anything else. Returns -1 also
// for counts larger than any sequence, so that no sum overflows.
long long token_count(PyObject* value) {
  if (!PyLong_CheckExact(value)) return -1;
  const long long count = PyLong_AsLongLong(value);
  return count <= std::numeric_limits<std::uint32_t>::max() ? count : -1;
}

// Whether the arguments are a request, the number of its new tokens and optionally that of its
// lookahead tokens. Sets `num_tokens` to the sum of the two.
bool is_plain_step(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
                   long long* num_tokens) {
  if (nargs != 2) return false;
  *num_tokens = token_count(args[1]);
  if (*num_tokens <= 0) return false;
  if (kwnames == nullptr || PyTuple_GET_SIZE(kwnames) == 0) return true;
  // Argument names in source code are interned, so the pointer is enough.
  if (PyTuple_GET_SIZE(kwnames) != 1 ||
      PyTuple_GET_ITEM(kwnames, 0) != names().num_lookahead_tokens.ptr()) {
    return false;
  }
  const long long num_lookahead = token_count(args[2]);
  *num_tokens += num_lookahead;
  return num_lookahead >= 0;
}

PyObject* allocate_slots(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* kwnames) {
  long long num_tokens = 0;
  if (!is_plain_step(args, nargs, kwnames, &num_tokens)) {
    return call_method(self, args, nargs, kwnames);
  }
  const long long event = next_event(self, args[0]);
  if (event < 0) return call_method(self, args, nargs, kwnames);
  PyObject* value = PyObject_GetAttr(args[0], names().num_computed_tokens.ptr());
  const long long num_computed = value == nullptr ? -1 : token_count(value);
  Py_XDECREF(value);
  if (num_computed < 0) return call_method(self, args, nargs, kwnames);
  if (num_computed + num_tokens < event) return Py_NewRef(idle_answer(self));
  const Py_ssize_t num_args = kwnames == nullptr ? nargs : nargs + PyTuple_GET_SIZE(kwnames);
  return call(self, step_method(self), args, num_args, nullptr);
}

PyObject* cache_blocks(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  if (nargs == 2 && kwnames == nullptr) {
    const long long num_tokens = token_count(args[1]);
    if (num_tokens >= 0 && num_tokens < next_event(self, args[0])) {
      return Py_NewRef(idle_answer(self));
    }
  }
  return call_method(self, args, nargs, kwnames);
}

PyCFunction as_function(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

nb::object make_gate(PyMethodDef& definition, nb::handle owner, nb::handle method, nb::handle step,
                     const nb::dict& next_events, nb::handle idle_answer) {
  const nb::object weak_owner = checked(PyWeakref_NewRef(owner.ptr(), nullptr));
  const nb::tuple self = nb::make_tuple(weak_owner, method, step, next_events, idle_answer);
  return checked(PyCFunction_New(&definition, self.ptr()));
}

PyMethodDef allocate_slots_definition = {
    "allocate_slots", as_function(allocate_slots), METH_FASTCALL | METH_KEYWORDS,
    "allocate_slots($self, request, num_new_tokens, /, **kwargs)\n--\n\n"
    "Give a request slots for the tokens of the next step; see KVCacheManager."};
PyMethodDef cache_blocks_definition = {
    "cache_blocks", as_function(cache_blocks), METH_FASTCALL | METH_KEYWORDS,
    "cache_blocks($self, request, num_computed_tokens, /)\n--\n\n"
    "Enter a request's first blocks in the prefix cache; see KVCacheManager."};

nb::object gate_allocate_slots(nb::handle owner, nb::handle method, nb::handle step,
                               nb::dict next_events, nb::handle idle_answer) {
  return make_gate(allocate_slots_definition, owner, method, step, next_events, idle_answer);
}

nb::object gate_cache_blocks(nb::handle owner, nb::handle method, nb::dict next_events) {
  return make_gate(cache_blocks_definition, owner, method, nb::none(), next_events, nb::none());
}

}  // namespace

void bind_step_gate(nb::module_& m) {
  m.def("gate_allocate_slots", &gate_allocate_slots, nb::arg("owner"), nb::arg("method"),
        nb::arg("step"), nb::arg("next_events"), nb::arg("idle_answer"));
  m.def("gate_cache_blocks", &gate_cache_blocks, nb::arg("owner"), nb::arg("method"),
        nb::arg("next_events"));
}

}  // namespace hybrid_kv
