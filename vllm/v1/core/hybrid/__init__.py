# SPDX-License-Identifier: Apache-2.0
"""The hybrid KV cache for vLLM, with grouped blocks.

    from vllm.v1.core.hybrid import KVCacheManager

Names are imported when first used: the plugin lies in this package and is loaded in
every process, most of which never build a scheduler.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.hybrid._core import GroupedKVCacheBlock
    from vllm.v1.core.hybrid.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager

__all__ = ["GroupedKVCacheBlock", "KVCacheBlocks", "KVCacheManager"]

_MODULES = {
    "GroupedKVCacheBlock": "_core",
    "KVCacheBlocks": "kv_cache_blocks",
    "KVCacheManager": "kv_cache_manager",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
