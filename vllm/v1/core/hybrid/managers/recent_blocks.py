# SPDX-License-Identifier: Apache-2.0
"""What types share whose next query reads only the last tokens before it."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash


class RecentBlocksManager(SingleTypeKVCacheManager):
    """Keeps the blocks of the last tokens before the next query, and releases those before.

    ``num_tokens_before`` is how many of them a query reads besides itself.
    """

    releases: ClassVar[bool] = True

    def __init__(
        self,
        type_id: int,
        attention_type: AttentionType,
        block_pool: BlockPool,
        settings: CacheSettings,
        num_tokens_before: int,
    ) -> None:
        super().__init__(type_id, attention_type, block_pool, settings)
        self.num_tokens_before = num_tokens_before
        #: Blocks before a boundary that a request which resumes there reads.
        self.num_blocks_before = cdiv(num_tokens_before, self.block_size)
        interval = settings.retention_interval
        #: Whether the ``boundaries`` of a request are kept; dense retention has them anyway.
        self.keeps_boundaries = interval is not None
        #: Besides, a hit can end at each multiple of so many blocks; None: nowhere.
        self.retention_interval = (
            self.blocks_per_hit if interval is None else interval // self.block_size or None
        )
        self.caches_all = (
            self.retention_interval is not None
            and self.retention_interval <= self.num_blocks_before
        )

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        num_skipped = num_computed_tokens - self.num_tokens_before
        return num_skipped if num_skipped > 0 else 0

    def next_release(self, num_released: int) -> int:
        return (num_released + 1) * self.block_size + self.num_tokens_before

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """The last blocks before the boundary must be cached, as many as are read there.

        |  null  ...  null  |  cached  ...  cached  |  boundary
        """
        hits = self.block_pool.find_last_run(
            self.type_id,
            block_hashes,
            max_tokens // self.block_size,
            # As in base, a window of one token also asks for one cached block.
            length=max(self.num_blocks_before, 1),
            alignment=self.blocks_per_hit,
        )
        return hits, len(hits) * self.block_size

    def cacheable_blocks(
        self, begin: int, end: int, boundaries: Sequence[int]
    ) -> Sequence[tuple[int, int]]:
        """The blocks just before the positions that a hit can end at.

        Dense retention keeps all such positions; a positive interval its multiples and
        the ``boundaries``; 0 the ``boundaries`` only.
        """
        interval = self.retention_interval
        if interval is None and begin * self.block_size >= max(boundaries):
            return ()  # as for all output tokens
        ends = [b // self.block_size for b in boundaries] if self.keeps_boundaries else []
        if interval is not None:
            first = (begin // interval + 1) * interval
            ends.extend(range(first, end + self.num_blocks_before, interval))
        ends.sort()
        runs: list[tuple[int, int]] = []
        for run_end in ends:
            # Runs before ends that are close to each other overlap; no block is named twice.
            run_begin = run_end - self.num_blocks_before
            if run_begin > begin:
                begin = run_begin
            if run_end > end:
                run_end = end
            if begin < run_end:
                runs.append((begin, run_end))
                begin = run_end
        return runs

    def caches_beyond(self, num_tokens: int, boundaries: Sequence[int]) -> bool:
        return self.retention_interval is not None or num_tokens < max(boundaries)
