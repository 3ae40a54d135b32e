# SPDX-License-Identifier: Apache-2.0
"""One request across attention types; one file per coordinator."""

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import KVCacheCoordinator, RequestBlocks
from vllm.v1.core.hybrid.coordinators.hybrid import HybridKVCacheCoordinator
from vllm.v1.core.hybrid.coordinators.no_prefix_cache import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.hybrid.coordinators.unitary import UnitaryKVCacheCoordinator
from vllm.v1.core.hybrid.managers import manager_class

__all__ = [
    "HybridKVCacheCoordinator",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "RequestBlocks",
    "UnitaryKVCacheCoordinator",
    "create_coordinator",
]


def create_coordinator(block_pool: BlockPool) -> KVCacheCoordinator:
    """The coordinator for the attention types of a pool.

    Models without a KV cache or with cross attention get no prefix cache: equal decoder tokens may
    belong to unequal encoder tokens. Base turns caching off for them by default. If the user turns
    it on, base raises in the first lookup, and the hybrid manager finds no hits.

    Raises:
        ValueError: for settings that do not fit the model, or a type that no manager serves.
    """
    attention_types = block_pool.attention_types
    cacheable = all(manager_class(t).prefix_cacheable for t in attention_types)
    coordinator_cls: type[KVCacheCoordinator]
    if not (block_pool.settings.enable_caching and cacheable and attention_types):
        coordinator_cls = KVCacheCoordinatorNoPrefixCache
    elif len(attention_types) == 1:
        coordinator_cls = UnitaryKVCacheCoordinator
    else:
        coordinator_cls = HybridKVCacheCoordinator
    return coordinator_cls(block_pool)
