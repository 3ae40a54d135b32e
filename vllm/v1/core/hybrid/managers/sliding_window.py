# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention: a query attends to itself and the window before it."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Keeps the blocks that the next query's window touches, and releases those before."""

    releases: ClassVar[bool] = True

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
        num_skipped = num_computed_tokens - self.num_tokens_before
        return num_skipped if num_skipped > 0 else 0

    def next_release(self, num_released: int) -> int:
        return (num_released + 1) * self.block_size + self.num_tokens_before

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """The last blocks before the boundary must be cached, as many as the window touches.

        |  null  ...  null  |  cached  ...  cached  |  boundary
        """
        hits = self.block_pool.find_last_run(
            self.type_id,
            block_hashes,
            max_tokens // self.block_size,
            # As in base, a window of one token also asks for one cached block.
            length=max(self.num_blocks_before, 1),
            alignment=self.settings.scheduler_block_size // self.block_size,
        )
        return hits, len(hits) * self.block_size

    def cacheable_blocks(
        self, begin: int, end: int, boundaries: Sequence[int]
    ) -> Sequence[tuple[int, int]]:
        """The blocks just before the positions that a hit can end at.

        Dense retention keeps all such positions; a positive interval its multiples and
        the ``boundaries``; 0 the ``boundaries`` only.
        """
        alignment, interval = self.settings.scheduler_block_size, self.settings.retention_interval
        ends: set[int] = set()
        if interval != 0:
            step = (alignment if interval is None else interval) // self.block_size
            if step <= self.num_blocks_before:
                return ((begin, end),)
            ends.update(range((begin // step + 1) * step, end + self.num_blocks_before, step))
        if interval is not None:
            ends.update(round_down(b, alignment) // self.block_size for b in boundaries)
        runs: list[tuple[int, int]] = []
        for run_end in sorted(ends):
            # Runs before ends that are close to each other overlap; no block is named twice.
            run_begin = max(begin, run_end - self.num_blocks_before)
            run_end = min(end, run_end)
            if run_begin < run_end:
                runs.append((run_begin, run_end))
                begin = run_end
        return runs

    def caches_beyond(self, num_tokens: int, boundaries: Sequence[int]) -> bool:
        return self.settings.retention_interval != 0 or num_tokens < max(boundaries)
