# SPDX-License-Identifier: Apache-2.0
"""Full attention: every query attends to the whole prefix."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.utils.math_utils import round_down
from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash


class FullAttentionManager(SingleTypeKVCacheManager):
    """Full attention, and MLA, which keeps one latent vector per token in the same way."""

    downward_closed: ClassVar[bool] = True

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[list[GroupedKVCacheBlock], int]:
        """All blocks of the prefix must be cached: scan from the left to the first miss."""
        scale = self.block_size // self.settings.hash_block_size
        num_blocks = min(max_tokens // self.block_size, len(block_hashes) // scale)
        get = self.prefix_index.get
        hits: list[GroupedKVCacheBlock] = []
        for end in range(scale, num_blocks * scale + 1, scale):
            block = get(block_hashes[end - 1])
            if block is None:
                break
            hits.append(block)
        num_tokens = round_down(len(hits) * self.block_size, self.settings.scheduler_block_size)
        del hits[num_tokens // self.block_size :]
        return hits, num_tokens
