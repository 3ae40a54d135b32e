# SPDX-License-Identifier: Apache-2.0
"""Cross attention: each decoder token attends to all of what an encoder made of the input."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Holds the encoder's KV: written in a request's first step, and read in every step.

    So all blocks come at once, and however long the request grows, there are no more. No
    other request reads them, not even one with the same input: base does not cache them.
    """

    holds_encoder: ClassVar[bool] = True

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """Nothing: block hashes are of the decoder's tokens."""
        return self.no_blocks, 0
