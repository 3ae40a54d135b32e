// SPDX-License-Identifier: Apache-2.0
// The Python face of the native core: conversions only, no rules of its own.
#include <nanobind/nanobind.h>

#include "python.h"

NB_MODULE(_core, m) {
  // vLLM freezes its heap: what lives until the process ends is never collected.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native core of the hybrid KV cache.";
  hybrid_kv::bind_blocks(m);
  hybrid_kv::bind_block_pool(m);
  hybrid_kv::bind_step_gate(m);
  hybrid_kv::bind_block_hasher(m);
}
