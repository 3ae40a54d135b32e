// SPDX-License-Identifier: Apache-2.0
// The parts of the Python module, one file each, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace hybrid_kv {

// An int, or anything with __index__. What does not fit is clamped, and so is out of every range
// that the core accepts: the caller then gets ValueError as for any other wrong number.
std::int64_t to_int64(nanobind::handle value);
std::vector<std::int64_t> to_ids(nanobind::handle sequence);
// A new reference, or the Python exception that stands in its place.
nanobind::object checked(PyObject* object);

void bind_block_hasher(nanobind::module_& m);
void bind_block_pool(nanobind::module_& m);
void bind_blocks(nanobind::module_& m);
void bind_step_gate(nanobind::module_& m);

}  // namespace hybrid_kv
