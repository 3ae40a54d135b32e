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
        hits = self.block_pool.find_prefix(
            self.type_id, block_hashes, max_tokens // self.block_size, self.blocks_per_hit
        )
        return hits, len(hits) * self.block_size
