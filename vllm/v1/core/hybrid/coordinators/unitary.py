# SPDX-License-Identifier: Apache-2.0
"""Models with one attention type."""

from collections.abc import Sequence

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import Hit, KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """Prefix caching with one attention type."""

    def __init__(self, block_pool: BlockPool) -> None:
        num_types = len(block_pool.attention_types)
        if num_types != 1:
            raise ValueError(f"the number of attention types must be 1, got {num_types}")
        if not block_pool.settings.enable_caching:
            raise ValueError("enable_caching must be True, got False")
        super().__init__(block_pool)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        manager = self.managers[0]
        if manager.num_peeked and manager.num_groups == 1:
            # As in base with a single group: the block after the hit must not hold the last token.
            max_tokens = max(max_tokens - manager.block_size, 0)
        max_tokens -= max_tokens % self.scheduler_block_size
        blocks, num_tokens = manager.find_longest_hit(block_hashes, max_tokens)
        return Hit((blocks,), num_tokens, cuts=(max_tokens - num_tokens,))
