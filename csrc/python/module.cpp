// SPDX-License-Identifier: Apache-2.0
// The Python module. This folder has the conversions between Python and C++, and the gates. The
// rules are in the other folders.
#include <nanobind/nanobind.h>

#include "python/convert.h"

NB_MODULE(_core, m) {
  // vLLM freezes its heap: objects that live until the process ends are never collected, and
  // nanobind would report them as leaks.
  nanobind::set_leak_warnings(false);
  hybrid_kv::bind_blocks(m);
  hybrid_kv::bind_block_pool(m);
  hybrid_kv::bind_step_gate(m);
  hybrid_kv::bind_block_hasher(m);
}
