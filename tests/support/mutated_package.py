# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that imports `vllm.v1.core.hybrid` from another folder.

``HYBRID_KV_SOURCE`` names the folder, ``hybrid``; `tools.mutation_check` sets it to a copy
of the package with one fault planted. Loaded with ``-p``, so before any test.
"""

import os
import sys
from pathlib import Path

import vllm.v1.core

NAME = "vllm.v1.core.hybrid"

for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
    del sys.modules[name]
vars(vllm.v1.core).pop("hybrid", None)
vllm.v1.core.__path__.insert(0, str(Path(os.environ["HYBRID_KV_SOURCE"]).parent))
