# SPDX-License-Identifier: Apache-2.0
"""Full attention: every query attends to the whole prefix."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash


class FullAttentionManager(SingleTypeKVCacheManager):
    """Full attention, and MLA, which keeps one latent vector per token in the same way."""

    downward_closed: ClassVar[bool] = True

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """All blocks of the prefix must be cached, up to the first miss."""
        num_blocks = max_tokens // self.block_size
        if not self.num_peeked:
            hits = self.block_pool.find_prefix(
                self.type_id, block_hashes, num_blocks, self.hit_alignment_blocks
            )
            return hits, len(hits) * self.block_size
        found = self.block_pool.find_prefix(self.type_id, block_hashes, num_blocks + 1)
        num_blocks = max(len(found) - 1, 0) // self.hit_alignment_blocks * self.hit_alignment_blocks
        return found.truncated(num_blocks), num_blocks * self.block_size
