# SPDX-License-Identifier: Apache-2.0
"""Cross attention: each decoder token attends to everything that an encoder made of the input."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockList, BlockTable
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.hybrid.step import ALL, NO_LIMIT, Step, Target
from vllm.v1.core.kv_cache_utils import BlockHash


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Holds the encoder's KV, which a request's first step writes and every step reads.

    All blocks are allocated with the first step. The table does not grow with the request. No
    other request reads the blocks, not even one with the same input: as in base, they are not
    cached.
    """

    prefix_cacheable: ClassVar[bool] = False

    def __init__(self, type_id: int, block_pool: BlockPool) -> None:
        super().__init__(type_id, block_pool)
        self.slots_per_block = 0

    def target(self, step: Step) -> Target:
        if step.num_encoder_tokens < 0:
            raise ValueError(
                f"num_encoder_tokens must be at least 0, got {step.num_encoder_tokens}"
            )
        return -(-step.num_encoder_tokens // self.block_size), ALL

    def num_slots(self, table: BlockTable) -> int:
        return NO_LIMIT

    def block_begin(self, i: int) -> int:
        """0: every token attends to all blocks."""
        return 0

    def num_computed_blocks(self, num_computed_tokens: int) -> int:
        """All blocks: they are full from the first step on."""
        return ALL

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """Always empty: block hashes describe the decoder's tokens."""
        return self.no_blocks, 0
