// SPDX-License-Identifier: Apache-2.0
// The Python module. This folder converts between Python and C++; rules are in the other folders.
#include <nanobind/nanobind.h>

#include "python/convert.h"

NB_MODULE(_core, m) {
  // vLLM freezes its heap: what lives until the process ends is never collected.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native core of the hybrid KV cache.";
  hybrid_kv::bind_blocks(m);
  hybrid_kv::bind_block_pool(m);
  hybrid_kv::bind_step_gate(m);
  hybrid_kv::bind_block_hasher(m);
}
