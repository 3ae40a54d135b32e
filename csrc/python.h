// SPDX-License-Identifier: Apache-2.0
// The parts of the Python module, a file each; module.cpp puts them together.
#pragma once

#include <nanobind/nanobind.h>

namespace hybrid_kv {

void bind_block_hasher(nanobind::module_& m);

}  // namespace hybrid_kv
