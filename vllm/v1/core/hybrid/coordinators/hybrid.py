# SPDX-License-Identifier: Apache-2.0
"""Models with several attention types."""

from collections.abc import Sequence

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import Hit, KVCacheCoordinator
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Prefix caching with several attention types, full attention among them or not."""

    def __init__(
        self,
        attention_types: tuple[AttentionType, ...],
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        if len(attention_types) < 2:
            raise ValueError(
                f"HybridKVCacheCoordinator needs 2 or more attention types, "
                f"got {len(attention_types)}"
            )
        if not settings.enable_caching:
            raise ValueError("HybridKVCacheCoordinator needs prefix caching to be enabled")
        super().__init__(attention_types, block_pool, settings)
        # Types whose hits can simply be cut come first: one scan bounds all others.
        self._lookup_order = sorted(self.managers, key=lambda m: not m.downward_closed)
        self._num_to_verify = sum(not m.downward_closed for m in self.managers)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """Each type in turn accepts the length so far or shortens it, until all accept.

        Every type answers with its longest hit within the length, so the first length
        that all accept is the longest there is.
        """
        hits = list(self.no_blocks)
        accepted: dict[int, int] = {}
        length, longest = max_tokens, 0
        while True:
            candidate = length
            for manager in self._lookup_order:
                type_id = manager.type_id
                if manager.downward_closed and type_id in accepted:
                    candidate = min(candidate, accepted[type_id])
                    continue
                hits[type_id], candidate = manager.find_longest_hit(block_hashes, candidate)
                accepted[type_id] = candidate
                longest = max(longest, candidate)
            # A single type to verify has just answered for the candidate.
            converged = candidate == length or self._num_to_verify <= 1
            length = candidate
            if converged:
                break
        for manager in self.managers:
            num_blocks = length // manager.block_size
            if num_blocks < len(hits[manager.type_id]):
                hits[manager.type_id] = hits[manager.type_id].truncated(num_blocks)
        return Hit(tuple(hits), length, longest - length)
