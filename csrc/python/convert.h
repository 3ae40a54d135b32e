// SPDX-License-Identifier: Apache-2.0
// The parts of the Python module, one file each, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_kv {

// An int, or anything with __index__. Clamps numbers that do not fit: they are out of every range
// that the core accepts, so the caller gets ValueError as for any other wrong number.
std::int64_t to_int64(nanobind::handle value);
// The same for a sequence of them; `rule` as in to_sequence().
std::vector<std::int64_t> to_int64s(const char* rule, nanobind::handle sequence);
// A number that must be at least `least`; std::invalid_argument names it otherwise.
std::size_t to_count(const char* name, nanobind::handle value, std::int64_t least);
// A tuple or list as it is, any other iterable as a list. Throws TypeError for the rest, which says
// what the value must be and which type it has.
nanobind::object to_sequence(const char* rule, nanobind::handle value);

// TypeError: the rule, e.g. "tokens must be ints", and the type of the value.
[[noreturn]] void throw_type_error(const char* rule, nanobind::handle value);

// Takes over a new reference; throws the Python exception if there is none.
nanobind::object checked(PyObject* object);

void bind_block_hasher(nanobind::module_& m);
void bind_block_pool(nanobind::module_& m);
void bind_blocks(nanobind::module_& m);
void bind_step_gate(nanobind::module_& m);

}  // namespace hybrid_kv
