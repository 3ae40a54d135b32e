# SPDX-License-Identifier: Apache-2.0
"""Which manager serves which KV cache spec: the one table of attention types.

Imports no native core, so that `vllm-hybrid-kv doctor` works in an installation without one.
"""

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

#: KV cache spec (subclasses included) to our manager: its module in `managers`, and its class. Our
#: class has the name of base's class, and `coverage` requires that base serves the spec with that.
MANAGERS: dict[type[KVCacheSpec], tuple[str, str]] = {
    FullAttentionSpec: ("full_attention", "FullAttentionManager"),
    SlidingWindowSpec: ("sliding_window", "SlidingWindowManager"),
    ChunkedLocalAttentionSpec: ("chunked_local", "ChunkedLocalAttentionManager"),
    MambaSpec: ("mamba", "MambaManager"),
    CrossAttentionSpec: ("cross_attention", "CrossAttentionManager"),
}


def find_manager(spec: KVCacheSpec) -> tuple[str, str] | None:
    """Module and class of the manager for a spec; None if there is none."""
    return next((manager for cls, manager in MANAGERS.items() if isinstance(spec, cls)), None)
