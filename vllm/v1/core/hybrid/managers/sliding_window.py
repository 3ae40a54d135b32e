# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention: a query attends to itself and the window before it."""

from collections.abc import Sequence

from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock
from vllm.v1.core.hybrid.managers.base import BlockTable, SingleTypeKVCacheManager
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Keeps the blocks that the next query's window touches, and releases those before."""

    def __init__(
        self,
        type_id: int,
        attention_type: AttentionType,
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        super().__init__(type_id, attention_type, block_pool, settings)
        spec = attention_type.spec
        assert isinstance(spec, SlidingWindowSpec)
        # The query at position p reads the keys p - window + 1 .. p.
        self.num_tokens_before = spec.sliding_window - 1
        #: Blocks before a boundary that a request which resumes there reads.
        self.num_blocks_before = cdiv(self.num_tokens_before, self.block_size)
        # The bound that base sizes the pool by: admission has to agree with it.
        self.max_blocks_per_request = spec.max_admission_blocks_per_request(
            max_in_flight_tokens=settings.max_in_flight_tokens,
            max_model_len=settings.max_model_len,
        )

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.num_tokens_before)

    def next_release(self, table: BlockTable) -> int:
        return (table.num_released + 1) * self.block_size + self.num_tokens_before

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[list[GroupedKVCacheBlock], int]:
        """The last blocks before the boundary must be cached, as many as the window touches.

        |  null  ...  null  |  cached  ...  cached  |  boundary

        Boundaries are tried from the right. A miss rules out every boundary whose
        window holds that block, so each block is looked up at most once.
        """
        scale = self.block_size // self.settings.hash_block_size
        get = self.prefix_index.get
        # As in base, a window of one token also asks for one cached block.
        num_needed = max(self.num_blocks_before, 1)
        end = min(max_tokens // self.block_size, len(block_hashes) // scale)
        end = self._align(end)
        while end > 0:
            first = max(end - num_needed, 0)
            found: list[GroupedKVCacheBlock] = []
            for i in range(end - 1, first - 1, -1):
                block = get(block_hashes[(i + 1) * scale - 1])
                if block is None:
                    end = self._align(i)
                    break
                found.append(block)
            else:
                hits = [self.null_block] * first
                hits.extend(reversed(found))
                return hits, end * self.block_size
        return [], 0

    def _align(self, num_blocks: int) -> int:
        alignment = self.settings.scheduler_block_size // self.block_size
        return round_down(num_blocks, alignment)

    def cacheable_blocks(self, span: range, boundaries: Sequence[int]) -> Sequence[int]:
        """The blocks just before the positions that a hit can end at.

        Dense retention keeps all such positions; a positive interval its multiples and
        the ``boundaries``; 0 the ``boundaries`` only.
        """
        alignment, interval = self.settings.scheduler_block_size, self.settings.retention_interval
        indices: set[int] = set()
        if interval != 0:
            blocks_per_interval = (alignment if interval is None else interval) // self.block_size
            num_left_out = blocks_per_interval - self.num_blocks_before
            if num_left_out <= 0:
                return span
            indices.update(i for i in span if i % blocks_per_interval >= num_left_out)
        if interval is not None:
            for boundary in boundaries:
                end = round_down(boundary, alignment) // self.block_size
                first = max(span.start, end - self.num_blocks_before)
                indices.update(range(first, min(span.stop, end)))
        return sorted(indices)
