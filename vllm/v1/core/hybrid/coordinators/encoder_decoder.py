# SPDX-License-Identifier: Apache-2.0
"""Models whose decoder attends to what an encoder made of the input, such as Whisper."""

from collections.abc import Sequence

from vllm.v1.core.hybrid._core import BlockTable
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import RequestBlocks
from vllm.v1.core.hybrid.coordinators.no_prefix_cache import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType
from vllm.v1.core.hybrid.settings import CacheSettings


class EncoderDecoderKVCacheCoordinator(KVCacheCoordinatorNoPrefixCache):
    """Types that grow with a request's own tokens, and cross attention, which does not.

    The scheduler tells the number of encoder tokens when it admits a request, or admits it
    again. From then on a step concerns the growing types only.

    Nothing is ever cached. Base says so, too, at start-up; but where its users ask for prefix
    caching all the same, its first lookup raises.
    """

    def __init__(
        self,
        attention_types: tuple[AttentionType, ...],
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        super().__init__(attention_types, block_pool, settings)
        self._caching = ()
        self._encoder = tuple(m for m in self.managers if m.holds_encoder)
        self._no_growing_blocks = tuple(m.no_blocks for m in self._growing)
        self._no_encoder_blocks = tuple(m.no_blocks for m in self._encoder)
        self._most_growing_blocks = tuple(m.max_blocks_per_request for m in self._growing)

    def blocks_of(self, request_id: str) -> RequestBlocks:
        known = self.requests.get(request_id)
        if known is not None:
            return known
        tables = self.block_pool.new_tables()
        return RequestBlocks(tables, self._caching, tuple(tables[m.type_id] for m in self._growing))

    def num_physical_blocks_needed(
        self,
        blocks: RequestBlocks,
        num_tokens: int,
        hits: BlocksByType,
        num_skipped: Sequence[int],
        recycled: bool = False,
        num_states: int = 1,
        num_encoder_tokens: int = 0,
    ) -> int:
        """As in every coordinator; ``hits`` are always empty."""
        num_needed = self.block_pool.num_missing_ids(
            blocks.growing,
            num_tokens,
            self._no_growing_blocks,
            [num_skipped[m.type_id] for m in self._growing],
            self._most_growing_blocks if recycled else None,
            num_states,
        )
        return num_needed + self._num_encoder_ids_needed(blocks, num_encoder_tokens)

    def allocate(
        self,
        request_id: str,
        blocks: RequestBlocks,
        num_tokens: int,
        num_kept: int = 0,
        num_states: int = 1,
        num_encoder_tokens: int = 0,
    ) -> BlocksByType | None:
        # All or nothing: what the encoder will take is kept while the others allocate.
        num_kept += self._num_encoder_ids_needed(blocks, num_encoder_tokens)
        grown = super().allocate(request_id, blocks, num_tokens, num_kept, num_states)
        if grown is None:
            return None
        encoder = self._no_encoder_blocks
        if num_encoder_tokens:
            taken = self.block_pool.allocate(self._encoder_tables(blocks), num_encoder_tokens)
            assert taken is not None
            encoder = taken
        new_blocks = list(self.no_blocks)
        for manager, new in zip(self._growing + self._encoder, grown + encoder, strict=True):
            new_blocks[manager.type_id] = new
        return tuple(new_blocks)

    def _num_encoder_ids_needed(self, blocks: RequestBlocks, num_encoder_tokens: int) -> int:
        if not num_encoder_tokens:
            return 0
        return self.block_pool.num_missing_ids(
            self._encoder_tables(blocks),
            num_encoder_tokens,
            self._no_encoder_blocks,
            [0] * len(self._encoder),
        )

    def _encoder_tables(self, blocks: RequestBlocks) -> tuple[BlockTable, ...]:
        return tuple(blocks.tables[m.type_id] for m in self._encoder)
