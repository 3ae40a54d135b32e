# SPDX-License-Identifier: Apache-2.0
"""What all vLLM processes of the tests have in common: environment and engine arguments."""

import os
from typing import Any

_ENVIRONMENT = {
    # One thread a process: threads that wait by spinning make an engine a hundred times slower
    # as soon as something else runs.
    "OMP_NUM_THREADS": "1",
    # On few cores there is none that a worker could be bound to.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Even an eager engine compiles a few small functions, which takes longer than these tests run.
    "TORCHDYNAMO_DISABLE": "1",
    # Makes block hashes, and so KV cache events, the same in all processes.
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Arguments of every engine; a test's own arguments replace them.
ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    # Batches that are composed differently add in another order, which hardly matters in float32.
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,  # The smallest that attention on CPUs supports.
    "kv_cache_memory_bytes": 64 << 20,
    # Base ignores it, as it ignores any other plugin's options.
    "additional_config": {"hybrid_kv": {"check_integrity": True}},
}


def environment(hybrid: bool, more: dict[str, str]) -> dict[str, str]:
    """The environment of a process with the plugin on or off, and with more variables."""
    return os.environ | _ENVIRONMENT | {"VLLM_HYBRID_KV": "1" if hybrid else "0"} | more
