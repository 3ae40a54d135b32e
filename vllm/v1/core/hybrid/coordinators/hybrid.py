# SPDX-License-Identifier: Apache-2.0
"""Models with several attention types."""

from collections.abc import Sequence

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import Hit, KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Prefix caching with several attention types, full attention among them or not."""

    def __init__(self, block_pool: BlockPool) -> None:
        num_types = len(block_pool.attention_types)
        if num_types < 2:
            raise ValueError(f"the number of attention types must be 2 or more, got {num_types}")
        if not block_pool.settings.enable_caching:
            raise ValueError("enable_caching must be True, got False")
        super().__init__(block_pool)
        # Types whose hits can simply be cut come first: one scan bounds all others.
        self._to_cut = [m for m in self.managers if m.downward_closed]
        self._to_verify = [m for m in self.managers if not m.downward_closed]

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """Each type in turn accepts the length so far or shortens it, until all accept.

        Every type answers with its longest hit within the length, so the first length
        that all accept is the longest there is.
        """
        hits = list(self.no_blocks)
        cuts = [0] * len(hits)
        # All answers are multiples of the scheduler block size.
        length, first_length = max_tokens - max_tokens % self.scheduler_block_size, -1
        for manager in self._to_cut:
            hits[manager.type_id], found = manager.find_longest_hit(block_hashes, length)
            cuts[manager.type_id] += length - found
            length = found
            if first_length < 0:
                first_length = length  # no later answer is longer
        while True:
            candidate = length
            for manager in self._to_verify:
                hits[manager.type_id], found = manager.find_longest_hit(block_hashes, candidate)
                cuts[manager.type_id] += candidate - found
                candidate = found
                if first_length < 0:
                    first_length = candidate
            # With one type to verify, the candidate is its own answer.
            converged = candidate == length or len(self._to_verify) <= 1
            length = candidate
            if converged:
                break
        for manager in self._to_cut:
            hit = hits[manager.type_id]
            num_blocks = length // manager.block_size
            if num_blocks < len(hit):
                hits[manager.type_id] = hit.truncated(num_blocks)
        return Hit(tuple(hits), length, first_length if first_length > length else 0, cuts)
