# SPDX-License-Identifier: Apache-2.0
"""One request across attention types; one file per coordinator."""

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import Hit, KVCacheCoordinator, RequestBlocks
from vllm.v1.core.hybrid.coordinators.encoder_decoder import EncoderDecoderKVCacheCoordinator
from vllm.v1.core.hybrid.coordinators.hybrid import HybridKVCacheCoordinator
from vllm.v1.core.hybrid.coordinators.no_prefix_cache import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.hybrid.coordinators.unitary import UnitaryKVCacheCoordinator
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.kv_cache_interface import CrossAttentionSpec

__all__ = [
    "EncoderDecoderKVCacheCoordinator",
    "Hit",
    "HybridKVCacheCoordinator",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "RequestBlocks",
    "UnitaryKVCacheCoordinator",
    "create_coordinator",
]


def create_coordinator(
    attention_types: tuple[AttentionType, ...], block_pool: BlockPool, settings: CacheSettings
) -> KVCacheCoordinator:
    """The coordinator for a model's attention types.

    A model without KV cache has no prefixes to cache, whatever the setting says; nor has one
    with cross attention, where equal decoder tokens mean nothing for what they attended to.
    """
    coordinator_cls: type[KVCacheCoordinator]
    if any(isinstance(t.spec, CrossAttentionSpec) for t in attention_types):
        coordinator_cls = EncoderDecoderKVCacheCoordinator
    elif not settings.enable_caching or not attention_types:
        coordinator_cls = KVCacheCoordinatorNoPrefixCache
    elif len(attention_types) == 1:
        coordinator_cls = UnitaryKVCacheCoordinator
    else:
        coordinator_cls = HybridKVCacheCoordinator
    return coordinator_cls(attention_types, block_pool, settings)
