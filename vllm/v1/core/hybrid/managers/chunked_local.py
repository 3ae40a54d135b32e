# SPDX-License-Identifier: Apache-2.0
"""Chunked local attention: a query attends to its own chunk, up to itself."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Keeps the blocks of the next query's chunk, and releases a chunk when it is complete."""

    releases: ClassVar[bool] = True

    def __init__(self, type_id: int, block_pool: BlockPool) -> None:
        super().__init__(type_id, block_pool)
        spec = self.kv_cache_spec
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        #: In tokens. Chunks begin at its multiples.
        self.chunk_size = spec.attention_chunk_size
        self.bound_blocks(spec)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def next_release(self, num_released: int) -> int:
        return cdiv((num_released + 1) * self.block_size, self.chunk_size) * self.chunk_size

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """The blocks from the beginning of the boundary's chunk on must be cached.

        |  null  ...  null  |  cached  ...  cached  |  boundary
                            | the boundary's chunk ...

        If a chunk begins at the boundary, no block is needed.
        """
        alignment = self.hit_alignment_blocks
        num_blocks = max_tokens // self.block_size // alignment * alignment
        while True:
            first = self.num_skipped_tokens(num_blocks * self.block_size) // self.block_size
            hits = self.block_pool.find_prefix(
                self.type_id, block_hashes, num_blocks, alignment, first
            )
            num_tokens = len(hits) * self.block_size
            # A hit that was cut before a miss may end in an earlier chunk and need its blocks.
            if self.num_skipped_tokens(num_tokens) // self.block_size >= first:
                return hits, num_tokens
            num_blocks = len(hits)
