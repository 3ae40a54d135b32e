// SPDX-License-Identifier: Apache-2.0
// The parts of the Python module, one file each, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "python/limited_api.h"

namespace hybrid_kv {

// Converts an int, or anything with __index__. Clamps numbers that do not fit. They are out of
// every range that the core accepts, so the caller gets ValueError as for any other wrong number.
std::int64_t to_int64(nanobind::handle value);
// The same for a sequence of numbers. `rule` is that of to_sequence().
std::vector<std::int64_t> to_int64s(const char* rule, nanobind::handle sequence);
// A number that must be at least `least`. Throws std::invalid_argument, with `name`, otherwise.
std::size_t to_count(const char* name, nanobind::handle value, std::int64_t least);
// Returns a tuple or list as it is, and any other iterable as a list. Throws TypeError, with `rule`
// and the type of the value, for anything else.
nanobind::object to_sequence(const char* rule, nanobind::handle value);

// The name of a type, for messages.
std::string name_of_type(nanobind::handle type);
// Throws TypeError. The text is the rule, e.g. "tokens must be ints", and the type of the value.
[[noreturn]] void throw_type_error(const char* rule, nanobind::handle value);

// Takes over a new reference. Throws the current Python exception if `object` is null.
nanobind::object checked(PyObject* object);

void bind_block_hasher(nanobind::module_& m);
void bind_block_pool(nanobind::module_& m);
void bind_blocks(nanobind::module_& m);
void bind_step_gate(nanobind::module_& m);

}  // namespace hybrid_kv
