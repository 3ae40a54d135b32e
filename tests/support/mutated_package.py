# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that imports `vllm.v1.core.hybrid` from another folder.

``HYBRID_KV_SOURCE`` names the folder; `tools.mutation_check` sets it to a copy
of the package with one fault planted. Loaded with ``-p``, so before any test.
"""

import importlib.util
import os
import sys

import vllm.v1.core

NAME = "vllm.v1.core.hybrid"


for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
    del sys.modules[name]
folder = os.environ["HYBRID_KV_SOURCE"]
spec = importlib.util.spec_from_file_location(
    NAME, f"{folder}/__init__.py", submodule_search_locations=[folder]
)
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[NAME] = module
setattr(vllm.v1.core, "hybrid", module)  # noqa: B010 (mypy does not know the name)
spec.loader.exec_module(module)
