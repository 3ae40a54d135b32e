# SPDX-License-Identifier: Apache-2.0
"""Models with one attention type."""

from collections.abc import Sequence

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import Hit, KVCacheCoordinator
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """Prefix caching with a single attention type: its hit is the hit."""

    def __init__(
        self,
        attention_types: tuple[AttentionType, ...],
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        if len(attention_types) != 1:
            raise ValueError(
                f"UnitaryKVCacheCoordinator needs 1 attention type, got {len(attention_types)}"
            )
        if not settings.enable_caching:
            raise ValueError("UnitaryKVCacheCoordinator needs prefix caching to be enabled")
        super().__init__(attention_types, block_pool, settings)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        manager = self.managers[0]
        if manager.num_peeked and manager.num_groups == 1:
            # As base with a single group: the block after the hit may not hold the last token.
            max_tokens = max(max_tokens - manager.block_size, 0)
        blocks, num_tokens = manager.find_longest_hit(block_hashes, max_tokens)
        return Hit((blocks,), num_tokens)
