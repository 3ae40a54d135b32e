# SPDX-License-Identifier: Apache-2.0
"""Mamba and other linear attention: a request has one state, whatever its length."""

from collections.abc import Sequence

from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash


class MambaManager(SingleTypeKVCacheManager):
    """Without prefix caching: base then makes a block as long as the longest sequence.

    So a request's first slot brings the block for its state, and no later one another.
    States that serve prefix hits (base's mode ``align``) are left to base.
    """

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """Nothing: the state at a boundary is overwritten by the next token."""
        return self.no_blocks, 0
