# SPDX-License-Identifier: Apache-2.0
"""KV cache residency metrics: how long blocks stay cached, and how often they are hit."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector


class _Block(NamedTuple):
    """What base's collector reads of a block."""

    block_id: int


class ResidencyMetrics:
    """Reports what happens to physical blocks to base's collector.

    As in base, a block counts as evicted when its id is reallocated or when
    `KVCacheManager.evict_blocks` names it. Without prefix caching no block counts as evicted. A
    grouped block is evicted as a whole, and each of its ids is reported when it is reallocated.
    """

    def __init__(self, collector: KVCacheMetricsCollector, enable_caching: bool) -> None:
        # Typed for base's blocks, but it reads only their ids.
        self._collector: Any = collector
        self._enable_caching = enable_caching

    def allocated(self, new_blocks: BlocksByType) -> None:
        for block in _blocks_of(new_blocks, [0] * len(new_blocks)):
            if self._enable_caching:
                self._collector.on_block_evicted(block)
            self._collector.on_block_allocated(block)

    def hit(self, hits: BlocksByType, num_skipped: Sequence[int]) -> None:
        """A prefix hit was adopted, without the first ``num_skipped`` blocks of each type."""
        for block in _blocks_of(hits, num_skipped):
            self._collector.on_block_accessed(block)

    def evicted(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._collector.on_block_evicted(_Block(block_id))

    def reset(self) -> None:
        """The prefix cache was reset."""
        self._collector.reset()


def _blocks_of(blocks: BlocksByType, num_skipped: Sequence[int]) -> Iterable[_Block]:
    for type_blocks, skipped in zip(blocks, num_skipped, strict=True):
        for group_ids in type_blocks.block_ids():
            for block_id in group_ids[skipped:]:
                if block_id:
                    yield _Block(block_id)
