# SPDX-License-Identifier: Apache-2.0
"""Attention types whose next query reads only the last tokens before it."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash


class RecentBlocksManager(SingleTypeKVCacheManager):
    """Keeps the blocks of the last tokens before the next query, and releases earlier ones.

    A query reads ``num_tokens_before`` tokens besides its own.
    """

    releases: ClassVar[bool] = True

    def __init__(self, type_id: int, block_pool: BlockPool, num_tokens_before: int) -> None:
        super().__init__(type_id, block_pool)
        self.num_tokens_before = num_tokens_before
        #: Blocks before a boundary that a request reads when it resumes there.
        self.num_blocks_before = cdiv(num_tokens_before, self.block_size)
        #: The same, and the blocks after the boundary that must match.
        self.num_blocks_around = self.num_blocks_before + self.num_peeked
        interval = self.settings.retention_interval
        #: Whether to keep the ``boundaries`` of a request, too. Dense retention (None) has them.
        self.adds_boundaries = interval is not None
        #: Besides the boundaries, hits can end at multiples of this many blocks. None, for the
        #: setting 0: nowhere else. For the setting None, at every alignment.
        self.dense_interval_blocks = (
            self.hit_alignment_blocks if interval is None else interval // self.block_size or None
        )
        self.caches_all = (
            self.dense_interval_blocks is not None
            and self.dense_interval_blocks <= self.num_blocks_around
        )

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        num_skipped = num_computed_tokens - self.num_tokens_before
        return num_skipped if num_skipped > 0 else 0

    def next_release(self, num_released: int) -> int:
        num_tokens_kept = self.num_tokens_before + self.num_reread_tokens
        return (num_released + 1) * self.block_size + num_tokens_kept

    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """The last blocks before the boundary must be cached, as many as a query reads.

        |  null  ...  null  |  cached  ...  cached  |  boundary  |  cached, with EAGLE  |
        """
        # As in base, even a window of one token needs one cached block.
        length, alignment = max(self.num_blocks_around, 1), self.hit_alignment_blocks
        num_blocks = max_tokens // self.block_size
        if not self.num_peeked:
            hits = self.block_pool.find_last_run(
                self.type_id, block_hashes, num_blocks, length, alignment
            )
            return hits, len(hits) * self.block_size
        num_blocks = num_blocks // alignment * alignment
        while True:
            # The run ends one block after the boundary, so the search cannot align its end.
            run = self.block_pool.find_last_run(
                self.type_id, block_hashes, num_blocks + 1, length, alignment=1
            )
            num_blocks = max(len(run) - 1, 0) // alignment * alignment
            # Accept no run, or one that ends one block after an aligned boundary. For any other,
            # search again from the boundary below its end.
            if len(run) <= num_blocks + 1:
                return run.truncated(num_blocks), num_blocks * self.block_size

    def cacheable_blocks(
        self, begin: int, end: int, boundaries: Sequence[int]
    ) -> Sequence[tuple[int, int]]:
        """The blocks just before the positions where a hit can end.

        Dense retention keeps all such positions. A positive interval keeps its multiples and the
        ``boundaries``. 0 keeps the ``boundaries`` only.
        """
        interval = self.dense_interval_blocks
        if interval is None and not self.caches_beyond(begin, boundaries):
            return ()  # usual for output tokens
        # Runs end where hits can end, or after the block that such a hit peeks at.
        num_blocks, peeked = self.num_blocks_around, self.num_peeked
        ends = [b // self.block_size + peeked for b in boundaries] if self.adds_boundaries else []
        if interval is not None:
            first = max((begin - peeked) // interval + 1, 1) * interval + peeked
            ends.extend(range(first, end + num_blocks, interval))
        ends.sort()
        runs: list[tuple[int, int]] = []
        for run_end in ends:
            # Runs can overlap if their ends are close. Each block is returned once.
            run_begin = run_end - num_blocks
            if run_begin > begin:
                begin = run_begin
            if run_end > end:
                run_end = end
            if begin < run_end:
                runs.append((begin, run_end))
                begin = run_end
        return runs

    def caches_beyond(self, end: int, boundaries: Sequence[int]) -> bool:
        return (
            self.dense_interval_blocks is not None
            or end < max(boundaries) // self.block_size + self.num_peeked
        )
