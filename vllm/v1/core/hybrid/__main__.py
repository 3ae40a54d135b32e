# SPDX-License-Identifier: Apache-2.0
"""Command line ``python -m vllm.v1.core.hybrid``: the same as ``vllm-hybrid-kv``."""

import sys

from vllm_hybrid_kv import main

if __name__ == "__main__":
    sys.exit(main())
